"""Containers, fetched runs and comparisons, against a docker client and an engine of known answers."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from docker.errors import APIError

from buildctl import bench, binding, cli, container, measuring
from buildctl.bench import Wanted
from buildctl.container import Container, Spec
from buildctl.engine import Engine, Facts, LocalImage
from buildctl.errors import AuditError, EngineError, Interrupted, ResourceError, UsageError

KEY, OTHER = "ab" * 32, "cd" * 32
IMAGE = LocalImage("sha256:id", "sha256:digest", {"buildctl.key": KEY, "buildctl.targets": "cpu"}, 1, ("sglang:1",))
PLAN = {"run_id": "r1", "created_at": "2026-12-01T10:00:00Z", "image": {"key": KEY, "lock_sha256": "cd"}}


class Client:
    """The SDK's half: state, archives and facts."""

    def __init__(self, **state: Any) -> None:
        self.state = {"Running": False, "StartedAt": "2026-12-01T10:00:00Z", "ExitCode": 0, "OOMKilled": False, **state}
        self.put: dict[str, tarfile.TarInfo] = {}
        self.takes = True
        self.lost = 0

    def info(self) -> dict[str, Any]:
        if self.state.get("silent"):
            raise ConnectionError("reset by peer")
        return {"ServerVersion": "26", "Runtimes": {"runc": {}}, "NCPU": 2}

    def inspect_container(self, name: str) -> dict[str, Any]:
        if self.state.get("gone"):
            raise APIError("gone")
        self.lost -= 1
        return {"State": {**self.state, "Running": self.lost >= 0}, "Config": {"User": "1000:1000"}}

    def put_archive(self, name: str, folder: str, data: io.BufferedReader) -> bool:
        if self.state.get("full"):
            raise APIError("no space left on device")
        with tarfile.open(fileobj=data) as tar:
            self.put.update({one.name: one for one in tar.getmembers()})
        return self.takes


class KnownEngine(Engine):
    """An engine with one image."""

    def __init__(self, client: Client, image: LocalImage | None = IMAGE, *, local: bool = True) -> None:
        super().__init__()
        self.known, self.there, self.local = client, image, local

    @property
    def client(self) -> Any:
        return self.known

    def image(self, reference: str) -> LocalImage | None:
        if self.there is None or not reference.startswith("b:"):
            return self.there
        return dataclasses.replace(self.there, labels={**self.there.labels, "buildctl.key": OTHER})

    def images(self, label: str) -> list[LocalImage]:
        return [self.there] if self.there and label == f"buildctl.key={self.there.labels['buildctl.key']}" else []

    def facts(self) -> Facts:
        return Facts("26", True, "/", 1 if self.local else None)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker client that notes its words in `calls`; `cp` copies the folder `inside`, `start` runs `body`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "inside").mkdir()
    (tmp_path / "body").write_text("")
    path = folder / "docker"
    path.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
case "$1" in
create) env > {tmp_path}/env; [ ! -f {tmp_path}/refuse ] || {{ cat {tmp_path}/refuse >&2; exit 1; }};;
cp) [ ! -f {tmp_path}/full ] || {{ cat {tmp_path}/full >&2; exit 1; }}
    for last; do :; done; cp -r {tmp_path}/inside/. "$last";;
start) . {tmp_path}/body;;
stop) touch {tmp_path}/stopped;;
esac
""")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return tmp_path


def calls(docker: Path) -> list[str]:
    return [line.split()[0] for line in (docker / "calls").read_text().splitlines()]


def run_in(docker: Path, name: str = "r1", verdict: str = "win", **plan: Any) -> Path:
    folder = docker / "inside" / name
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({**PLAN, **plan}))
    (folder / "result.json").write_text(json.dumps({"verdict": {"class": verdict, "headline": "H"}}))
    return folder


SPEC = Spec("n", "sglang:1", ("--read-only",), ("benchmark",), {"HF_TOKEN": "secret"})


def measure(docker: Path, client: Client | None = None, said: list[str] | None = None, **wanted: Any
            ) -> measuring.Measured:
    out = docker / "out"
    out.mkdir(exist_ok=True)
    return measuring.measure(KnownEngine(client or Client()), SPEC, IMAGE, Wanted("m", **wanted), out, "stderr",
                             (said if said is not None else []).append)


def test_a_run_is_fetched_bound_and_its_container_removed(docker: Path) -> None:
    run_in(docker)
    done = measure(docker, Client(ExitCode=10))
    assert (done.code, done.folder) == (10, docker / "out" / "r1")
    assert calls(docker) == ["create", "start", "cp", "rm"]
    words = (docker / "calls").read_text()
    assert "create --name n --read-only --env HF_TOKEN sglang:1 benchmark" in words
    assert "secret" not in words
    assert "HF_TOKEN=secret" in (docker / "env").read_text()
    bound = json.loads((docker / "out" / "r1" / binding.NAME).read_text())
    assert bound["image"] == {"reference": "sglang:1", "digest": "sha256:digest", "id": "sha256:id", "key": KEY,
                              "stack": "", "lock_sha256": "cd"}
    assert bound["engine"]["runtimes"] == ["runc"]
    assert done.as_dict()["headline"] == "H"
    assert [path.name for path in (docker / "out").iterdir()] == ["r1"], "nothing else is left"


def test_what_goes_in_belongs_to_the_containers_user(docker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    (folder / "plan.json").chmod(0o400)
    client = Client()
    run_in(docker, "old")
    measure(docker, client, resume=folder)
    assert {name: (one.uid, oct(one.mode & 0o777)) for name, one in client.put.items()} == {
        "old": (1000, "0o755"), "old/plan.json": (1000, "0o600")}
    assert (docker / "out" / "old" / "result.json").is_file()
    client.takes = False
    with pytest.raises(EngineError, match="does not take files"):
        measure(docker, client, resume=folder)
    with pytest.raises(EngineError, match="no space left"):
        measure(docker, Client(full=True), resume=folder)


def test_a_resumed_run_replaces_what_there_was_of_it(docker: Path) -> None:
    before = docker / "out" / "r1"
    before.mkdir(parents=True)
    (before / "half").touch()
    run_in(docker)
    measure(docker)
    assert sorted(path.name for path in before.iterdir()) == ["binding.json", "plan.json", "result.json"]


def test_of_a_sweep_both_runs_are_kept_and_the_last_is_the_result(docker: Path) -> None:
    run_in(docker, "b", created_at="2026-12-01T10:00:00Z")
    run_in(docker, "a", created_at="2026-12-01T11:00:00Z")
    assert measure(docker).folder == docker / "out" / "a"
    assert sorted(path.name for path in (docker / "out").iterdir()) == ["a", "b"]


def test_a_verdict_without_a_run_is_not_believed(docker: Path) -> None:
    with pytest.raises(AuditError, match="left no run"):
        measure(docker)
    assert measure(docker, Client(ExitCode=66)).folder is None


def test_a_run_of_another_image_is_refused(docker: Path) -> None:
    run_in(docker, image={"key": "other"})
    with pytest.raises(AuditError, match="another image"):
        measure(docker)


def test_memory_that_ran_out_is_told(docker: Path) -> None:
    said: list[str] = []
    assert measure(docker, Client(ExitCode=137, OOMKilled=True), said).code == 137
    assert "out of memory" in said[0]


def test_an_output_that_is_lost_is_waited_for(docker: Path) -> None:
    said: list[str] = []
    client = Client()
    client.lost = 2
    run_in(docker)
    assert measure(docker, client, said).code == 0
    assert "output of the container was lost" in said[0]
    assert calls(docker).count("wait") == 2


@pytest.mark.parametrize(("text", "kind", "what"), [
    ('Error response from daemon: could not select device driver "" with capabilities: [[gpu]]', EngineError,
     "no GPU runtime"),
    ("Error response from daemon: failed to create task for container: error running prestart hook #0: exit status 1, "
     "stdout: , stderr: nvidia-container-cli: initialization error: driver rpc error: timed out", EngineError,
     "GPU runtime refuses the container"),
    ('Error response from daemon: invalid mount config for type "bind": bind source path does not exist: /x\n\n'
     "See 'docker create --help'.", UsageError, "not there on the engine's host"),
    ("Error response from daemon: No such image: x", UsageError, "no such image"),
    ("Error response from daemon: something", EngineError, "refuses the container"), ("", EngineError, "refuses")])
def test_why_an_engine_refuses(docker: Path, text: str, kind: type[Exception], what: str) -> None:
    (docker / "refuse").write_text(text)
    with pytest.raises(kind, match=what) as caught:
        measure(docker)
    assert "Error response" not in str(caught.value)
    (docker / "refuse").unlink()
    with pytest.raises(kind, match=what):  # the same words when it is started
        measure(docker, Client(StartedAt="0001-01-01T00:00:00Z", Error=text))
    assert calls(docker)[-1] == "rm"


@pytest.mark.parametrize(("text", "kind"), [("write: no space left on device", ResourceError),
                                            ("connection reset", EngineError)])
def test_results_that_cannot_be_fetched_stay_in_the_container(docker: Path, text: str, kind: type[Exception]) -> None:
    (docker / "full").write_text(text)
    with pytest.raises(kind, match=r"docker cp n:/results/\. DIR"):
        measure(docker)
    assert "rm" not in calls(docker)


def test_an_engine_that_goes_away_keeps_the_container(docker: Path) -> None:
    with pytest.raises(EngineError, match="says nothing of the container"):
        measure(docker, Client(gone=True))
    assert "rm" not in calls(docker)


def test_an_engine_that_does_not_answer(docker: Path) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        measure(docker, Client(silent=True))


def test_no_docker_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="no docker client"):
        Container(cast(Engine, None), SPEC, print)


def interrupt_when(path: Path) -> threading.Thread:
    def wait() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_stops_the_container_and_keeps_the_run(docker: Path, begun: bool) -> None:
    if begun:
        run_in(docker, verdict="invalid")
    (docker / "body").write_text(
        f"touch {docker}/started; while [ ! -f {docker}/stopped ] && kill -0 $PPID; do sleep 0.02; done\n")
    thread = interrupt_when(docker / "started")
    with pytest.raises(Interrupted) as caught:
        measure(docker)
    thread.join()
    assert calls(docker) == ["create", "start", "stop", "cp", "rm"]
    assert (f"--resume {docker}/out/r1" in str(caught.value)) == begun
    assert (docker / "out" / "r1" / binding.NAME).is_file() == begun


def test_a_second_interrupt_kills_at_once(docker: Path) -> None:
    run_in(docker)
    (docker / "body").write_text(f"touch {docker}/started; sleep 60\n")
    box = Container(KnownEngine(Client()), SPEC, lambda _: None)
    tried: list[str] = []

    def impatient(*words: str) -> subprocess.CompletedProcess[str]:
        tried.append(words[0])
        if words[0] == "stop":
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(words, 0, "", "")

    box._run = impatient  # type: ignore[method-assign]
    box._stop()
    assert tried == ["stop", "kill"]


def test_an_interrupt_while_fetching_keeps_the_container(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Container._run

    def interrupted(self: Container, *words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "cp":
            raise KeyboardInterrupt
        return real(self, *words)

    monkeypatch.setattr(Container, "_run", interrupted)
    with pytest.raises(Interrupted, match=r"docker cp n:/results/\. DIR"):
        measure(docker)
    assert "rm" not in calls(docker)


def test_a_client_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(process, "wait", _late(process.wait))
    container._end(process)
    assert process.returncode == -signal.SIGKILL


def _late(wait: Any) -> Any:
    def called(timeout: float | None = None) -> Any:
        if timeout is not None:
            raise subprocess.TimeoutExpired("x", timeout)
        return wait()

    return called


# ----------------------------------------------------------------------------------------------------------- commands

@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> KnownEngine:
    known = KnownEngine(Client())
    for name in ("bench", "compare"):
        monkeypatch.setattr(f"buildctl.commands.{name}.Engine", lambda: known)
    return known


def call(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.run(list(words))
    out, err = capfd.readouterr()
    return code, out, err


def test_the_exit_code_and_the_report_are_the_entrypoints(docker: Path, engine: KnownEngine,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    run_in(docker, verdict="equivalent")
    engine.known.state["ExitCode"] = 11
    (docker / "body").write_text("echo REPORT; echo progress >&2\n")
    out = str(docker / "out")
    code, text, err = call(capfd, "bench", "sglang:1", "--model", "m", "--out", out, "--", "--pairs", "2", "--", "--tp")
    assert (code, text) == (11, "REPORT\n")
    assert f"results: {out}/r1" in err
    assert "benchmark --model m --pairs 2 -- --tp" in (docker / "calls").read_text()
    code, text, err = call(capfd, "bench", "sglang:1", "--model", "m", "--out", out, "--json")
    assert code == 11
    assert json.loads(text)["runs"] == [{"image": "sglang:1", "digest": "sha256:digest", "exit_code": 11,
                                         "folder": f"{out}/r1", "verdict": "equivalent", "headline": "H", "causes": []}]
    assert "REPORT" in err


def test_dry_run_starts_nothing(docker: Path, engine: KnownEngine, capfd: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capfd, "bench", "a:1", "b:1", "--model", "m", "--dry-run", "--rounds", "2", "--seed", "1")
    assert code == 0
    assert text.count("docker create") == 4
    assert text.count("--pairs 1") == 4
    code, text, _ = call(capfd, "bench", "a:1", "--model", "m", "--dry-run", "--json")
    assert json.loads(text)["commands"][0][0].startswith("docker create")
    assert not (docker / "calls").exists()


def test_words_that_do_not_fit(docker: Path, engine: KnownEngine, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "bench", "a:1", "a:1", "--model", "m", "--resume", str(docker))
    assert code == 2
    assert "named twice" in err
    assert "one image is resumed" in err
    assert "rounds need several" in call(capfd, "bench", "a:1", "--model", "m", "--rounds", "2")[2]
    (docker / "file").touch()
    code, _, err = call(capfd, "bench", "a:1", "--model", "m", "--out", str(docker / "file" / "x"))
    assert code == 8
    assert "cannot write the results" in err
    assert "two run folders" in call(capfd, "compare", "x")[2]


def test_images_alternate_and_are_compared(docker: Path, engine: KnownEngine, capfd: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(docker)
    monkeypatch.setattr(binding, "write", lambda *_: {})
    (docker / "body").write_text(f'grep -q " compare " {docker}/calls && echo \'{{"verdict": "win"}}\'; true\n')
    out = str(docker / "out")
    code, text, err = call(capfd, "bench", "a:1", "b:1", "--model", "m", "--out", out, "--rounds", "2", "--json")
    assert code == 0, err
    assert json.loads(text)["comparison"] == {"verdict": "win"}
    assert [one["image"] for one in json.loads(text)["runs"]] == ["a:1", "a:1", "b:1", "b:1"], "a:1 is the reference"
    last = next(line for line in (docker / "calls").read_text().splitlines() if " compare " in line)
    assert "--network none" in last
    assert "compare /results/r1 /results/1-r1 /results/2-r1 /results/3-r1 --json" in last
    assert {"r1/plan.json", "3-r1/plan.json"} <= set(engine.known.put)


def test_a_run_that_says_nothing_ends_the_rounds(docker: Path, engine: KnownEngine,
                                                 capfd: pytest.CaptureFixture[str]) -> None:
    run_in(docker, verdict="invalid")
    engine.known.state["ExitCode"] = 13
    code, _, err = call(capfd, "bench", "a:1", "b:1", "--model", "m", "--out", str(docker / "out"), "--rounds", "2")
    assert code == 13
    assert "run 1 of 4 ended with 13: no comparison" in err
    assert calls(docker).count("start") == 1


def test_an_error_in_the_rounds_names_the_runs_before_it(docker: Path, engine: KnownEngine,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    run_in(docker)
    (docker / "body").write_text(f"touch {docker}/full\n")  # the second fetch fails
    (docker / "bin" / "docker").write_text((docker / "bin" / "docker").read_text().replace(
        "[ ! -f", f'[ "$(grep -c ^cp {docker}/calls)" -lt 2 ] || [ ! -f'))
    code, _, err = call(capfd, "bench", "a:1", "b:1", "--model", "m", "--out", str(docker / "out"), "--rounds", "2")
    assert code == 9
    assert f"complete before it: {docker}/out/r1" in err


def test_compare_runs_in_the_image_of_the_latest_run(docker: Path, engine: KnownEngine,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        run_in(docker, name)
    folders = [f"old={docker}/inside/a", f"new={docker}/inside/b"]
    engine.known.state["ExitCode"] = 10
    (docker / "body").write_text("echo TABLE\n")
    code, text, _ = call(capfd, "compare", *folders, "--drift", "0.02", "--allow", "machine.driver", "--json")
    assert (code, text) == (10, "TABLE\n")
    words = (docker / "calls").read_text().splitlines()[0]
    assert "sglang:1 compare old=/results/a new=/results/b --drift 0.02 --allow=machine.driver --json" in words
    engine.known.state["ExitCode"] = 127
    code, _, err = call(capfd, "compare", *folders, "--image", "other:1", "--exit-zero-on-valid")
    assert code == 2
    assert "other:1: this image's entrypoint knows no `compare`" in err
    engine.there = None
    assert "has none of the images" in call(capfd, "compare", *folders)[2]


def test_an_unreadable_result_has_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"verdict": 1}')
    assert measuring.Measured("i", IMAGE, 0, tmp_path).as_dict()["verdict"] is None
    assert measuring.Measured("i", IMAGE, 66, None).as_dict()["folder"] is None
    assert set(bench.VERDICTS) >= bench.VALID
