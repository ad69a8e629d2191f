"""What a build publishes and in which order, to a real registry: images as a builder pushes them, and no engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buildctl import attestations, sbom
from buildctl.building import Built, Outcome
from buildctl.compose import Composition, compose
from buildctl.engine import Baked, Engine
from buildctl.errors import AuditError, NetworkError, Problem
from buildctl.oci import OCI_MANIFEST, Manifest
from buildctl.progress import BuildRecord
from buildctl.provenance import Build, Origin
from buildctl.publishing import Finish, Placed, publish
from buildctl.push import Publisher
from buildctl.reference import Target
from buildctl.registry import Registry
from buildctl.retry import Policy
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer
from tests.unit import tars
from tests.unit.projects import ready
from tests.unit.test_compose import NO_HOST

BAKED = Baked(BuildRecord((), 0, 0, 0.0), {})


@pytest.fixture
def composition(tmp_path: Path) -> Composition:
    project, loaded, lock = ready(tmp_path / "project")
    return compose(project, loaded, lock, NO_HOST)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher(Engine(), policy=Policy(2, 0.01)) as made:
        yield made


def put(host: str, image: Any, *, tagged: bool = False, salt: str = "") -> str:
    """The image of a plan as a builder pushes it: by digest, its bill of materials in the top layer."""
    repository, _, key = image.tags[1].partition(":")
    with Registry(host, actions="pull,push", policy=Policy(1)) as registry:
        layer = tars.of({sbom.PATH: b"{}"})
        packed = registry.put_blob(repository, tars.pack(layer, "zstd"))
        config = registry.put_blob(repository, json.dumps({
            "config": {"Labels": {"buildctl.key": image.key.value, "salt": salt}},
            "rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}}).encode())
        manifest = Manifest(OCI_MANIFEST, json.dumps({
            "schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": {**config.as_dict(), "mediaType": "application/vnd.oci.image.config.v1+json"},
            "layers": [{**packed.as_dict(), "mediaType": "application/vnd.oci.image.layer.v1.tar+zstd"}]}).encode())
        registry.put_manifest(repository, key if tagged else manifest.digest, manifest)
    return manifest.digest


def outcome(image: Any, digest: str, state: str, place: Target) -> Outcome:
    return Outcome((Built(image, digest, 0, state),), (), BAKED, 0.0, None, straight_to=place)


def attaching(composition: Composition, publisher: Publisher, began: float) -> Finish:
    return partial(attestations.attach_all, composition, registry=publisher.registry, origin=Origin(),
                   build=Build("", "far", began, began), environment={})


def tags(host: str, repository: str) -> set[str]:
    with Registry(host, policy=Policy(1)) as registry:
        return {tag for tag in registry.tags(repository) if not tag.startswith("sha256-")}


def attached(host: str, repository: str, digest: str) -> list[attestations.Attestation]:
    with Registry(host, policy=Policy(1)) as registry:
        return list(attestations.attached(registry, repository, digest))


@pytest.mark.parametrize("lost", range(4), ids=["bill of materials", "its entry", "provenance", "entry of that"])
def test_what_could_not_be_attached_is_attached_by_the_next_run(lost: int, composition: Composition,
                                                                publisher: Publisher, proxy: FaultProxy) -> None:
    """And until then no version tag names the image. This registry has no referrers API: the list is an index."""
    image, place = composition.image("torch"), Target(proxy.host, "")
    version, key = (tag.partition(":")[2] for tag in image.tags)
    digest = put(proxy.upstream, image)
    proxy.add(Fault("PUT", "/manifests/sha256[:-]", code=503, headers={"Retry-After": "3600"}, skip=lost, times=1))
    with pytest.raises(NetworkError):
        publish(outcome(image, digest, "pushed", place), [place], publisher, attaching(composition, publisher, 1e9))
    assert tags(proxy.upstream, "torch") == {key}
    told = publish(outcome(image, digest, "published", place), [place], publisher,
                   attaching(composition, publisher, 2e9))
    assert [one["action"] for one in told] == ["attest", "attest", "move"]
    assert tags(proxy.upstream, "torch") == {key, version}
    there = attached(proxy.upstream, "torch", digest)
    assert [one.kind for one in there] == ["provenance", "sbom"]
    # the run that attaches it did not build the image, and names neither itself nor times
    assert json.loads(there[0].content)["predicate"]["runDetails"]["metadata"] == {}
    again = publish(outcome(image, digest, "published", place), [place], publisher,
                    attaching(composition, publisher, 3e9))
    assert [one["action"] for one in again] == ["keep"]


def test_another_place_gets_image_and_documents_before_its_version_tag(
        composition: Composition, publisher: Publisher, proxy: FaultProxy, tmp_path: Path) -> None:
    image, first = composition.image("torch"), Target(proxy.host, "")
    digest = put(proxy.upstream, image)
    with RegistryServer(tmp_path / "second") as server, FaultProxy(server.host) as far:
        publish(outcome(image, digest, "pushed", first), [first, Target(far.host, "mirror")], publisher,
                attaching(composition, publisher, 1e9))
        put_there = [request.path.rpartition("/")[2] for request in far.requests
                     if request.method == "PUT" and "/manifests/" in request.path]
        version, key = (tag.partition(":")[2] for tag in image.tags)
        assert put_there[0] == digest
        assert put_there[1] == key
        assert put_there[-1] == version
        assert [one.kind for one in attached(server.host, "mirror/torch", digest)] == ["provenance", "sbom"]


def test_whoever_refuses_an_image_sees_what_its_version_tag_would_name(
        composition: Composition, publisher: Publisher, proxy: FaultProxy, tmp_path: Path) -> None:
    """Also another image that the second place has under the key: that stays, and has not been asked yet."""
    image, first = composition.image("torch"), Target(proxy.host, "")
    seen: list[Placed] = []

    def refuse(placed: Sequence[Placed]) -> list[dict[str, Any]]:
        seen.extend(placed)
        raise AuditError(Problem("no"))

    with RegistryServer(tmp_path / "second") as server:
        digest, other = put(proxy.upstream, image, tagged=True), put(server.host, image, tagged=True, salt="x")
        with pytest.raises(AuditError):
            publish(outcome(image, digest, "published", first), [first, Target(server.host, "")], publisher, refuse)
        assert [(one.target.registry, one.digest, one.foreign) for one in seen] == [
            (proxy.host, digest, False), (server.host, other, True)]
        assert tags(proxy.upstream, "torch") == tags(server.host, "torch") == {image.tags[1].partition(":")[2]}
