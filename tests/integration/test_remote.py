"""Engines and builders that lie elsewhere: a second engine in its own network, its BuildKit as a remote builder."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildctl.image_config import key_of
from buildctl.registry import Registry
from tests.integration.conftest import PREFIX, Ran, buildctl, docker
from tests.integration.second import Bridge, SecondEngine, remote_builder, ssh_server
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

pytestmark = pytest.mark.engine

BUILDER = f"far-{os.getpid()}"


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    with SecondEngine(tmp_path_factory.mktemp("second") / "engine") as running:
        yield running


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a registry that all tests share, so that builds go on from what earlier ones left."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def proxy(second: SecondEngine, storage: Path) -> Iterator[FaultProxy]:
    """That registry, as both machines see it."""
    with (RegistryServer(storage, address=second.gateway) as far,
          FaultProxy(far.host, address=second.gateway) as running):
        yield running


@pytest.fixture(scope="module")
def builder(second: SecondEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for `--builder`; the second engine says which registries speak plain HTTP."""
    with Bridge(second) as bridge, remote_builder(BUILDER, bridge.address, tmp_path_factory.mktemp("buildx")) as env:
        yield {**env, "DOCKER_HOST": second.host}


@pytest.fixture
def small(tiny: Path) -> Path:
    """A stack of a few steps that need no network, the upper one never seen before."""
    images = tiny / "images"
    (images / "cuda" / "Dockerfile").write_text(
        f"FROM base AS system\nRUN echo below > /below\n\nFROM system AS layer\nRUN echo {tiny} > /edited\n")
    (images / "runtime" / "Dockerfile").write_text(
        "FROM parent AS layer\nARG IMAGE\nCOPY --link image/${IMAGE}/ /etc/buildctl/\n")
    return tiny


def build(project: Path, *words: str, **env: str) -> dict[str, Any]:
    ran = buildctl("build", "--stack", "tiny", "--json", "--progress", "plain", *words, cwd=project, **env)
    assert ran.code == 0, ran.err
    return {**json.loads(ran.out), "err": ran.err}


def digest(proxy: FaultProxy, tag: str, namespace: str = "team") -> str:
    repository, _, name = tag.partition(":")
    with Registry(proxy.upstream, plain_http=True) as client:
        found = client.head(f"{namespace}/{repository}", name)
    return found.digest if found else ""


def local_tags() -> set[str]:
    return set(docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())


# ---------------------------------------------------------------------- an engine elsewhere


def test_an_engine_over_tcp(small: Path, second: SecondEngine, proxy: FaultProxy) -> None:
    full = buildctl("build", "--stack", "tiny", "--push", f"{proxy.host}/team", cwd=small, DOCKER_HOST=second.host,
                     BUILDCTL_FREE_DISK="1000")
    assert full.code == 8, full.err
    build(small, "--push", f"{proxy.host}/team", DOCKER_HOST=second.host)
    path = small / "images" / "cuda" / "Dockerfile"
    path.write_text(path.read_text() + "RUN echo again > /edited\n")
    made = build(small, "--push", f"{proxy.host}/team", DOCKER_HOST=second.host)
    assert f"disk: {second.host}: {second.folder}/data: cannot be seen from here" in made["err"]
    assert set(made["resumed"]) == {"cuda-system"}
    (image,) = made["images"]
    assert digest(proxy, image["tags"][0]) == digest(proxy, image["tags"][1]) == image["digest"]
    assert image["tags"][0] in second.docker("images", "--format", "{{.Repository}}:{{.Tag}}")
    assert image["tags"][1] not in local_tags()


def test_an_engine_over_ssh_and_one_of_a_context(small: Path, second: SecondEngine, proxy: FaultProxy,
                                                 tmp_path: Path) -> None:
    """The SDK knows neither; what the client can reach is reached."""
    with ssh_server(second, tmp_path / "ssh") as folder:
        over_ssh = {"DOCKER_HOST": f"ssh://root@{second.address}:2222", "PATH": f"{folder}:{os.environ['PATH']}"}
        place = f"{proxy.host}/ssh"
        made = build(small, **over_ssh)
        second.docker("tag", made["images"][0]["tags"][0], f"{PREFIX}-ssh:1")
        pushed = buildctl("push", f"{PREFIX}-ssh:1", "--to", place, cwd=small, **over_ssh)
        assert pushed.code == 0, pushed.err
        assert digest(proxy, f"{PREFIX}-ssh:1", "ssh") == made["images"][0]["digest"]
        config = {"DOCKER_CONFIG": str(tmp_path / "docker"), "PATH": over_ssh["PATH"]}
        subprocess.run(["docker", "context", "create", "elsewhere", "--docker", f"host={over_ssh['DOCKER_HOST']}"],
                       env={**os.environ, **config}, check=True, capture_output=True)
        again = buildctl("push", f"{PREFIX}-ssh:1", "--to", place, cwd=small, **config, DOCKER_CONTEXT="elsewhere")
        assert again.code == 0, again.err
        assert "already there" in again.err
    gone = buildctl("push", f"{PREFIX}-ssh:1", "--to", place, cwd=small, **over_ssh)
    assert gone.code == 9
    assert "Connection refused" in gone.err
    assert over_ssh["DOCKER_HOST"] in gone.err
    unknown = buildctl("push", f"{PREFIX}-ssh:1", "--to", place, cwd=small, DOCKER_CONTEXT="nowhere")
    assert unknown.code == 9
    assert "nowhere" in unknown.err


def test_a_fresh_engine_sends_what_changed_and_no_more(tiny: Path, second: SecondEngine, proxy: FaultProxy,
                                                       storage: Path) -> None:
    """The real lowest layer, filled from the engine here; one line of the entrypoint changed, built over there."""
    with RegistryServer(storage) as near:
        build(tiny, "--push", f"{near.host}/team")
    path = tiny / "entrypoints" / "__init__.py"
    path.write_text(path.read_text() + f"\n# {tiny}\n")
    made = build(tiny, "--push", f"{proxy.host}/team", DOCKER_HOST=second.host)
    assert set(made["resumed"]) == {"cuda", "entrypoint-env"}
    assert proxy.upload_bytes() < 2_000_000


# ---------------------------------------------------------------------- a builder elsewhere


def test_a_remote_builder_loads_into_the_engine_here(small: Path, builder: dict[str, str], proxy: FaultProxy) -> None:
    """Without --push its images come here; it needs no image registry and no folder of this machine."""
    made = build(small, "--builder", BUILDER, BUILDX_CONFIG=builder["BUILDX_CONFIG"])
    (image,) = made["images"]
    assert image["state"] == "built"
    assert f"disk: builder {BUILDER}: cannot be seen from here" in made["err"]
    assert set(image["tags"]) <= local_tags()
    full = buildctl("build", "--stack", "tiny", "--no-cache", "--builder", BUILDER, cwd=small,
                     BUILDX_CONFIG=builder["BUILDX_CONFIG"], BUILDCTL_FREE_DISK="1000")
    assert full.code == 8
    assert f"builder {BUILDER} (BUILDCTL_FREE_DISK)" in full.err


def test_a_remote_builder_pushes_by_itself(small: Path, builder: dict[str, str], second: SecondEngine,
                                           proxy: FaultProxy, tmp_path: Path) -> None:
    other = f"{proxy.host}/mirror"
    made = build(small, "--builder", BUILDER, "--push", f"{proxy.host}/team", "--push", other, **builder)
    (image,) = made["images"]
    version, key = image["tags"]
    assert image["state"] == "pushed"
    assert {digest(proxy, tag, space) for tag in (version, key) for space in ("team", "mirror")} == {image["digest"]}
    with Registry(proxy.upstream, plain_http=True) as client:
        chain = [tag for tag in client.tags("team/cuda") if tag.startswith("chain-")]
        manifest = client.manifest("team/cuda", key.partition(":")[2])
        assert manifest is not None
        assert key_of(client, "team/cuda", manifest) == image["key"]
        assert set(client.tags("mirror/cuda")) & set(chain), "the other place gets the stages too"
    here = sum(request.body_bytes for request in proxy.requests if request.peer == second.gateway)
    there = sum(request.body_bytes for request in proxy.requests if request.peer == second.address)
    assert here < 100_000, "attached documents and manifests, no layer"
    assert there > 0
    assert key not in local_tags()
    assert key not in second.docker("images", "--format", "{{.Repository}}:{{.Tag}}")
    # another machine goes on from there, and has nothing to do
    proxy.requests.clear()
    again = build(small, "--push", f"{proxy.host}/team", "--push", other, DOCKER_HOST=second.host)
    assert again["build"] is None
    assert {entry["action"] for entry in again["pushed"]} == {"keep"}
    # two tags and the list of what is attached, in two places
    assert [request.method for request in proxy.requests if request.method != "GET"] == ["HEAD"] * 4
    assert {request.path.split("/")[-2] for request in proxy.requests if request.method == "GET"} <= {
        "referrers", "manifests"}
    # a registry that the engine calls insecure is one for `promote` and `results` too
    name = f"{proxy.host}/team/{key}"
    promoted = buildctl("promote", name, "--to", "tested", DOCKER_HOST=second.host)
    assert promoted.code == 0, promoted.err
    assert digest(proxy, f"{key.partition(':')[0]}:tested") == image["digest"]
    assert buildctl("results", name, DOCKER_HOST=second.host).code == 0
    refused = buildctl("results", name, DOCKER_HOST="unix:///nowhere")
    assert refused.code == 10
    assert "TLS" in refused.err


def test_strict_asks_what_a_builder_pushed(small: Path, builder: dict[str, str], proxy: FaultProxy) -> None:
    """This stack's image has no guard: what cannot be asked gets no tag."""
    ran = buildctl("build", "--stack", "tiny", "--strict", "--builder", BUILDER, "--push", f"{proxy.host}/strict",
                   cwd=small, **builder)
    assert ran.code == 7, ran.err
    assert "cannot be asked for its Debian packages" in ran.err
    with Registry(proxy.upstream, plain_http=True) as client:
        assert client.tags("strict/cuda") == ()


def test_two_runners_build_and_push_one_stack_at_once(small: Path, builder: dict[str, str], second: SecondEngine,
                                                      proxy: FaultProxy, tmp_path: Path) -> None:
    """Two jobs on one engine, one on a builder that pushes itself; all succeed, and the registry has one image."""
    other, third = (shutil.copytree(small, tmp_path / name) for name in ("other", "third"))
    words = [sys.executable, "-m", "buildctl", "build", "--stack", "tiny", "--json", "--push", f"{proxy.host}/team"]
    processes = [subprocess.Popen([*words, *more], cwd=folder, env={**os.environ, **builder}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                 for folder, more in ((small, []), (other, []), (third, ["--builder", BUILDER]))]
    told = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    images = [json.loads(out)["images"][0] for out, _ in told]
    version, key = images[0]["tags"]
    assert all(image["tags"] == [version, key] for image in images)
    assert digest(proxy, key)
    with Registry(proxy.upstream, plain_http=True) as client:
        manifest = client.manifest("team/cuda", version.partition(":")[2])
        assert manifest is not None
        assert key_of(client, "team/cuda", manifest) == images[0]["key"]


def test_a_builders_login_is_this_machines(small: Path, builder: dict[str, str], second: SecondEngine,
                                           storage: Path, tmp_path: Path) -> None:
    """buildx answers the registry's challenge from here; the builder gets a token and never the password."""
    config = tmp_path / "docker"
    config.mkdir()
    with (RegistryServer(storage, address=second.gateway) as far,
          FaultProxy(far.host, address=second.gateway, token_ttl=600, password="geheim-1") as proxy):
        auth = base64.b64encode(b"ci:geheim-1").decode()
        (config / "config.json").write_text(json.dumps({"auths": {proxy.host: {"auth": auth}}}))
        env = {**builder, "DOCKER_CONFIG": str(config)}
        made = build(small, "--builder", BUILDER, "--push", f"{proxy.host}/team", **env)
        assert made["images"][0]["state"] == "pushed"
        tokens = [request for request in proxy.requests if request.path.startswith("/token")]
        assert {request.peer for request in tokens} == {second.gateway}
        assert "geheim" not in made["err"]
        hidden = buildctl("build", "--stack", "tiny", "--builder", BUILDER, "--push", f"{proxy.host}/x", cwd=small,
                          **env, SGL_BUILDCTL_REGISTRY_HOST=proxy.host, SGL_BUILDCTL_REGISTRY_USER="ci",
                          SGL_BUILDCTL_REGISTRY_PASSWORD="geheim-1")
        assert hidden.code == 2
        assert f"docker login {proxy.host}" in hidden.err
        (config / "config.json").write_text("{}")
        assert failing(small, proxy, **env).code == 10


def failing(project: Path, proxy: FaultProxy, **env: str) -> Ran:
    words = ("build", "--stack", "tiny", "--builder", BUILDER, "--push", f"{proxy.host}/team")
    return buildctl(*words, cwd=project, **env)


def test_faults_of_a_builders_push(small: Path, builder: dict[str, str], proxy: FaultProxy) -> None:
    for fault, code in ((Fault("PUT", "/blobs/uploads/", code=413, read_body=False), 10),
                        (Fault("PUT", "/blobs/uploads/", code=500), 11),
                        (Fault("PUT", "/manifests/sha256:", code=403), 10)):
        proxy.add(fault)
        ran = failing(small, proxy, **builder)
        assert ran.code == code, ran.err
        assert fault.fired
        proxy.faults.clear()
    proxy.add(late := Fault("PUT", "/manifests/sha256:", code=504, times=1))
    made = build(small, "--builder", BUILDER, "--push", f"{proxy.host}/team", **builder)
    assert late.fired == 1
    (image,) = made["images"]
    assert digest(proxy, image["tags"][0]) == image["digest"]
    # finished layers are not sent again, and one that is cut is
    assert proxy.sent_twice() == 0
    path = small / "images" / "cuda" / "Dockerfile"
    path.write_text(path.read_text() + "RUN echo again > /edited\n")
    proxy.add(cut := Fault("PUT", "/blobs/uploads/", "reset", after=50, times=1))
    again = build(small, "--builder", BUILDER, "--push", f"{proxy.host}/team", **builder)
    assert cut.fired == 1
    assert digest(proxy, again["images"][0]["tags"][0]) == again["images"][0]["digest"] != image["digest"]


def test_a_builder_that_is_gone(small: Path, proxy: FaultProxy, tmp_path: Path, second: SecondEngine) -> None:
    with Bridge(second) as bridge, remote_builder("gone", bridge.address, tmp_path / "buildx") as env:
        pass
    ran = buildctl("build", "--stack", "tiny", "--builder", "gone", "--push", f"{proxy.host}/team", cwd=small, **env,
                   DOCKER_HOST=second.host)
    assert ran.code == 9, ran.err
    assert bridge.address in ran.err
    assert "answers" in ran.err
