"""Guard of a finished layer: does it hold what the lock says, and will the server's libraries load?

Usage: guard.py FOLDER OPTIONAL REPORT. FOLDER has the image's image.json and lock.json, OPTIONAL the patterns of
libraries that may lack what they need. Standard library only; runs in the image at build time, without a GPU. Every
difference is said at once; the report travels in the image.
"""

import base64
import csv
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from elf import ElfError, Library, read
from loader import Loader, system_loader

#: libraries that the host's driver brings when a container starts
_DRIVER = re.compile(r"lib(cuda|nvidia-[a-z0-9-]+|nvcuvid|nvoptix)\.so(\.\d+)*$")
#: libraries whose number is CUDA's own major version; the others (cuFFT, cuSOLVER, cuDNN, ...) count for themselves
_FOLLOWS_CUDA = re.compile(
    r"lib(?:cudart|cublas|cublasLt|nvrtc|nvrtc-builtins|nvJitLink|cupti|nvfatbin)\.so\.(\d\d)(?:\.|$)")
#: packages that others import before their own libraries, whether they say so or not (torchaudio 2.11 does not)
_FIRST = frozenset({"torch"})
_SHARED = re.compile(r"\.so(\.\d+)*$")
#: what has to be importable, by the package that brings it
_IMPORTS = {"torch": "torch", "flashinfer-python": "flashinfer", "sglang": "sglang.launch_server"}


@dataclass(frozen=True)
class Difference:
    """One thing that is wrong."""

    what: str
    found: str
    expected: str
    todo: str

    def __str__(self) -> str:
        return f"{self.what}\n    found:    {self.found}\n    expected: {self.expected}\n    do:       {self.todo}"


@dataclass
class Installed:
    """A distribution with the files that its RECORD names, absolute."""

    name: str
    version: str
    requires: frozenset[str]
    files: dict[Path, str] = field(default_factory=dict)


@dataclass
class Found:
    """A library of the layer, read."""

    path: Path
    owner: Installed
    library: Library


def name_of(text: str) -> str:
    """A distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower()


def installed() -> list[Installed]:
    """Everything that this interpreter finds."""
    return [_installed(one) for one in distributions()]


def _installed(one: Distribution) -> Installed:
    site = Path(str(one.locate_file("")))
    needs = frozenset(name_of(re.split(r"[\s;\[<>=!~(]", text, maxsplit=1)[0]) for text in one.requires or ())
    made = Installed(name_of(one.metadata["Name"]), one.version, needs)
    for row in csv.reader((one.read_text("RECORD") or "").splitlines()):
        if row:
            made.files[Path(os.path.normpath(site / row[0]))] = row[1] if len(row) > 1 else ""
    return made


# --- files -----------------------------------------------------------------------------------------------------------


def shared_files(packages: Iterable[Installed]) -> dict[Path, tuple[str, str]]:
    """Files that two packages own with different content: the later one has changed the earlier one's."""
    owners: dict[Path, Installed] = {}
    shared = {}
    for package in packages:
        for path, digest in package.files.items():
            other = owners.setdefault(path, package)
            if digest and other.files[path] not in ("", digest):
                shared[path] = (other.name, package.name)
    return shared


def check_owners(shared: Mapping[Path, tuple[str, str]], known: Iterable[Iterable[str]]) -> Iterator[Difference]:
    """No two packages share a file, but for pairs that the lock knows: those were judged before the build."""
    pairs = {frozenset(pair) for pair in known}
    for path, names in shared.items():
        if frozenset(names) not in pairs:
            yield Difference(f"two packages own {path}", f"{' and '.join(names)}, different content", "one owner",
                             "keep one of them out with an 'excludes' of the stack")


def check_files(package: Installed, whole: bool, shared: Iterable[Path]) -> Iterator[Difference]:
    """The files of a package are there as its RECORD tells.

    :param whole: read them; else only look whether they are there.
    """
    for path, digest in package.files.items():
        try:
            # bytecode is made anew, also where a wheel brought some
            read_it = whole and digest and path not in shared and path.suffix != ".pyc"
            same = _holds(path, digest) if read_it else path.lstat() is not None
        except OSError as error:
            yield Difference(f"{path} of {package.name} is gone", str(error.strerror), "as installed",
                             "find the step that removed it")
            continue
        if not same:
            yield Difference(f"{path} of {package.name} was changed", "other content", f"{digest}, as in its RECORD",
                             "find the step that changed it; changes of ours are patches of a series")


def _holds(path: Path, stated: str) -> bool:
    """Whether a file has the digest that a RECORD states, as `sha256=...` (PEP 376)."""
    algorithm, _, value = stated.partition("=")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, algorithm).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value


# --- CUDA ------------------------------------------------------------------------------------------------------------


def check_names(packages: Iterable[Installed], cuda: str) -> Iterator[Difference]:
    """No package is made for another CUDA."""
    major = cuda.partition(".")[0]
    for package in packages:
        made_for = re.search(r"-cu(?:da)?(\d\d)(?:\d|x)?(?=-|$)", package.name)
        label = re.search(r"\+cu(\d\d)\d$", package.version)
        for match in (made_for, label):
            if match and match[1] != major:
                yield Difference(f"{package.name} {package.version} is made for CUDA {match[1]}", f"CUDA {match[1]}",
                                 f"CUDA {cuda}", f"take the build for CUDA {major}, or exclude it in the stack")


def check_trio(packages: Iterable[Installed], cuda: str | None) -> Iterator[Difference]:
    """FlashInfer's packages are of one release."""
    trio = {one.name: one.version for one in packages
            if one.name in ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")}
    public = {name: version.split("+")[0] for name, version in trio.items()}
    if len(set(public.values())) > 1:
        yield Difference("FlashInfer's packages do not match", ", ".join(f"{k} {v}" for k, v in sorted(trio.items())),
                         "one version", "require the same version of each, or leave cubin and jit-cache out")
    label = re.search(r"\+cu(\d+)$", trio.get("flashinfer-jit-cache", ""))
    if label and cuda and label[1] != cuda.replace(".", ""):
        yield Difference("flashinfer-jit-cache is made for another CUDA", f"cu{label[1]}",
                         f"cu{cuda.replace('.', '')}", "take it from FlashInfer's index for the stack's CUDA")


def check_majors(found: Iterable[Found], cuda: str, optional: Iterable[str]) -> Iterator[Difference]:
    """Every library is linked to the stack's CUDA, but for those that the stack lets pass with a reason."""
    major = cuda.partition(".")[0]
    for one in found:
        if fits(one.path, optional):
            continue
        other = sorted(name for name in {*one.library.needed, one.library.soname, one.path.name}
                       if (match := _FOLLOWS_CUDA.match(name)) and match[1] != major)
        if other:
            yield Difference(f"{one.path} of {one.owner.name} {one.owner.version} is made for another CUDA",
                             ", ".join(other), f"libraries of CUDA {cuda}",
                             f"take the cu{cuda.replace('.', '')} build of {one.owner.name}; installing the same wheel "
                             "again changes nothing")


def fits(path: Path, patterns: Iterable[str]) -> bool:
    """Whether a path ends as one of the patterns says."""
    return any(path.match(pattern) for pattern in patterns)


# --- the loader ------------------------------------------------------------------------------------------------------


@dataclass
class Linkage:
    """How the libraries' needs are met, besides those that the loader finds by itself."""

    #: soname -> libraries that need it
    driver: dict[str, list[str]] = field(default_factory=dict)
    loaded: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[Found]] = field(default_factory=dict)


def link(found: Iterable[Found], packages: Iterable[Installed], loader: Loader) -> Linkage:
    """Look up everything that the libraries need, as the loader will.

    What it does not find may still be there: a library that the importing package, or one that it requires, has
    loaded before under that name (torch does so with its own). NVIDIA's libraries do not count: their place in the
    loader's configuration is what this check is about.
    """
    libraries = list(found)
    by_name = {one.name: one for one in packages}
    providers: dict[str, set[str]] = {}
    for one in libraries:
        if not one.owner.name.startswith("nvidia-"):
            providers.setdefault(one.library.soname or one.path.name, set()).add(one.owner.name)
    result = Linkage()
    for one in libraries:
        for name in one.library.needed:
            if _DRIVER.match(name):
                result.driver.setdefault(name, []).append(str(one.path))
            elif loader.find(name, one.path, one.library) is not None:
                continue
            elif providers.get(name, set()) & (closure(one.owner, by_name) | _FIRST):
                result.loaded.setdefault(name, []).append(str(one.path))
            else:
                result.missing.setdefault(name, []).append(one)
    return result


def closure(package: Installed, by_name: Mapping[str, Installed]) -> set[str]:
    """A package and everything that it requires."""
    seen: set[str] = set()
    waiting = [package.name]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in by_name:
            seen.add(name)
            waiting.extend(by_name[name].requires)
    return seen


def check_linkage(linkage: Linkage, optional: Iterable[str]) -> Iterator[Difference]:
    """Nothing is missing, but for libraries that the stack lets pass with a reason."""
    for name, needed_by in sorted(linkage.missing.items()):
        wrong = [one for one in needed_by if not fits(one.path, optional)]
        if wrong:
            rest = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            yield Difference(f"{name} is not on the loader's path", f"needed by {wrong[0].path} of "
                             f"{wrong[0].owner.name}{rest}", "a library in the image that the loader finds without "
                             "LD_LIBRARY_PATH", "require the package that brings it, or name the library that needs it "
                             "under 'optional' of the stack with a reason")


def check_stubs(found: Iterable[Found], loader: Loader) -> Iterator[Difference]:
    """Nothing in the image can be loaded in the driver's place."""
    for name in ("libcuda.so.1", "libcuda.so"):
        place = loader.cache.get(name)
        if place:
            yield Difference("the image brings a driver library of its own", f"{name} at {place}",
                             "the host's, mounted when a container starts",
                             "keep stubs and compat folders out of the loader's configuration")
    for one in found:
        folders = [folder for folder in (*one.library.rpath, *one.library.runpath)
                   if "stubs" in Path(folder).parts or "compat" in Path(folder).parts]
        if folders:
            yield Difference(f"{one.path} looks for the driver in a stub folder", ":".join(folders), "no such path",
                             f"report it to {one.owner.name}, or exclude it in the stack")


def check_stub(stub: Path) -> Iterator[Difference]:
    """The stub that linkers use is one that no loader takes."""
    if not stub.is_file():
        return
    try:
        ctypes.CDLL(str(stub))
    except OSError:
        return
    yield Difference(f"{stub} can be loaded", "a library with segments", "a stub for linkers only",
                     "make it by bin/toolkit")


# --- compilers and kernels -------------------------------------------------------------------------------------------


def check_compiler(cuda: str, environment: Mapping[str, str]) -> Iterator[Difference]:
    """The compiler is the toolkit's, of the stack's CUDA, and Triton's assembler is there."""
    home = environment.get("CUDA_HOME")
    if home is None:
        return
    nvcc = Path(home, "bin", "nvcc")
    version = _release(str(nvcc))
    if version != cuda:
        yield Difference(f"{nvcc} is not the compiler of this stack", version, cuda,
                         "constrain nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt to the stack's CUDA")
    first = shutil.which("nvcc", path=environment.get("PATH", ""))
    if first is None or os.path.realpath(first) != os.path.realpath(nvcc):
        yield Difference("PATH finds another nvcc than CUDA_HOME",
                         f"{first} of CUDA {_release(first)}" if first else "none", f"{nvcc} of CUDA {cuda}",
                         "put CUDA_HOME/bin before every folder with another nvcc on PATH")
    ptxas = environment.get("TRITON_PTXAS_PATH")
    if ptxas and not os.access(ptxas, os.X_OK):
        yield Difference("TRITON_PTXAS_PATH names no program", ptxas, "an assembler that knows the targets",
                         "take a base or wheels with ptxas")


def _release(nvcc: str) -> str:
    """The CUDA of a compiler, or why it does not tell."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    release = re.search(r"release (\d+\.\d+)", text)
    return release[1] if release else text.strip()


def check_ahead(found: Iterable[Found], targets: Iterable[str]) -> Iterator[Difference]:
    """Modules that were compiled ahead hold machine code for every target."""
    wanted = {int(target[2:]) for target in targets if target.startswith("sm")}
    for one in found:
        missing = wanted - one.library.architectures
        if one.library.architectures and missing:
            yield Difference(f"{one.path} has no code for a target", _numbers(one.library.architectures),
                             _numbers(wanted), "name the targets in FLASHINFER_CUDA_ARCH_LIST of the stack")


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(f"sm_{value}" for value in sorted(values)) or "none"


def check_torch(facts: Mapping[str, Any], cuda: str | None, targets: Iterable[str]) -> Iterator[Difference]:
    """torch's CUDA and kernels are the stack's."""
    if facts["cuda"] != cuda:
        yield Difference("torch is made for another CUDA", f"{facts['version']} for CUDA {facts['cuda']}",
                         f"CUDA {cuda}", "take torch from the index of that CUDA; see 'indexes' of the stack")
    arches = {re.sub(r"\D", "", arch) for arch in facts["architectures"]}
    missing = [target for target in targets if target != "cpu" and target[2:] not in arches]
    if missing:
        yield Difference("torch has no kernels for a target", ", ".join(facts["architectures"]) or "none",
                         ", ".join(missing), "take a torch build that has them, or drop the target")


_TORCH = """import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "cudnn": torch.backends.cudnn.version(), "architectures": torch.cuda.get_arch_list()
                  or torch._C._cuda_getArchFlags().split() if torch.version.cuda else []}))"""


def run(code: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python code as the server's interpreter would."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/",
                          env={**os.environ, **environment})


def check_imports(own: Iterable[str], environment: Mapping[str, str]) -> Iterator[Difference]:
    """What the layer is about can be imported without a GPU."""
    for package in own:
        module = _IMPORTS.get(package)
        if module is None:
            continue
        done = run(f"import {module}", environment)
        if done.returncode:
            yield Difference(f"{module} cannot be imported", " / ".join(done.stderr.strip().splitlines()[-3:]),
                             "an import without a GPU", "run the same import in the image of the layer below")


# --- Debian ----------------------------------------------------------------------------------------------------------


def debian_installed(status: str) -> dict[str, str]:
    """The installed packages of a dpkg status file: name -> version."""
    found = {}
    for stanza in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[\w-]+: ", line))
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields["Version"]
    return found


def debian_drift(have: Mapping[str, str], locked: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Debian packages that are not those of the lock: name -> [locked, installed], "" for none."""
    want = {name: text.split()[0] for packages in locked.values() for name, text in packages.items()}
    return {name: [want.get(name, ""), have.get(name, "")] for name in sorted({*want, *have})
            if want.get(name) != have.get(name)} if want else {}


# --- all of it -------------------------------------------------------------------------------------------------------


def libraries(packages: Iterable[Installed], extra: Iterable[Path]) -> tuple[list[Found], list[Difference]]:
    """Every shared library of the packages, and those that lie in `extra` folders."""
    found, wrong = [], []
    ours = Installed("compiled ahead", "", frozenset(one.name for one in packages))
    places = [(path, one) for one in packages for path in one.files if _SHARED.search(path.name)]
    places += [(path, ours) for folder in extra for path in sorted(folder.rglob("*.so"))]
    for path, owner in places:
        if not path.is_file() or path.is_symlink():
            continue
        try:
            library = read(path)
        except ElfError as error:
            wrong.append(Difference(f"{path} of {owner.name} is damaged", str(error), "a whole library",
                                    "remove the wheel from uv's cache and build again"))
            continue
        if library is not None:
            found.append(Found(path, owner, library))
    return found, wrong


def main() -> int:
    """Check a layer."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[3])
    optional = json.loads(Path(sys.argv[2]).read_text())
    image = json.loads((folder / "image.json").read_text())
    lock = json.loads((folder / "lock.json").read_text())
    own = [wheel["name"] for wheel in lock["wheels"] if wheel["layer"] == image["image"]]
    cuda, targets = image["cuda"], image["targets"]
    packages = installed()
    ahead = [path / "data" / "aot" for path in {Path(str(one.locate_file("flashinfer"))) for one in distributions()}]
    found, wrong = libraries(packages, [path for path in ahead if path.is_dir()])
    loader = system_loader()
    linkage = link(found, packages, loader)
    shared = shared_files(packages)
    wrong += check_owners(shared, [(pair["first"], pair["second"]) for pair in lock.get("overlaps", ())])
    series = {one["wheel_sha256"] for one in lock["patches"].values()}
    patched = {wheel["name"] for wheel in lock["wheels"] if wheel["sha256"] in series}
    for package in packages:
        wrong += check_files(package, package.name in own and package.name not in patched, shared.keys())
    wrong += check_trio(packages, cuda)
    wrong += check_linkage(linkage, optional)
    report: dict[str, Any] = {
        "image": image["image"], "packages": len(packages), "libraries": len(found),
        "driver": {name: sorted(paths) for name, paths in sorted(linkage.driver.items())},
        "loaded_before": {name: len(paths) for name, paths in sorted(linkage.loaded.items())},
        "absent": {name: [str(one.path) for one in needed] for name, needed in sorted(linkage.missing.items())},
    }
    if cuda is not None:
        wrong += check_names(packages, cuda)
        wrong += check_majors(found, cuda, optional)
        wrong += check_stubs(found, loader)
        wrong += check_compiler(cuda, os.environ)
        wrong += check_stub(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64", "stubs", "libcuda.so"))
        wrong += check_ahead([one for one in found if one.owner.name == "compiled ahead"], targets)
        report["architectures"] = {str(one.path): sorted(one.library.architectures) for one in found
                                   if one.library.architectures}
    environment = image["profile"]["environment"] if image["profile"] else {}
    if "torch" in own:
        done = run(_TORCH, environment)
        if done.returncode == 0:
            report["torch"] = json.loads(done.stdout.strip().splitlines()[-1])
            wrong += check_torch(report["torch"], cuda, targets)
        else:
            wrong.append(Difference("torch cannot be imported", " / ".join(done.stderr.strip().splitlines()[-3:]),
                                    "an import without a GPU", "see the libraries above"))
    wrong += check_imports([name for name in own if name != "torch"], environment)
    status = Path("/var/lib/dpkg/status")
    system = debian_installed(status.read_text()) if status.is_file() else {}
    drift = debian_drift(system, lock.get("debian", {}))
    report["debian"] = {"installed": system, "drift": drift}
    shown = ", ".join(f"{name} {old or 'none'} -> {new or 'none'}" for name, (old, new) in drift.items())
    if drift and lock["base"].get("snapshot"):
        wrong.append(Difference(f"{len(drift)} Debian packages are not those of the lock", shown,
                                f"those of snapshot {lock['base']['snapshot']}",
                                "`buildctl lock STACK --upgrade-debian`, or mend the snapshot mirror"))
    elif drift:
        print(f"guard: {len(drift)} Debian packages are not those of the lock, the mirror moved on: {shown}")
    if wrong:
        print(f"guard: image {image['image']} is not what its lock says", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(f"guard: {len(packages)} packages and {len(found)} libraries of {image['image']} as they should be; "
          f"the driver brings {', '.join(linkage.driver) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
