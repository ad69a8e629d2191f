"""An image with everything that can be known of it without running it: config, annotations, layers, files.

From a registry the layers are streamed one after the other; from an engine comes the stream of `docker save`. Every
digest is checked against the bytes. Memory is bounded by the number of files, not by their size.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, cast

from buildctl import layers
from buildctl.errors import AuditError, NetworkError, Problem, UsageError
from buildctl.filesystem import FileSystem
from buildctl.layers import Keep, Layer, Pieces, Source, WrongDigest
from buildctl.oci import INDEXES, Descriptor, Manifest, digest_of, platforms_of
from buildctl.reference import Reference, parse
from buildctl.registry import Registry

#: hears of a layer's number (from 1; 0 where they come in any order), how many there are, and its bytes so far
Progress = Callable[[int, int, int], None]

#: documents of an image are small; what is bigger in an export is a layer
_LARGEST_DOCUMENT = 4 << 20
_AGAIN = "read it again; if it stays so, push the image again"


@dataclass(frozen=True, slots=True)
class Image:
    """One image of one platform, read. Sizes in bytes as they travel."""

    reference: str
    #: of the manifest; of the config where an engine keeps no manifest
    digest: str
    config: Mapping[str, Any]
    annotations: Mapping[str, str]
    layers: tuple[Layer, ...]
    files: FileSystem

    @property
    def settings(self) -> Mapping[str, Any]:
        """The part of the config that a container starts with."""
        return self.config.get("config") or {}

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels in the config."""
        return self.settings.get("Labels") or {}

    @property
    def size(self) -> int:
        """Bytes of all layers."""
        return sum(layer.size for layer in self.layers)

    def step(self, layer: int) -> str:
        """The build step that made a layer, as the image's history tells it."""
        steps = [step for step in self.config.get("history") or () if not step.get("empty_layer")]
        return str(steps[layer].get("created_by", "")) if layer < len(steps) else ""


def from_registry(registry: Registry, reference: Reference, platform: str, keep: Keep,
                  progress: Progress | None = None) -> Image:
    """Read an image from a registry, without an engine.

    :param platform: the one to take of an index, as `linux/amd64`.
    :raises UsageError: there is no such image.
    :raises NetworkError: the registry keeps failing, or answers with other bytes than asked for.
    :raises AuditError: a layer is none that may be trusted.
    """
    manifest = manifest_of(registry, reference, platform)
    config, *blobs = manifest.blobs
    document = json.loads(registry.blob(reference.repository, config.digest))
    found = []
    for number, blob in enumerate(blobs, start=1):
        where = f"{reference} layer {number} of {len(blobs)}"
        try:
            with closing(registry.open_blob(reference.repository, blob.digest)) as stream:
                found.append(layers.read(_Watched(stream, progress, number, len(blobs)), keep, where=where,
                                         digest=blob.digest, size=blob.size))
        except WrongDigest as wrong:
            raise NetworkError(Problem("the registry answers with other bytes than asked for", where, wrong.found,
                                       blob.digest, _AGAIN)) from None
    annotations = manifest.content.get("annotations") or {}
    return _image(str(reference), manifest.digest, document, annotations, found)


def manifest_of(registry: Registry, reference: Reference, platform: str) -> Manifest:
    """The manifest of an image, of an index the one for a platform. Raises as `from_registry`."""
    manifest = registry.existing(reference)
    if manifest.media_type not in INDEXES:
        return manifest
    child = _child(manifest.content.get("manifests", []), platform, str(reference))
    found = registry.manifest(reference.repository, child.digest)
    if found is None or found.digest != child.digest:
        raise NetworkError(Problem("the index names a manifest that the registry does not have", str(reference),
                                   found.digest if found else "nothing", child.digest, "push the image again"))
    return found


def top_file(registry: Registry, reference: Reference, platform: str, path: str) -> bytes | None:
    """A file of an image, read from the top down and from small layers only; None where none of those has it."""
    for blob in reversed(manifest_of(registry, reference, platform).blobs[1:]):
        if blob.size > _LARGEST_DOCUMENT:
            return None
        try:
            layer = layers.read(layers.Pieces([registry.blob(reference.repository, blob.digest)]),
                                lambda one: one == path, where=str(reference), digest=blob.digest)
        except AuditError:
            return None
        for name, entry in reversed(layer.entries):
            if name == path:
                return entry.content
    return None


@dataclass(frozen=True, slots=True)
class TopFiles:
    """Reads small files of images in registries, for one platform, as `top_file` does."""

    registry: Callable[[str], Registry]
    platform: str

    def file(self, reference: str, path: str) -> bytes | None:
        """The content, None where no small layer has it. Raises as `from_registry`."""
        parsed = parse(reference)
        return top_file(self.registry(parsed.registry), parsed, self.platform, path.removeprefix("/"))


def from_export(chunks: Iterable[bytes], name: str, keep: Keep, progress: Progress | None = None) -> Image:
    """Read an image from an engine's export, as it comes: layers may stand before what names them.

    :param name: the image's name in messages.
    :raises AuditError: a layer is none that may be trusted, or the export lacks a part.
    """
    found: dict[str, Layer] = {}
    documents: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", Pieces(chunks)), mode="r|", bufsize=1 << 16) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined] # it would keep every header
                content = archive.extractfile(member) if member.isfile() else None
                if content is None:
                    continue
                path = layers.clean(member.name, name)
                head = content.read(1)
                source = _Joined(head, content)
                if head in (b"{", b"[") and member.size <= _LARGEST_DOCUMENT:
                    documents[path] = source.read(_LARGEST_DOCUMENT) + content.read()
                elif path.startswith("blobs/") or path.endswith("layer.tar"):
                    found[path] = _exported(source, path, name, keep, progress)
    except tarfile.TarError as error:
        raise _incomplete(name, str(error)) from None
    return _assembled(name, documents, found)


def _exported(source: Source, path: str, name: str, keep: Keep, progress: Progress | None) -> Layer:
    digest = path.removeprefix("blobs/").replace("/", ":", 1) if path.startswith("blobs/") else ""
    try:
        return layers.read(_Watched(source, progress, 0, 0), keep, where=f"{name} {path}", digest=digest)
    except WrongDigest as wrong:
        raise AuditError(Problem("the engine holds other bytes than the digest says", f"{name} {path}", wrong.found,
                                 digest, "remove the image from the engine and build or pull it again")) from None


def _assembled(name: str, documents: Mapping[str, bytes], found: Mapping[str, Layer]) -> Image:
    try:
        listed = json.loads(documents["manifest.json"])[0]
        config = json.loads(documents[listed["Config"]])
        read = [found[path] for path in listed["Layers"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _incomplete(name, repr(error)) from None
    config_digest = digest_of(documents[listed["Config"]])
    # the manifest: the document that names this very config; graph drivers export none
    for data in documents.values():
        manifest = json.loads(data)
        if isinstance(manifest, dict) and (manifest.get("config") or {}).get("digest") == config_digest \
                and [layer.get("digest") for layer in manifest.get("layers") or ()] == [layer.digest for layer in read]:
            return _image(name, digest_of(data), config, manifest.get("annotations") or {}, read)
    return _image(name, config_digest, config, {}, read)


def _image(name: str, digest: str, config: Mapping[str, Any], annotations: Mapping[str, str],
           found: list[Layer]) -> Image:
    stated = list((config.get("rootfs") or {}).get("diff_ids") or ())
    actual = [layer.diff_id for layer in found]
    if stated != actual:
        wrong = [number for number, pair in enumerate(zip(stated, actual, strict=False), start=1) if pair[0] != pair[1]]
        raise AuditError(Problem("the image's config names other layers than its manifest", name,
                                 f"layer {', '.join(map(str, wrong))}" if wrong else f"{len(actual)} layers",
                                 "the same layers" if wrong else f"{len(stated)} layers", "push the image again"))
    return Image(name, digest, config, annotations, tuple(found), FileSystem(found))


def _child(entries: Iterable[Mapping[str, Any]], platform: str, where: str) -> Descriptor:
    found = platforms_of(entries)
    if platform not in found:
        raise UsageError(Problem("the index has no image for this platform", where, ", ".join(found) or "no images",
                                 platform, "name another image"))
    return found[platform]


def _incomplete(name: str, found: str) -> AuditError:
    return AuditError(Problem("the engine's export of the image lacks a part", name, found,
                              "manifest.json, the config and every layer", "build or pull the image again"))


class _Joined:
    """What was read of a source already, and the rest of it."""

    def __init__(self, head: bytes, source: Source) -> None:
        self._head, self._source = head, source

    def read(self, size: int, /) -> bytes:
        head, self._head = self._head, b""
        return head or self._source.read(size)


class _Watched:
    """Tells how much has been read."""

    def __init__(self, source: Source, progress: Progress | None, number: int, count: int) -> None:
        self._source, self._progress, self._number, self._count = source, progress, number, count
        self._read = 0

    def read(self, size: int, /) -> bytes:
        piece = self._source.read(size)
        self._read += len(piece)
        if self._progress is not None:
            self._progress(self._number, self._count, self._read)
        return piece
