"""An image against a lock: package by package, file by file, patch by patch. Pure; everything that differs at once.

What is believed: the lock, the checkout's fragments and patches, and the digests of the layers' bytes. What is not:
labels, and anything that the image would say when it runs. RECORD files are the image's own; where a locked wheel is at
hand, its RECORD is the one that counts (`wheels`).
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from buildctl import installed, provenance, sbom, udiff
from buildctl import lock as locks
from buildctl.contents import Image
from buildctl.errors import Problem
from buildctl.expectation import Expectation
from buildctl.filesystem import Found
from buildctl.image_config import KEY_LABEL
from buildctl.installed import ENTRYPOINT, ETC, SERVER, Distribution

Subject = Literal["lock", "label", "annotation", "setting", "package", "file", "patch", "base", "debian", "sbom",
                  "provenance"]

#: variables that change what the loader or an interpreter runs, or that switch checks off: no base image is trusted
#: with them. LD_LIBRARY_PATH is not among them: NVIDIA's base images set it
_BYPASS = re.compile(r"LD_PRELOAD|LD_AUDIT|PYTHON(?!UNBUFFERED$)\w+|BASH_ENV|ENV|\w*(?:SKIP|DISABLE|IGNORE)\w*CHECK\w*|"
                     r"\w+_(?:PROXY|TOKEN|PASSWORD|SECRET)|\w+_proxy")
#: the loader runs what this file names in every program
_PRELOAD = "etc/ld.so.preload"
#: written by installers beside what a RECORD's wheel had, without meaning for what runs
_INSTALLER = frozenset({"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json"})
#: code that the build itself makes in an environment: the toolkit's stub and links, kernels compiled ahead
_MADE = re.compile(r".*/site-packages/(?:nvidia/[^/]+/lib64/|flashinfer/data/aot/)")
#: where the entrypoint's package lies, without the name that the checkout gives it
_ENTRYPOINT_LIB = "opt/entrypoint/lib/"
#: what steps above Debian's write outside packages: the loader's settings for NVIDIA's wheels, the toolkit's name, uv's
#: lock file, volumes, what is about the image
_WRITTEN = re.compile(rf"etc/ld\.so\.(?:cache|conf\.d/nvidia-wheels\.conf)|usr/local/cuda|{SERVER}/\.lock|{ETC}/.*")
#: nobody reads these in a container of ours, which does not run as root
_IDLE = re.compile(r"(?:root|tmp|var/tmp|var/cache|var/log)/.*")
#: the entrypoint's package is found by this file and not by a variable
_PTH = ("entrypoints.pth", b"/opt/entrypoint/lib\n")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as the lock says. `layer` counts from 1, the lowest first; 0: no layer did it."""

    subject: Subject
    name: str
    what: str
    found: str
    expected: str
    layer: int = 0
    step: str = ""

    @property
    def where(self) -> str:
        """As messages show it."""
        return f"{self.subject} {self.name}".rstrip()

    def as_problem(self) -> Problem:
        """As an error shows it."""
        came = f"layer {self.layer}: {self.step}" if self.layer else ""
        return Problem(self.what, self.where, self.found, self.expected, came and f"look at {came}")

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"subject": self.subject, "name": self.name, "what": self.what, "found": self.found,
                "expected": self.expected, "layer": self.layer, "step": self.step}


@dataclass(slots=True)
class Report:
    """Everything that differs, how much was compared, and what was not."""

    differences: list[Difference] = field(default_factory=list)
    #: what was counted -> how many
    compared: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"equal": not self.differences, "compared": dict(self.compared), "notes": list(self.notes),
                "differences": [one.as_dict() for one in self.differences]}


def compare(image: Image, wanted: Expectation, wheels: Mapping[str, Mapping[str, str]] | None = None) -> Report:
    """Compare an image with what stack and lock want.

    :param wheels: wheel file -> RECORD of the locked wheel itself, path -> SHA-256 in hex; those that are at hand.
    """
    report = Report()
    run = _Comparison(image, wanted, dict(wheels or {}), report)
    for check in (run.lock, run.words, run.settings, run.packages, run.patches, run.debian,
                  run.additions, run.entrypoint, run.materials):
        report.differences += check()
    return report


def attested(image: Image, wanted: Expectation, digests: Iterable[str],
             documents: Iterable[tuple[str, bytes]]) -> list[Difference]:
    """What documents attached to an image say otherwise than image and lock.

    :param digests: by which the image is known: of its manifest, of the index that names it.
    :param documents: kind (`provenance` or `sbom`) and bytes of each.
    """
    own = image.files.content(sbom.PATH)
    known = tuple(digests)
    found = []
    for kind, data in documents:
        if kind == "sbom" and data != own:
            found.append(Difference("sbom", "attached", "the attached bill of materials is not the one in the image",
                                    _sum(hashlib.sha256(data).hexdigest()),
                                    _sum(hashlib.sha256(own).hexdigest()) if own else "none"))
        elif kind == "provenance":
            # of several names the one with the fewest faults is the one that is meant
            faults = min((provenance.differences(data, digest, wanted.part) for digest in known), key=len)
            found += [Difference("provenance", "", *fault) for fault in faults]
    return found


class _Comparison:
    """One image, one expectation; each method is one kind of difference."""

    def __init__(self, image: Image, wanted: Expectation, wheels: dict[str, Mapping[str, str]],
                 report: Report) -> None:
        self.image, self.wanted, self.wheels, self.report = image, wanted, wheels, report
        self.files = image.files
        self.facts = self._json(f"{ETC}/image.json")
        #: files of packages, Python's and Debian's, by real path
        self.owned: set[str] = set()

    # ------------------------------------------------------------------ what the image says of itself

    def lock(self) -> Iterator[Difference]:
        """The lock in the image is byte for byte the one that stack and lock give; image.json says the same."""
        text = locks.dump(self.wanted.part).encode()
        there = self.files.find(f"{ETC}/lock.json")
        content = there.entry.content if there else None
        if content != text:
            yield self._at("lock", "", "the lock in the image is another one", there,
                           _sum(there.entry.sha256) if there else "none", _sum(hashlib.sha256(text).hexdigest()))
        want: dict[str, object] = {
            "image": self.wanted.image, "stack": self.wanted.stack, "lock_sha256": locks.text_digest(self.wanted.part),
            "packages": {wheel.name: wheel.version for wheel in self.wanted.part.wheels},
            "trees": {name: series.tree for name, series in self.wanted.part.patches.items()},
            "unlocked": list(self.wanted.part.open_ends),
            "patches": [[package, *patch] for package, series in sorted(self.wanted.part.patches.items())
                        for patch in series.patches]}
        have = dict(self.facts)
        have["patches"] = [[one.get("package"), one.get("name"), one.get("sha256")] for one in have.get("patches") or ()
                           if isinstance(one, dict)]
        for name, value in want.items():
            if have.get(name) != value:
                yield self._at("lock", f"image.json '{name}'", "image.json says something else than the lock",
                               self.files.find(f"{ETC}/image.json"), _short(have.get(name)), _short(value))

    def words(self) -> Iterator[Difference]:
        """Labels and annotations."""
        labels, annotations = self.image.labels, self.image.annotations
        want = {**self.wanted.labels, KEY_LABEL: str(self.facts.get("key", ""))}
        for name, value in want.items():
            if labels.get(name) != value:
                yield Difference("label", name, "the label says something else", labels.get(name, "none"), value)
            if annotations and annotations.get(name) != value:
                yield Difference("annotation", name, "the annotation says something else",
                                 annotations.get(name, "none"), value)
        if not annotations:
            self.report.notes.append("the manifest has no annotations: it comes from an engine without the containerd "
                                     "image store, or was not made by buildctl")
        self.report.compared["labels"] = len(want)

    def settings(self) -> Iterator[Difference]:
        """User, entrypoint, health check, environment: what a container starts with."""
        have, want = self.image.settings, self.wanted.settings
        health = have.get("Healthcheck") or {}
        pairs = [("user", have.get("User") or "", want.user), ("folder", have.get("WorkingDir") or "", want.folder),
                 ("entrypoint", tuple(have.get("Entrypoint") or ()), want.entrypoint),
                 ("cmd", tuple(have.get("Cmd") or ()), want.cmd),
                 ("volumes", frozenset(have.get("Volumes") or ()), want.volumes),
                 ("ports", frozenset(have.get("ExposedPorts") or ()), want.ports),
                 ("healthcheck", tuple(health.get("Test") or ()), want.healthcheck),
                 ("onbuild", tuple(have.get("OnBuild") or ()), ()), ("shell", tuple(have.get("Shell") or ()), ())]
        names = {"interval": "Interval", "timeout": "Timeout", "start-period": "StartPeriod"}
        pairs += [(f"healthcheck {name}", f"{int(health.get(names.get(name, ''), 0)) / 1e9:g} s", f"{value:g} s")
                  for name, value in want.times.items()]
        own_base = self.wanted.part.base.source == "registry"
        for name, found, expected in pairs:
            if found != expected and not (own_base and not expected and name in ("volumes", "ports", "shell")):
                yield Difference("setting", name, "a container starts otherwise than it should", _short(found),
                                 _short(expected))
        environment = dict(str(pair).partition("=")[::2] for pair in have.get("Env") or ())
        for name, value in want.environment.items():
            if "$" not in value and environment.get(name) != value:
                yield Difference("setting", name, "a variable has another value", environment.get(name, "none"), value)
        for name in sorted(environment.keys() - want.environment.keys()):
            if not own_base or _BYPASS.fullmatch(name):
                yield Difference("setting", name, "a variable that no fragment sets", _hidden(name, environment[name]),
                                 "none")
        count, base = len(self.image.layers), "" if not own_base else " and those of the base"
        if count < want.layers or (count > want.layers and not own_base):
            yield Difference("setting", "layers", "the image has other layers than its steps make", str(count),
                             f"{want.layers}{base}")
        self.report.compared["settings"] = len(pairs) + len(want.environment)

    # ------------------------------------------------------------------ packages and their files

    def packages(self) -> Iterator[Difference]:
        """Both environments: what is installed, every file of it, and that nothing else is."""
        count = 0
        for environment, wanted in ((SERVER, self.wanted.packages), (ENTRYPOINT, self.wanted.helpers)):
            if not wanted and self.files.find(environment) is None:
                continue
            site = installed.site_of(self.files, environment)
            if site is None:
                yield Difference("package", environment, "the environment is not there", "nothing", environment)
                continue
            found = installed.distributions(self.files, site)
            count += len(found)
            yield from self._versions(found, wanted, environment)
            yield from self._owned(found, site)
        preload = self.files.find(_PRELOAD)
        if preload is not None:
            yield self._at("file", f"/{_PRELOAD}", "every program would load what this file names", preload, "a file",
                           "none")
        self.report.compared["packages"] = count

    def _versions(self, found: Iterable[Distribution], wanted: Mapping[str, str | None],
                  environment: str) -> Iterator[Difference]:
        known: dict[str, Distribution] = {}
        for one in found:
            for fault in one.faults:
                yield self._at("package", one.name, "the package cannot be read", self.files.find(one.info), fault,
                               "as pip and uv install it")
            if one.name in known:
                yield self._at("package", one.name, "the package is installed twice", self.files.find(one.info),
                               f"{known[one.name].version} and {one.version}", wanted.get(one.name) or "once")
            known.setdefault(one.name, one)
            if one.name not in wanted:
                yield self._at("package", one.name, f"a package that the lock does not have, in /{environment}",
                               self.files.find(one.info), one.version, "none")
            elif wanted[one.name] is not None and one.version != wanted[one.name]:
                yield self._at("package", one.name, f"another version, in /{environment}", self.files.find(one.info),
                               one.version, str(wanted[one.name]))
        for name in sorted(wanted.keys() - known.keys()):
            yield Difference("package", name, f"a package of the lock is missing in /{environment}", "none",
                             wanted[name] or "some version")

    def _owned(self, found: tuple[Distribution, ...], site: str) -> Iterator[Difference]:
        """Every file as its RECORD states, every RECORD as its wheel has it where that is at hand, nothing unowned."""
        shared = {frozenset((pair.first, pair.second)) for pair in self.wanted.part.overlaps}
        owners: dict[str, Distribution] = {}
        compared = held = 0
        for one in found:
            yield from self._record(one, site)
            held += one.name in self._by_name and self._by_name[one.name] in self.wheels
            for path, digest in one.files.items():
                other = owners.setdefault(path, one)
                there = self.files.own(path)
                if there is None:
                    if not path.endswith(".pyc"):
                        yield Difference("file", f"/{path}", f"a file of {one.name} {one.version} is gone", "nothing",
                                         _sum(digest))
                elif digest and not path.endswith(".pyc") and there.entry.sha256 != digest:
                    if frozenset((other.name, one.name)) in shared or self._explained(path, one, found, shared):
                        continue
                    yield self._at("file", f"/{path}", f"a file of {one.name} {one.version} was changed", there,
                                   _sum(there.entry.sha256) if there.entry.kind == "file" else there.entry.kind,
                                   _sum(digest))
                compared += bool(digest)
        self.report.compared["files"] = self.report.compared.get("files", 0) + compared
        self.report.compared["wheels"] = self.report.compared.get("wheels", 0) + held
        yield from self._unowned(owners.keys(), site)

    def _explained(self, path: str, one: Distribution, found: Iterable[Distribution],
                   shared: Iterable[frozenset[str]]) -> bool:
        """Whether a later package of a pair that the lock knows has put its own file there."""
        there = self.files.own(path)
        return any(other.files.get(path) == (there.entry.sha256 if there else None) for other in found
                   if frozenset((one.name, other.name)) in shared)

    def _unowned(self, owned: Iterable[str], site: str) -> Iterator[Difference]:
        known = set(owned)
        self.owned |= known
        bytecode = 0
        for there in self.files.under(site):
            path, entry = there.path, there.entry
            if path in known or entry.kind == "folder":
                continue
            if "/__pycache__/" in path and path.endswith(".pyc"):
                bytecode += 1
                yield from self._bytecode(there)
            elif posixpath.basename(path) == _PTH[0] and entry.content == _PTH[1]:
                continue
            elif _MADE.match(path):
                self.report.compared["made"] = self.report.compared.get("made", 0) + 1
            elif not (posixpath.basename(path) in _INSTALLER and ".dist-info/" in path):
                yield self._at("file", f"/{path}", "a file that no package owns", there,
                               f"{entry.kind}, {entry.size} bytes", "none")
        self.report.compared["bytecode"] = self.report.compared.get("bytecode", 0) + bytecode

    def _bytecode(self, there: Found) -> Iterator[Difference]:
        """Bytecode cannot be compared by content; it comes with its source, and not in a later layer."""
        folder, _, name = there.path.rpartition("/__pycache__/")
        source = self.files.find(f"{folder}/{name.partition('.')[0]}.py")
        if source is not None and source.layer < there.layer:
            yield self._at("file", f"/{there.path}", "bytecode that was not made with its source", there,
                           f"in layer {there.layer + 1}", f"in layer {source.layer + 1}, as its source")

    @property
    def _by_name(self) -> dict[str, str]:
        return {wheel.name: wheel.file for wheel in (*self.wanted.part.entrypoint, *self.wanted.part.wheels)}

    def _record(self, one: Distribution, site: str) -> Iterator[Difference]:
        """The RECORD in the image against the one in the locked wheel; patched files apart."""
        rows = self.wheels.get(self._by_name.get(one.name, ""))
        if rows is None:
            return
        patched = {f"{site}/{path}" for series in self.wanted.part.patches.values() for path in self._touched(series)}
        own = {f"{site}/{path}": digest for path, digest in rows.items() if not re.match(r"[^/]+\.data/", path)}
        there = self.files.find(f"{one.info}/RECORD")
        for path, digest in own.items():
            if digest and path not in patched and one.files.get(path) != digest:
                yield self._at("file", f"/{path}", f"RECORD of {one.name} states another hash than the locked wheel",
                               there, _sum(one.files.get(path, "")), _sum(digest))
        placed = any(re.match(r"[^/]+\.data/", path) for path in rows)
        for path in sorted(one.files.keys() - own.keys() - patched):
            if path.startswith(f"{site}/") and not placed and not path.endswith(".pyc") \
                    and posixpath.basename(path) not in _INSTALLER:
                yield self._at("file", f"/{path}", f"RECORD of {one.name} has a file that the locked wheel has not",
                               there, _sum(one.files[path]), "none")

    # ------------------------------------------------------------------ patches

    def patches(self) -> Iterator[Difference]:
        """The series in the image, patch by patch, and the tree that its files make."""
        series = self.wanted.part.patches
        present = {there.path.removeprefix(f"{ETC}/patches/").partition("/")[0]
                   for there in self.files.under(f"{ETC}/patches")}
        for package in sorted(present - series.keys()):
            yield Difference("patch", package, "a series that the lock does not have", package, "none")
        for package, locked in sorted(series.items()):
            folder = f"{ETC}/patches/{package}"
            names = {posixpath.basename(there.path): there for there in self.files.under(folder)
                     if there.path.endswith(".patch")}
            for name, digest in locked.patches:
                there = names.pop(name, None)
                if there is None:
                    yield Difference("patch", f"{package} {name}", "a patch is missing", "none", _sum(digest))
                elif there.entry.sha256 != digest:
                    yield self._at("patch", f"{package} {name}", "the patch is another one", there,
                                   _sum(there.entry.sha256), _sum(digest))
            for name, there in sorted(names.items()):
                yield self._at("patch", f"{package} {name}", "a patch that the lock does not have", there,
                               _sum(there.entry.sha256), "none")
            yield from self._tree(package, locked)
        self.report.compared["patches"] = sum(len(one.patches) for one in series.values())

    def _tree(self, package: str, locked: locks.LockedSeries) -> Iterator[Difference]:
        touched = self._touched(locked)
        site = installed.site_of(self.files, SERVER)
        if not touched or site is None:
            self.report.notes.append(f"the effective tree of {package} was not computed: its patches are not here")
            return
        lines, gone, newest = [], [], None
        for path in touched:
            there = self.files.find(f"{site}/{path}")
            if there is None:
                gone.append(path)
                continue
            lines.append(f"{there.entry.sha256}  {path}\n")
            newest = there if newest is None or there.layer > newest.layer else newest
        tree = hashlib.sha256("".join(lines).encode()).hexdigest()
        if tree != locked.tree:
            found = tree + (f"; gone: {', '.join(gone)}" if gone else "")
            yield self._at("patch", package, "the patched files make another effective tree", newest, found,
                           locked.tree)

    def _touched(self, locked: locks.LockedSeries) -> list[str]:
        """The files that a series changes, by patches of the locked hash: from the checkout, else from the image."""
        found: set[str] = set()
        for name, digest in locked.patches:
            candidates = [content for path, content in self.wanted.patches.items() if path.endswith(f"/{name}")]
            candidates += [there.entry.content for there in self.files.under(f"{ETC}/patches")
                           if there.path.endswith(f"/{name}") and there.entry.content]
            text = next((one for one in candidates if hashlib.sha256(one).hexdigest() == digest), None)
            if text is None:
                return []
            found |= {file.path for file in udiff.parse(text, name).files}
        return sorted(found)

    # ------------------------------------------------------------------ what lies below

    def debian(self) -> Iterator[Difference]:
        """The base's suite, the packages that were asked for, and their files by Debian's own sums."""
        base = self.wanted.part.base
        release = next((text for path in sbom.OS_RELEASE if (text := self.files.content(path))), b"").decode()
        suite = dict(line.partition("=")[::2] for line in release.splitlines()).get("VERSION_CODENAME", "")
        if base.source == "bootstrap" and suite != base.suite:
            yield Difference("base", "suite", "the base is another Debian", suite or "none", base.suite)
        packages = installed.debian_packages(self.files)
        names = {one.name for one in packages}
        for name in sorted((self.wanted.apt | set(base.include)) - names):
            yield Difference("debian", name, "a Debian package of the stack is missing", "none", "some version")
        count = 0
        for one in packages:
            self.owned |= one.files.keys()
            for path, digest in one.files.items():
                there = self.files.find(path)
                if there is None or not there.entry.md5:
                    continue  # documentation that minimal images leave out; diversions
                count += 1
                if there.entry.md5 != digest:
                    yield self._at("debian", f"/{path}", f"a file of {one.name} {one.version} was changed", there,
                                   f"md5 {there.entry.md5}", f"md5 {digest}")
        self.report.compared["debian packages"], self.report.compared["debian files"] = len(packages), count

    def additions(self) -> Iterator[Difference]:
        """Above the layers of Debian's packages everything belongs to a package or is written by a known step.

        In and below those layers Debian's own scripts write what nobody lists.
        """
        status = self.files.find(sbom.DPKG_STATUS)
        if status is None:
            self.report.notes.append("files outside Python's packages were not looked at: this is no Debian")
            return
        site = installed.site_of(self.files, SERVER)
        for one in installed.distributions(self.files, site) if site else ():
            there = self.files.find(one.info)
            if one.name in self.wanted.above and there is not None and there.layer < status.layer:
                yield self._at("debian", "packages", f"Debian's packages were changed after {one.name} was installed",
                               status, f"layer {status.layer + 1}", f"below layer {there.layer + 1}")
                break
        idle = 0
        for there in self.files.under():
            path = there.path
            if there.layer <= status.layer or there.entry.kind == "folder" or path in self.owned \
                    or "/site-packages/" in path or _WRITTEN.fullmatch(path):
                continue
            if path.startswith("opt/entrypoint/"):
                continue  # below
            if _IDLE.fullmatch(path):
                idle += 1
            else:
                yield self._at("file", f"/{path}", "a file that no package owns and no step of ours writes", there,
                               f"{there.entry.kind}, {there.entry.size} bytes", "none")
        self.report.compared["idle files"] = idle

    def entrypoint(self) -> Iterator[Difference]:
        """What the container starts: our package, the launcher and tini."""
        cfg = self.files.find(f"{ENTRYPOINT}/pyvenv.cfg")
        for there in self.files.under("opt/entrypoint"):
            if there.entry.kind == "folder" or there.path in self.owned or "/site-packages/" in there.path \
                    or there.path.startswith(_ENTRYPOINT_LIB):
                continue
            if cfg is not None and there.layer != cfg.layer:
                yield self._at("file", f"/{there.path}", "a file that did not come with the entrypoint's environment",
                               there, f"in layer {there.layer + 1}", f"in layer {cfg.layer + 1}")
        found = {there.path.removeprefix(_ENTRYPOINT_LIB): there for there in self.files.under(_ENTRYPOINT_LIB)
                 if there.entry.kind != "folder" and "/__pycache__/" not in there.path}
        want = self.wanted.entrypoint
        wrong = sorted(path for path in found.keys() | want.keys()
                       if path not in found or found[path].entry.sha256 != want.get(path))
        if wrong and self.facts.get("key") != self.wanted.key:
            self.report.notes.append(f"{len(wrong)} files of the entrypoint are not those of this checkout; the image "
                                     "has another key as well, as one from another commit would")
            return
        for path in wrong:
            yield self._at("file", f"/{_ENTRYPOINT_LIB}{path}", "a file of the entrypoint is not the checkout's",
                           found.get(path), _sum(found[path].entry.sha256) if path in found else "nothing",
                           _sum(want[path]) if path in want else "none")
        self.report.compared["entrypoint files"] = len(want)

    def materials(self) -> Iterator[Difference]:
        """The bill of materials, made again from the files."""
        there = self.files.find(sbom.PATH)
        if there is None:
            yield Difference("sbom", "", "the image has no bill of materials", "none", f"/{sbom.PATH}")
            return
        if (made := sbom_of(self.image)) != there.entry.content:
            yield self._at("sbom", "", "the bill of materials is not the one of these files", there,
                           _sum(there.entry.sha256), _sum(hashlib.sha256(made).hexdigest()) if made else "none")

    # ------------------------------------------------------------------ helpers

    def _json(self, path: str) -> dict[str, Any]:
        try:
            content = json.loads(self.files.content(path) or b"{}")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _at(self, subject: Subject, name: str, what: str, there: Found | None, found: str,
            expected: str) -> Difference:
        if there is None:
            return Difference(subject, name, what, found, expected)
        return Difference(subject, name, what, found, expected, there.layer + 1, self.image.step(there.layer))


def sbom_of(image: Image) -> bytes:
    """The bill of materials of an image, from its files; empty where its image.json or lock.json cannot be read."""
    files = image.files
    metadata = {}
    for name, environment in (("server", SERVER), ("entrypoint", ENTRYPOINT)):
        site = installed.site_of(files, environment)
        metadata[name] = [one.metadata for one in installed.distributions(files, site)] if site else []
    try:
        facts, lock = (json.loads(files.content(f"{ETC}/{name}") or b"") for name in ("image.json", "lock.json"))
        return sbom.document(facts, lock, metadata,
                             (files.content(sbom.DPKG_STATUS) or b"").decode("utf-8", "replace"),
                             next((text for path in sbom.OS_RELEASE if (text := files.content(path))), b"").decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return b""


def _sum(digest: str) -> str:
    return f"sha256 {digest}" if digest else "no hash"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=sorted)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _hidden(name: str, value: str) -> str:
    """A value that may be a secret is not shown."""
    return "set" if re.search(r"TOKEN|PASSWORD|SECRET|KEY|PROXY", name, re.IGNORECASE) else _short(value)
