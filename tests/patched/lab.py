"""Small wheels, series and diffs for tests of patches; and loading of patched real modules with stand-in imports."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

HEADER = """\
Description: a change for a test
 with its reason.
Origin: ours
Forwarded: no
Last-Update: 2026-12-01
Concern: {concern}
Targets: sm120
Files: {files}
Marker: {marker}
Tested: cpu
---
"""


def diff(path: str, old: str | bytes | None, new: str | bytes, *, context: int = 3) -> str:
    """A diff made by git, so that tests do not check our own writer against our own reader."""
    text = _git_diff(path, _bytes(old) if old is not None else None, _bytes(new), context)
    assert text, "nothing differs"
    return text


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _git_diff(path: str, old: bytes | None, new: bytes, context: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for side, content in (("a", old), ("b", new)):
            if content is not None:
                (root / side / path).parent.mkdir(parents=True, exist_ok=True)
                (root / side / path).write_bytes(content)
        words = ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-color", "--no-prefix", f"-U{context}"]
        first = f"a/{path}" if old is not None else "/dev/null"
        done = subprocess.run([*words, first, f"b/{path}"], cwd=root, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    # without a repository git writes `b/` twice for a new file
    return done.stdout.decode().replace(f"diff --git b/{path} b/{path}", f"diff --git a/{path} b/{path}")


def patch(*diffs: str, files: str, marker: str = "MARK", concern: str = "test", header: str = HEADER) -> str:
    """A whole patch file."""
    return header.format(concern=concern, files=files, marker=marker) + "".join(diffs)


def series(folder: Path, patches: Mapping[str, str | bytes], *, names: str | None = None) -> Path:
    """A series folder; `names` is the text of the `series` file when it is not simply the patches in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in patches.items():
        (folder / name).write_bytes(_bytes(text))
    (folder / "series").write_bytes(_bytes("".join(f"{name}\n" for name in patches) if names is None else names))
    return folder


def wheel(folder: Path, files: Mapping[str, str | bytes], *, name: str = "demo", version: str = "1.0") -> Path:
    """A wheel of about a kilobyte with a proper RECORD."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    contents = {
        **{member: _bytes(text) for member, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for member, data in contents.items()
    ]
    contents[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in contents.items():
            archive.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), data)
    return path


def git_apply(patch_bytes: bytes, files: Mapping[str, bytes], folder: Path) -> dict[str, bytes] | None:
    """What `git apply` makes of a patch, `None` when it refuses; an independent judge of our own application."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-p1", "-"],
        cwd=folder,
        input=patch_bytes,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )
    if done.returncode:
        return None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
