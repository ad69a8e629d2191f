"""Images read out of a real registry, and what is attached to them: cuts, wrong bytes, platforms, referrers."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from buildctl import attestations, contents, drift, provenance, sbom
from buildctl.commands import verify
from buildctl.contents import Image
from buildctl.errors import AuditError, BuildctlError, ManifestError, NetworkError, UsageError
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Descriptor, Manifest
from buildctl.promote import Promoter
from buildctl.reference import Reference, parse
from buildctl.registry import Registry
from buildctl.retry import Policy
from tests.conftest import ROOT
from tests.registry.proxy import Fault, FaultProxy
from tests.unit import tars

REPOSITORY = "team/sglang"
PLAIN = [tars.of({"a": b"1", "big": random.Random(1).randbytes(3_000_000)}), tars.of({"b": b"2"}),
         tars.of({sbom.PATH: b'{"old": 1}\n'}), tars.of({sbom.PATH: b'{"new": 1}\n', "etc/.wh.x": b""})]


@pytest.fixture
def registry(proxy: FaultProxy) -> Iterator[Registry]:
    with Registry(proxy.host, actions="pull,push", policy=Policy(4, 0.01)) as client:
        yield client


def put_image(registry: Registry, tag: str, layers: list[bytes], *, how: str = "zstd",
              diff_ids: list[str] | None = None) -> Manifest:
    """An image with these layers."""
    packed = [registry.put_blob(REPOSITORY, tars.pack(one, how)) for one in layers]
    actual = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    config = registry.put_blob(REPOSITORY, json.dumps({
        "config": {"Labels": {"buildctl.stack": "x"}}, "rootfs": {"diff_ids": diff_ids or actual},
        "history": [{"created_by": f"step {number}"} for number, _ in enumerate(layers)]}).encode())
    body = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "annotations": {"k": "v"},
            "config": {**config.as_dict(), "mediaType": "application/vnd.oci.image.config.v1+json"},
            "layers": [{**one.as_dict(), "mediaType": "application/vnd.oci.image.layer.v1.tar"} for one in packed]}
    manifest = Manifest(OCI_MANIFEST, json.dumps(body).encode())
    registry.put_manifest(REPOSITORY, tag, manifest)
    return manifest


def read(registry: Registry, reference: str, told: list[Any] | None = None) -> Image:
    return contents.from_registry(registry, parse(f"{registry.host}/{REPOSITORY}{reference}"), "linux/amd64",
                                  lambda path: path == "a",
                                  (lambda *words: told.append(words)) if told is not None else None)


@pytest.mark.parametrize("how", ["zstd", "gzip", "plain"])
def test_an_image_as_a_registry_has_it(registry: Registry, how: str) -> None:
    manifest = put_image(registry, "1", PLAIN, how=how)
    told: list[Any] = []
    image = read(registry, ":1", told)
    assert image.digest == manifest.digest
    assert image.annotations == {"k": "v"}
    assert image.files.content("a") == b"1"
    assert [found.path for found in image.files.under()] == ["a", "b", "big", "etc", "etc/buildctl", sbom.PATH]
    assert image.size == sum(blob.size for blob in manifest.blobs[1:])
    assert told[-1][:2] == (4, 4)
    assert read(registry, f"@{manifest.digest}").digest == manifest.digest


def test_a_cut_in_the_middle_is_survived(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, "1", PLAIN)
    proxy.add(Fault("GET", f"blobs/{manifest.blobs[1].digest}", "cut_answer", after=1_000_000, times=1))
    assert read(registry, ":1").digest == manifest.digest


def test_a_download_goes_on_where_it_was(registry: Registry, proxy: FaultProxy) -> None:
    blob = put_image(registry, "1", PLAIN).blobs[1]
    stream = registry.open_blob(REPOSITORY, blob.digest)
    data = stream.read(1000)
    stream.close()  # as a cut does, which may take along what has arrived
    while piece := stream.read(1 << 20):
        data += piece
    stream.close()
    assert hashlib.sha256(data).hexdigest() == blob.digest.partition(":")[2]
    gets = [request.status for request in proxy.requests if request.path.endswith(blob.digest)
            and request.method == "GET"]
    assert gets == [200, 206]


def test_a_registry_that_knows_no_ranges_is_read_anew(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, "1", PLAIN)
    blob = manifest.blobs[1]
    whole = tars.pack(PLAIN[0], "zstd")
    proxy.add(Fault("GET", f"blobs/{blob.digest}", "cut_answer", after=1_000_000, times=1),
              Fault("GET", f"blobs/{blob.digest}", code=200, body=whole, times=1, skip=1))
    assert read(registry, ":1").digest == manifest.digest


def test_a_registry_that_keeps_cutting_is_a_network_error(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, "1", PLAIN)
    proxy.add(Fault("GET", f"blobs/{manifest.blobs[1].digest}", "cut_answer", after=0))
    with pytest.raises(NetworkError):
        read(registry, ":1")


def test_other_bytes_than_the_digest_names(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, "1", PLAIN)
    blob = manifest.blobs[2]
    for body in (tars.pack(tars.of({"evil": b"x"}), "zstd"), b"x" * 100_000, b"short"):
        proxy.faults.clear()
        proxy.add(Fault("GET", f"blobs/{blob.digest}", code=200, body=body))
        with pytest.raises(NetworkError, match="other bytes than asked for"):
            read(registry, ":1")
    proxy.faults.clear()
    other = put_image(registry, "2", PLAIN[:1])
    proxy.add(Fault("GET", "manifests/", code=200, body=other.body, headers={"Content-Type": OCI_MANIFEST}))
    with pytest.raises(NetworkError, match="other bytes than asked for"):
        read(registry, f"@{manifest.digest}")


def test_a_config_that_names_other_layers(registry: Registry) -> None:
    put_image(registry, "1", PLAIN[:1], diff_ids=["sha256:" + "0" * 64])
    with pytest.raises(AuditError, match="names other layers"):
        read(registry, ":1")


def test_of_an_index_the_platform_counts(registry: Registry) -> None:
    manifest = put_image(registry, "1", PLAIN[:1])

    def index(tag: str, *entries: dict[str, Any]) -> None:
        body = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()
        registry.put_manifest(REPOSITORY, tag, Manifest(OCI_INDEX, body))

    entry = manifest.descriptor.as_dict()
    unknown = {**entry, "platform": {"os": "unknown", "architecture": "unknown"}}
    index("both", unknown, {**entry, "platform": {"os": "linux", "architecture": "amd64"}})
    assert read(registry, ":both").digest == manifest.digest
    index("other", unknown, {**entry, "platform": {"os": "linux", "architecture": "arm64"}})
    with pytest.raises(UsageError, match="no image for this platform"):
        read(registry, ":other")
    with pytest.raises(UsageError, match="no such image"):
        read(registry, ":nothing")


def test_an_index_whose_image_is_gone(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, "1", PLAIN[:1])
    body = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [
        {**manifest.descriptor.as_dict(), "platform": {"os": "linux", "architecture": "amd64"}}]}).encode()
    registry.put_manifest(REPOSITORY, "index", Manifest(OCI_INDEX, body))
    proxy.add(Fault("GET", f"manifests/{manifest.digest}", code=404))
    with pytest.raises(NetworkError, match="does not have"):
        read(registry, ":index")


def test_a_file_is_read_from_the_top_and_from_small_layers_only(registry: Registry, proxy: FaultProxy) -> None:
    put_image(registry, "1", PLAIN)
    where = parse(f"{registry.host}/{REPOSITORY}:1")
    proxy.requests.clear()
    assert contents.top_file(registry, where, "linux/amd64", sbom.PATH) == b'{"new": 1}\n'
    assert sum("blobs/" in request.path for request in proxy.requests) == 1
    assert contents.top_file(registry, where, "linux/amd64", "nowhere") is None
    put_image(registry, "2", [tars.of({sbom.PATH: b"1"}), b"no tar at all"])
    assert contents.top_file(registry, parse(f"{registry.host}/{REPOSITORY}:2"), "linux/amd64", sbom.PATH) is None
    put_image(registry, "3", [tars.of({sbom.PATH: b"1"}), tars.of({"big": random.Random(2).randbytes(5_000_000)})])
    assert contents.top_file(registry, parse(f"{registry.host}/{REPOSITORY}:3"), "linux/amd64", sbom.PATH) is None


def test_drift_is_asked_of_images_in_a_registry(registry: Registry) -> None:
    report = json.dumps({"debian": {"drift": {"libgomp1": ["0-gone", "12"]}}}).encode()
    told = put_image(registry, "1", [PLAIN[0], tars.of({drift.REPORT.removeprefix("/"): report})])
    silent = put_image(registry, "2", PLAIN)
    reader = contents.TopFiles(lambda _: registry, "linux/amd64")
    where = [f"{registry.host}/{REPOSITORY}@{manifest.digest}" for manifest in (told, silent)]
    assert drift.of((reader, one) for one in where) == ({"libgomp1": ("0-gone", "12")}, (where[1],))


def attach(registry: Registry, subject: Descriptor, artifact: str, data: bytes, **annotations: str) -> None:
    registry.attach(REPOSITORY, subject, artifact, {"x": (artifact, data)}, annotations)


def test_what_is_attached_is_found_and_goes_along(registry: Registry) -> None:
    manifest = put_image(registry, "1", PLAIN[1:])
    subject = manifest.descriptor
    attach(registry, subject, attestations.IN_TOTO, b"statement",
           **{"in-toto.io/predicate-type": provenance.PREDICATE})
    attach(registry, subject, attestations.IN_TOTO, b"other", **{"in-toto.io/predicate-type": "https://x.example"})
    attach(registry, subject, sbom.MEDIA_TYPE, b"bom")
    attach(registry, subject, "application/vnd.example.signature", b"signature")

    def found(repository: str) -> list[tuple[str, bytes]]:
        return [(one.kind, one.content) for one in attestations.attached(registry, repository, manifest.digest)]

    assert found(REPOSITORY) == [("provenance", b"statement"), ("sbom", b"bom")]
    promoter = Promoter(lambda _: registry)
    source = Reference(registry.host, REPOSITORY, "1")
    promoter.carry_out(promoter.plan(source, [Reference(registry.host, "prod/sglang", "1")]))
    assert found("prod/sglang") == [("provenance", b"statement"), ("sbom", b"bom")]
    assert len(registry.referrers("prod/sglang", manifest.digest)) == 4


def test_errors_are_ours(registry: Registry, proxy: FaultProxy) -> None:
    put_image(registry, "1", PLAIN[:1])
    proxy.add(Fault("GET", "blobs/", code=403))
    with pytest.raises(BuildctlError) as caught:
        read(registry, ":1")
    assert caught.value.exit_code == 10


@pytest.mark.parametrize(("fault", "code"), [
    (Fault("GET", "", code=503), 11), (Fault("GET", "", code=403), 10), (Fault("GET", "manifests/", code=404), 2)])
def test_verify_ends_as_the_other_commands_do(registry: Registry, proxy: FaultProxy, fault: Fault, code: int) -> None:
    put_image(registry, "1", PLAIN[:1])
    proxy.add(replace(fault))
    done = CliRunner().invoke(verify.command, [f"{registry.host}/{REPOSITORY}:1", "--attempts", "2", "--wait", "0.01"],
                              obj=ROOT)
    assert isinstance(done.exception, BuildctlError)
    assert done.exception.exit_code == code


def test_a_stack_that_this_checkout_does_not_have(registry: Registry) -> None:
    put_image(registry, "1", PLAIN[:1])
    done = CliRunner().invoke(verify.command, [f"{registry.host}/{REPOSITORY}:1"], obj=ROOT)
    assert isinstance(done.exception, ManifestError)
