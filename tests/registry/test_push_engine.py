"""`buildctl push`: the real engine, a real registry, and everything that a registry does wrong."""

from __future__ import annotations

import base64
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import docker
import pytest

from buildctl.commands import push
from buildctl.registry import Registry
from buildctl.retry import Policy
from buildctl.upload import exact_layers
from tests.registry.conftest import fast_push, pushing, run
from tests.registry.images import Images
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

pytestmark = pytest.mark.engine

UPLOAD, MANIFEST = "/blobs/uploads/", "/manifests/"


def stored(proxy: FaultProxy, repository: str, tag: str) -> str:
    """The digest behind a tag, asked past the proxy; empty when there is none."""
    with Registry(proxy.upstream, policy=Policy(1)) as registry:
        found = registry.head(repository, tag)
        return found.digest if found else ""


def test_a_push_ends_with_the_digest_that_the_registry_shows(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1")
    done = fast_push(name, "--to", f"{proxy.host}/team", "--alias", "v1", "--moving", "latest", "--json")
    assert done.code == 0, done.text
    digest = images.digest(name)
    pushed = done.json["pushed"]
    assert [(entry["action"], entry["target"].rpartition(":")[2], entry["digest"]) for entry in pushed] == [
        ("upload", "1", digest), ("tag", "v1", digest), ("move", "latest", digest)]
    assert pushed[0]["layers"] == {"sent": 2, "present": 0, "mounted": 0}
    assert {stored(proxy, "team/regtest-a", tag) for tag in ("1", "v1", "latest")} == {digest}


def test_a_second_push_sends_nothing(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1")
    assert fast_push(name, "--to", proxy.host, "--moving", "latest").code == 0
    proxy.clear()
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert done.code == 0
    assert [request.method for request in proxy.requests] == ["HEAD", "HEAD"]
    assert "already there" in done.err


def test_an_image_that_names_its_registry_needs_no_target(proxy: FaultProxy, images: Images,
                                                          engine: object) -> None:
    name = images.make("a:1")
    images.engine.tag(name, f"{proxy.host}/regtest-a", "1")
    try:
        done = fast_push(f"{proxy.host}/regtest-a:1")
        assert done.code == 0, done.text
        assert done.out.strip() == f"{proxy.host}/regtest-a:1@{images.digest(name)}"
        assert f"{proxy.host}/regtest-a:1" in images.names(), "a name that was there before stays"
    finally:
        images.engine.remove_image(f"{proxy.host}/regtest-a:1")


def test_a_dry_run_says_what_would_move_and_changes_nothing(proxy: FaultProxy, images: Images) -> None:
    done = fast_push(images.make("a:1"), "--to", proxy.host, "--moving", "latest", "--dry-run")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["push", "move"]
    assert {request.method for request in proxy.requests} == {"HEAD"}
    listed = fast_push(images.make("a:1"), "--to", proxy.host, "--dry-run", "--json").json["moves"]
    assert [(move["action"], move["target"]) for move in listed] == [("upload", f"{proxy.host}/regtest-a:1")]


def test_an_image_that_the_engine_does_not_have_is_exit_2(proxy: FaultProxy) -> None:
    done = fast_push("nobody/nothing:1", "--to", proxy.host)
    assert done.code == 2
    assert "docker images" in done.text
    assert proxy.requests == []


def test_two_registries_get_the_same_digest(proxy: FaultProxy, images: Images, tmp_path: Path) -> None:
    name = images.make("a:1")
    with RegistryServer(tmp_path / "second") as second:
        done = fast_push(name, "--to", proxy.host, "--to", f"{second.host}/mirror")
        assert done.code == 0, done.text
        with Registry(second.host, policy=Policy(1)) as registry:
            found = registry.head("mirror/regtest-a", "1")
            assert found is not None
            assert found.digest == images.digest(name)
    assert stored(proxy, "regtest-a", "1") == images.digest(name)


def test_a_second_namespace_of_one_registry_gets_its_blobs_mounted(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", size=200_000)
    done = fast_push(name, "--to", f"{proxy.host}/one", "--to", f"{proxy.host}/two", "--json")
    assert done.code == 0, done.text
    assert done.json["pushed"][1]["layers"] == {"sent": 0, "present": 0, "mounted": 2}
    assert 400_000 < proxy.upload_bytes() < 410_000


def test_the_exact_layer_sizes_are_those_that_travel(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", layers=3, size=50_000)
    layers = exact_layers(images.engine, name)
    assert [(layer.made_by, layer.exact) for layer in layers] == [(f"RUN step {number}", True) for number in range(3)]
    assert fast_push(name, "--to", proxy.host).code == 0
    with Registry(proxy.host, policy=Policy(1)) as registry:
        manifest = registry.manifest("regtest-a", "1")
        assert manifest is not None
        assert [layer.size for layer in layers] == [blob.size for blob in manifest.blobs[1:]]


def test_what_was_pushed_can_be_pulled(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", labels={"buildctl.key": "ef" * 32})
    digest = images.digest(name)
    done = fast_push(name, "--to", proxy.host)
    images.clean()
    reference = done.out.strip()
    assert reference == f"{proxy.host}/regtest-a:1@{digest}"
    images.engine.pull(f"{proxy.host}/regtest-a@{digest}")
    try:
        pulled = images.engine.inspect_image(digest)  # type: ignore[no-untyped-call]
        assert pulled["Config"]["Labels"]["buildctl.key"] == "ef" * 32
        assert pulled["Id"] == digest
    finally:
        images.engine.remove_image(digest, force=True)


def test_an_engine_that_knows_configs_only_finds_its_image_published(proxy: FaultProxy, images: Images,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph drivers call an image by its config's digest, and know a manifest's digest only after a push or pull."""
    name = images.make("a:1")
    assert fast_push(name, "--to", proxy.host).code == 0
    with Registry(proxy.host, policy=Policy(1)) as registry:
        manifest = registry.manifest("regtest-a", "1")
        assert manifest is not None
    configs_only(monkeypatch, manifest.blobs[0].digest)
    done = fast_push(name, "--to", proxy.host, "--alias", "v1", "--json")
    assert done.code == 0, done.text
    assert [(entry["action"], entry["digest"]) for entry in done.json["pushed"]] == [
        ("keep", manifest.digest), ("tag", manifest.digest)]


# ---------------------------------------------------------------------- what exists already


def test_a_fixed_tag_with_other_content_is_refused_before_anything_moves(proxy: FaultProxy, images: Images) -> None:
    first = images.make("a:1")
    digest = images.digest(first)
    assert fast_push(first, "--to", proxy.host, "--alias", "v1").code == 0
    proxy.clear()
    done = fast_push(images.make("a:1"), images.make("b:1"), "--to", proxy.host, "--alias", "v1")
    assert done.code == 12
    assert done.error is not None
    there = f"{proxy.host}/regtest-a"
    assert [problem.where for problem in done.error.problems] == [f"{there}:1", f"{there}:v1"]
    assert digest in done.error.problems[0].found
    assert stored(proxy, "regtest-a", "1") == digest
    assert stored(proxy, "regtest-b", "1") == "", "nothing of the push that conflicts may move"
    assert {request.method for request in proxy.requests} <= {"HEAD", "GET"}


def test_an_image_built_again_with_the_same_content_key_is_there_already(proxy: FaultProxy, images: Images) -> None:
    labels = {"buildctl.key": "ab" * 32}
    first = images.make("a:1", labels=labels)
    digest = images.digest(first)
    assert fast_push(first, "--to", proxy.host).code == 0
    again = images.make("a:1", labels=labels)
    assert images.digest(again) != digest
    done = fast_push(again, "--to", proxy.host, "--alias", "v1")
    assert done.code == 0
    assert f"content key {'ab' * 6}" in done.err
    assert stored(proxy, "regtest-a", "v1") == digest, "the alias follows the published image, not the rebuilt one"


def test_a_moving_tag_moves_and_says_from_where(proxy: FaultProxy, images: Images) -> None:
    first = images.make("a:1")
    digest = images.digest(first)
    assert fast_push(first, "--to", proxy.host, "--moving", "latest").code == 0
    second = images.make("a:2")
    planned = fast_push(second, "--to", proxy.host, "--moving", "latest", "--dry-run")
    assert f"(now {digest})" in planned.out
    assert fast_push(second, "--to", proxy.host, "--moving", "latest").code == 0
    assert stored(proxy, "regtest-a", "latest") == images.digest(second)
    assert stored(proxy, "regtest-a", "1") == digest


def retagging(images: Images, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Another job on this engine gives the name that a push has just made to its own image."""
    tag = docker.APIClient.tag

    def both(self: docker.APIClient, image: str, repository: str, name: str) -> bool:
        tag(self, image, repository, name)
        return bool(tag(images.engine, other, repository, name))

    monkeypatch.setattr(docker.APIClient, "tag", both)


def test_another_jobs_image_pushed_under_the_same_tag_is_no_success(proxy: FaultProxy, images: Images,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs on one engine push other content to one tag: the engine reads the name after both have set it."""
    name, other = images.make("a:1"), images.make("b:1")
    retagging(images, monkeypatch, other)
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert stored(proxy, "regtest-a", "1") == images.digest(other)
    assert done.code == 12, done.text
    assert "another job on this engine" in done.text
    assert images.digest(name) in done.text
    assert images.digest(other) in done.text
    assert stored(proxy, "regtest-a", "latest") == "", "a tag that moves does not name it"


def test_another_jobs_image_with_the_same_content_key_is_as_good(proxy: FaultProxy, images: Images,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"buildctl.key": "ef" * 32}
    name, other = images.make("a:1", labels=labels), images.make("b:1", labels=labels)
    retagging(images, monkeypatch, other)
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert done.code == 0, done.text
    assert stored(proxy, "regtest-a", "latest") == images.digest(other)


def test_an_engine_that_knows_configs_only_pushes_the_image_that_was_meant(
        proxy: FaultProxy, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = images.make("a:1")
    with RegistryServer(tmp_path / "other") as server:
        assert fast_push(name, "--to", server.host).code == 0
        with Registry(server.host, policy=Policy(1)) as registry:
            manifest = registry.manifest("regtest-a", "1")
            assert manifest is not None
    known = configs_only(monkeypatch, manifest.blobs[0].digest)
    assert fast_push(name, "--to", proxy.host).code == 0
    known["Id"] = "sha256:" + "0" * 64
    done = fast_push(name, "--to", f"{proxy.host}/team")
    assert done.code == 12, done.text


def configs_only(monkeypatch: pytest.MonkeyPatch, config: str) -> dict[str, object]:
    """Let the engine answer as one with a graph driver does, for the one image in use."""
    known: dict[str, object] = {"Id": config, "RepoDigests": []}
    asked = docker.APIClient.inspect_image
    monkeypatch.setattr(docker.APIClient, "inspect_image",
                        lambda self, image: {**asked(self, image), **known})  # type: ignore[no-untyped-call]
    return known


def test_moving_tags_stay_when_a_later_image_fails(proxy: FaultProxy, images: Images) -> None:
    """Tags never move half-way: the moving tag of the first image waits for the second image's upload."""
    proxy.add(Fault("PUT", "/regtest-b/blobs/uploads/", code=413))
    done = fast_push(images.make("a:1"), images.make("b:1"), "--to", proxy.host, "--moving", "latest")
    assert done.code == 10
    assert stored(proxy, "regtest-a", "1")
    assert stored(proxy, "regtest-a", "latest") == ""


def test_one_tag_for_two_images_is_a_usage_error(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1")
    other = images.make("other/regtest-a:1")
    done = fast_push(name, other, "--to", proxy.host)
    assert done.code == 2
    assert proxy.requests == []


# ---------------------------------------------------------------------- faults that pass


PASSING = {
    "500 twice when asked for the right": Fault("POST", UPLOAD, times=2),
    "500 twice when asked by the engine": Fault("POST", UPLOAD, skip=1, times=2),
    "502 on a blob": Fault("PUT", UPLOAD, code=502, times=1),
    "504 on the manifest": Fault("PUT", MANIFEST, code=504, times=1),
    "522 on the manifest": Fault("PUT", MANIFEST, code=522, times=1),
    "499 on a blob": Fault("PUT", UPLOAD, code=499, times=1),
    "reset in the middle of a blob": Fault("PUT", UPLOAD, "reset", after=50_000, times=1),
    "answer to a blob lost": Fault("PUT", UPLOAD, "lose_answer", times=1),
    "answer to the manifest lost": Fault("PUT", MANIFEST, "lose_answer", times=1),
    "reset before the manifest": Fault("PUT", MANIFEST, "reset", times=1),
    "upload forgotten, blob there": Fault(
        "PUT", UPLOAD, "swap", code=404, times=2, headers={"Content-Type": "application/json"},
        body=b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN","message":"blob upload unknown"}]}'),
    "504 on a blob that arrived": Fault("PUT", UPLOAD, "swap", code=504, times=2),
    "504 on a manifest that arrived": Fault("PUT", MANIFEST, "swap", code=504, times=1),
    "upload forgotten": Fault("PUT", UPLOAD, code=404, times=1, headers={"Content-Type": "application/json"},
                              body=b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN","message":"blob upload unknown"}]}'),
    "503 on the first look": Fault("HEAD", MANIFEST, code=503, times=1),
    "reset when read back": Fault("HEAD", MANIFEST, "reset", skip=2, times=1),
    "the wrong answer once when read back": Fault("GET", MANIFEST, code=500, times=1),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_faults_that_pass_are_repeated_until_the_push_is_proved(fault: Fault, proxy: FaultProxy,
                                                                images: Images) -> None:
    proxy.add(fault)
    name = images.make("a:1", size=100_000)
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert done.code == 0, done.text
    assert fault.fired
    assert stored(proxy, "regtest-a", "1") == stored(proxy, "regtest-a", "latest") == images.digest(name)
    assert proxy.sent_twice() == 0


@pytest.mark.parametrize("headers", [{"Retry-After": "1"}, {}], ids=["header", "body only"])
def test_429_waits_as_long_as_the_registry_asks(headers: dict[str, str], proxy: FaultProxy, images: Images) -> None:
    body = b'{"errors":[{"code":"TOOMANYREQUESTS","message":"retry-after: 1s, allowed: 44000/minute"}]}'
    proxy.add(Fault("POST", UPLOAD, code=429, headers=headers, body=body, times=1))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 0, done.text
    asked = [request for request in proxy.requests if request.method == "POST"]
    assert asked[0].status == 429
    assert asked[1].at - asked[0].at >= 1
    assert "next in 1." in done.err


def test_a_wait_longer_than_anybody_waits_ends_the_push_and_is_told(proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault("POST", UPLOAD, code=429, headers={"Retry-After": "3600"}))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 11
    assert "asks to wait 3600 s" in done.text
    assert proxy.count("POST") == 1


# ---------------------------------------------------------------------- faults that stay


def test_a_registry_that_is_down_is_exit_11(server: RegistryServer, images: Images) -> None:
    name = images.make("a:1")
    server.stop()
    done = fast_push(name, "--to", server.host)
    assert done.code == 11
    assert "refused" in done.text
    assert done.text.count("failed:") == 3
    server.start()
    assert fast_push(name, "--to", server.host).code == 0, "the same command works when it is back"


@pytest.mark.parametrize(("method", "path"), [("POST", UPLOAD), ("PUT", UPLOAD), ("PUT", MANIFEST), ("HEAD", MANIFEST)])
def test_500_for_ever_ends_bounded_with_exit_11(method: str, path: str, proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault(method, path))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 11
    assert "500 Internal Server Error" in done.text
    assert "(4 attempts)" in done.text
    assert "finished layers are not sent twice" in done.text
    assert stored(proxy, "regtest-a", "1") == ""


def test_a_missing_right_is_found_in_two_requests_with_the_registrys_words(proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault("POST", UPLOAD, code=403, headers={"Content-Type": "application/json"},
                    body=b'{"errors":[{"code":"DENIED","message":"permission_denied: write_package"}]}'))
    done = fast_push(images.make("a:1"), "--to", f"{proxy.host}/team")
    assert done.code == 10
    assert "permission_denied: write_package" in done.text
    assert f"{proxy.host}/team/regtest-a" in done.text
    assert len(proxy.requests) == 2


def test_a_size_that_is_refused_ends_at_once(proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault("PUT", UPLOAD, code=413, read_body=False, body=b"<html><h1>413 Too Large</h1></html>"))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 10
    assert "refuses the size of a layer" in done.text
    assert proxy.count("PUT", UPLOAD) <= 3, "at most once per blob, never again"


def test_an_unknown_repository_is_not_repeated(proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault("POST", UPLOAD, code=404, headers={"Content-Type": "application/json"},
                    body=b'{"errors":[{"code":"NAME_UNKNOWN","message":"The repository does not exist"}]}'))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 10
    assert "does not exist" in done.text
    assert proxy.count("POST") == 1


def test_a_right_lost_between_question_and_upload_is_told_in_the_registrys_words(proxy: FaultProxy,
                                                                                images: Images) -> None:
    proxy.add(Fault("POST", UPLOAD, code=403, skip=1, body=b'{"errors":[{"code":"DENIED","message":"quota of 5 GB"}]}',
                    headers={"Content-Type": "application/json"}))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 10
    assert "quota of 5 GB" in done.text


def test_a_wrong_digest_read_back_is_an_error(proxy: FaultProxy, images: Images) -> None:
    wrong = "sha256:" + "0" * 64
    proxy.add(Fault("HEAD", MANIFEST, "rewrite", headers={"Docker-Content-Digest": wrong}, skip=2))
    name = images.make("a:1")
    done = fast_push(name, "--to", proxy.host)
    assert done.code == 11
    assert wrong in done.text
    assert images.digest(name) in done.text


def test_somebody_else_moving_the_tag_is_seen(proxy: FaultProxy, images: Images) -> None:
    other, name = images.make("b:1"), images.make("a:1")
    assert fast_push(other, "--to", proxy.upstream).code == 0
    proxy.add(stealing(proxy, "regtest-b"))
    done = fast_push(name, "--to", proxy.host)
    assert done.code == 12
    assert "somebody else moved the tag" in done.text


def stealing(proxy: FaultProxy, other: str, tag: str = "1") -> Fault:
    """Another writer: puts tag 1 of `other` over a tag of regtest-a when the push has put its own tag 1."""

    class Stealing(Fault):
        pushed = False

        def takes(self, method: str, path: str) -> bool:
            if method == "PUT" and "/regtest-a/manifests/1" in path:
                self.pushed = True
            if method == "HEAD" and "/regtest-a/manifests/1" in path and self.pushed:
                self.pushed = False
                with Registry(proxy.upstream, actions="pull,push", policy=Policy(1)) as registry:
                    manifest = registry.manifest(other, "1")
                    assert manifest is not None
                    for blob in manifest.blobs:
                        assert registry.mount("regtest-a", blob.digest, other)
                    registry.put_manifest("regtest-a", tag, manifest)
            return False

    return Stealing("", "")


def test_a_fixed_tag_set_by_another_job_during_the_upload_is_not_overwritten(proxy: FaultProxy,
                                                                            images: Images) -> None:
    other, name = images.make("b:1"), images.make("a:1")
    assert fast_push(other, "--to", proxy.upstream).code == 0
    proxy.add(stealing(proxy, "regtest-b", "v1"))
    done = fast_push(name, "--to", proxy.host, "--alias", "v1")
    assert done.code == 12
    assert stored(proxy, "regtest-a", "v1") == images.digest(other)


def test_a_push_that_stands_still_ends(proxy: FaultProxy, images: Images) -> None:
    proxy.add(Fault("PUT", UPLOAD, "hang"))
    name = images.make("a:1")
    done = run(push.command, name, "--to", proxy.host, "--timeout", "0.5", "--attempts", "2", "--wait", "0")
    assert done.code == 11
    assert "nothing has moved" in done.text
    _until(lambda: proxy.clients_waiting() == 0)  # the engine has given the stalled uploads up


def test_a_config_that_stands_still_is_repeated_too(proxy: FaultProxy, images: Images, tmp_path: Path) -> None:
    """The engine's stream has lines for layers only: when the config hangs alone there is silence."""

    class Config(Fault):
        def takes(self, method: str, path: str) -> bool:
            return config[7:] in path and super().takes(method, path)

    name = images.make("a:1", layers=1)
    with RegistryServer(tmp_path / "other") as other:
        assert fast_push(name, "--to", other.host).code == 0
        with Registry(other.host, policy=Policy(1)) as registry:
            manifest = registry.manifest("regtest-a", "1")
            assert manifest is not None
            config = manifest.blobs[0].digest
    proxy.add(Config("PUT", UPLOAD, "hang", times=1))
    started = time.monotonic()
    done = fast_push(name, "--to", proxy.host, "--timeout", "1")
    assert done.code == 0, done.text
    assert time.monotonic() - started < 30
    assert "no answer for too long" in done.err


# ---------------------------------------------------------------------- logins


def login(folder: Path, host: str, password: str, user: str = "ci") -> None:
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def test_a_token_that_ends_before_the_manifest_costs_no_blob_twice(server: RegistryServer, images: Images,
                                                                   docker_config: Path) -> None:
    with FaultProxy(server.host, token_ttl=60, password="s3cret") as proxy:
        login(docker_config, proxy.host, "s3cret")
        proxy.add(Fault("PUT", MANIFEST, "expire_tokens", times=1))
        name = images.make("a:1", size=100_000)
        done = fast_push(name, "--to", proxy.host)
        assert done.code == 0, done.text
        assert "logging in again" in done.err
        assert proxy.upload_bytes() < 202_500
        assert stored(proxy, "regtest-a", "1") == images.digest(name)
        assert "s3cret" not in done.text


def test_a_login_rejected_again_and_again_ends(server: RegistryServer, images: Images, docker_config: Path) -> None:
    with FaultProxy(server.host, token_ttl=60, password="s3cret") as proxy:
        login(docker_config, proxy.host, "s3cret")
        proxy.add(Fault("PUT", MANIFEST, "expire_tokens"))
        done = fast_push(images.make("a:1"), "--to", proxy.host)
        assert done.code == 10
        assert "rejects the login" in done.text
        assert "docker login" in done.text


@pytest.mark.parametrize("password", ["", "wrong-pass"])
def test_no_login_and_a_wrong_one_are_exit_10_and_never_shown(password: str, server: RegistryServer, images: Images,
                                                              docker_config: Path) -> None:
    with FaultProxy(server.host, token_ttl=60, password="s3cret") as proxy:
        if password:
            login(docker_config, proxy.host, password)
        done = fast_push(images.make("a:1"), "--to", proxy.host)
        assert done.code == 10
        assert "rejects the login" in done.text
        assert "wrong-pass" not in done.text
        assert proxy.count("GET", "/token") == 1, "a rejected login is not repeated"


def test_a_login_from_the_environment_goes_to_its_host_only(server: RegistryServer, images: Images,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultProxy(server.host, token_ttl=60, password="s3cret") as proxy:
        monkeypatch.setenv("SGL_BUILDCTL_REGISTRY_USER", "ci")
        monkeypatch.setenv("SGL_BUILDCTL_REGISTRY_PASSWORD", "s3cret")
        monkeypatch.setenv("SGL_BUILDCTL_REGISTRY_HOST", "elsewhere.example")
        name = images.make("a:1")
        assert fast_push(name, "--to", proxy.host).code == 10
        monkeypatch.setenv("SGL_BUILDCTL_REGISTRY_HOST", proxy.host)
        assert fast_push(name, "--to", proxy.host).code == 0


def test_a_token_answer_without_a_lifetime_is_fine(server: RegistryServer, images: Images, docker_config: Path) -> None:
    with FaultProxy(server.host, token_ttl=60, password="s3cret") as proxy:
        proxy.token_expires_in = False
        login(docker_config, proxy.host, "s3cret")
        assert fast_push(images.make("a:1"), "--to", proxy.host).code == 0


def test_a_credential_helper_is_asked_again_at_each_login(server: RegistryServer, images: Images, tmp_path: Path,
                                                          docker_config: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers of cloud registries hand out short-lived secrets: the one from before the build is dead after it."""
    helper = tmp_path / "docker-credential-changing"
    secret = tmp_path / "secret"
    answer = '{"ServerURL":"%s","Username":"ci","Secret":"%s"}'
    helper.write_text(f"#!/bin/sh\nprintf '{answer}' \"$(cat)\" \"$(cat {secret})\"\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    secret.write_text("old")

    class Rotated(Fault):
        def takes(self, method: str, path: str) -> bool:
            if super().takes(method, path):
                proxy.password = "new"
                secret.write_text("new")
                return True
            return False

    with FaultProxy(server.host, token_ttl=60, password="old") as proxy:
        (docker_config / "config.json").write_text(json.dumps({"credHelpers": {proxy.host: "changing"}}))
        proxy.add(Rotated("PUT", MANIFEST, "expire_tokens", times=1))
        done = fast_push(images.make("a:1"), "--to", proxy.host)
        assert done.code == 0, done.text
        assert proxy.password == "new"


def test_a_broken_credential_helper_is_named_and_is_exit_10(proxy: FaultProxy, images: Images, tmp_path: Path,
                                                            docker_config: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-broken"
    helper.write_text("#!/bin/sh\necho 'secret-in-a-message' >&2; exit 1\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (docker_config / "config.json").write_text(json.dumps({"credHelpers": {proxy.host: "broken"}}))
    done = fast_push(images.make("a:1"), "--to", proxy.host)
    assert done.code == 10
    assert "docker login" in done.text
    assert "secret-in-a-message" not in done.text


def test_secrets_are_in_no_output_no_log_and_no_process_list(server: RegistryServer, images: Images,
                                                            docker_config: Path) -> None:
    secret = "planted-s3cret-7f3a"
    encoded = base64.b64encode(f"ci:{secret}".encode()).decode()
    with FaultProxy(server.host, token_ttl=60, password=secret) as proxy:
        login(docker_config, proxy.host, secret)
        slow = Fault("PUT", UPLOAD, "slow", delay=0.5, times=1)
        proxy.add(slow, Fault("POST", UPLOAD, code=500, times=1), Fault("PUT", MANIFEST, code=503))
        with pushing(images.make("a:1"), "--to", proxy.host, "--attempts", "3", "--wait", "0.01") as process:
            _until(lambda: slow.fired > 0)
            listed = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
            out, err = process.communicate(timeout=60)
        assert process.returncode == 11
        seen = out + err + listed.decode(errors="replace") + (server.folder / "log").read_text()
        assert "503" in err
        for word in (secret, encoded, *(request.authorization[7:] for request in proxy.requests
                                        if request.authorization.startswith("Bearer "))):
            assert word not in seen


# ---------------------------------------------------------------------- disks and neighbours


def test_a_registry_without_space_is_exit_11_and_works_when_there_is_some(images: Images, tmp_path: Path) -> None:
    big, small = images.make("a:1", size=400_000), images.make("b:1", size=1000)
    with RegistryServer(tmp_path / "full", disk="600k") as server:
        done = fast_push(big, "--to", server.host)
        assert done.code == 11
        assert "500 Internal Server Error" in done.text
        with Registry(server.host, policy=Policy(1)) as registry:
            assert registry.head("regtest-a", "1") is None
    with RegistryServer(tmp_path / "roomy") as server:
        assert fast_push(big, small, "--to", server.host).code == 0


def test_two_jobs_pushing_the_same_images_at_once_both_succeed(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", layers=3, size=300_000)
    proxy.add(Fault("PUT", "", "slow", delay=0.2))
    words = (name, "--to", proxy.host, "--moving", "latest", "--wait", "0.01")
    with pushing(*words) as one, pushing(*words) as two:
        outcomes = [process.communicate(timeout=60) for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outcomes
    assert stored(proxy, "regtest-a", "1") == stored(proxy, "regtest-a", "latest") == images.digest(name)


def test_two_builds_with_one_content_key_pushed_at_once_both_succeed(proxy: FaultProxy, images: Images) -> None:
    """Two runners built the same key: whoever is later finds other bytes under its tag, and that is fine."""
    labels = {"buildctl.key": "cd" * 32}
    other, name = images.make("b:1", labels=labels), images.make("a:1", labels=labels)
    assert fast_push(other, "--to", proxy.upstream).code == 0
    proxy.add(stealing(proxy, "regtest-b"))
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert done.code == 0, done.text
    assert stored(proxy, "regtest-a", "latest") == images.digest(other), "the moving tag follows what is published"


def test_two_jobs_moving_one_tag_end_with_one_of_the_two(proxy: FaultProxy, images: Images) -> None:
    first, second = images.make("a:1", size=100_000), images.make("a:2", size=100_000)
    proxy.add(Fault("PUT", MANIFEST, "slow", delay=0.1))
    with (pushing(first, "--to", proxy.host, "--moving", "latest") as one,
          pushing(second, "--to", proxy.host, "--moving", "latest") as two):
        outcomes = [process.communicate(timeout=60) for process in (one, two)]
    assert {one.returncode, two.returncode} <= {0, 12}, outcomes
    assert 0 in {one.returncode, two.returncode}
    assert stored(proxy, "regtest-a", "1") == images.digest(first)
    assert stored(proxy, "regtest-a", "2") == images.digest(second)
    assert stored(proxy, "regtest-a", "latest") in {images.digest(first), images.digest(second)}


def test_two_jobs_with_other_content_for_one_new_fixed_tag_are_not_both_told_success(proxy: FaultProxy,
                                                                                     images: Images) -> None:
    """Each finds the tag free and sets it; whose content does not stay is told."""
    first, second = images.make("a:1"), images.make("a:2")
    proxy.add(Fault("PUT", MANIFEST, "slow", delay=0.2))
    with (pushing(first, "--to", proxy.host, "--alias", "1.0") as one,
          pushing(second, "--to", proxy.host, "--alias", "1.0") as two):
        outcomes = [process.communicate(timeout=60) for process in (one, two)]
    assert {one.returncode, two.returncode} == {0, 12}, outcomes
    assert stored(proxy, "regtest-a", "1.0") == images.digest(first if one.returncode == 0 else second)


# ---------------------------------------------------------------------- crashes


def test_a_killed_push_is_resumed_without_sending_finished_blobs(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", layers=3, size=300_000)
    hang = Fault("PUT", MANIFEST, "hang")
    proxy.add(hang)
    with pushing(name, "--to", proxy.host) as process:
        _until(lambda: hang.fired > 0)
        process.kill()
    sent = proxy.upload_bytes()
    proxy.faults.clear()
    done = fast_push(name, "--to", proxy.host)
    assert done.code == 0, done.text
    assert proxy.upload_bytes() == sent
    images.engine.remove_image(f"{proxy.host}/regtest-a:1")


def test_an_interrupted_push_is_exit_130_and_leaves_nothing_behind(proxy: FaultProxy, images: Images) -> None:
    name = images.make("a:1", size=300_000)
    before = images.names()
    proxy.add(hang := Fault("PUT", UPLOAD, "hang"))
    with pushing(name, "--to", proxy.host) as process:
        _until(lambda: hang.fired > 0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert images.names() == before
    _until(lambda: proxy.clients_waiting() == 0)  # the engine has stopped uploading


class Wire:
    """A unix socket in front of the engine's own, which can be cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect("/var/run/docker.sock")
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=(one, other)))
                    self._threads[-1].start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """The engine is gone, for connections that there are and for new ones."""
        self._path.unlink(missing_ok=True)
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._ends]:
            end.close()


def test_an_engine_that_dies_in_the_middle_is_exit_9(proxy: FaultProxy, images: Images, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    name = images.make("a:1")
    wire = Wire(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'docker.sock'}")
    proxy.add(hang := Fault("PUT", UPLOAD, "hang"))
    with pushing(name, "--to", proxy.host, "--wait", "0.01") as process:
        _until(lambda: hang.fired > 0)
        wire.cut()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 9, out + err
    assert "the engine hung up" in err
    assert "docker info" in err
    images.engine.remove_image(f"{proxy.host}/regtest-a:1")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
