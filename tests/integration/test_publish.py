"""Builds that publish: what a registry has under its key is not built again, and a fresh machine goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import lock as locks
from buildctl.project import Project
from buildctl.registry import Registry
from tests.integration.conftest import PREFIX, buildctl, docker, remove_images
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

pytestmark = pytest.mark.engine


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def second(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "second") as running:
        yield running


def build(project: Path, *places: str) -> dict[str, Any]:
    words = [word for place in places for word in ("--push", place)]
    ran = buildctl("build", "--stack", "tiny", "--json", "--progress", "plain", *words, cwd=project)
    assert ran.code == 0, ran.err
    data: dict[str, Any] = json.loads(ran.out)
    data["err"] = ran.err
    return data


def local_tags() -> set[str]:
    return set(docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())


def digest(server: RegistryServer, repository: str, tag: str) -> str:
    with Registry(server.host) as client:
        found = client.head(repository, tag)
    assert found is not None, f"{repository}:{tag}"
    return found.digest


def test_published_once_then_never_built_again(tiny: Path, registry: RegistryServer, second: RegistryServer) -> None:
    place = f"{registry.host}/team"
    before = local_tags()
    first = build(tiny, place)
    (image,) = first["images"]
    version, key = (tag.split(":")[1] for tag in image["tags"])
    assert image["state"] == "built"
    assert digest(registry, "team/cuda", key) == digest(registry, "team/cuda", version) == image["digest"]
    assert not [tag for tag in local_tags() - before if ":chain-" in tag]

    # a machine with nothing in its engine
    remove_images()
    assert not [tag for tag in local_tags() if PREFIX in tag]
    again = build(tiny, place)
    assert [one["state"] for one in again["images"]] == ["published"]
    assert again["build"] is None
    assert [move["action"] for move in again["pushed"]] == ["keep"]
    assert not [tag for tag in local_tags() if PREFIX in tag]

    # with nothing to do it asks for two tags and for the list of what is attached, and for no engine
    with FaultProxy(registry.host) as proxy:
        ran = buildctl("build", "--stack", "tiny", "--push", f"{proxy.host}/team", cwd=tiny,
                       DOCKER_HOST="unix:///nowhere")
        assert ran.code == 0, ran.err
        tag = image["digest"].replace(":", "-")  # this registry has no referrers API: the list is behind a tag
        assert [(request.method, request.path.rpartition("/")[2]) for request in proxy.requests] == [
            ("HEAD", key), ("GET", image["digest"]), ("GET", tag), ("HEAD", version)]

    both = build(tiny, place, f"{second.host}/mirror")
    assert both["build"] is None
    assert digest(second, "mirror/cuda", key) == digest(second, "mirror/cuda", version) == image["digest"]


def test_a_fresh_machine_goes_on_from_the_deepest_stage(tiny: Path, registry: RegistryServer) -> None:
    build(tiny, registry.host)
    remove_images()
    path = tiny / "entrypoints" / "__init__.py"
    path.write_text(path.read_text() + "\n# an edit\n")
    after = build(tiny, registry.host)
    assert set(after["resumed"]) == {"cuda", "entrypoint-env"}
    assert all(there.startswith(f"{registry.host}/") and "@sha256:" in there for there in after["resumed"].values())
    stages = {step["stage"] for step in after["build"]["steps"] if step["kind"] == "instruction"}
    assert stages <= {"entrypoint", "cuda-image", "entrypoint-env", "cuda", "cuda-guard", "cuda-sbom"}
    assert not (tiny / ".buildctl/tiny/context/base").exists()
    layers = json.loads(docker("image", "inspect", after["images"][0]["tags"][0]))[0]["RootFS"]["Layers"]
    assert len(layers) > 3


def test_a_version_tag_moves_and_a_key_tag_does_not(tiny: Path, registry: RegistryServer) -> None:
    before = build(tiny, registry.host)["images"][0]
    path = tiny / "entrypoints" / "__init__.py"
    path.write_text(path.read_text() + "\n# an edit\n")
    after = build(tiny, registry.host)["images"][0]
    assert before["digest"] != after["digest"]
    version = after["tags"][0].split(":")[1]
    assert digest(registry, "cuda", version) == after["digest"]
    assert digest(registry, "cuda", before["tags"][1].split(":")[1]) == before["digest"]


def test_an_image_whose_documents_were_lost_gets_them_from_the_next_run(tiny: Path, registry: RegistryServer) -> None:
    with FaultProxy(registry.host) as proxy:
        proxy.add(Fault("PUT", "/manifests/sha256:", code=503, headers={"Retry-After": "3600"}, times=1))
        words = ("build", "--stack", "tiny", "--json", "--progress", "quiet", "--push", f"{proxy.host}/team")
        failed = buildctl(*words, cwd=tiny)
        assert failed.code == 11, failed.err
        with Registry(registry.host) as client:
            assert not [tag for tag in client.tags("team/cuda") if PREFIX in tag]
        ran = buildctl(*words, cwd=tiny)
    assert ran.code == 0, ran.err
    (image,) = json.loads(ran.out)["images"]
    assert image["state"] == "published"
    version, key = (tag.partition(":")[2] for tag in image["tags"])
    assert digest(registry, "team/cuda", version) == digest(registry, "team/cuda", key)
    check = buildctl("verify", f"{registry.host}/team/cuda:{key}", "--json", cwd=tiny)
    assert check.code == 0, check.out + check.err
    assert [one["kind"] for one in json.loads(check.out)["attached"]] == ["provenance", "sbom"]


def test_strict_refuses_before_and_after_somebody_else_has_published(tiny: Path, registry: RegistryServer) -> None:
    path = tiny / "images" / "stacks" / "tiny.lock"
    lock = locks.read(path, Project(tiny))
    cuda = {**lock.debian["cuda"], "libgomp1": "0-gone sha256:" + "0" * 64}
    path.write_text(locks.dump(replace(lock, debian={**lock.debian, "cuda": cuda})))
    words = ("build", "--stack", "tiny", "--strict", "--progress", "quiet", "--push", registry.host)
    before = local_tags()
    refused = buildctl(*words, cwd=tiny)
    assert refused.code == 7, refused.err
    assert not [tag for tag in local_tags() - before if ":chain-" in tag]
    with Registry(registry.host) as client:
        assert client.tags("cuda") == ()
    build(tiny, registry.host)
    # only the registry is asked
    again = buildctl(*words, cwd=tiny, DOCKER_HOST="unix:///nowhere")
    assert again.code == 7, again.err
    assert "libgomp1 0-gone" in again.err


def test_a_registry_that_is_gone_is_noticed_before_the_build(tiny: Path, registry: RegistryServer) -> None:
    registry.stop()
    ran = buildctl("build", "--stack", "tiny", "--push", registry.host, cwd=tiny)
    assert ran.code == 11
    assert registry.host in ran.err
    assert not [tag for tag in local_tags() if PREFIX in tag]
