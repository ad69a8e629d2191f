"""A base image saved by digest from a real registry, and what BuildKit does with it once the registry is gone."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildctl import layout
from buildctl.engine import Engine
from buildctl.errors import ManifestError, NetworkError
from buildctl.fault import Fault, Kind
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Manifest
from buildctl.registry import Registry
from buildctl.retry import Failed, Policy
from tests.registry.server import RegistryServer


def one_file(text: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("told")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


def push(server: RegistryServer, platforms: dict[str, str]) -> tuple[str, str]:
    """An index with one image per platform, each with one file; the image's name and the index's digest."""
    with Registry(server.host, actions="pull,push") as registry:
        entries: list[dict[str, Any]] = []
        for platform, text in platforms.items():
            blob = one_file(text)
            system, _, machine = platform.partition("/")
            config = {"architecture": machine, "os": system, "config": {}, "rootfs": {
                "type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(gzip.decompress(blob)).hexdigest()}"]}}
            body = json.dumps({
                "schemaVersion": 2, "mediaType": OCI_MANIFEST,
                "config": {**registry.put_blob("base", json.dumps(config).encode()).as_dict(),
                           "mediaType": "application/vnd.oci.image.config.v1+json"},
                "layers": [{**registry.put_blob("base", blob).as_dict(),
                            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}]}).encode()
            manifest = Manifest(OCI_MANIFEST, body)
            registry.put_manifest("base", manifest.digest, manifest)
            entries.append({**manifest.descriptor.as_dict(), "platform": {"os": system, "architecture": machine}})
        content = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
        top = Manifest(OCI_INDEX, json.dumps(content).encode())
        registry.put_manifest("base", "12", top)
        return f"{server.host}/base:12", top.digest


def test_a_build_stands_on_it_without_the_registry(server: RegistryServer, tmp_path: Path) -> None:
    image, digest = push(server, {"linux/arm64": "other", "linux/amd64": "ours"})
    place = layout.path_of(tmp_path / "house", digest)
    assert layout.save(image, digest, "linux/amd64", place) > 0
    assert layout.save(image, digest, "linux/amd64", place) == 0  # nothing twice
    names = [path.name for path in (place / "blobs" / "sha256").iterdir()]
    assert len(names) == 4  # index, manifest, config, layer: one platform
    assert all(hashlib.sha256((place / "blobs" / "sha256" / name).read_bytes()).hexdigest() == name for name in names)
    server.stop()
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {image}@{digest} AS base\n"
                                       "FROM scratch AS out\nCOPY --from=base /told /\n")
    (folder / "docker-bake.json").write_text(json.dumps({"target": {"out": {
        "context": ".", "target": "out", "output": [f"type=local,dest={tmp_path}/out"],
        "contexts": {"base": f"oci-layout://{place}@{digest}"}}}}))
    Engine().bake(folder, ["out"], tmp_path / "log", show="quiet")
    assert (tmp_path / "out" / "told").read_text() == "ours"


def test_a_platform_that_the_image_does_not_have(server: RegistryServer, tmp_path: Path) -> None:
    image, digest = push(server, {"linux/arm64": "other"})
    with pytest.raises(ManifestError, match=r"(?s)no image for the stack's platform.*linux/arm64.*linux/amd64"):
        layout.save(image, digest, "linux/amd64", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_digest_that_is_gone_and_a_registry_that_is_down(server: RegistryServer, tmp_path: Path) -> None:
    image, digest = push(server, {"linux/amd64": "ours"})
    with pytest.raises(NetworkError, match="does not have the base any more"):
        layout.save(image, "sha256:" + "0" * 64, "linux/amd64", tmp_path / "x")
    server.stop()
    with pytest.raises(NetworkError) as caught:
        layout.save(image, digest, "linux/amd64", tmp_path / "x", Policy(attempts=2, first=0.001))
    assert caught.value.exit_code == 11


def test_a_blob_that_is_not_what_its_digest_names(server: RegistryServer, tmp_path: Path) -> None:
    image, digest = push(server, {"linux/amd64": "ours"})
    blob = hashlib.sha256(one_file("ours")).hexdigest()
    data = server.blobs / blob[:2] / blob / "data"
    data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(NetworkError, match="something else than the digest names"):
        layout.save(image, digest, "linux/amd64", tmp_path / "x")
    assert not list(tmp_path.glob("x/blobs/sha256/*"))[1:]  # the config is whole and kept
    assert not (tmp_path / "x" / "index.json").exists()


def test_a_cut_is_tried_again_and_a_registry_that_keeps_cutting_is_given_up(
        server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, digest = push(server, {"linux/amd64": "ours"})
    real = Registry.stream
    cuts = [2]

    def cut(self: Registry, repository: str, blob: str) -> Iterator[bytes]:
        if cuts[0]:
            cuts[0] -= 1
            yield b"half of it"
            raise Failed(Fault(Kind.TRANSIENT, "connection reset by peer"))
        yield from real(self, repository, blob)

    monkeypatch.setattr(Registry, "stream", cut)
    place = tmp_path / "x"
    layout.save(image, digest, "linux/amd64", place, Policy(attempts=3, first=0.001))
    assert not [path for path in (place / "blobs" / "sha256").iterdir() if path.name.startswith(".")]
    cuts[0] = 9
    with pytest.raises(NetworkError, match=r"(?s)does not give a blob.*connection reset by peer.*whole is kept"):
        layout.save(image, digest, "linux/amd64", tmp_path / "y", Policy(attempts=3, first=0.001))
    assert list((tmp_path / "y" / "blobs" / "sha256").iterdir()) == []
