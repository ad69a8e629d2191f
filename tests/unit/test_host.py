"""Settings of this host: which win, and that the index's credentials stay out of sight."""

from __future__ import annotations

import os
from pathlib import Path

from buildctl import host


def test_nothing_is_set(tmp_path: Path) -> None:
    found = host.read((), {"XDG_CONFIG_DIRS": str(tmp_path)}, tmp_path)
    assert found.index is None
    assert found.netrc is None
    assert found.uv_config() is None
    assert found.local_wheels() == {}


def test_the_environment_wins_over_pips_files(tmp_path: Path) -> None:
    config = tmp_path / ".config" / "pip"
    config.mkdir(parents=True)
    (config / "pip.conf").write_text("[global]\nindex-url = https://file.example/simple\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": ""}
    assert host.read((), env).index == "https://file.example/simple"
    assert host.read((), {**env, "PIP_INDEX_URL": "https://env.example"}).index == "https://env.example"
    assert host.read((), {**env, "PIP_CONFIG_FILE": os.devnull}).index is None
    broken = tmp_path / "broken.conf"
    broken.write_text("no section\n")
    assert host.read((), {**env, "PIP_CONFIG_FILE": str(broken)}).index == "https://file.example/simple"
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "pip.conf").write_text("[install]\nindex-url = https://venv.example\n")
    assert host.read((), {**env, "VIRTUAL_ENV": str(venv)}).index == "https://venv.example"


def test_the_index_reaches_uv_as_a_config_file(tmp_path: Path) -> None:
    found = host.read((), {"UV_DEFAULT_INDEX": 'https://u:p"@index.example'}, tmp_path)
    assert found.uv_config() == '[[index]]\nurl = "https://u:p\\"@index.example"\ndefault = true\n'


def test_ca_bundle_and_netrc(tmp_path: Path) -> None:
    bundle, netrc = tmp_path / "ca.pem", tmp_path / ".netrc"
    bundle.touch()
    netrc.touch()
    found = host.read((), {"SSL_CERT_FILE": str(tmp_path / "none"), "PIP_CERT": str(bundle)}, tmp_path)
    assert found.ca == bundle
    assert found.netrc == netrc
    named = tmp_path / "other"
    named.touch()
    assert host.read((), {"NETRC": str(named)}, tmp_path).netrc == named


def test_wheelhouses_come_from_the_option_first_then_from_find_links(tmp_path: Path) -> None:
    for name in ("given", "uv", "pip dir"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a-1-py3-none-any.whl").write_text(name)
    (tmp_path / "uv" / "b-1-py3-none-any.whl").write_text("uv")
    env = {"UV_FIND_LINKS": f"{tmp_path}/uv,https://example.org/links",
           "PIP_FIND_LINKS": f"file://{tmp_path}/pip%20dir {tmp_path}/none", "XDG_CONFIG_DIRS": ""}
    found = host.read([tmp_path / "given"], env, tmp_path)
    assert [path.name for path in found.wheelhouses] == ["given", "uv", "pip dir"]
    wheels = found.local_wheels()
    assert wheels["a-1-py3-none-any.whl"].read_text() == "given"
    assert wheels["b-1-py3-none-any.whl"].read_text() == "uv"


def test_the_real_environment_is_the_default() -> None:
    assert isinstance(host.read(), host.Host)


def test_proxies_with_a_login_are_named_and_not_shown(tmp_path: Path) -> None:
    env = {"HTTPS_PROXY": "http://u:secret@proxy:3128", "http_proxy": "u:secret@proxy", "HTTP_PROXY": "http://proxy:3128",
           "no_proxy": "localhost"}
    assert host.secret_proxies(env, tmp_path) == ("http_proxy", "HTTPS_PROXY")
    assert host.secret_proxies({}, tmp_path) == ()
    config = tmp_path / ".docker" / "config.json"
    config.parent.mkdir()
    config.write_text('{"proxies": {"default": {"httpsProxy": "http://u:secret@proxy", "noProxy": "localhost"}}}')
    assert host.secret_proxies({}, tmp_path) == ("proxies.default.httpsProxy in docker's config.json",)
    assert host.secret_proxies({"DOCKER_CONFIG": str(tmp_path)}, tmp_path) == ()
    for broken in ("no json", '["list"]', '{"proxies": {"default": "text"}}'):
        config.write_text(broken)
        assert host.secret_proxies({}, tmp_path) == ()
