"""A base as an OCI layout: where it is asked for, and what is made of the answers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from buildctl import layout
from buildctl.errors import ManifestError, NetworkError
from buildctl.fault import Fault, Kind
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Manifest
from buildctl.registry import Registry
from buildctl.retry import Failed, Policy

CONTENT = {"sha256:" + hashlib.sha256(blob).hexdigest(): blob for blob in (b"config", b"layer")}


def _body(value: object) -> tuple[bytes, str]:
    body = json.dumps(value).encode()
    return body, "sha256:" + hashlib.sha256(body).hexdigest()


CONFIG, LAYER = ({"mediaType": "application/octet-stream", "digest": digest, "size": len(blob)}
                 for digest, blob in CONTENT.items())
IMAGE, IMAGE_DIGEST = _body({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": CONFIG, "layers": [LAYER]})
INDEX, DIGEST = _body({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [
    {"mediaType": OCI_MANIFEST, "digest": IMAGE_DIGEST, "size": len(IMAGE),
     "platform": {"os": "linux", "architecture": "amd64"}}]})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that has the image, whatever its name; what it is asked for."""
    found: list[str] = []

    def manifest(registry: Registry, repository: str, digest: str) -> Manifest:
        found.append(f"{registry.base} {repository}")
        return Manifest(OCI_INDEX, INDEX) if digest == DIGEST else Manifest(OCI_MANIFEST, IMAGE)

    def stream(registry: Registry, repository: str, digest: str) -> list[bytes]:
        found.append(f"{registry.base} {repository}")
        return [CONTENT[digest]]

    monkeypatch.setattr(Registry, "manifest", manifest)
    monkeypatch.setattr(Registry, "stream", stream)
    return found


@pytest.mark.parametrize(("image", "place"), [
    ("debian:bookworm-slim", "https://registry-1.docker.io library/debian"),
    ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "https://registry-1.docker.io nvidia/cuda"),
    (f"ghcr.io/team/base:1@{DIGEST}", "https://ghcr.io team/base")])
def test_a_base_is_asked_of_the_registry_that_its_name_means(tmp_path: Path, asked: list[str], image: str,
                                                             place: str) -> None:
    path = layout.path_of(tmp_path, DIGEST)
    assert layout.save(image, DIGEST, "linux/amd64", path) == len(b"config") + len(b"layer")
    assert set(asked) == {place}
    assert json.loads((path / "index.json").read_text())["manifests"][0]["digest"] == DIGEST
    assert {file.name for file in (path / "blobs" / "sha256").iterdir()} == {
        digest.removeprefix("sha256:") for digest in (*CONTENT, IMAGE_DIGEST, DIGEST)}
    assert layout.save(image, DIGEST, "linux/amd64", path) == 0  # what is whole is kept


def test_a_base_for_another_platform(tmp_path: Path, asked: list[str]) -> None:
    with pytest.raises(ManifestError, match="no image for the stack's platform"):
        layout.save("debian:12", DIGEST, "linux/arm64", tmp_path)
    assert len(asked) == 1


def test_a_blob_that_is_another_one_or_does_not_come(tmp_path: Path, asked: list[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "stream", lambda *_: [b"other"])
    with pytest.raises(NetworkError, match="gives something else than the digest names"):
        layout.save("debian:12", DIGEST, "linux/amd64", tmp_path)
    assert asked

    def cut(*_: object) -> list[bytes]:
        raise Failed(Fault(Kind.TRANSIENT, "connection reset"))

    monkeypatch.setattr(Registry, "stream", cut)
    with pytest.raises(NetworkError, match="does not give a blob of the base"):
        layout.save("debian:12", DIGEST, "linux/amd64", tmp_path, Policy(attempts=1))
    assert not (tmp_path / "index.json").exists()


def test_a_base_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "manifest", lambda *_: None)
    with pytest.raises(NetworkError, match=r"docker\.io/library/debian: the registry does not have the base any more"):
        layout.save("debian:12", DIGEST, "linux/amd64", tmp_path)
