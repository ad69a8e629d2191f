"""What lies in a registry: media types, descriptors, manifests (image specification 1.1). Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
#: all four: without the index types a registry answers 404 for an index
MANIFESTS = (OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST)
ACCEPT = ", ".join(MANIFESTS)
INDEXES = {OCI_INDEX, DOCKER_LIST}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Something in a registry: its digest, media type and size in bytes."""

    digest: str
    media_type: str
    size: int

    def as_dict(self) -> dict[str, object]:
        """In the form of the image specification."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest or index: its exact bytes, and the digest of those bytes."""

    media_type: str
    body: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, computed here and not believed."""
        return digest_of(self.body)

    @property
    def descriptor(self) -> Descriptor:
        """This manifest as something to point at."""
        return Descriptor(self.digest, self.media_type, len(self.body))

    @property
    def content(self) -> dict[str, Any]:
        """The parsed JSON object."""
        content = json.loads(self.body)
        return content if isinstance(content, dict) else {}

    @property
    def children(self) -> tuple[Descriptor, ...]:
        """The manifests of an index; nothing for a manifest."""
        return tuple(map(descriptor_of, self.content.get("manifests", []))) if self.media_type in INDEXES else ()

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Config and layers of a manifest; nothing for an index."""
        if self.media_type in INDEXES:
            return ()
        content = self.content
        return tuple(map(descriptor_of, [content["config"], *content.get("layers", [])]))


def digest_of(data: bytes) -> str:
    """`sha256:` and the hash of the bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def platforms_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, Descriptor]:
    """The manifests of an index by `os/architecture` (linux unless given); the first of a platform counts."""
    found: dict[str, Descriptor] = {}
    for entry in entries:
        platform = entry.get("platform") or {}
        found.setdefault(f"{platform.get('os', 'linux')}/{platform.get('architecture', '')}", descriptor_of(entry))
    return found


def descriptor_of(entry: Mapping[str, Any]) -> Descriptor:
    """A descriptor from its JSON object."""
    return Descriptor(entry["digest"], entry.get("mediaType", ""), int(entry.get("size", 0)))
