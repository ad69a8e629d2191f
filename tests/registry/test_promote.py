"""`buildctl promote` and `buildctl results` against real registries; no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildctl.commands import promote, results
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Manifest
from buildctl.registry import Registry
from buildctl.retry import Policy
from tests.registry.conftest import Ran, run
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

KEY = "ab" * 32
FAST = Policy(4, 0.01)


def promoting(*args: str) -> Ran:
    return run(promote.command, *args, "--attempts", "4", "--wait", "0.01")


@pytest.fixture
def registry(proxy: FaultProxy) -> Iterator[Registry]:
    with Registry(proxy.host, actions="pull,push", policy=FAST) as client:
        yield client


def put_image(registry: Registry, tag: str, *, key: str = KEY, size: int = 1000, index: bool = False,
              repository: str = "team/sglang") -> str:
    """An image (or an index with one and an attestation) with a content key; returns its digest."""
    content = {"config": {"Labels": {"buildctl.key": key}}, "tag": tag}
    config = registry.put_blob(repository, json.dumps(content).encode())
    layer = registry.put_blob(repository, tag.encode() * size)
    body = {"schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": {**config.as_dict(), "mediaType": "application/vnd.oci.image.config.v1+json"},
            "layers": [{**layer.as_dict(), "mediaType": "application/vnd.oci.image.layer.v1.tar"}]}
    manifest = Manifest(OCI_MANIFEST, json.dumps(body).encode())
    registry.put_manifest(repository, manifest.digest if index else tag, manifest)
    if index:
        entries = [{**manifest.descriptor.as_dict(), "platform": {"os": "unknown", "architecture": "unknown"}},
                   {**manifest.descriptor.as_dict(), "platform": {"os": "linux", "architecture": "amd64"}}]
        manifest = Manifest(OCI_INDEX, json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX,
                                                   "manifests": entries}).encode())
        registry.put_manifest(repository, tag, manifest)
    return manifest.digest


def put_result(folder: Path, verdict: str = "win", key: str = KEY, ended: str = "2026-12-01T05:12:57Z") -> Path:
    """A results folder as the entrypoint writes it, the fields that matter here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({
        "schema_version": 1, "run_id": "r", "raw_sha256": "0" * 64, "ended_at": ended,
        "plan": {"image": {"key": key, "image": "sglang"}},
        "verdict": {"class": verdict, "headline": f"{verdict.upper()}: eagle3 against baseline"}}))
    (folder / "report.md").write_text(f"# {verdict}\n")
    (folder / "server-00-eagle3.log").write_text("not for others")
    return folder


def digest_at(host: str, repository: str, tag: str) -> str:
    with Registry(host, policy=Policy(1)) as registry:
        found = registry.head(repository, tag)
        return found.digest if found else ""


# ---------------------------------------------------------------------- by digest


@pytest.mark.parametrize("index", [False, True], ids=["manifest", "index"])
def test_a_tag_in_the_same_repository_costs_no_bytes(index: bool, registry: Registry, proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1", index=index)
    proxy.requests.clear()
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "1.0", "--to", "stable")
    assert done.code == 0, done.text
    assert [line.split()[0] for line in done.out.splitlines()] == ["tag", "tag"]
    assert {digest_at(proxy.upstream, "team/sglang", tag) for tag in ("1.0", "stable")} == {digest}
    assert proxy.upload_bytes() == 0


def test_another_repository_of_the_registry_gets_its_blobs_mounted(registry: Registry, proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1", size=100_000, index=True)
    proxy.requests.clear()
    done = promoting(f"{proxy.host}/team/sglang@{digest}", "--to", f"{proxy.host}/public/sglang:1.0", "--json")
    assert done.code == 0, done.text
    assert done.json["blobs"]["mounted"] == 2
    assert done.json["blobs"]["sent_bytes"] == 0
    assert digest_at(proxy.upstream, "public/sglang", "1.0") == digest
    assert proxy.upload_bytes() == 0


def test_another_registry_gets_the_same_bytes(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    digest = put_image(registry, "rc.1", size=100_000, index=True)
    with RegistryServer(tmp_path / "second") as second:
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{second.host}/sglang:1.0", "--json")
        assert done.code == 0, done.text
        assert done.json["blobs"]["sent"] == 2
        assert digest_at(second.host, "sglang", "1.0") == digest
        with Registry(second.host, policy=FAST) as there:
            top = there.manifest("sglang", "1.0")
            assert top is not None
            child = there.manifest("sglang", top.children[0].digest)
            assert child is not None
            assert there.blob("sglang", child.blobs[1].digest) == b"rc.1" * 100_000
        again = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{second.host}/sglang:1.1", "--json")
        assert again.json["blobs"] == {"present": 4, "mounted": 0, "sent": 0, "sent_bytes": 0}


def test_a_cut_between_two_registries_is_repeated(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    digest = put_image(registry, "rc.1", size=100_000)
    with RegistryServer(tmp_path / "second") as second, FaultProxy(second.host) as far:
        far.add(Fault("PUT", "/blobs/uploads/", "reset", after=50_000, times=1))
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{far.host}/sglang:1.0")
        assert done.code == 0, done.text
        assert digest_at(second.host, "sglang", "1.0") == digest
        assert "failed:" in done.err


def test_a_layer_cut_off_at_its_source_is_read_again(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    digest = put_image(registry, "rc.1", size=1_000_000)
    proxy.add(cut := Fault("GET", "/blobs/", "cut_answer", after=2_000_000, times=2))
    with RegistryServer(tmp_path / "second") as second:
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{second.host}/sglang:1.0")
        assert done.code == 0, done.text
        assert cut.fired == 2
        assert digest_at(second.host, "sglang", "1.0") == digest
        with Registry(second.host, policy=FAST) as there:
            manifest = there.manifest("sglang", "1.0")
            assert manifest is not None
            assert there.blob("sglang", manifest.blobs[1].digest) == b"rc.1" * 1_000_000


def test_a_tag_with_other_content_moves_only_when_told(registry: Registry, proxy: FaultProxy) -> None:
    old, new = put_image(registry, "stable"), put_image(registry, "rc.2")
    done = promoting(f"{proxy.host}/team/sglang:rc.2", "--to", "stable")
    assert done.code == 12
    assert old in done.text
    assert "--move" in done.text
    planned = promoting(f"{proxy.host}/team/sglang:rc.2", "--to", "stable", "--move", "--dry-run")
    assert planned.out.startswith("would move")
    assert digest_at(proxy.upstream, "team/sglang", "stable") == old
    assert promoting(f"{proxy.host}/team/sglang:rc.2", "--to", "stable", "--move").code == 0
    assert digest_at(proxy.upstream, "team/sglang", "stable") == new
    again = promoting(f"{proxy.host}/team/sglang:rc.2", "--to", "stable")
    assert again.out.startswith("keep")


def test_rights_are_asked_for_everywhere_before_anything_moves(registry: Registry, proxy: FaultProxy,
                                                               tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    with RegistryServer(tmp_path / "second") as second, FaultProxy(second.host) as far:
        far.add(Fault("POST", "/blobs/uploads/", code=403))
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "1.0", "--to", f"{far.host}/sglang:1.0")
        assert done.code == 10
    assert digest_at(proxy.upstream, "team/sglang", "1.0") == ""


def test_an_index_with_a_missing_manifest_is_not_promoted_by_half(registry: Registry, proxy: FaultProxy,
                                                                  tmp_path: Path) -> None:
    put_image(registry, "rc.1", index=True)
    with RegistryServer(tmp_path / "second") as second:
        proxy.add(Fault("GET", "/manifests/sha256:", code=404))
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{second.host}/sglang:1.0")
        assert done.code == 11
        assert digest_at(second.host, "sglang", "1.0") == ""


@pytest.mark.parametrize("args", [
    ("sglang:1", "--to", "x"), ("127.0.0.1:1/sglang", "--to", "x"), ("127.0.0.1:1/a:1", "--to", "b/c"),
    ("127.0.0.1:1/a:1", "--to", "no tag")])
def test_references_are_checked_before_the_network(args: tuple[str, ...]) -> None:
    assert promoting(*args).code == 2


def test_an_image_that_is_not_there_is_exit_2(proxy: FaultProxy) -> None:
    assert promoting(f"{proxy.host}/team/sglang:none", "--to", "x").code == 2
    assert run(results.command, f"{proxy.host}/team/sglang:none").code == 2


def test_other_bytes_than_asked_for_are_an_error(registry: Registry, proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1")
    proxy.add(Fault("GET", "/manifests/sha256:", code=200, headers={"Content-Type": OCI_MANIFEST}, body=b"{}"))
    done = promoting(f"{proxy.host}/team/sglang@{digest}", "--to", "1.0")
    assert done.code == 11
    assert digest in done.text


def test_a_tag_that_does_not_hold_is_an_error(registry: Registry, proxy: FaultProxy) -> None:
    put_image(registry, "rc.1")
    proxy.add(Fault("HEAD", "/manifests/1.0", code=404))
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "1.0")
    assert done.code == 11
    assert "does not show what was promoted" in done.text


class Meanwhile(Fault):
    """Another job sets the tag `1.0` of `repository` when a request comes, after `skip` others of its kind."""

    def takes(self, method: str, path: str) -> bool:
        if super().takes(method, path):
            with Registry(self.host, actions="pull,push", policy=Policy(1)) as registry:
                self.digest = put_image(registry, "1.0", repository=self.repository)
        return False

    host, repository, digest = "", "team/sglang", ""


def test_a_fixed_tag_that_appeared_during_the_copy_is_not_overwritten(registry: Registry, proxy: FaultProxy,
                                                                      tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    with RegistryServer(tmp_path / "second") as second, FaultProxy(second.host) as far:
        far.add(other := Meanwhile("PUT", "/blobs/uploads/", times=1))
        other.host, other.repository = second.host, "sglang"
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{far.host}/sglang:1.0")
        assert done.code == 12, done.text
        assert other.digest in done.text
        assert digest_at(second.host, "sglang", "1.0") == other.digest
        assert promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{far.host}/sglang:1.0", "--move").code == 0


@pytest.mark.parametrize("look", [2, 3], ids=["when it is read back", "when it is read once more"])
def test_a_tag_that_another_job_sets_at_the_same_moment_is_told(look: int, registry: Registry,
                                                                proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1")
    proxy.add(other := Meanwhile("HEAD", "/manifests/1.0", skip=look, times=1))
    other.host = proxy.upstream
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "1.0")
    assert done.code == 12, done.text
    assert "somebody else moved the tag" in done.text
    assert f"what was promoted is {proxy.host}/team/sglang@{digest}" in done.text
    assert digest_at(proxy.upstream, "team/sglang", "1.0") == other.digest


# ---------------------------------------------------------------------- results


def test_a_good_result_opens_the_gate_and_stays_with_the_image(registry: Registry, proxy: FaultProxy,
                                                               tmp_path: Path) -> None:
    digest = put_image(registry, "rc.1", index=True)
    image = f"{proxy.host}/team/sglang:rc.1"
    folder = put_result(tmp_path / "run")
    done = promoting(image, "--to", "stable", "--require-verdict", "win", "--result", str(folder))
    assert done.code == 0, done.text
    listed = run(results.command, f"{proxy.host}/team/sglang:stable", "--json", "--out", str(tmp_path / "back"))
    assert listed.code == 0, listed.text
    assert listed.json["digest"] == digest
    assert [(one["verdict"], one["key"], one["files"]) for one in listed.json["results"]] == [
        ("win", KEY, ["report.md", "result.json"])]
    back = next((tmp_path / "back").iterdir())
    assert (back / "result.json").read_bytes() == (folder / "result.json").read_bytes()
    assert "WIN: eagle3 against baseline" in run(results.command, image).out
    # attached results count for later promotions
    assert promoting(image, "--to", "newest", "--require-verdict", "equivalent").code == 0


@pytest.mark.parametrize(("required", "verdict", "code"), [
    ("win", "win", 0), ("win", "equivalent", 7), ("win", "inconclusive", 7), ("win", "invalid", 7), ("win", "loss", 7),
    ("equivalent", "win", 0), ("equivalent", "equivalent", 0), ("equivalent", "loss", 7)])
def test_the_gate(required: str, verdict: str, code: int, registry: Registry, proxy: FaultProxy,
                  tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    folder = put_result(tmp_path / "run", verdict)
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "stable", "--require-verdict", required,
                     "--result", str(folder))
    assert done.code == code, done.text
    assert bool(digest_at(proxy.upstream, "team/sglang", "stable")) is (code == 0)
    if code:
        assert verdict.upper() in done.text


def test_a_result_of_another_image_is_refused_with_and_without_a_gate(registry: Registry, proxy: FaultProxy,
                                                                     tmp_path: Path) -> None:
    put_image(registry, "rc.1", key="cd" * 32)
    folder = put_result(tmp_path / "run")
    for more in ((), ("--require-verdict", "win")):
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "stable", "--result", str(folder), *more)
        assert done.code == 7
        assert "of another image" in done.text
    assert run(results.command, f"{proxy.host}/team/sglang:rc.1", "--json").json["results"] == []


def put_binding(folder: Path, *digests: str, run_id: str = "r") -> None:
    """What `buildctl bench` writes beside a result."""
    image = dict(zip(("id", "digest"), digests, strict=False))
    (folder / "binding.json").write_text(json.dumps(
        {"schema": 1, "run_id": run_id, "raw_sha256": "0" * 64, "image": image}))


@pytest.mark.parametrize("index", [False, True], ids=["manifest", "index"])
def test_a_bound_result_opens_the_gate_for_its_own_digest_only(index: bool, registry: Registry, proxy: FaultProxy,
                                                               tmp_path: Path) -> None:
    """Two builds with one content key are not the same bytes: only one of them was measured."""
    digest = put_image(registry, "rc.1", index=index)
    twin = put_image(registry, "rc.2", index=index)
    assert twin != digest
    folder = put_result(tmp_path / "run")
    put_binding(folder, digest)
    gate = ("--to", "stable", "--require-verdict", "win", "--result", str(folder))
    refused = promoting(f"{proxy.host}/team/sglang:rc.2", *gate)
    assert refused.code == 7
    assert "the result is of another image" in refused.text
    assert digest in refused.text
    assert twin in refused.text
    assert digest_at(proxy.upstream, "team/sglang", "stable") == ""
    assert run(results.command, f"{proxy.host}/team/sglang:rc.2", "--attach", str(folder)).code == 7
    done = promoting(f"{proxy.host}/team/sglang:rc.1", *gate)
    assert done.code == 0, done.text
    assert digest_at(proxy.upstream, "team/sglang", "stable") == digest
    listed = run(results.command, f"{proxy.host}/team/sglang:rc.1", "--json")
    assert "binding.json" in listed.json["results"][0]["files"]


def test_a_result_may_be_bound_to_the_image_as_an_engine_without_digests_knows_it(
        registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    manifest = registry.manifest("team/sglang", "rc.1")
    assert manifest is not None
    folder = put_result(tmp_path / "run")
    put_binding(folder, manifest.blobs[0].digest)
    image = f"{proxy.host}/team/sglang:rc.1"
    assert promoting(image, "--to", "1.0", "--require-verdict", "win", "--result", str(folder)).code == 0
    put_binding(folder, manifest.blobs[0].digest, run_id="another")
    done = promoting(image, "--to", "1.1", "--require-verdict", "win", "--result", str(folder))
    assert done.code == 7
    assert "binding.json belongs to another run" in done.text
    (folder / "binding.json").write_text("[]")
    assert promoting(image, "--to", "1.1", "--require-verdict", "win", "--result", str(folder)).code == 2


def test_no_result_at_all_is_refused(registry: Registry, proxy: FaultProxy) -> None:
    put_image(registry, "rc.1")
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "stable", "--require-verdict", "win")
    assert done.code == 7
    assert "--result DIR" in done.text
    assert "no results attached" in run(results.command, f"{proxy.host}/team/sglang:rc.1").err


def test_a_result_is_attached_without_moving_any_tag(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    image = f"{proxy.host}/team/sglang:rc.1"
    done = run(results.command, image, "--attach", str(put_result(tmp_path / "run", "loss")), "--json")
    assert [one["verdict"] for one in done.json["results"]] == ["loss"]
    foreign = put_result(tmp_path / "other", key="cd" * 32)
    assert run(results.command, image, "--attach", str(foreign)).code == 7


def test_an_index_without_an_image_has_no_key(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    index = Manifest(OCI_INDEX, json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}).encode())
    registry.put_manifest("team/sglang", "empty", index)
    done = promoting(f"{proxy.host}/team/sglang:empty", "--to", "x", "--result", str(put_result(tmp_path / "run")))
    assert done.code == 7
    assert "an image with a content key" in done.text


def test_the_newest_attached_result_counts(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    image = f"{proxy.host}/team/sglang:rc.1"
    newer = put_result(tmp_path / "new", "loss", ended="2026-12-02T00:00:00Z")
    older = put_result(tmp_path / "old", "win")
    for folder in (newer, older):
        assert promoting(image, "--to", "rc.1", "--result", str(folder)).code == 0
    assert [one["verdict"] for one in run(results.command, image, "--json").json["results"]] == ["win", "loss"]
    assert promoting(image, "--to", "stable", "--require-verdict", "win").code == 7


def test_results_go_where_their_image_goes(registry: Registry, proxy: FaultProxy, tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    with RegistryServer(tmp_path / "second") as second:
        done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", f"{second.host}/sglang:1.0",
                         "--require-verdict", "win", "--result", str(put_result(tmp_path / "run")))
        assert done.code == 0, done.text
        assert len(run(results.command, f"{second.host}/sglang:1.0", "--json").json["results"]) == 1


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}", '{"verdict": "win"}'])
def test_a_folder_without_a_readable_result_is_exit_2(content: str | None, registry: Registry, proxy: FaultProxy,
                                                      tmp_path: Path) -> None:
    put_image(registry, "rc.1")
    folder = tmp_path / "run"
    folder.mkdir()
    if content is not None:
        (folder / "result.json").write_text(content)
    done = promoting(f"{proxy.host}/team/sglang:rc.1", "--to", "stable", "--result", str(folder))
    assert done.code == 2
    assert "result.json" in done.text


def test_attached_files_of_others_are_passed_over(registry: Registry, proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1")
    subject = registry.head("team/sglang", digest)
    assert subject is not None
    from buildctl.results import ARTIFACT_TYPE

    registry.attach("team/sglang", subject, ARTIFACT_TYPE, {"result.json": ("application/json", b"[]")}, {})
    gone = registry.attach("team/sglang", subject, ARTIFACT_TYPE, {"x": ("application/json", b"[]")}, {})
    proxy.add(Fault("GET", f"/manifests/{gone.digest}", code=404))
    assert run(results.command, f"{proxy.host}/team/sglang:rc.1", "--json").json["results"] == []


def test_writers_of_the_referrers_index_do_not_lose_each_other(registry: Registry, proxy: FaultProxy) -> None:
    digest = put_image(registry, "rc.1")
    subject = registry.head("team/sglang", digest)
    assert subject is not None
    index = f"/manifests/{digest.replace(':', '-')}"
    proxy.add(Fault("GET", index, code=404, skip=1, times=2))  # as if another writer had replaced the index
    registry.attach("team/sglang", subject, "a/b", {"x": ("text/plain", b"x")}, {})
    assert len(registry.referrers("team/sglang", digest)) == 1
    proxy.add(Fault("GET", index, code=404))
    with pytest.raises(Exception, match="keep replacing"):
        registry.attach("team/sglang", subject, "a/b", {"y": ("text/plain", b"y")}, {})
