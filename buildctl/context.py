"""The build context: every file that a build reads, by its path, and how it gets onto the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildctl import debian, resolve
from buildctl.errors import ManifestError, Problem
from buildctl.host import Host
from buildctl.lock import PUBLIC, SERVER, Lock, Unlocked, Wheel, apt_of, counts
from buildctl.manifest import Problems
from buildctl.project import Project
from buildctl.stack import ARCH_VARIABLE, Stack


@dataclass(frozen=True, slots=True)
class File:
    """A file of the build context: its bytes, or a file on this host that is linked there. Modes are normalised."""

    data: bytes | None = None
    source: Path | None = None
    executable: bool = False
    #: sha256 that the file must have
    sha256: str = ""
    #: a big file of ours: linked, not read
    trusted: bool = False
    #: where a wheel or Debian package comes from, which decides nothing: what is installed is in the lists, by hash
    lent: bool = False

    def content(self) -> bytes:
        """The bytes."""
        return self.data if self.data is not None else self.source.read_bytes() if self.source else b""

    def digest(self) -> str:
        """sha256 of the content."""
        return self.sha256 or hashlib.sha256(self.content()).hexdigest()


def holds(files: Mapping[str, File], path: str) -> bool:
    """Whether the context has such a file or folder."""
    return any(name == path or name.startswith(f"{path}/") for name in files)


def digest_part(files: Mapping[str, File], path: str) -> list[tuple[str, str]]:
    """Names and digests of the files at or under a path. Where a wheel comes from does not count, what it is does."""
    return [(name, file.digest()) for name, file in sorted(files.items())
            if (name == path or name.startswith(f"{path}/")) and not file.lent]


def collect(project: Project, stack: Stack, lock: Lock, local: Mapping[str, Path]) -> dict[str, File]:
    """The files that do not depend on the image being built.

    :param local: wheels of this host's wheelhouses by file name; those that the lock names come along.
    """
    files: dict[str, File] = {}

    def text(path: str, content: str) -> None:
        files[path] = File(content.encode())

    def share(folder: str, share_wheels: tuple[Wheel, ...], expected: Iterable[str]) -> None:
        lists = _lists(stack, share_wheels)
        for index, lines in lists.items():
            text(f"{folder}/index/{index}.txt", lines)
            members = [wheel for wheel in share_wheels if wheel.index == index]
            here = [wheel for wheel in members if wheel.file in local]
            for wheel in here:
                files[f"{folder}/local/{wheel.file}"] = File(source=local[wheel.file], sha256=wheel.sha256, lent=True)
            if len(here) == len(members):
                files[f"{folder}/local/{index}.complete"] = File(b"", lent=True)
        if PUBLIC not in lists:
            text(f"{folder}/index/{PUBLIC}.txt", "")
        text(f"{folder}/local/README", "Wheels of this host's wheelhouse that the lock names.\n")
        text(f"{folder}/expect.txt", "".join(f"{line}\n" for line in sorted(expected)))

    def open_ends(folder: str, entries: Iterable[Unlocked], below: Iterable[Unlocked]) -> None:
        """What a build that allows it resolves by itself: packages without a hash, held to all that the lock has.

        :param below: such packages of the layers below, which must stay what they are.
        """
        if not tuple(entries):
            return
        request = resolve.environments(stack)[SERVER]
        wanted = tuple(entry.requirement for entry in (*below, *entries))
        text(f"{folder}/unlocked/pyproject.toml", resolve.project_file(request, wanted, request.indexes))
        for index, lines in _lists(stack, lock.wheels).items():
            text(f"{folder}/unlocked/locked/{index}.txt", lines)
        # an override says another version than whoever requires it, and is in the lock as such
        pins = [f"{wheel.name}=={wheel.version}" for wheel in lock.wheels]
        for name, lines_of in (("constraints", (*pins, *request.constraints)), ("overrides", request.overrides),
                               ("excludes", request.excludes)):
            text(f"{folder}/unlocked/{name}.txt", "".join(f"{line}\n" for line in lines_of))
        text(f"{folder}/unlocked/options.txt", "--prerelease allow\n" if request.prerelease else "")

    installed: list[str] = []
    open_below: list[Unlocked] = []
    apt = apt_of(stack)
    for layer in stack.layers:
        own_name = layer.version_of
        members = lock.share(layer.name)
        own = tuple(wheel for wheel in members if wheel.name == own_name)
        others = tuple(wheel for wheel in members if wheel.name != own_name)
        folder = f"layers/{layer.name}"
        if layer.name in apt:
            text(f"{folder}/system/apt.txt", "".join(f"{name}\n" for name in apt[layer.name]))
            text(f"{folder}/system/preferences", debian.preferences(lock.debian.get(layer.name, {})))
            text(f"{folder}/system/python.txt", f"{stack.python}\n")
        installed += [f"{wheel.name}=={wheel.version}" for wheel in others]
        # all of them in the layer's last step: torchvision, installed first, would bring a torch of its own choice
        unlocked = [entry for entry in lock.unlocked if entry.layer == layer.name]
        open_ends(f"{folder}/{'own' if own_name else 'wheels'}", unlocked, open_below)
        open_below += unlocked
        share(f"{folder}/wheels", others, installed)
        installed += [f"{wheel.name}=={wheel.version}" for wheel in own]
        for path in stack.local.get(layer.name, ()):
            package = project.images / path
            files.update(tree(package, f"{folder}/own/packages/{package.name}"))
            installed.append(local_version(package))
        share(f"{folder}/own", own, installed)
        text(f"{folder}/jit/modules.txt", "".join(f"{name}\n" for name in stack.jit.get(layer.name, ())))
        text(f"{folder}/jit/arch.txt", f"{stack.environment.get(ARCH_VARIABLE, '')}\n")
        files[f"{folder}/patches/README"] = File(b"Patch series that this layer applies, one folder per package.\n")
        applied = {name: lock.patches[name] for name in layer.patches if name in lock.patches}
        for package_name, locked in applied.items():
            files.update(series(project, package_name, locked.folder, f"{folder}/patches"))
            text(f"{folder}/patches/{package_name}/tree", f"{locked.tree}\n")
        if applied:
            text(f"{folder}/patches/environment",
                 "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(stack.profile.environment.items())))
            files.update(applier(stack, f"{folder}/applier"))
        elif layer.patches:  # then neither the applier nor the profile is a reason to build the layers above again
            text(f"{folder}/applier/apply", "#!/bin/sh\n# this stack patches nothing here\n")
    share("layers/entrypoint", lock.entrypoint, [f"{wheel.name}=={wheel.version}" for wheel in lock.entrypoint])
    share("layers/tools", lock.tools, ())
    text("layers/guard/optional.json", json.dumps({rule.text: rule.reason for rule in stack.optional}, indent=1,
                                                  sort_keys=True) + "\n")
    text("layers/tools/apt.txt", "".join(f"{name}\n" for name in stack.tools.apt))
    text("layers/tools/preferences", debian.preferences(lock.debian.get(stack.tools.name, {})))
    files.update(tree(stack.tools.folder / "bin", "bin"))
    files.update(applier(stack, "bin/patches"))
    files["bin/sbom/sbom.py"] = File(source=Path(__file__).with_name("sbom.py"))
    files.update(tree(project.entrypoints, "entrypoints"))
    return files


def _lists(stack: Stack, wheels: Iterable[Wheel]) -> dict[str, str]:
    """Wheels as pip and uv take them, by hash, one list per index."""
    urls = {index.name: index.url for index in stack.indexes}
    found: dict[str, str] = {}
    for wheel in sorted(wheels, key=lambda wheel: (wheel.index, wheel.name)):
        head = f"--index-url {urls[wheel.index]}\n" if wheel.index in urls else ""
        line = f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n"
        found[wheel.index] = found.get(wheel.index, head) + line
    return found


def debs(stack: Stack, host: Host) -> dict[str, File]:
    """The Debian packages that builds without network install, where the system's installer looks for them."""
    places = {**{layer.name: f"layers/{layer.name}/system/local" for layer in stack.layers},
              stack.tools.name: f"layers/{stack.tools.name}/local"}
    return {f"{place}/{name}": File(source=path, trusted=True, lent=True)
            for layer, place in places.items() for name, path in host.debs(layer).items()}


def applier(stack: Stack, prefix: str) -> dict[str, File]:
    """What applies patch series in a build."""
    return {**tree(stack.tools.folder / "bin" / "patches", prefix),
            f"{prefix}/udiff.py": File(source=Path(__file__).with_name("udiff.py"))}


def tree(folder: Path, prefix: str) -> dict[str, File]:
    """The source files of a folder."""
    return {f"{prefix}/{path.relative_to(folder)}": File(source=path,
                                                         executable=bool(path.stat().st_mode & stat.S_IXUSR))
            for path in sorted(folder.rglob("*")) if path.is_file() and counts(path.relative_to(folder))}


def series(project: Project, package: str, folder: str, prefix: str) -> dict[str, File]:
    """The files of a patch series."""
    return {f"{prefix}/{package}/{path.name}": File(source=path)
            for path in sorted((project.patches / folder).iterdir()) if path.is_file()}


def local_version(package: Path) -> str:
    """`name==version` of a package of ours, from its pyproject.toml.

    :raises ManifestError: it names neither.
    """
    try:
        data = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return f"{data['name']}=={data['version']}"
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ManifestError(Problem("a local package has no name and version", str(package / "pyproject.toml"),
                                    found=repr(error), expected="[project] with name and version")) from None


def write(wanted: Mapping[str, File], folder: Path) -> None:
    """Make a folder hold exactly these files: only what changed is touched, what no longer belongs is removed.

    :raises ManifestError: a wheel of the wheelhouse has another hash than the lock.
    """
    _check_linked(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    for stale in present - wanted.keys():
        (folder / stale).unlink()
    for path, file in wanted.items():
        _put(folder / path, file)
    for empty in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(empty.iterdir()):
            empty.rmdir()


def _check_linked(wanted: Mapping[str, File]) -> None:
    problems = Problems()
    for file in wanted.values():
        if file.source is None or not file.sha256:
            continue
        with file.source.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.sha256:
            problems.add("a wheel of the wheelhouse is not the one that the lock names", str(file.source), found=found,
                         expected=file.sha256, todo="remove the file from the wheelhouse, or lock again with it")
    problems.raise_any()


def _put(target: Path, file: File) -> None:
    mode = 0o755 if file.executable else 0o644
    if file.source is not None and (file.sha256 or file.trusted):  # a big file: a link costs nothing
        if target.is_file() and target.samefile(file.source):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        link(file.source, target)
        return
    data = file.content()
    if target.is_file() and target.read_bytes() == data and stat.S_IMODE(target.stat().st_mode) == mode:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.write_bytes(data)
    target.chmod(mode)


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system does not allow that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
