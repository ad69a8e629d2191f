"""Tiny images of known content, loaded into the engine without pulling anything."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Mapping
from contextlib import suppress

import docker
import docker.errors

from tests.registry.server import HOSTS

#: names in the engine are this process's own; the last part is what the repository in a registry is called
PREFIX = f"p{os.getpid()}/regtest-"


def layer(seed: int, size: int = 2000) -> bytes:
    """An incompressible layer of about `size` bytes, the same for the same seed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(f"file-{seed}")
        info.size = size
        archive.addfile(info, io.BytesIO(random.Random(seed).randbytes(size)))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def archive(name: str, layers: list[bytes], labels: Mapping[str, str]) -> bytes:
    """An OCI layout in a tar, as `docker load` takes it."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    oci = "application/vnd.oci.image"
    diff_ids = [f"sha256:{hashlib.sha256(gzip.decompress(data)).hexdigest()}" for data in layers]
    config = {"architecture": "amd64", "os": "linux", "config": {"Labels": dict(labels)},
              "rootfs": {"type": "layers", "diff_ids": diff_ids},
              "history": [{"created_by": f"RUN step {number}"} for number, _ in enumerate(layers)]}
    manifest = {"schemaVersion": 2, "mediaType": f"{oci}.manifest.v1+json",
                "config": blob(json.dumps(config).encode(), f"{oci}.config.v1+json"),
                "layers": [blob(data, f"{oci}.layer.v1.tar+gzip") for data in layers]}
    index = {"schemaVersion": 2, "mediaType": f"{oci}.index.v1+json", "manifests": [
        {**blob(json.dumps(manifest).encode(), f"{oci}.manifest.v1+json"),
         "annotations": {"io.containerd.image.name": f"docker.io/{name}",
                         "org.opencontainers.image.ref.name": name.rpartition(":")[2]}}]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class Images:
    """Loads images into an engine and takes them away again."""

    def __init__(self, engine: docker.APIClient) -> None:
        self.engine = engine
        self._names: list[str] = []
        self._seed = random.SystemRandom().randrange(1 << 40)

    def make(self, name: str = "a:1", *, layers: int = 2, size: int = 2000, labels: Mapping[str, str] | None = None,
             seed: int | None = None) -> str:
        """A new image `PREFIX + NAME` with fresh content (or that of `seed`); returns its name."""
        name = PREFIX + name
        if seed is None:
            self._seed += 1000
            seed = self._seed
        data = archive(name, [layer(seed + number, size) for number in range(layers)], labels or {})
        list(self.engine.load_image(data))  # type: ignore[no-untyped-call]
        self._names.append(name)
        return name

    def digest(self, name: str) -> str:
        """The engine's id of an image."""
        return str(self.engine.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]

    def names(self) -> set[str]:
        """All names in the engine that this process or its pushes made."""
        while True:
            try:
                listed = self.engine.images()
            except docker.errors.NotFound:  # somebody else removes an image right now
                continue
            tags = {tag for image in listed for tag in image["RepoTags"] or []}
            return {tag for tag in tags if tag.startswith(PREFIX) or tag.partition("/")[0] in HOSTS}

    def clean(self) -> None:
        """Remove everything that was made."""
        for name in self._names:
            with suppress(docker.errors.NotFound):
                self.engine.remove_image(name, force=True)
        self._names.clear()
