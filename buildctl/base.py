"""The base by bootstrap: a minimal Debian made by mmdebstrap, from a snapshot or from the machine's own mirror.

Made once per machine and specification; builds take it as a plain tar, so it works on every builder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from buildctl import debian
from buildctl.errors import BuildError, EngineError, ManifestError, Problem
from buildctl.lock import Lock, LockedBase, digest

_KEYS = debian.KEYRING
_ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
_PINS = "/etc/apt/preferences.d/buildctl"


#: where mirrors of snapshot.debian.org are when nothing else is said, and the variable that says it
SNAPSHOTS = "https://snapshot.debian.org/archive"
SNAPSHOT_VARIABLE = "BUILDCTL_SNAPSHOT_MIRROR"
#: suites that get their security updates by themselves
_ROLLING = ("sid", "unstable", "experimental")


def architecture(platform: str) -> str:
    """Debian's name of a platform."""
    return _ARCHITECTURES[platform]


def path_of(lock: Lock, cache: Path) -> Path:
    """Where the tar of a bootstrapped base lies once it is made."""
    base = lock.base
    key = digest([base.suite, list(base.include), base.snapshot, lock.platform, lock.debian.get("base", {})])
    return cache / "base" / f"{base.suite}-{_ARCHITECTURES[lock.platform]}-{key[:16]}.tar"


def ensure(lock: Lock, cache: Path, say: Callable[[str], None]) -> Path:
    """The tar of the base; makes it when it is not there.

    Locked versions are taken where the mirror has them; what came instead, the guard of the built layer says.

    :raises EngineError: mmdebstrap cannot run here.
    :raises BuildError: it ran and failed.
    """
    base = lock.base
    path = path_of(lock, cache)
    if path.is_file():
        return path
    program = shutil.which("mmdebstrap")
    if program is None:
        raise EngineError(Problem(
            "this machine cannot make the base", "base", found="no mmdebstrap on PATH",
            expected="mmdebstrap (package mmdebstrap on Debian and Ubuntu)",
            todo="install it (`make engine` does), or take the base from a registry: `buildctl lock --base registry`"))
    say(f"base: making {base.suite} with mmdebstrap")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        tar = Path(folder) / "base.tar"
        pins = Path(folder) / "preferences"
        pins.write_text(debian.preferences(lock.debian.get("base", {})))
        command = [program, "--variant=minbase", f"--architectures={_ARCHITECTURES[lock.platform]}", "--quiet",
                   f"--setup-hook=upload {shlex.quote(str(pins))} {_PINS}", f'--customize-hook=rm "$1{_PINS}"',
                   *([f"--include={','.join(base.include)}"] if base.include else []), base.suite, str(tar),
                   *sources(base)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
                              env={**os.environ, "LC_ALL": "C.UTF-8"})
        if done.returncode != 0 or not tar.is_file():
            tail = "\n            ".join(done.stderr.strip().splitlines()[-8:])
            keys = "" if _KEYS.is_file() else f"install debian-archive-keyring ({_KEYS} is missing); "
            raise BuildError(Problem("mmdebstrap failed", "base", found=tail or f"exit {done.returncode}",
                                     todo=f"{keys}check the machine's apt sources and network; `mmdebstrap` needs root "
                                          "or unprivileged user namespaces"))
        tar.replace(path)
    return path


def sources(base: LockedBase, environ: Mapping[str, str] | None = None, apt: Path = Path("/etc/apt")) -> list[str]:
    """The lines of the base's sources.list: a snapshot, else the machine's own Debian mirror.

    mmdebstrap reads sources itself only for the machine's own suite; the mirror is right for every suite. Empty when
    the machine knows none: mmdebstrap then has its own default.

    :raises ManifestError: the host names a mirror of snapshots that no sources.list can hold.
    """
    if base.snapshot:
        mirror = (os.environ if environ is None else environ).get(SNAPSHOT_VARIABLE, "") or SNAPSHOTS
        if not re.fullmatch(r"https?://[^\s@\[\]]+", mirror):
            raise ManifestError(Problem("the mirror of Debian's snapshots cannot be used", SNAPSHOT_VARIABLE,
                                        found=re.sub(r"//[^/@]*@", "//***@", mirror), expected="an http(s) URL without "
                                        "credentials, as " + SNAPSHOTS))
        # a snapshot is older than its lists say they are good for
        main, security = (f"[check-valid-until=no] {mirror.rstrip('/')}/{name}/{base.snapshot}"
                          for name in ("debian", "debian-security"))
    else:
        known = list(_mirrors(apt))
        main, security = (next((url for url in known if url.rstrip("/").endswith(f"/{name}")), "")
                          for name in ("debian", "debian-security"))
        if not main:
            return []
    lines = [f"deb {main} {base.suite} main"]
    if security and base.suite not in _ROLLING:
        lines.append(f"deb {security} {base.suite}-security main")
    return lines


def _mirrors(apt: Path) -> Iterator[str]:
    """The mirrors of this machine's apt; not those with a password in their address, which the image would keep."""
    for path in [*sorted((apt / "sources.list.d").glob("*.sources")), apt / "sources.list"]:
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            candidates = words[1:2] if words[:1] == ["URIs:"] else \
                [word for word in words if "://" in word][:1] if words[:1] == ["deb"] else []
            yield from (url for url in candidates if "@" not in url)
