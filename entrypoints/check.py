"""`entrypoint check`: machine, models and image, before anything starts. One line each: ok, warn, fail or skip.

The judging is pure: facts in (`host.Host`, image, settings), findings out. Thresholds and their reasons stand where
they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from entrypoints import contract, jobs, models
from entrypoints.command import server_argv
from entrypoints.errors import CannotWrite, InputMissing, Problem, Unusable
from entrypoints.host import Gpu, Host
from entrypoints.image import Image
from entrypoints.readiness import asked
from entrypoints.settings import Settings

GIB = 2**30
#: lowest driver branch for each CUDA major: NVIDIA's CUDA toolkit release notes, table of driver versions
DRIVER_FLOOR = {"12": 525, "13": 580}
#: NCCL takes about 10 MB of shared memory for each channel and pair; Docker's default of 64 MB fails with 2 GPUs
SHM_NEEDED = 1 * GIB
SHM_WANTED = 16 * GIB
MEMLOCK_WANTED = 64 * 2**20
DISK_WANTED = 10 * GIB
#: RTX PRO 6000 and RTX 5090 are x16 cards
LANES = 16
PATCH_ROOT = Path("/etc/buildctl/patches")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check. `state` is ok, warn, fail or skip (could not be looked at, and why)."""

    name: str
    state: str
    found: str
    needed: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def run(host: Host, image: Image, settings: Settings, environ: Mapping[str, str], *,
        whole: bool = True) -> list[Finding]:
    """All findings, in the order in which problems should be solved; the image itself is looked at when `whole`."""
    first, gpus_needed = _placement(image, settings)
    return [*gpus(host, image, gpus_needed, first), *links(host, gpus_needed), *memory(host, gpus_needed),
            *compilers(host, image, environ), *folders(settings, image), *model_files(settings, environ),
            *network(environ), *(integrity(image) if whole else ())]


def before_start(findings: Sequence[Finding], *, measuring: bool) -> list[Finding]:
    """The warnings; raises for failures, all at once, before minutes are spent on a server that cannot work.

    A server may share its GPU with others and needs no results folder; a measurement may not and does.
    """
    tolerated = set() if measuring else {"gpu memory", "results"}
    failed = [one for one in findings if one.state == "fail" and one.name not in tolerated]
    if failed:
        kind = {66: InputMissing, 73: CannotWrite}.get(exit_code(failed), Unusable)
        raise kind([Problem(what=f"check: {one.name}", found=one.found, expected=one.needed, todo=one.remedy)
                    for one in failed])
    return [one for one in findings if one.state in {"warn", "fail"}]


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a fail; 66 when only model files fail; 73 when only folders do; else 69."""
    failed = {one.name for one in findings if one.state == "fail"}
    if not failed:
        return 0
    if failed <= {"model", "draft"}:
        return InputMissing.exit_code
    return CannotWrite.exit_code if failed <= {"results", "cache"} else Unusable.exit_code


def render(findings: Sequence[Finding]) -> str:
    """One line each, the remedy under what is not ok."""
    lines = []
    for one in findings:
        needed = f" (needed: {one.needed})" if one.needed else ""
        lines.append(f"{one.state:<5} {one.name:<18} {one.found}{needed}")
        if one.remedy and one.state in {"warn", "fail"}:
            lines.append(f"{'':<24} do: {one.remedy}")
    count = {state: sum(one.state == state for one in findings) for state in ("ok", "warn", "fail", "skip")}
    lines.append(", ".join(f"{number} {state}" for state, number in count.items() if number))
    return "\n".join(lines)


def tensor_parallel(image: Image, settings: Settings) -> int:
    """How many GPUs one server takes on this machine, from the profile and the user's flags."""
    return _placement(image, settings)[1]


def _placement(image: Image, settings: Settings) -> tuple[int, int]:
    """(first GPU, how many): tensor times pipeline times data parallelism over the nodes.

    With attention data parallelism the replicas share the GPUs.
    """
    said = asked(server_argv(image, {}, model=settings.model, host="", port=0, extra=settings.extra))

    def number(default: int, *names: str) -> int:
        text = str(next((said[name] for name in names if name in said), default))
        return int(text) if text.isdigit() else default

    replicas = 1 if "enable_dp_attention" in said else number(1, "dp", "dp_size", "data_parallel_size")
    count = number(1, "tp", "tp_size", "tensor_parallel_size") * number(1, "pp", "pp_size", "pipeline_parallel_size")
    return number(0, "base_gpu_id"), max(1, count * replicas // max(1, number(1, "nnodes")))


def gpus(host: Host, image: Image, needed: int, first: int = 0) -> Iterator[Finding]:
    """Driver, count, capability, free memory, foreign processes, settings of the cards from `first` on."""
    wanted = [target for target in image.targets if target != "cpu"]
    if not wanted:
        found = f"{len(host.gpus)} GPU, not used" if host.gpus else "no GPU, none needed"
        yield Finding("gpu", "ok", found, "this image runs on the CPU")
        return
    if not host.gpus:
        yield Finding("gpu", "fail", host.gpu_trouble or "no GPU and no driver in this container",
                      f"{needed} x SM {' or '.join(wanted)}", "docker run --gpus all; on the host: NVIDIA driver and "
                      "nvidia-container-toolkit")
        return
    yield driver(host, image)
    if lost := [f"GPU {one.index}: {one.error}" for one in host.gpus if one.error]:
        yield Finding("gpu lost", "fail", "; ".join(lost), "an answer from every GPU",
                      "dmesg on the host says why (Xid): reset the card or restart the machine, or leave the card out "
                      "with --gpus '\"device=...\"'")
    count = len(host.gpus) - first
    yield Finding("gpu count", "ok" if count >= needed else "fail",
                  f"{len(host.gpus)}" + (f", {max(count, 0)} from --base-gpu-id {first} on" if first else ""),
                  f"{needed} (--tp)", "" if count >= needed else "docker run --gpus all, or a smaller --tp after --")
    ours = [one for one in host.gpus[first:first + needed] or host.gpus if not one.error]
    if not ours:
        return
    fitting = {_target(one) for one in wanted}
    wrong = [one for one in ours if one.capability not in fitting]
    yield Finding("gpu capability", "fail" if wrong else "ok", _summary(ours), f"SM {' or '.join(sorted(fitting))}",
                  f"GPU {', '.join(str(one.index) for one in wrong)}: the kernels of this image are not built for it; "
                  "use an image whose stack has it as a target" if wrong else "")
    foreign = [one for one in host.gpus if one.processes]
    yield Finding("gpu processes", "warn" if foreign else "ok",
                  "; ".join(f"GPU {one.index}: pid {', '.join(map(str, one.processes))}" for one in foreign) or "none",
                  "no other process", "they disturb a measurement and take memory: end them, or choose GPUs with "
                  "--gpus '\"device=...\"'" if foreign else "")
    full = [one for one in ours if one.memory_used > 0.05 * one.memory_total]
    yield Finding("gpu memory", "fail" if full else "ok",
                  "; ".join(f"GPU {one.index}: {one.memory_used / GIB:.1f} of {one.memory_total / GIB:.0f} GiB used"
                            for one in full) or _free(ours),
                  "less than 5 % in use", "nvidia-smi on the host names who holds it; memory of a killed server comes "
                  "back within a minute" if full else "")
    yield from cards(ours)


def cards(ours: Sequence[Gpu]) -> Iterator[Finding]:
    """Power limit, persistence and ECC: what makes cards of one kind differ in speed, or a start in length."""
    limits = {one.power_limit for one in ours}
    lowered = [one for one in ours if 0 < one.power_limit < one.power_default]
    listed = "; ".join(f"GPU {one.index}: {one.power_limit:.0f} of {one.power_default:.0f} W" for one in lowered)
    yield Finding("gpu power", "warn" if len(limits) > 1 else "ok",
                  listed or (f"{max(limits):.0f} W each" if max(limits) else "unknown"), "one limit for all",
                  "the slowest card sets the pace of all: nvidia-smi -pl WATTS on the host" if len(limits) > 1 else "")
    cold = [str(one.index) for one in ours if one.persistence is False]
    mixed = len({one.ecc for one in ours}) > 1
    word = {True: "on", False: "off", None: "unknown"}
    kept = f"off on GPU {', '.join(cold)}" if cold else word[ours[0].persistence]
    yield Finding("gpu settings", "warn" if cold or mixed else "ok",
                  f"persistence {kept}, ECC {' and '.join(sorted({word[one.ecc] for one in ours}))}",
                  "persistence on, ECC the same everywhere",
                  "nvidia-smi -pm 1 on the host (else each start waits for the driver)" if cold
                  else "nvidia-smi -e 0 or 1 for all, then a restart" if mixed else "")


def _free(cards: Sequence[Gpu]) -> str:
    """The least free memory; a DGX Spark has none of its own."""
    own = [one.memory_total - one.memory_used for one in cards if one.memory_total]
    return f"{min(own) / GIB:.0f} GiB free each" if own else "the machine's own memory"


def driver(host: Host, image: Image) -> Finding:
    """Whether the driver is new enough for the image's CUDA."""
    major = (image.cuda or "13").partition(".")[0]
    floor = DRIVER_FLOOR.get(major, 0)
    branch = int(host.driver.partition(".")[0] or 0) if host.driver.partition(".")[0].isdigit() else 0
    return Finding("driver", "ok" if branch >= floor else "fail",
                   f"{host.driver} (CUDA {host.driver_cuda})", f"{floor} or later for CUDA {image.cuda or major}",
                   "" if branch >= floor else "update the driver on the host; consumer cards cannot use the "
                   "cuda-compat package")


def links(host: Host, needed: int) -> Iterator[Finding]:
    """PCIe link and peer access; only of interest with more than one GPU."""
    if len(host.gpus) < 2 or needed < 2:
        return
    blocked = [(i, j) for i, row in enumerate(host.p2p) for j, reads in enumerate(row) if reads is False]
    unknown = any(reads is None for i, row in enumerate(host.p2p) for j, reads in enumerate(row) if i != j)
    yield Finding("p2p", "warn" if blocked or unknown else "ok",
                  f"no peer access for {len(blocked)} of {len(host.gpus) * (len(host.gpus) - 1)} pairs" if blocked
                  else "unknown" if unknown else "all pairs", "peer access between all GPUs",
                  "on the host: IOMMU off or passthrough, ACS off, a driver with P2P; until then NCCL_P2P_DISABLE=1 "
                  "avoids a hang at the first all-reduce" if blocked
                  else "nvidia-smi topo -p2p r on the host says it" if unknown else "")
    far = {path for i, row in enumerate(host.topology) for path in row[i + 1:]}
    yield Finding("topology", "ok", ", ".join(sorted(far)) or "unknown")
    # NVML's maximum is that of card and slot together: a card in a narrow slot says x8 of x8
    known = [one for one in host.gpus if one.pcie_max[1]]
    slow = [one for one in known if min(one.pcie_now[1], one.pcie_max[1]) < LANES or one.pcie_max[0] < one.pcie_card]
    yield Finding("pcie link", "warn" if slow or not known else "ok",
                  "; ".join(f"GPU {one.index}: gen {one.pcie_max[0]} x{one.pcie_now[1]} of "
                            f"gen {max(one.pcie_card, one.pcie_max[0])} x{LANES}" for one in slow)
                  or (f"gen {min(one.pcie_max[0] for one in known)} x{LANES}" if known else "unknown"),
                  f"x{LANES} at the card's own generation (which drops when idle, the width does not)",
                  "reseat the card or its riser, look at the slot's generation and bifurcation in the firmware"
                  if slow else "")


def memory(host: Host, needed: int) -> Iterator[Finding]:
    """Shared memory, locked memory, main memory."""
    many = needed > 1
    option = "docker run --ipc=host, or --shm-size=32g"
    if host.shm_total < SHM_NEEDED:
        yield Finding("shared memory", "fail" if many else "warn" if host.gpus else "ok",
                      f"{host.shm_total / 2**20:.0f} MiB in all",
                      f"{SHM_WANTED // GIB} GiB for more than one GPU", option)
    elif host.shm_free < SHM_NEEDED // 2:
        yield Finding("shared memory", "fail" if many else "warn",
                      f"{host.shm_free / 2**20:.0f} MiB free of {host.shm_total / GIB:.0f} GiB", "half a GiB free",
                      "old segments fill it: remove those in /dev/shm that no process uses")
    else:
        state = "warn" if many and host.shm_total < SHM_WANTED else "ok"
        yield Finding("shared memory", state, f"{host.shm_free / GIB:.1f} of {host.shm_total / GIB:.1f} GiB free",
                      f"{SHM_WANTED // GIB} GiB for more than one GPU" if many else "",
                      option if state != "ok" else "")
    if host.gpus:
        low = 0 <= host.memlock < MEMLOCK_WANTED
        yield Finding("memlock", "warn" if low else "ok",
                      "unlimited" if host.memlock < 0 else f"{host.memlock / 2**20:.1f} MiB", "unlimited",
                      "docker run --ulimit memlock=-1" if low else "")
    yield Finding("memory", "ok", f"{host.memory / GIB:.0f} GiB for this container, {host.cpus} CPUs")


def folders(settings: Settings, image: Image) -> Iterator[Finding]:
    """Whether results and caches can be written, and have room."""
    for name, path in (("results", Path(settings.results)), ("cache", Path(settings.cache))):
        trouble = writable(path)
        if trouble:
            yield Finding(name, "fail", f"{path}: {trouble}", f"writable by user {os.getuid()}",
                          f"-v NAME:{path}, owned by that user")
            continue
        free = shutil.disk_usage(nearest(path)).free
        state = "ok" if free >= DISK_WANTED else "warn"
        yield Finding(name, state, f"{path}: writable, {free / GIB:.0f} GiB free", f"{DISK_WANTED // GIB} GiB free",
                      "" if state == "ok" else "a larger volume")
    keyed = Path(settings.cache) / image.short_key
    yield Finding("kernel cache", "ok", f"warm: {keyed}" if keyed.is_dir() and any(keyed.iterdir())
                  else f"cold: the first start compiles into {keyed}")


def writable(path: Path) -> str:
    """ "" when a file can be made there, or below its nearest parent that exists, else why not."""
    try:
        with tempfile.TemporaryFile(dir=nearest(path)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def nearest(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists: folders are made when they are needed."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def model_files(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Model and draft: there, complete, made for each other. Not named: nothing to check."""
    if not settings.model:
        yield Finding("model", "skip", "not named", "", "--model FOLDER")
        return
    wrong = models.problems(settings.model, settings.draft, environ)
    for problem in wrong:
        name = "draft" if "draft" in problem.what else "model"
        yield Finding(name, "fail", f"{problem.what}: {problem.found or problem.where}", problem.expected, problem.todo)
    if not wrong:
        for name, path in (("model", settings.model), ("draft", settings.draft)):
            if path:
                kind = " ".join(models.config(Path(path)).get("architectures") or ["not looked at: on the hub"])
                yield Finding(name, "ok", f"{path}: {kind}")


def compilers(host: Host, image: Image, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Kernels that are compiled at the first start fit into the memory."""
    if image.targets == ("cpu",):
        return
    wrong = jobs.too_many(environ, host.memory)
    shown = ", ".join(f"{name}={environ[name]}" for name in (jobs.JOBS, *jobs.THREADS) if environ.get(name))
    if wrong:
        yield Finding("compilers", "warn", wrong, "4 GiB a thread", "leave both variables out: they are then "
                      f"{jobs.JOBS}={jobs.jobs(host.cpus, host.memory)} and {jobs.THREADS[0]}=1")
    else:
        yield Finding("compilers", "ok", shown)


def network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the hub would be asked."""
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    yield Finding("hub", "ok", "offline: only local models" if offline else "online: names are downloaded")


def integrity(image: Image, root: Path = PATCH_ROOT) -> Iterator[Finding]:
    """The image against its own image.json: patch files, packages and the server's interpreter."""
    wrong = []
    for one in image.patches:
        try:
            found = hashlib.sha256((root / one.package / one.name).read_bytes()).hexdigest()
        except OSError as error:
            found = error.strerror or "unreadable"
        if found != one.sha256:
            wrong.append(f"{one.package}/{one.name}: {found[:16]}")
    yield Finding("patches", "fail" if wrong else "ok", "; ".join(wrong) or f"{len(image.patches)} as built",
                  "the hashes of image.json", "pull the image again; do not edit it in place" if wrong else "")
    installed, site = packages(image)
    if not site:
        yield Finding("packages", "fail", installed.get("", "no answer"), f"a working {image.python}",
                      "pull the image again")
        return
    changed = [f"{name} {installed.get(name, 'absent')} instead of {version}" for name, version in
               image.packages.items() if installed.get(name) != version]
    yield Finding("packages", "fail" if changed else "ok", "; ".join(changed) or f"{len(image.packages)} as built",
                  "the versions of image.json",
                  "something was installed over the image: start from a fresh container" if changed else "")
    yield agreement(site / "sglang", image.packages.get("sglang", image.profile.sglang))
    for package, tree in image.trees.items():
        files = {path for one in image.patches if one.package == package
                 for path in patched_files(root / one.package / one.name)}
        found = effective_tree(site, files)
        yield Finding(f"tree {package}", "ok" if found == tree else "fail", found[:16], tree[:16],
                      "patched files were changed after the build" if found != tree else "")


def agreement(source: Path, version: str) -> Finding:
    """Whether the installed SGLang has what this program uses of it (contract.toml)."""
    if not source.is_dir():
        return Finding("contract", "fail", f"no {source}", "SGLang", "pull the image again")
    missing = contract.missing_in_source(source, version)
    names = "; ".join(f"{one.name} (unavailable: {', '.join(one.consumers)})" for one in missing)
    state = "fail" if any(one.required for one in missing) else "warn" if missing else "ok"
    return Finding("contract", state, names or f"everything that is used of SGLang {version}", "",
                   "use the entrypoint that was released with this SGLang" if missing else "")


def patched_files(patch: Path) -> set[str]:
    """Paths relative to site-packages that a patch leaves behind changed."""
    try:
        lines = patch.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line[6:].split("\t")[0] for line in lines if line.startswith("+++ b/")}


def effective_tree(site: Path, files: Iterable[str]) -> str:
    """sha256 over the lines `SHA256  PATH`, sorted by path; the same rule as in the image's lock."""
    text = ""
    for name in sorted(files):
        try:
            text += f"{hashlib.sha256((site / name).read_bytes()).hexdigest()}  {name}\n"
        except OSError:
            text += f"absent  {name}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def packages(image: Image) -> tuple[dict[str, str], Path | None]:
    """Versions that the server's interpreter finds, by image.json's names, and its site-packages.

    When it does not run: the reason under the name "" and None.
    """
    script = ("import importlib.metadata as m, json, sys, sysconfig\n"
              "def v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return 'absent'\n"
              "print(json.dumps([{n: v(n) for n in sys.argv[1:]}, sysconfig.get_path('purelib')]))")
    try:
        done = subprocess.run([str(image.python), "-I", "-c", script, *image.packages], capture_output=True, text=True,
                              timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"": str(error)}, None
    if done.returncode:
        return {"": (done.stderr.strip().splitlines() or ["no output"])[-1]}, None
    found, site = json.loads(done.stdout)
    return found, Path(site)


def _target(name: str) -> str:
    """`sm120`, `12.0a` or `12.0` -> `12.0`."""
    digits = name.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    return digits if "." in digits else f"{digits[:-1]}.{digits[-1:]}"


def _summary(cards: Sequence[Gpu]) -> str:
    kinds = {f"{one.name} (SM {one.capability})" for one in cards}
    return f"{len(cards)} x {', '.join(sorted(kinds))}"
