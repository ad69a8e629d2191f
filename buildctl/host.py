"""What this host lends to a build: CA bundle, package index, netrc, local wheels. Secrets stay in memory or files of
the user; they reach RUN steps as BuildKit secrets only."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from buildctl import uv_settings

#: where distributions keep the bundle of trusted certificates
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
            "/etc/ssl/cert.pem")
_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
#: proxy settings that steps of a build get, as predefined build arguments
PROXIES = tuple(name for word in ("http_proxy", "https_proxy", "no_proxy") for name in (word, word.upper()))


@dataclass(frozen=True, slots=True)
class Host:
    """Settings of this host. `index` may hold credentials: never print it."""

    ca: Path | None
    index: str | None
    netrc: Path | None
    wheelhouses: tuple[Path, ...]
    #: whether builds get no network; what they need is then in the wheelhouses, as `buildctl fetch` puts it there
    offline: bool = False
    #: where indexes beside the default one are set for uv: builds do not have them
    extra_indexes: tuple[str, ...] = ()
    #: settings of uv that would change what is resolved, and do not
    unused: tuple[str, ...] = ()

    def uv_config(self) -> str | None:
        """A uv.toml that names the host's index, or None when it uses the public one."""
        if self.index is None:
            return None
        return f"[[index]]\nurl = {json.dumps(self.index)}\ndefault = true\n"

    def local_wheels(self) -> dict[str, Path]:
        """Every wheel in the wheelhouses by file name; an earlier wheelhouse wins."""
        found: dict[str, Path] = {}
        for folder in self.wheelhouses:
            for path in sorted(folder.glob("*.whl")):
                found.setdefault(path.name, path)
        return found

    def debs(self, layer: str) -> dict[str, Path]:
        """The Debian packages of a layer that builds without network install, from the first wheelhouse with any."""
        for folder in self.wheelhouses if self.offline else ():
            found = {path.name: path for path in sorted((folder / "apt" / layer).glob("*.deb"))}
            if found:
                return found
        return {}


    def layout(self, digest: str) -> Path | None:
        """The base image that `buildctl fetch` saved, for builds without network."""
        places = (folder / "base" / f"oci-{digest.removeprefix('sha256:')[:16]}" for folder in self.wheelhouses)
        return next((place for place in places if (place / "index.json").is_file()), None) if self.offline else None


def read(wheelhouses: Iterable[Path] = (), environ: Mapping[str, str] | None = None, home: Path | None = None, *,
         offline: bool = False) -> Host:
    """Read this host's settings: the given wheelhouses, the environment, uv's and pip's configuration, netrc."""
    env = os.environ if environ is None else environ
    folder = Path(env["HOME"]) if home is None and "HOME" in env else home or Path.home()
    config, uv = _pip_config(env, folder), uv_settings.read(env, folder)
    netrc = Path(env["NETRC"]) if env.get("NETRC") else folder / ".netrc"
    links = [*uv.links, *env.get("PIP_FIND_LINKS", "").replace(",", " ").split(), *config.get("find-links", "").split()]
    local = [path for link in links if (path := _local_path(link)) is not None]
    return Host(
        ca=_ca(env),
        index=next((uv_settings.named(env[name], env) for name in _INDEX_VARIABLES if env.get(name)),
                   uv.index or config.get("index-url") or None),
        netrc=netrc if netrc.is_file() else None,
        wheelhouses=tuple(dict.fromkeys([*(path.resolve() for path in wheelhouses), *local])),
        offline=offline,
        extra_indexes=uv.extra,
        unused=uv.unused,
    )


def secret_proxies(environ: Mapping[str, str], home: Path) -> tuple[str, ...]:
    """Where a proxy with a login is set that builds get as an argument, by name and never by value: in the environment,
    or in the docker client's own configuration, which buildx adds to every build."""
    named = {name: environ.get(name, "") for name in PROXIES}
    config = Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    try:
        per_engine = json.loads(config.read_text(encoding="utf-8")).get("proxies", {})
        named |= {f"proxies.{engine}.{name} in docker's config.json": str(value)
                  for engine, settings in per_engine.items() for name, value in settings.items()}
    except (OSError, ValueError, AttributeError):
        pass  # none, or none that docker could read
    return tuple(name for name, value in named.items() if "@" in value)


def _ca(env: Mapping[str, str]) -> Path | None:
    named = [env[name] for name in _BUNDLE_VARIABLES if env.get(name)]
    return next((Path(text) for text in (*named, *_BUNDLES) if Path(text).is_file()), None)


def _local_path(link: str) -> Path | None:
    parts = urlsplit(link)
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(link)
    return path.resolve() if path.is_dir() else None


def _pip_config(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """The `[global]` and `[install]` sections of pip's configuration files, later ones winning, as pip reads them."""
    if env.get("PIP_CONFIG_FILE") == os.devnull:
        return {}
    xdg = env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)
    files = [*(Path(folder) / "pip" / "pip.conf" for folder in reversed(xdg) if folder), Path("/etc/pip.conf"),
             home / ".pip" / "pip.conf", Path(env.get("XDG_CONFIG_HOME", home / ".config")) / "pip" / "pip.conf"]
    if env.get("VIRTUAL_ENV"):
        files.append(Path(env["VIRTUAL_ENV"]) / "pip.conf")
    if env.get("PIP_CONFIG_FILE"):
        files.append(Path(env["PIP_CONFIG_FILE"]))
    found: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # pip itself will complain about its own file
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update(parser.items(section))
    return found
