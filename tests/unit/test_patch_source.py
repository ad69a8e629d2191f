"""The real source of a package: fetched by the real pip from a small index of the test's own."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildctl import source
from buildctl.errors import ManifestError, NetworkError
from tests.patched import lab

FILES = {"demo/__init__.py": "", "demo/gate.py": "x = 1\n"}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A simple index with demo 1.0, 1.0.post1, 1.1 and 1.2rc1; the host's own pip settings do not count."""
    root = tmp_path / "index"
    for version in ("1.0", "1.0.post1", "1.1", "1.2rc1"):
        lab.wheel(root / "simple" / "demo", FILES, version=version)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT", "UV_INDEX_URL",
                 "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"own=http://127.0.0.1:{server.server_port}/simple")
    yield root
    server.shutdown()
    server.server_close()


def test_a_release_is_fetched_once_and_read_without_unpacking(index: Path, tmp_path: Path) -> None:
    first = source.wheel("demo", "1.0", cache=tmp_path / "cache")
    for file in index.rglob("*.whl"):
        file.unlink()

    again = source.wheel("demo", "1.0", sha256=first.sha256, cache=tmp_path / "cache")

    assert again.path == first.path
    assert again.version == "1.0"
    assert again.names == ("demo/__init__.py", "demo/gate.py")
    assert again.read("demo/gate.py") == b"x = 1\n"
    assert again.read("demo/none.py") is None


def test_another_file_than_the_locks_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="another wheel than the lock names"):
        source.wheel("demo", "1.0", sha256="0" * 64, cache=tmp_path / "cache")


def test_a_release_that_is_not_there_is_said_with_pips_own_words(index: Path, tmp_path: Path) -> None:
    with pytest.raises(NetworkError) as caught:
        source.wheel("demo", "9.9", cache=tmp_path / "cache")

    assert "demo==9.9" in caught.value.problems[0].found
    assert caught.value.exit_code == 11


def test_the_releases_are_the_final_ones_with_the_last_post_release(index: Path) -> None:
    assert source.releases("demo", "1.0") == ["1.0.post1", "1.1"]


@pytest.mark.parametrize(("versions", "since", "expected"), [
    (["0.5.9", "0.5.10", "0.5.10.post1", "0.5.11rc1", "not a version", "0.5.8"], "0.5.9", ["0.5.9", "0.5.10.post1"]),
    ([], "1", []),
])
def test_only_final_releases_from_one_on_count(versions: list[str], since: str, expected: list[str]) -> None:
    assert source.newest_posts(versions, since) == expected


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUILDCTL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert source.default_cache() == Path("/somewhere/buildctl")
    monkeypatch.setenv("BUILDCTL_CACHE_DIR", "/else")
    assert source.default_cache() == Path("/else")


def test_import_names_and_distributions_may_differ() -> None:
    assert (source.distribution("flashinfer"), source.distribution("sglang")) == ("flashinfer-python", "sglang")


def test_without_pip_and_uv_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NetworkError, match="neither pip nor uv"):
        source.wheel("demo", "1.0", cache=tmp_path)
