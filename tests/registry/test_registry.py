"""Our own registry client against a real registry and its faults; no engine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from buildctl.credentials import ANONYMOUS, Credentials
from buildctl.errors import AuthError, NetworkError
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Manifest, digest_of
from buildctl.registry import Registry
from buildctl.retry import Policy, Retry
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

FAST = Policy(4, 0.01)
CI = Credentials("ci", "s3cret")


@pytest.fixture
def registry(proxy: FaultProxy) -> Iterator[Registry]:
    with Registry(proxy.host, actions="pull,push", policy=FAST) as client:
        yield client


def put_image(registry: Registry, repository: str = "a", tag: str = "1", text: bytes = b"layer") -> Manifest:
    """A minimal image of one layer."""
    config = registry.put_blob(repository, b'{"config":{"Labels":{"k":"v"}}}')
    layer = registry.put_blob(repository, text)
    body = {"schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": {**config.as_dict(), "mediaType": "application/vnd.oci.image.config.v1+json"},
            "layers": [{**layer.as_dict(), "mediaType": "application/vnd.oci.image.layer.v1.tar"}]}
    manifest = Manifest(OCI_MANIFEST, json.dumps(body).encode())
    registry.put_manifest(repository, tag, manifest)
    return manifest


def test_what_is_put_is_read_back_byte_for_byte(registry: Registry) -> None:
    manifest = put_image(registry)
    assert registry.head("a", "1") == manifest.descriptor
    assert registry.manifest("a", manifest.digest) == manifest
    assert [registry.has_blob("a", blob.digest) for blob in manifest.blobs] == [True, True]
    assert registry.blob("a", manifest.blobs[1].digest) == b"layer"


def test_an_index_is_found_by_all_four_accept_types(registry: Registry) -> None:
    manifest = put_image(registry)
    index = Manifest(OCI_INDEX, json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX,
                                            "manifests": [manifest.descriptor.as_dict()]}).encode())
    registry.put_manifest("a", "all", index)
    assert registry.head("a", "all") == index.descriptor
    found = registry.manifest("a", "all")
    assert found is not None
    assert found.children == (manifest.descriptor,)
    assert found.blobs == ()


def test_a_registry_that_names_no_digest_is_asked_for_the_bytes(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry)
    proxy.add(Fault("HEAD", "/manifests/", "rewrite", headers={"Docker-Content-Digest": ""}))
    assert registry.head("a", "1") == manifest.descriptor


def test_what_is_not_there_is_nothing_and_no_error(registry: Registry) -> None:
    assert registry.head("nobody/home", "1") is None
    assert registry.manifest("nobody/home", "1") is None
    assert registry.tags("nobody/home") == ()
    assert not registry.has_blob("a", digest_of(b"none"))


def test_tags_are_followed_over_pages(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry)
    for number in range(5):
        registry.put_manifest("a", f"t{number}", manifest)
    assert sorted(registry.tags("a")) == ["1", "t0", "t1", "t2", "t3", "t4"]
    # docker-registry 2.8 pages only when asked; the second page is asked for as a server's Link header says
    more = {"Link": '</v2/a/tags/list?last=t3>; rel="next"'}
    proxy.add(Fault("GET", "/tags/list$", "rewrite", headers=more, times=1))
    assert len(registry.tags("a")) > 6
    assert proxy.count("GET", r"tags/list\?last=t3") == 1


def test_the_right_to_push_is_asked_without_leaving_an_upload(registry: Registry, proxy: FaultProxy) -> None:
    registry.check_push("a")
    assert [(request.method, request.status) for request in proxy.requests] == [("POST", 202), ("DELETE", 204)]


def test_mounting_moves_no_bytes(registry: Registry, proxy: FaultProxy) -> None:
    manifest = put_image(registry, text=b"x" * 100_000)
    proxy.requests.clear()
    assert all(registry.mount("b", blob.digest, "a") for blob in manifest.blobs)
    assert not registry.mount("b", digest_of(b"none"), "a")
    assert registry.has_blob("b", manifest.blobs[1].digest)
    assert proxy.upload_bytes() == 0


def test_a_blob_that_arrived_without_an_answer_is_not_sent_again(registry: Registry, proxy: FaultProxy) -> None:
    proxy.add(Fault("PUT", "/blobs/uploads/", "lose_answer", times=1))
    data = b"y" * 100_000
    registry.put_blob("a", data)
    assert proxy.upload_bytes() == len(data)
    assert registry.blob("a", digest_of(data)) == data


def test_a_cut_upload_starts_again_from_its_first_byte(registry: Registry, proxy: FaultProxy) -> None:
    proxy.add(Fault("PUT", "/blobs/uploads/", "reset", after=50_000, times=2))
    data = bytes(range(256)) * 1000
    assert registry.upload("a", digest_of(data), len(data), lambda: iter([data[:100_000], data[100_000:]])) == len(data)
    assert registry.blob("a", digest_of(data)) == data


def test_a_blob_that_arrives_changed_is_refused(registry: Registry, proxy: FaultProxy, server: RegistryServer) -> None:
    digest = registry.put_blob("a", b"original").digest
    (server.blobs / digest[7:9] / digest[7:] / "data").write_bytes(b"tampered")
    with pytest.raises(NetworkError, match="arrived as"):
        registry.blob("a", digest)


def test_waits_are_announced(proxy: FaultProxy) -> None:
    heard: list[Retry] = []
    proxy.add(Fault("HEAD", "/manifests/", code=503, times=2))
    with Registry(proxy.host, policy=FAST, announce=heard.append) as registry:
        assert registry.head("a", "1") is None
    assert [retry.attempt for retry in heard] == [1, 2]
    assert "503" in heard[0].fault.text


def test_a_page_where_a_manifest_belongs_is_called_what_it_is(registry: Registry, proxy: FaultProxy) -> None:
    proxy.add(Fault("GET|HEAD", "/manifests/", code=200, headers={"Content-Type": "text/html"}, body=b"Sign in"))
    with pytest.raises(AuthError, match="text/html"):
        registry.head("a", "1")


def test_words_where_json_belongs_are_an_error(registry: Registry, proxy: FaultProxy) -> None:
    proxy.add(Fault("GET", "/tags/list", code=200, headers={"Content-Type": "text/html"}, body=b"<h1>Sign in</h1>"))
    with pytest.raises(AuthError, match="where JSON belongs"):
        registry.tags("a")


def test_a_plain_body_of_a_proxy_is_quoted_without_its_tags(registry: Registry, proxy: FaultProxy) -> None:
    proxy.add(Fault("GET", "/tags/list", code=400, body=b"<html><h1>Bad</h1> <p>gateway says no</p></html>"))
    with pytest.raises(AuthError, match="Bad gateway says no"):
        registry.tags("a")


# ---------------------------------------------------------------------- referrers


@pytest.mark.parametrize("api", [False, True], ids=["tag schema", "referrers api"])
def test_results_are_attached_and_found_again(api: bool, registry: Registry, proxy: FaultProxy) -> None:
    subject = put_image(registry).descriptor
    assert registry.referrers("a", subject.digest) == ()
    if api:  # docker-registry 2.8 has no such API; its answers are put into its mouth here
        proxy.add(Fault("PUT", "/manifests/sha256:", "rewrite", headers={"OCI-Subject": subject.digest}))
    kind = "application/vnd.example.result"
    files = {"result.json": ("application/json", b'{"verdict":"win"}')}
    first = registry.attach("a", subject, kind, files, {"v": "win"})
    other = registry.attach("a", subject, "application/other", {"x": ("text/plain", b"x")}, {})
    if api:
        entries = [{**first.as_dict(), "artifactType": kind}, {**other.as_dict(), "artifactType": "application/other"}]
        proxy.add(Fault("GET", "/referrers/", code=200, headers={"Content-Type": OCI_INDEX},
                        body=json.dumps({"manifests": entries}).encode()))
        assert registry.head("a", subject.digest.replace(":", "-")) is None
    assert registry.attach("a", subject, kind, files, {"v": "win"}) == first, "the same result is attached once"
    assert {entry["digest"] for entry in registry.referrers("a", subject.digest)} == {first.digest, other.digest}
    found = registry.referrers("a", subject.digest, kind)
    assert [entry["digest"] for entry in found] == [first.digest]
    manifest = registry.manifest("a", first.digest)
    assert manifest is not None
    assert manifest.content["subject"] == subject.as_dict()
    assert registry.blob("a", manifest.blobs[1].digest) == b'{"verdict":"win"}'


# ---------------------------------------------------------------------- logins


@contextmanager
def guarded(server: RegistryServer, ttl: float = 60) -> Iterator[FaultProxy]:
    with FaultProxy(server.host, token_ttl=ttl, user=CI.user, password=CI.password) as proxy:
        yield proxy


def test_a_token_is_fetched_once_and_used_again(server: RegistryServer) -> None:
    with guarded(server) as proxy, Registry(proxy.host, actions="pull,push", source=lambda host: CI,
                                            policy=FAST) as registry:
        put_image(registry)
        registry.head("a", "1")
        assert proxy.count("GET", "/token") == 1


def test_an_expired_token_is_replaced_in_the_middle(server: RegistryServer) -> None:
    with guarded(server) as proxy, Registry(proxy.host, actions="pull,push", source=lambda host: CI,
                                            policy=FAST) as registry:
        proxy.add(Fault("PUT", "/blobs/uploads/", "expire_tokens", times=1))
        put_image(registry)
        assert proxy.count("GET", "/token") == 2


def test_a_second_rejection_in_a_row_is_the_end(server: RegistryServer) -> None:
    with guarded(server) as proxy, Registry(proxy.host, source=lambda host: CI, policy=FAST) as registry:
        proxy.add(Fault("HEAD", "/manifests/", "expire_tokens"))
        with pytest.raises(AuthError, match="rejects the login"):
            registry.head("a", "1")
        assert proxy.count("HEAD") == 2


def test_a_wrong_password_is_not_tried_twice_and_not_shown(server: RegistryServer) -> None:
    wrong = Credentials("ci", "wr0ng-word")
    with guarded(server) as proxy, Registry(proxy.host, source=lambda host: wrong, policy=FAST) as registry:
        with pytest.raises(AuthError) as caught:
            registry.head("a", "1")
        assert "wr0ng-word" not in str(caught.value) + repr(wrong)
        assert proxy.count("GET", "/token") == 1


def test_an_identity_token_is_exchanged(server: RegistryServer) -> None:
    token = Credentials(identity_token="refresh-me")
    with guarded(server) as proxy, Registry(proxy.host, source=lambda host: token, policy=FAST) as registry:
        with pytest.raises(AuthError):
            registry.head("a", "1")
        assert proxy.count("POST", "/token") == 1
        assert token.as_auth_config() == {"identitytoken": "refresh-me"}


def test_netrc_never_replaces_the_registrys_login(server: RegistryServer, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with guarded(server) as proxy, Registry(proxy.host, source=lambda host: CI, policy=FAST) as registry:
        assert registry.head("a", "1") is None
        basic = base64.b64encode(b"somebody:else").decode()
        assert all(basic not in request.authorization for request in proxy.requests)


@contextmanager
def stub(status: int, headers: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """A server that always gives one answer; yields its host and the Authorization headers that it saw."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(200 if seen[-1].startswith("Basic ") and status == 401 else status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_basic_logins_work() -> None:
    headers = {"WWW-Authenticate": 'Basic realm="x"', "Docker-Content-Digest": "sha256:1", "Content-Type": OCI_MANIFEST}
    with stub(401, headers) as (host, seen), Registry(host, source=lambda host: CI, policy=FAST) as registry:
        assert registry.head("a", "1") is not None
        assert seen == ["", "Basic " + base64.b64encode(b"ci:s3cret").decode()]
    with stub(401, headers) as (host, seen), Registry(host, source=lambda host: ANONYMOUS, policy=FAST) as registry, \
            pytest.raises(AuthError):
        registry.head("a", "1")


@pytest.mark.parametrize("challenge", ["", "Digest realm=x"])
def test_an_unknown_kind_of_login_is_a_rejection(challenge: str) -> None:
    headers = {"WWW-Authenticate": challenge} if challenge else {}
    with stub(401, headers) as (host, _), Registry(host, source=lambda host: CI, policy=FAST) as registry, \
            pytest.raises(AuthError):
        registry.head("a", "1")


def test_a_password_never_goes_to_a_token_server_without_tls() -> None:
    headers = {"WWW-Authenticate": 'Bearer realm="ftp://elsewhere/token?x=1",service="s"'}
    with stub(401, headers) as (host, seen), Registry(host, source=lambda host: CI, policy=FAST) as registry:
        with pytest.raises(AuthError, match="which is not https"):
            registry.head("a", "1")
        assert seen == [""]


def test_a_token_without_the_right_is_a_denial_and_not_a_login_problem(server: RegistryServer) -> None:
    with guarded(server) as proxy:
        proxy.add(Fault("POST", "/blobs/uploads/", code=401, headers={
            "WWW-Authenticate": f'Bearer realm="http://{proxy.host}/token",service="s",error="insufficient_scope"'}))
        with Registry(proxy.host, actions="pull,push", source=lambda host: CI, policy=FAST) as registry, \
                pytest.raises(AuthError, match="denies access"):
            registry.check_push("a")


def test_tls_trouble_is_not_repeated(proxy: FaultProxy) -> None:
    heard: list[Retry] = []
    with Registry(proxy.host, policy=FAST, announce=heard.append) as registry:
        registry.base = f"https://{proxy.host}"
        with pytest.raises(AuthError, match="TLS"):
            registry.head("a", "1")
    assert heard == []
