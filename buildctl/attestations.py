"""What is attached to an image about itself: provenance and bill of materials, as OCI referrers.

The image's digest stays what it is. Both are found by tools that know the types: in-toto statements, CycloneDX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from buildctl import contents, provenance, sbom
from buildctl import lock as locks
from buildctl.building import Built
from buildctl.compose import Composition
from buildctl.errors import NetworkError, Problem
from buildctl.oci import Descriptor
from buildctl.provenance import Build, Origin
from buildctl.reference import Reference
from buildctl.registry import Registry

if TYPE_CHECKING:
    from buildctl.publishing import Placed

IN_TOTO = "application/vnd.in-toto+json"
_PREDICATE_TYPE = "in-toto.io/predicate-type"
#: attested documents are read whole; a bigger one is passed over
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class Attestation:
    """One attached document: what it is (`provenance` or `sbom`), its bytes, and the digest of its referrer."""

    kind: str
    content: bytes
    digest: str


def attach_all(composition: Composition, placed: Iterable[Placed], registry: Callable[[str], Registry],
               origin: Origin, build: Build, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Attach what is missing to every image: what this run made, and what is in a registry without provenance.

    An image that somebody else pushed under the key while this run was building has another digest and is left alone.
    """
    told = []
    for one in placed:
        built, reference = one.built, one.target.at(one.digest)
        if built.state != "published" and one.foreign:
            continue
        client = registry(reference.registry)
        if not one.new and attested(client, reference.repository, one.digest):
            continue
        how = build if built.state in ("built", "pushed") else Build(builder=build.builder)
        told += [{"action": "attest", "target": str(reference), "digest": descriptor.digest} for descriptor in
                 _attach(client, reference, composition, built, origin, how, environment)]
    return told


def _attach(registry: Registry, reference: Reference, composition: Composition, one: Built, origin: Origin,
            build: Build, environment: Mapping[str, str]) -> list[Descriptor]:
    """The bill of materials that the image itself carries, then provenance: where that is, nothing is missing."""
    repository, stack = reference.repository, composition.stack
    manifest = registry.manifest(repository, reference.digest)
    if manifest is None or manifest.digest != reference.digest:
        raise NetworkError(Problem("the registry does not show what was pushed", str(reference),
                                   manifest.digest if manifest else "nothing", reference.digest, "repeat the push"))
    made = []
    document = contents.top_file(registry, reference, stack.platform, sbom.PATH)
    if document is not None:
        made.append(registry.attach(repository, manifest.descriptor, sbom.MEDIA_TYPE,
                                    {"sbom.json": (sbom.MEDIA_TYPE, document)}, {}))
    layer = stack.layer(one.image.name)
    part = locks.restrict(composition.lock, stack.layers[: stack.layers.index(layer) + 1])
    facts = {"image": one.image.name, "stack": stack.name, "version": one.image.version, "key": one.image.key.value}
    statement = provenance.statement(reference.name, reference.digest, facts, part, origin, build, environment)
    made.append(registry.attach(repository, manifest.descriptor, IN_TOTO, {"provenance.json": (IN_TOTO, statement)},
                                {_PREDICATE_TYPE: provenance.PREDICATE}))
    return made


def attested(registry: Registry, repository: str, digest: str) -> bool:
    """Whether a digest has provenance, by the list of what is attached alone."""
    return any(entry.get("artifactType") == IN_TOTO
               and (entry.get("annotations") or {}).get(_PREDICATE_TYPE) == provenance.PREDICATE
               for entry in registry.referrers(repository, digest))


def attached(registry: Registry, repository: str, digest: str) -> tuple[Attestation, ...]:
    """Provenance and bills of materials attached to a digest, by anybody."""
    found = []
    for entry in registry.referrers(repository, digest):
        kind = {IN_TOTO: "provenance", sbom.MEDIA_TYPE: "sbom"}.get(str(entry.get("artifactType", "")))
        manifest = registry.manifest(repository, str(entry["digest"])) if kind else None
        if manifest is None or kind is None:
            continue
        predicate = (manifest.content.get("annotations") or {}).get(_PREDICATE_TYPE)
        if kind == "provenance" and predicate != provenance.PREDICATE:
            continue
        found += [Attestation(kind, registry.blob(repository, layer["digest"]), manifest.digest)
                  for layer in manifest.content.get("layers", []) if int(layer.get("size", 0)) <= _LARGEST]
    return tuple(sorted(found, key=lambda one: (one.kind, one.digest)))
