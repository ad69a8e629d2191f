"""What a registry says about an image without its layers: its config and labels."""

from __future__ import annotations

import json
from dataclasses import dataclass

from buildctl.oci import INDEXES, Descriptor, Manifest
from buildctl.registry import Registry

#: the label that holds an image's content key: two builds with the same key are the same content
KEY_LABEL = "buildctl.key"
#: the label that holds the key of the chain below the image's last stages
CHAIN_LABEL = "buildctl.chain"
#: the label that names the stack
STACK_LABEL = "buildctl.stack"
#: the label and annotation that hold the digest of the lock in the image
LOCK_LABEL = "buildctl.lock"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an image is: its content key (empty without one), and every digest by which somebody may know it."""

    key: str
    digests: frozenset[str]


def config_of(registry: Registry, repository: str, manifest: Manifest) -> Descriptor | None:
    """The config of an image; of an index that of its first image, attestations passed over."""
    if manifest.media_type in INDEXES:
        for entry in manifest.content.get("manifests", []):
            if (entry.get("platform") or {}).get("os", "linux") == "unknown":
                continue
            child = registry.manifest(repository, entry["digest"])
            return child.blobs[0] if child else None
        return None
    return manifest.blobs[0]


def config_labels(registry: Registry, repository: str, config: Descriptor) -> dict[str, str]:
    """The labels in an image's config."""
    content = json.loads(registry.blob(repository, config.digest))
    return dict((content.get("config") or {}).get("Labels") or {})


def key_of(registry: Registry, repository: str, manifest: Manifest) -> str:
    """The content key of an image; empty when it has none."""
    config = config_of(registry, repository, manifest)
    return config_labels(registry, repository, config).get(KEY_LABEL, "") if config else ""


def identity_of(registry: Registry, repository: str, manifest: Manifest) -> Identity:
    """The identity of an image: its own digest, of an index also those of its manifests, and its config's.

    An engine without the containerd image store knows an image by its config.
    """
    config = config_of(registry, repository, manifest)
    digests = {manifest.digest, *(child.digest for child in manifest.children), *([config.digest] if config else [])}
    return Identity(key_of(registry, repository, manifest), frozenset(digests))
