"""uv's own settings on this host: what is lent, what is refused, what is left out and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import host, uv_settings

TOML = """\
prerelease = "allow"
find-links = ["{here}/wheels", "https://links.example/"]
[[index]]
name = "explicit-one"
url = "https://one.example/simple"
explicit = true
[[index]]
name = "own"
url = "https://own.example/simple"
default = true
"""


def test_a_host_without_settings(tmp_path: Path) -> None:
    assert uv_settings.read({"XDG_CONFIG_DIRS": str(tmp_path)}, tmp_path) == uv_settings.Settings(None, (), (), ())


def test_uvs_file_lends_its_default_index_and_folders(tmp_path: Path) -> None:
    (tmp_path / ".config" / "uv").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    path = tmp_path / ".config" / "uv" / "uv.toml"
    path.write_text(TOML.format(here=tmp_path))
    env = {"XDG_CONFIG_DIRS": str(tmp_path)}
    found = host.read((), env, tmp_path)
    assert found.index == "https://own.example/simple"
    assert found.wheelhouses == (tmp_path / "wheels",)
    assert found.extra_indexes == (f"'find-links' in {path}",)
    assert found.unused == (f"'prerelease' in {path}",)
    # the index of a file is lent with the login of its variables; a variable with an index wins
    login = {**env, "UV_INDEX_OWN_USERNAME": "me", "UV_INDEX_OWN_PASSWORD": "p@ss"}
    assert host.read((), login, tmp_path).index == "https://me:p%40ss@own.example/simple"
    assert host.read((), {**env, "PIP_INDEX_URL": "https://pip.example"}, tmp_path).index == "https://pip.example"
    assert host.read((), {**env, "UV_NO_CONFIG": "1"}, tmp_path).index is None
    other = tmp_path / "other.toml"
    other.write_text("[pip]\nindex-url = 'https://other.example'\nresolution = 'lowest'\nextra-index-url = ['https://x']\n")
    found = host.read((), {**env, "UV_CONFIG_FILE": str(other)}, tmp_path)
    assert (found.index, found.unused, found.extra_indexes) == (
        "https://other.example", (f"'resolution' in {other}",), (f"'extra-index-url' in {other}",))
    for broken in ("no toml", "index = 3\npip = 4\nfind-links = 5\n", "[[index]]\nurl = 3\ndefault = true\n"):
        path.write_text(broken)
        assert host.read((), env, tmp_path).index is None
    path.write_text("[[index]]\nurl = 'https://beside.example'\n")
    assert host.read((), env, tmp_path).extra_indexes == (f"'index' in {path}",)


@pytest.mark.parametrize(("name", "value", "extra", "unused"), [
    ("UV_INDEX", "https://x", ("UV_INDEX",), ()), ("UV_EXTRA_INDEX_URL", "https://x", ("UV_EXTRA_INDEX_URL",), ()),
    ("UV_FIND_LINKS", "https://x", ("UV_FIND_LINKS",), ()), ("UV_FIND_LINKS", "/nowhere", (), ()),
    ("UV_PRERELEASE", "allow", (), ("UV_PRERELEASE",)), ("UV_EXCLUDE_NEWER", "2020-01-01", (), ("UV_EXCLUDE_NEWER",)),
    ("UV_PRERELEASE", "", (), ()), ("UV_PUBLISH_TOKEN", "secret", (), ()), ("UV_CACHE_DIR", "/c", (), ())])
def test_a_variable_is_refused_told_or_of_no_matter(tmp_path: Path, name: str, value: str, extra: tuple[str, ...],
                                                    unused: tuple[str, ...]) -> None:
    found = uv_settings.read({name: value, "XDG_CONFIG_DIRS": str(tmp_path)}, tmp_path)
    assert (found.extra, found.unused) == (extra, unused)


def test_uv_gets_what_does_not_change_its_choice() -> None:
    kept = {"UV_CACHE_DIR": "/c", "UV_NO_CACHE": "1", "UV_HTTP_TIMEOUT": "9", "UV_HTTP_RETRIES": "0",
            "UV_PYTHON": "3.11", "UV_CONCURRENT_DOWNLOADS": "4", "HTTPS_PROXY": "http://p", "NETRC": "/n"}
    gone = {"UV_INDEX": "x", "UV_PRERELEASE": "allow", "UV_CONFIG_FILE": "/x", "UV_OFFLINE": "1",
            "UV_DEFAULT_INDEX": "x", "UV_SOMETHING_NEW": "1", "UV_INDEX_OWN_PASSWORD": "secret"}
    assert uv_settings.environment({**kept, **gone}) == kept


@pytest.mark.parametrize(("text", "found"), [
    ("https://own.example/simple", "https://own.example/simple"), ("own=https://own.example", "https://me:pw@own.example"),
    ("own=https://x:y@own.example", "https://x:y@own.example"), ("other=https://own.example", "https://own.example"),
    ("https://own.example/?a=https://b", "https://own.example/?a=https://b")])
def test_an_index_with_a_name_gets_its_login(text: str, found: str) -> None:
    assert uv_settings.named(text, {"UV_INDEX_OWN_USERNAME": "me", "UV_INDEX_OWN_PASSWORD": "pw"}) == found


def test_logins_of_indexes_by_name() -> None:
    env = {"UV_INDEX_PYTORCH_CU130_PASSWORD": "secret", "UV_INDEX_OTHER_PASSWORD": "secret"}
    assert uv_settings.logins(["pytorch-cu130", "special"], env) == ["UV_INDEX_PYTORCH_CU130_PASSWORD"]
