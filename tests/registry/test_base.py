"""Bases from a registry that has them no longer, wants a login, or is asked too often: each is told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buildctl import locking
from buildctl.engine import Engine
from buildctl.errors import AuthError, BuildctlError, BuildError, ManifestError, NetworkError
from buildctl.retry import Policy
from tests.registry.proxy import Fault, FaultProxy

TOO_MANY = Fault("GET|HEAD", "/manifests/", code=429)
DENIED = Fault("GET|HEAD", "/manifests/", code=403)


@pytest.mark.parametrize(("fault", "expected", "words"), [
    (None, ManifestError, "name another one as 'base'"), (DENIED, AuthError, "docker login"),
    (TOO_MANY, NetworkError, "name a mirror of it")], ids=["404", "403", "429"])
def test_when_it_is_locked(fault: Fault | None, expected: type[BuildctlError], words: str, proxy: FaultProxy,
                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "Policy", lambda attempts: Policy(attempts, 0.01))
    proxy.add(*([fault] if fault else []))
    image = f"{proxy.host}/cuda:nightly"
    with pytest.raises(expected, match=words) as error:
        locking._digest(image)
    assert error.value.problems[0].where == image
    assert len(proxy.requests) <= 2


@pytest.mark.engine
@pytest.mark.parametrize(("fault", "expected", "words"), [
    (None, BuildError, "no longer has this image"), (DENIED, AuthError, "docker login"),
    (TOO_MANY, NetworkError, "429")], ids=["404", "403", "429"])
def test_when_it_is_built(fault: Fault | None, expected: type[BuildctlError], words: str, proxy: FaultProxy,
                          tmp_path: Path) -> None:
    """The lock named a digest; since then it has gone from the registry."""
    proxy.add(*([fault] if fault else []))
    (tmp_path / "Dockerfile").write_text(f"FROM {proxy.host}/cuda@sha256:{'12' * 32}\nRUN true\n")
    (tmp_path / "docker-bake.json").write_text(json.dumps({"target": {"a": {}}}))
    with pytest.raises(expected) as error:
        Engine().bake(tmp_path, ["a"], tmp_path / "log", show="quiet")
    assert words in str(error.value)
