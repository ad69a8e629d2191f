"""`buildctl verify` on the real image of the demo: in the engine, in a real registry, and changed by hand."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from buildctl.registry import Registry
from tests.integration.conftest import buildctl, docker
from tests.registry.server import RegistryServer

pytestmark = pytest.mark.engine

SITE = "/opt/venv/lib/python3.11/site-packages"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as running:
        yield running


def derived(demo_image: str, steps: str, registry: RegistryServer) -> str:
    """Somebody's image on top of ours, in the engine under a name of the registry."""
    name = f"{registry.host}/evil/sglang:1"
    done = subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=f"FROM {demo_image}\n{steps}",
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return name


def test_the_demo_image_is_what_its_lock_says(demo_image: str) -> None:
    ran = buildctl("verify", demo_image, "--stack", "cpu-demo", "--json")
    assert ran.code == 0, ran.out + ran.err
    report: dict[str, Any] = json.loads(ran.out)
    assert report["equal"] is True
    assert report["source"] == "engine"
    assert report["compared"]["packages"] > 90
    assert report["compared"]["files"] > 20_000
    assert report["compared"]["debian files"] > 5_000
    assert report["compared"]["patches"] == 3
    assert "read " in ran.err


def test_a_changed_image_in_a_registry_is_told_file_by_file(demo_image: str, registry: RegistryServer) -> None:
    name = derived(demo_image, f"""\
USER root
RUN echo "# evil" >> {SITE}/sglang/launch_server.py && rm {SITE}/torch/hub.py \
    && echo "import os" > {SITE}/sitecustomize.py && mv {SITE}/dill-*.dist-info /tmp/
ENV LD_PRELOAD=/tmp/x.so
""", registry)
    try:
        docker("push", name)
    finally:
        docker("rmi", "--force", name)
    # without an engine: nothing but the registry answers
    ran = buildctl("verify", name, "--json", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert ran.code == 7, ran.out + ran.err
    report: dict[str, Any] = json.loads(ran.out)
    assert report["source"] == "registry"
    said = {(one["subject"], one["name"]): one for one in report["differences"]}
    changed = said["file", f"{SITE}/sglang/launch_server.py"]
    assert changed["what"].startswith("a file of sglang 0.5.23 was changed")
    assert "# evil" in changed["step"]
    assert changed["layer"] == report["layers"]
    assert said["file", f"{SITE}/torch/hub.py"]["found"] == "nothing"
    assert said["file", f"{SITE}/sitecustomize.py"]["what"] == "a file that no package owns"
    assert said["package", "dill"]["what"] == "a package of the lock is missing in /opt/venv"
    assert said["setting", "user"]["found"] == "root"
    assert said["setting", "LD_PRELOAD"]["found"] == "/tmp/x.so"
    text = buildctl("verify", "--help")
    assert text.code == 0


def test_labels_annotations_and_the_bill_of_materials_are_there(demo_image: str) -> None:
    inspected = json.loads(docker("inspect", demo_image))[0]["Config"]["Labels"]
    assert {"buildctl.lock", "buildctl.key", "buildctl.patches", "buildctl.targets",
            "org.opencontainers.image.title", "org.opencontainers.image.base.name"} <= inspected.keys()
    text = docker("run", "--rm", "--entrypoint", "cat", demo_image, "/etc/buildctl/sbom.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {one["bom-ref"]: one for one in json.loads(text)["components"]}
    assert components["server/torch"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert len(components["server/sglang"]["pedigree"]["patches"]) == 3
    assert any(ref.startswith("debian/libc6:") for ref in components)


@pytest.mark.parametrize(("words", "code", "said"), [
    (("no-such-image:1",), 2, "no such image in the engine"),
    (("127.0.0.1:9/x",), 2, "must name a tag or digest"),
    (("IMAGE", "--stack", "none"), 3, "none")])
def test_what_cannot_be_verified(demo_image: str, words: tuple[str, ...], code: int, said: str) -> None:
    ran = buildctl("verify", *(demo_image if word == "IMAGE" else word for word in words))
    assert ran.code == code, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_buildkits_own_attestations_for_those_who_ask(tiny: Path, registry: RegistryServer) -> None:
    ran = buildctl("build", "--stack", "tiny", "--buildkit-attest", "type=provenance,mode=max", "--progress", "plain",
                   "--json", "--push", f"{registry.host}/team", cwd=tiny)
    assert ran.code == 0, ran.err
    (image,) = json.loads(ran.out)["images"]
    name = f"{registry.host}/team/{next(tag for tag in image['tags'] if ':key-' in tag)}"
    with Registry(registry.host) as client:
        manifest = client.manifest("team/cuda", image["digest"])
        assert manifest is not None
        platforms = [entry["platform"]["os"] for entry in manifest.content["manifests"]]
    assert platforms == ["linux", "unknown"]  # the image, and what is said about it
    check = buildctl("verify", name, "--json", cwd=tiny)
    assert check.code == 0, check.out + check.err
    assert [one["kind"] for one in json.loads(check.out)["attached"]] == ["provenance", "sbom"]
