"""Applies a patch series to the package that the server imports, and proves the result. Runs inside the image build.

    python apply_series.py --package sglang --series /series/sglang --expect-tree HEX [--from /] [--import]

Standard library and `udiff.py` beside it, nothing else. Everything is computed in memory first: when any hunk does
not fit exactly, a file would not compile or another tree than the lock's comes out, nothing has been written.
Exit status: 0 done, 5 the series does not fit or not this tree, 2 usage.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import cache_from_source
from pathlib import Path

import udiff

_WHERE = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print((list(spec.submodule_search_locations or [])[:1] or [spec.origin])[0] if spec else "")
"""
_MODES = {
    0: py_compile.PycInvalidationMode.TIMESTAMP,
    1: py_compile.PycInvalidationMode.UNCHECKED_HASH,
    3: py_compile.PycInvalidationMode.CHECKED_HASH,
}


def main(arguments: list[str]) -> int:
    """Exit status for the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True, help="import package, such as sglang")
    parser.add_argument("--series", required=True, type=Path, help="folder with `series` and the patches")
    parser.add_argument("--expect-tree", required=True, help="effective tree that must come out (the lock's)")
    parser.add_argument("--from", dest="folder", default="/", type=Path, help="the server's working folder")
    parser.add_argument("--import", dest="imports", action="store_true", help="import the touched modules afterwards")
    options = parser.parse_args(arguments)
    try:
        apply(options.package, options.series, options.expect_tree, options.folder, options.imports)
    except udiff.DiffError as error:
        print(f"patch series {options.series}: nothing was changed\n{error}", file=sys.stderr)
        return 5
    return 0


def apply(package: str, series: Path, expected: str, folder: Path, imports: bool) -> None:
    """Applies the series, or raises DiffError and leaves everything as it was."""
    site = site_of(package, folder)
    record = record_of(package, site)
    names = udiff.read_series_file(text_of(series / "series"), str(series / "series"))
    patches = [(name, udiff.parse(bytes_of(series / name), name)) for name in names]
    outside = [(name, file.path) for name, diff in patches for file in diff.files if file.path.split("/")[0] != package]
    if outside:
        raise udiff.DiffError(
            udiff.Fault(
                "the patch leaves the package", name, path, f"{package}/...", "move it to that package's series"
            )
            for name, path in outside
        )
    result = udiff.apply_patches(patches, reader(site))
    tree = udiff.effective_tree(result.files)
    if tree != expected:
        raise udiff.DiffError(
            [
                udiff.Fault(
                    "another tree comes out than the lock names",
                    str(series),
                    tree,
                    expected,
                    "run `buildctl lock`; if that changes nothing, the installed package is not the locked wheel",
                )
            ]
        )
    write(site, record, result.files, imports, folder)
    for name, diff in patches:
        offsets = [
            f"{place.path} hunk #{place.hunk} {place.offset:+d}" for place in result.offsets if place.patch == name
        ]
        print(f"{name}: {len(diff.files)} file(s)" + (f"; with offset: {', '.join(offsets)}" if offsets else ""))
    print(f"{package} at {site}: {len(patches)} patches, {len(result.files)} files, tree {tree}")


def site_of(package: str, folder: Path) -> Path:
    """The folder that holds the package which the server would import: asked of its interpreter, from its folder."""
    asked = subprocess.run(
        [sys.executable, "-c", _WHERE, package], cwd=folder, capture_output=True, text=True, check=False
    )
    where = asked.stdout.strip()
    if not where:
        found = asked.stderr.strip().splitlines()[-1:] or ["no such package"]
        raise stop(f"{package} cannot be found", sys.executable, found[0], "an installed package", "install it before")
    return Path(where).parent


def record_of(package: str, site: Path) -> Path:
    """The RECORD at `site` that lists the package: only an installed distribution is patched."""
    for record in sorted(site.glob("*.dist-info/RECORD")):
        if any(row and row[0] == f"{package}/__init__.py" for row in csv.reader(io.StringIO(text_of(record)))):
            return record
    raise stop(
        f"the server would import a copy of {package} that no installed distribution owns",
        str(site),
        "no RECORD that names it",
        "the package as installed from its wheel",
        "remove the stray copy, or the folder that shadows the package",
    )


def write(site: Path, record: Path, files: Mapping[str, bytes], imports: bool, folder: Path) -> None:
    """Puts the files, their bytecode and the RECORD in place; on any failure all of it is put back."""
    contents = {site / path: content for path, content in files.items()}
    contents[record] = new_record(text_of(record), files)
    before = {path: path.read_bytes() if path.exists() else None for path in contents}
    modes = {
        path: bytecode_mode(path, site, path.relative_to(site).parts[0]) for path in contents if path.suffix == ".py"
    }
    try:
        for path, content in contents.items():
            replace(path, content)
        compile_files(modes)
        if imports:
            import_all(files, folder)
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                replace(path, content)
        compile_files({path: mode if path.exists() else None for path, mode in modes.items()})
        raise


def replace(path: Path, content: bytes) -> None:
    """Writes by rename: a file shared by hard link with an installer's cache keeps its content there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.buildctl")
    new.write_bytes(content)
    new.chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o644)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdecimal():
        os.utime(new, (int(epoch), int(epoch)))
    new.replace(path)


def bytecode_mode(path: Path, site: Path, package: str) -> py_compile.PycInvalidationMode | None:
    """How the file's bytecode was compiled, a new file's like that of its package; None: there is none."""
    for source in (path, site / package / "__init__.py"):
        cached = Path(cache_from_source(str(source)))
        if cached.exists():
            return _MODES.get(int.from_bytes(cached.read_bytes()[4:8], "little"))
        if source.exists():
            return None
    return None


def compile_files(modes: dict[Path, py_compile.PycInvalidationMode | None]) -> None:
    """Bytecode for the files that had some; old bytecode of any level goes."""
    for path, mode in modes.items():
        for level in ("", 1, 2):
            Path(cache_from_source(str(path), optimization=level)).unlink(missing_ok=True)
        if mode is not None:
            py_compile.compile(str(path), doraise=True, quiet=2, invalidation_mode=mode)


def import_all(files: Iterable[str], folder: Path) -> None:
    """Imports the touched modules as the server would; raises DiffError when that fails.

    A build has no GPU driver: modules that need its libcuda.so.1 cannot be imported here, and that is said.
    """
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files if path.endswith(".py")
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *modules], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode and "libcuda.so.1" in done.stderr:
        print("imports not checked: they need libcuda.so.1 of the GPU driver, which a build does not have")
    elif done.returncode:
        raise stop(
            "a patched module cannot be imported", ", ".join(modules), done.stderr.strip().splitlines()[-1], "", ""
        )


def new_record(text: str, files: Mapping[str, bytes]) -> bytes:
    """The RECORD with hash and size of the touched files as they are now (packaging.python.org, recording projects)."""
    rows = list(csv.reader(io.StringIO(text)))
    fresh = {path: [path, f"sha256={urlsafe(content)}", str(len(content))] for path, content in files.items()}
    rows = [fresh.pop(row[0], row) for row in rows if row] + list(fresh.values())
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


def urlsafe(content: bytes) -> str:
    """The hash as RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def reader(site: Path) -> udiff.Reader:
    """Reads files below `site`; a link that leads out of it is refused."""

    def read(path: str) -> bytes | None:
        file = site / path
        if not file.is_file():
            return None
        if not file.resolve().is_relative_to(site.resolve()):
            raise stop("the file to patch lies elsewhere", path, str(file.resolve()), "a file of the package", "")
        return file.read_bytes()

    return read


def text_of(path: Path) -> str:
    """A file of the series as text."""
    return bytes_of(path).decode()


def bytes_of(path: Path) -> bytes:
    """A file's content, DiffError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise stop("the file cannot be read", str(path), str(error.strerror), "a file of the series", "") from None


def stop(what: str, where: str, found: str, expected: str, todo: str) -> udiff.DiffError:
    """The error for one fault."""
    return udiff.DiffError([udiff.Fault(what, where, found, expected, todo)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
