"""The base by bootstrap: a minimal Debian made by mmdebstrap from the machine's own mirror.

Made once per machine and specification; builds take it as a plain tar, so it works on every builder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from buildctl.errors import BuildError, EngineError, Problem
from buildctl.lock import LockedBase, digest

_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}


def path_of(base: LockedBase, platform: str, cache: Path) -> Path:
    """Where the tar of a bootstrapped base lies once it is made."""
    key = digest([base.suite, list(base.include), platform])
    return cache / "base" / f"{base.suite}-{_ARCHITECTURES[platform]}-{key[:16]}.tar"


def ensure(base: LockedBase, platform: str, cache: Path, say: Callable[[str], None]) -> Path:
    """The tar of the base; makes it when it is not there.

    :raises EngineError: mmdebstrap cannot run here.
    :raises BuildError: it ran and failed.
    """
    path = path_of(base, platform, cache)
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
        command = [program, "--variant=minbase", f"--architectures={_ARCHITECTURES[platform]}", "--quiet",
                   *([f"--include={','.join(base.include)}"] if base.include else []), base.suite, str(tar),
                   *mirrors()]
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


def mirrors(sources: Path = Path("/etc/apt")) -> list[str]:
    """The machine's own Debian mirror, as mmdebstrap takes it; empty: mmdebstrap's default.

    mmdebstrap reads sources itself only for the machine's own suite; the mirror is right for every suite.
    """
    found: list[str] = []
    files = [*sorted((sources / "sources.list.d").glob("*.sources")), sources / "sources.list"]
    for path in files:
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            candidates = words[1:2] if words[:1] == ["URIs:"] else \
                [word for word in words if "://" in word][:1] if words[:1] == ["deb"] else []
            found += [url for url in candidates if url.rstrip("/").endswith("/debian")]
    return found[:1]
