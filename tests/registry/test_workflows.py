"""The workflows: their structure, and their shell run for real against a local registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from buildctl import lock as locks
from buildctl import stack
from buildctl.project import Project
from buildctl.registry import Registry
from buildctl.retry import Policy
from tests.conftest import ROOT
from tests.integration.conftest import buildctl, copy_project, docker, remove_images
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer
from tests.registry.test_promote import put_image, put_result

SCRIPTS = ROOT / ".github" / "scripts"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
#: the contexts that GitHub offers where we use expressions
CONTEXTS = {"github", "vars", "secrets", "matrix", "needs", "steps", "env", "runner"}


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield path.name, name, job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for workflow, name, job in jobs():
        for number, step in enumerate(job["steps"]):
            yield f"{workflow}:{name}:{step.get('name', number)}", step


# ---------------------------------------------------------------------- structure


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_no_more_unless_a_job_says_so(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in workflow["concurrency"]
    assert "github.ref" in workflow["concurrency"]["group"]
    # plain YAML reads the key `on` as true
    assert set(workflow[True]) >= {"push", "pull_request"}
    assert "pull_request_target" not in workflow[True]


@pytest.mark.parametrize(("schema", "path"), [
    *(("github-workflows", path) for path in WORKFLOWS), ("gitlab-ci", ROOT / "docs" / "examples" / "gitlab-ci.yml")],
    ids=lambda value: getattr(value, "name", value))
def test_they_follow_the_published_schema(schema: str, path: Path) -> None:
    checker = Path(sys.executable).parent / "check-jsonschema"
    done = subprocess.run([checker, "--builtin-schema", f"vendor.{schema}", path], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout


def test_a_job_that_builds_has_what_the_base_needs() -> None:
    for _, name, job in jobs():
        scripts = "\n".join(step.get("run", "") for step in job["steps"])
        if ".github/scripts/publish" in scripts:
            assert "mmdebstrap debian-archive-keyring" in scripts, name


def test_only_jobs_of_a_tag_may_write_packages() -> None:
    for _, name, job in jobs():
        if "write" in job.get("permissions", {}).values():
            assert "github.ref_type == 'tag'" in job["if"], name
        assert job["timeout-minutes"] <= 360, name


def test_jobs_wait_for_jobs_that_exist() -> None:
    found = list(jobs())
    names = {(workflow, name) for workflow, name, _ in found}
    for workflow, name, job in found:
        needs = job.get("needs", [])
        for need in [needs] if isinstance(needs, str) else needs:
            assert (workflow, need) in names, name
        for used in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", json.dumps(job)):
            other = next(one for flow, title, one in found if (flow, title) == (workflow, used[0]))
            assert used[0] in needs
            assert used[1] in other["outputs"]
        for step, output in re.findall(r"steps\.(\w+)\.outputs\.(\w+)", json.dumps(job)):
            script = next(one["run"] for one in job["steps"] if one.get("id") == step)
            assert f"{output}=" in (ROOT / script).read_text()


@pytest.mark.parametrize(("where", "step"), list(steps()), ids=[where for where, _ in steps()])
def test_steps_are_pinned_and_keep_secrets_out_of_scripts(where: str, step: dict[str, Any]) -> None:
    assert set(step) <= {"name", "id", "if", "uses", "with", "run", "env"}
    if "uses" in step:
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"])
    if step.get("uses", "").startswith("actions/checkout@"):
        assert step["with"]["persist-credentials"] is False
    script = step.get("run", "")
    assert not EXPRESSION.search(script), "values reach a script through its environment, never as its text"
    for expression in EXPRESSION.findall(json.dumps(step)):
        words = re.findall(r"(?<![\w.'])([a-z]+)\.", expression)
        assert set(words) <= CONTEXTS, expression
    assert "secrets." not in json.dumps({key: value for key, value in step.items() if key != "env"})
    assert "curl" not in script
    for name in re.findall(r"\.github/scripts/\w+|\.ci/run", script):
        assert os.access(ROOT / name, os.X_OK)
    assert not re.search(r"(?<!-)\bbuildctl ", script), "CI uses the name that BuildKit's client does not have"


def test_scripts_and_steps_pass_shellcheck(tmp_path: Path) -> None:
    files = sorted(SCRIPTS.iterdir())
    for number, (where, step) in enumerate(steps()):
        if "run" in step:
            path = tmp_path / f"{number}.sh"
            path.write_text(f"#!/bin/bash\n# {where}\nset -euo pipefail\n{step['run']}\n")
            files.append(path)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------- the shell, for real


class Job:
    """A runner's surroundings: a folder, files for outputs and summary, our command line on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / ".bin"
        bin_folder.mkdir(parents=True)
        command = bin_folder / "sgl-buildctl"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m buildctl "$@"\n')
        command.chmod(0o755)
        self.output, self.summary = folder / "output", folder / "summary"
        self.env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(self.output),
                    "GITHUB_STEP_SUMMARY": str(self.summary), "PYTHONPATH": str(ROOT), "RETRY_WAIT": "0"}
        shutil.copytree(SCRIPTS, folder / ".github" / "scripts")

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([f".github/scripts/{script}", *args], cwd=self.folder, env={**self.env, **env},
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.mark.parametrize(("codes", "code", "runs"), [
    ([0], 0, 1), ([11, 0], 0, 2), ([11, 11, 0], 0, 3), ([11, 11, 11], 11, 3), ([10], 10, 1), ([12], 12, 1),
    ([11, 6], 6, 2), ([2], 2, 1)])
def test_only_exit_code_11_is_worth_another_run(codes: list[int], code: int, runs: int, job: Job) -> None:
    (job.folder / "codes").write_text("\n".join(map(str, codes)) + "\n")
    fake = job.folder / "fake"
    fake.write_text('#!/bin/sh\ncode=$(head -1 codes); sed -i 1d codes; echo "answer $code $1"; exit "$code"\n')
    fake.chmod(0o755)
    done = job.run("retry", "out.json", "./fake", "two words")
    assert done.returncode == code
    assert len((job.folder / "codes").read_text().split()) == len(codes) - runs
    assert (job.folder / "out.json").read_text() == f"answer {code} two words\n", "the last run's answer, alone"
    assert done.stdout.count("::warning::") == runs - 1


@pytest.fixture
def project_job(tmp_path: Path) -> Iterator[Job]:
    """A job in a checkout with one tiny stack of its own."""
    folder = copy_project(tmp_path / "regtest")
    yield Job(folder)
    remove_images()


@pytest.mark.engine
def test_plan_build_and_push_of_a_release(project_job: Job, proxy: FaultProxy) -> None:
    job = project_job
    planned = job.run("plan", TARGETS="all")
    assert planned.returncode == 0, planned.stderr
    assert job.output.read_text() == 'stacks=["tiny"]\n'
    assert "### tiny" in job.summary.read_text()
    assert re.search(r"\| cuda:none-inttest-regtest \| new \|", job.summary.read_text())

    where = {"STACK": "tiny", "REGISTRY": proxy.host, "NAMESPACE": "Team", "PROGRESS": "plain"}
    # the first run gives up at once, the second succeeds
    proxy.add(Fault("HEAD", "/manifests/", code=503, headers={"Retry-After": "3600"}, times=1))
    done = job.run("publish", **where)
    assert done.returncode == 0, done.stdout + done.stderr
    image = (job.folder / "image").read_text().strip()
    assert image.startswith(f"{proxy.host}/team/cuda@sha256:")
    with Registry(proxy.host, policy=Policy(1)) as registry:
        tags = registry.tags("team/cuda")
        assert {"none-inttest-regtest"} < set(tags)
        assert any(tag.startswith("key-") for tag in tags)
        found = registry.head("team/cuda", "none-inttest-regtest")
        assert found is not None
        assert found.digest == image.partition("@")[2]
    assert found.digest in job.summary.read_text()

    by_hand = subprocess.run(["sgl-buildctl", "push", "--stack", "tiny", "--to", f"{proxy.host}/hand", "--json"],
                             cwd=job.folder, env=job.env, capture_output=True, text=True, check=False)
    assert by_hand.returncode == 0, by_hand.stderr
    assert {entry["digest"] for entry in json.loads(by_hand.stdout)["pushed"]} == {found.digest}

    again = job.run("publish", **where)
    assert again.returncode == 0, again.stderr
    pushed = json.loads((job.folder / "build.json").read_text())["pushed"]
    assert {entry["action"] for entry in pushed} == {"keep"}


@pytest.mark.engine
def test_a_release_that_fails_passes_its_code_on_and_says_why(project_job: Job, proxy: FaultProxy) -> None:
    job = project_job
    proxy.add(Fault("POST", "/blobs/uploads/", code=403, headers={"Content-Type": "application/json"},
                    body=b'{"errors":[{"code":"DENIED","message":"permission_denied: write_package"}]}'))
    done = job.run("publish", STACK="tiny", REGISTRY=proxy.host, NAMESPACE="team", PROGRESS="plain")
    assert done.returncode == 10, done.stderr
    summary = job.summary.read_text()
    assert "### auth" in summary
    assert "permission_denied: write_package" in summary
    assert not (job.folder / "image").exists()
    assert "inttest-regtest" not in docker("images", "--format", "{{.Tag}}"), "known before the build, not after it"
    assert proxy.count("POST") == 1


def test_a_stack_without_a_current_lock_is_left_out_loudly(project_job: Job) -> None:
    lock = project_job.folder / "images" / "stacks" / "tiny.lock"
    lock.unlink()
    done = project_job.run("plan", TARGETS="all")
    assert done.returncode == 0, done.stderr
    assert project_job.output.read_text() == "stacks=[]\n"
    assert "::warning::not built" in done.stdout


def test_the_matrix_of_this_repository_has_what_a_build_takes_and_names_the_rest(job: Job) -> None:
    done = subprocess.run([SCRIPTS / "plan"], cwd=ROOT, env=job.env, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    taken = json.loads(job.output.read_text().removeprefix("stacks="))
    assert "sglang-0.5.23-cu130" in taken
    project = Project(ROOT)
    locked = {name: locks.load(stack.load(project, name), project) for name in stack.names(project)}
    # a publish job that exits 3 would take the benchmark of every other stack with it
    assert set(taken) == {name for name, lock in locked.items() if not lock.open_ends and name != "cpu-demo"}
    for name in {name for name, lock in locked.items() if lock.open_ends}:
        assert re.search(rf"::warning::not built.*{name}: incomplete", done.stdout)


@pytest.mark.parametrize(("verdict", "code", "stable"), [("win", 0, True), ("loss", 10, False), ("invalid", 13, False)])
def test_a_benchmark_attaches_its_result_and_promotes_a_win_only(verdict: str, code: int, stable: bool, job: Job,
                                                                proxy: FaultProxy) -> None:
    """The GPU job; `docker run` is the one thing that is played: this machine has no GPU."""
    with Registry(proxy.host, actions="pull,push", policy=Policy(1)) as registry:
        digest = put_image(registry, "rc.1")
    image = f"{proxy.host}/team/sglang@{digest}"
    (job.folder / "image").write_text(image + "\n")
    ready = put_result(job.folder / "ready", verdict)
    docker_stand_in = job.folder / ".bin" / "docker"
    docker_stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > docker-args\nmkdir -p results/run-1\n'
                               f'cp {ready}/*.json {ready}/*.md results/run-1/\nexit {code}\n')
    docker_stand_in.chmod(0o755)
    done = job.run("benchmark", MODELS="/data/models", MODEL="/models/T", DRAFT="/models/D")
    assert done.returncode == 0, done.stdout + done.stderr
    arguments = (job.folder / "docker-args").read_text().splitlines()
    assert arguments[:4] == ["run", "--rm", "--gpus", "all"]
    assert arguments[-6:] == [image, "benchmark", "--model", "/models/T", "--draft", "/models/D"]
    with Registry(proxy.host, policy=Policy(1)) as registry:
        assert bool(registry.head("team/sglang", "stable")) is stable
    attached = json.loads((job.folder / "results.json").read_text())["results"]
    assert [one["verdict"] for one in attached] == [verdict]
    assert f"# {verdict}" in job.summary.read_text()
    assert ("::warning::no win" in done.stdout) is not stable


@pytest.mark.parametrize(("code", "expected"), [(70, 70), (143, 143), (0, 1)])
def test_a_benchmark_that_failed_or_left_no_result_fails_the_job(code: int, expected: int, job: Job) -> None:
    (job.folder / "image").write_text("127.0.0.1:1/a@sha256:0\n")
    docker_stand_in = job.folder / ".bin" / "docker"
    docker_stand_in.write_text(f"#!/bin/sh\nexit {code}\n")
    docker_stand_in.chmod(0o755)
    assert job.run("benchmark", MODELS="/m", MODEL="/models/T", DRAFT="/models/D").returncode == expected


def test_the_engine_is_left_as_it_was() -> None:
    assert "inttest-regtest" not in docker("images", "--format", "{{.Tag}}")
    assert buildctl("--version").code == 0


@pytest.mark.engine
def test_the_gitlab_publish_job_logs_in_pushes_and_logs_out(project_job: Job, server: RegistryServer,
                                                            docker_config: Path) -> None:
    """Its own lines as they stand, without those that install: a real registry that wants a login, a real client."""
    example = yaml.safe_load((ROOT / "docs" / "examples" / "gitlab-ci.yml").read_text())
    publish = example["publish"]
    _prepare, *lines = publish["script"]
    shell = "\n".join([*(line for part in lines for line in ([part] if isinstance(part, str) else part))])
    with FaultProxy(server.host, token_ttl=600, user="gitlab-ci-token", password="job-token-1") as proxy:
        given = {"CI_REGISTRY": proxy.host, "CI_PROJECT_PATH": "Group/Project", "CI_REGISTRY_USER": "gitlab-ci-token",
                 "CI_REGISTRY_PASSWORD": "job-token-1"}
        variables = {name: given.get(str(value).removeprefix("$"), str(value))
                     for name, value in example["variables"].items()}
        env = {**project_job.env, **given, **variables, "STACK": "tiny"}

        def run(script: str) -> str:
            done = subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=project_job.folder, env=env,
                                  capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        said = run(shell)
        assert "job-token-1" not in said
        assert proxy.host in (docker_config / "config.json").read_text()
        run("\n".join(publish["after_script"]))
        assert proxy.host not in (docker_config / "config.json").read_text()
    image = (project_job.folder / "image").read_text().strip()
    assert image.startswith(f"{proxy.host}/group/project/cuda@sha256:")
    with Registry(server.host, policy=Policy(1)) as registry:
        assert registry.head("group/project/cuda", image.partition("@")[2]) is not None
    assert set(publish["artifacts"]["paths"]) <= {path.name for path in project_job.folder.iterdir()}


def test_the_gitlab_example_uses_scripts_that_exist(tmp_path: Path) -> None:
    example = yaml.safe_load((ROOT / "docs" / "examples" / "gitlab-ci.yml").read_text())
    lines: list[str] = []

    def flatten(entry: Any) -> None:
        if isinstance(entry, list):
            for one in entry:
                flatten(one)
        else:
            lines.append(entry)

    found = {name: job for name, job in example.items() if isinstance(job, dict) and "script" in job}
    assert set(found) == set(example["stages"]) == {"test", "publish", "benchmark"}
    for job in found.values():
        flatten(job["script"])
        flatten(job.get("after_script", []))
    for script in re.findall(r"\.github/scripts/\w+|\.ci/run", "\n".join(lines)):
        assert os.access(ROOT / script, os.X_OK)
    assert found["publish"]["rules"] == [{"if": "$CI_COMMIT_TAG"}]
    path = tmp_path / "all.sh"
    path.write_text("#!/bin/bash\n" + "\n".join(lines) + "\n")
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
