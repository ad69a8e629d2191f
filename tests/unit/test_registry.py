"""The parts of the registry client that need no registry."""

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from buildctl.credentials import Credentials, lookup
from buildctl.errors import AuthError
from buildctl.oci import OCI_INDEX, OCI_MANIFEST, Manifest, digest_of
from buildctl.registry import Registry, ca_bundle, is_local, plain_http, retry_after


@pytest.mark.parametrize(("host", "local"), [
    ("localhost", True), ("localhost:5000", True), ("127.0.0.1:5000", True), ("127.1.2.3", True), ("[::1]:5000", True),
    ("[::1]", True), ("ghcr.io", False), ("127.example.com", False), ("10.0.0.1:5000", False),
    ("localhost.example", False)])
def test_plain_http_is_for_this_machine_only(host: str, local: bool) -> None:
    assert is_local(host) is local
    assert Registry(host).base.startswith("http://" if local else "https://")


def test_an_engine_told_to_use_plain_http_is_followed() -> None:
    assert Registry("10.0.0.1:5000", plain_http=True).base == "http://10.0.0.1:5000"


@pytest.mark.parametrize(("host", "plain"), [
    ("dev.example:5000", True), ("safe.example", False), ("10.1.2.3:5000", True), ("10.1.2.3", True),
    ("10.9.0.1", False), ("[fd00::7]:5000", True), ("other.example", False)])
def test_what_the_engine_calls_insecure(host: str, plain: bool) -> None:
    """By name, or by address range; the shape of engine 26.1's `info`."""
    assert plain_http(host, {"IndexConfigs": {"dev.example:5000": {"Secure": False}, "safe.example": {"Secure": True}},
                             "InsecureRegistryCIDRs": ["10.1.0.0/16", "fd00::/8", "127.0.0.0/8"]}) is plain
    assert plain_http(host, {}) is False


def test_docker_hub_has_another_address() -> None:
    assert Registry("docker.io").base == "https://registry-1.docker.io"


def test_retry_after_is_a_number_or_a_date() -> None:
    now = time.time()
    assert retry_after("7", now) == 7
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 28 < retry_after(later, now) <= 31
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now) == 0
    assert retry_after("soon", now) == 0
    assert retry_after("", now) == 0


def test_the_hosts_own_certificates_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ca_bundle({"REQUESTS_CA_BUNDLE": "/a", "SSL_CERT_FILE": "/b"}) == "/a"
    assert ca_bundle({"SSL_CERT_FILE": "/b"}) == "/b"
    system = tmp_path / "ca.crt"
    monkeypatch.setattr("buildctl.registry._SYSTEM_CA", system)
    assert ca_bundle({}) is True
    system.touch()
    assert ca_bundle({}) == str(system)


def test_a_manifest_is_named_by_its_bytes() -> None:
    body = json.dumps({"config": {"digest": "sha256:c", "mediaType": "x", "size": 1},
                       "layers": [{"digest": "sha256:l", "mediaType": "y", "size": 2}]}).encode()
    manifest = Manifest(OCI_MANIFEST, body)
    assert manifest.digest == digest_of(body)
    assert [blob.digest for blob in manifest.blobs] == ["sha256:c", "sha256:l"]
    assert manifest.children == ()
    assert Manifest(OCI_INDEX, b"[]").content == {}


# ---------------------------------------------------------------------- credentials


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


def test_credentials_come_from_the_docker_configuration(config: Path) -> None:
    config.write_text(json.dumps({"auths": {"ghcr.io": {"auth": "Y2k6czNjcmV0"},
                                            "tokens.example": {"auth": "Y2k6", "identitytoken": "t0ken"}}}))
    assert lookup("ghcr.io", {}) == Credentials("ci", "s3cret")
    assert lookup("tokens.example", {}) == Credentials(identity_token="t0ken")
    assert lookup("elsewhere.example", {}) == Credentials()
    assert lookup("ghcr.io", {}).as_auth_config() == {"username": "ci", "password": "s3cret"}
    assert Credentials().as_auth_config() == {}


def test_the_environment_wins_for_its_own_host(config: Path) -> None:
    config.write_text("{}")
    environment = {"SGL_BUILDCTL_REGISTRY_HOST": "ghcr.io", "SGL_BUILDCTL_REGISTRY_USER": "u",
                   "SGL_BUILDCTL_REGISTRY_PASSWORD": "p"}
    assert lookup("ghcr.io", environment) == Credentials("u", "p")
    assert lookup("docker.io", environment) == Credentials()
    assert lookup("ghcr.io", {"SGL_BUILDCTL_REGISTRY_HOST": "ghcr.io"}) == Credentials()


def test_secrets_are_not_in_the_repr() -> None:
    assert "s3cret" not in repr(Credentials("ci", "s3cret", "s3cret"))


def test_a_broken_configuration_is_exit_10(config: Path) -> None:
    config.write_text(json.dumps({"auths": {"ghcr.io": {"auth": "%%%"}}}))
    with pytest.raises(AuthError) as caught:
        lookup("ghcr.io", {})
    assert "docker login ghcr.io" in str(caught.value)
