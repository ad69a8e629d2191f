"""What uv's own settings on this host mean for a lock: some are lent to builds, some do not matter, some are not used.

A lock has to come out of its stack alone, and a build has to find what the lock names. So uv gets neither the variables
nor the files that change what it chooses. What is set and not used is told by name, never by value.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

#: how uv works here: caches, patience, the interpreter that it runs on. None of them changes what is resolved
_HARMLESS = re.compile(r"UV_(?:CACHE_DIR|NO_CACHE|LOCK_TIMEOUT|REQUEST_TIMEOUT|HTTP_\w+|CONCURRENT_\w+|LINK_MODE"
                       r"|NO_PROGRESS|PYTHON\w*|(?:NO_)?MANAGED_PYTHON)")
#: what would change what is resolved, as `uv pip compile` 0.13 knows it: variables without UV_, keys of uv.toml
_DECISIVE = frozenset((
    "prerelease", "resolution", "fork-strategy", "index-strategy", "constraint", "constraint-dependencies", "override",
    "override-dependencies", "exclude", "exclude-dependencies", "exclude-newer", "exclude-newer-package", "no-sources",
    "torch-backend", "no-binary", "no-binary-package", "only-binary", "no-build", "no-build-package", "no-index",
    "offline", "dependency-metadata", "keyring-provider", "insecure-host", "allow-insecure-host"))
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)=(?P<url>[a-z+]+://.*|/.*)")


@dataclass(frozen=True, slots=True)
class Settings:
    """uv's settings on this host. `index` may hold credentials: never print it."""

    #: the default index of a file; that of a variable is `named`
    index: str | None
    links: tuple[str, ...]
    #: where indexes beside the default one are set: builds do not have them
    extra: tuple[str, ...]
    #: where something is set that would change what is resolved, and does not
    unused: tuple[str, ...]


def read(environ: Mapping[str, str], home: Path) -> Settings:
    """Read the variables and files that uv reads."""
    index: str | None = None
    links = environ.get("UV_FIND_LINKS", "").replace(",", " ").split()
    extra = [name for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL") if environ.get(name)]
    extra += ["UV_FIND_LINKS"] if any(map(_remote, links)) else []
    unused = [name for name, value in sorted(environ.items())
              if value and name.startswith("UV_") and name[3:].replace("_", "-").lower() in _DECISIVE]
    for path in _files(environ, home):
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            unused.append(f"{path} (not TOML)")
            continue
        for fields in (table, table.get("pip")):
            if not isinstance(fields, dict):
                continue
            index = index or _default(fields, environ)
            found = [link for link in _list(fields.get("find-links")) if isinstance(link, str)]
            links += found
            beside = [key for key, value in (("index", list(_beside(fields))), ("extra-index-url",
                      _list(fields.get("extra-index-url"))), ("find-links", list(filter(_remote, found)))) if value]
            extra += [f"'{key}' in {path}" for key in beside]
            unused += [f"'{key}' in {path}" for key in sorted(_DECISIVE & fields.keys())]
    return Settings(index, tuple(links), tuple(extra), tuple(unused))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that uv runs in when it makes a lock."""
    return {name: value for name, value in environ.items() if not name.startswith("UV_") or _HARMLESS.fullmatch(name)}


def named(text: str, environ: Mapping[str, str]) -> str:
    """The address of an index as uv takes it, `URL` or `NAME=URL`; a name's login from its variables goes into it."""
    match = _NAMED.fullmatch(text)
    return _with_login(match["url"], match["name"], environ) if match else text


def logins(names: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """The variables that are set with a login for indexes of these names."""
    return [variable for name in names for variable in _login_variables(name) if environ.get(variable)]


def _with_login(url: str, name: str, environ: Mapping[str, str]) -> str:
    user, password = (environ.get(variable, "") for variable in _login_variables(name))
    parts = urlsplit(url)
    if not (user or password) or "@" in parts.netloc:
        return url
    return parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc}").geturl()


def _login_variables(name: str) -> tuple[str, str]:
    stem = re.sub(r"[^A-Z0-9]", "_", name.upper())
    return f"UV_INDEX_{stem}_USERNAME", f"UV_INDEX_{stem}_PASSWORD"


def _files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """The configuration files that uv would read outside a project, the ones that win first."""
    if environ.get("UV_CONFIG_FILE"):
        return [Path(environ["UV_CONFIG_FILE"])]
    if environ.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        return []
    system = [Path(folder) for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep) if folder]
    folders = [Path(environ.get("XDG_CONFIG_HOME") or home / ".config"), *system, Path("/etc")]
    return [path for folder in folders if (path := folder / "uv" / "uv.toml").is_file()]


def _default(fields: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    for entry in _entries(fields):
        if entry.get("default") is True and isinstance(entry.get("url"), str):
            return _with_login(entry["url"], str(entry.get("name", "")), environ)
    url = fields.get("index-url")
    return url if isinstance(url, str) and url else None


def _beside(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Indexes that uv would ask for every package; one that is `explicit` is asked by projects that name it."""
    return (entry for entry in _entries(fields) if True not in (entry.get("default"), entry.get("explicit")))


def _entries(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in _list(fields.get("index")) if isinstance(entry, dict)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _remote(link: str) -> bool:
    return urlsplit(link).scheme in ("http", "https")
