"""Facts of the machine as seen from inside the container; gathered once, judged in `check`."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoints import gpu

_UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by NVML's index. Bytes, watts; PCIe as (generation, lanes), now and at most; `processes` are pids that
    use it. `pcie_max` is what card and slot can do together, `pcie_card` the generation of the card alone (0: unknown).
    `memory_total` is 0 where the GPU has no memory of its own (DGX Spark); None and 0 elsewhere: the card does not say.
    `error`: NVML's word on why the card does not answer at all (it is lost, for instance); nothing else is known then.
    """

    index: int
    name: str = ""
    capability: str = ""
    memory_total: int = 0
    memory_used: int = 0
    pcie_now: tuple[int, int] = (0, 0)
    pcie_max: tuple[int, int] = (0, 0)
    pcie_card: int = 0
    power_limit: float = 0.0
    processes: tuple[int, ...] = ()
    uuid: str = ""
    power_default: float = 0.0
    persistence: bool | None = None
    ecc: bool | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine. `driver` is "" without one; `p2p[i][j]` says whether GPU i reads from j, None where unknown.

    Bytes everywhere; `memlock` is -1 for unlimited; `memory` is the container's limit or the machine's memory.
    `gpu_trouble` says why NVML gives nothing although there is a driver.
    """

    cpus: int
    memory: int
    shm_total: int
    shm_free: int
    memlock: int
    uid: int
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    p2p: tuple[tuple[bool | None, ...], ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    gpu_trouble: str = ""


def read() -> Host:
    """Ask the kernel and NVML."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - only asked for its size
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(cpus=len(os.sched_getaffinity(0)), memory=memory_limit(), shm_total=shm.total if shm else 0,
                shm_free=shm.free if shm else 0,
                memlock=_UNLIMITED if soft == resource.RLIM_INFINITY else soft, uid=os.getuid(), **_gpus())


def memory_limit(root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that this container may use: its cgroup's limit (v2 or v1) or the machine's memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        machine = int(meminfo.read_text(encoding="ascii").split()[1]) * 1024
        for name in ("memory.max", "memory/memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                return min(machine, int((root / name).read_text(encoding="ascii")))
        return machine
    return 0


def _gpus() -> dict[str, Any]:
    with gpu.nvml() as library:
        if library is None:
            present = any(Path("/dev").glob("nvidia[0-9]*"))
            return {"gpu_trouble": "a GPU device is there, but NVML does not answer" if present else ""}
        cards = gpu.cards(library)
        handles = [card.handle for card in cards]
        driver, cuda = "", 0
        with contextlib.suppress(Exception):
            driver, cuda = _text(library.nvmlSystemGetDriverVersion()), int(library.nvmlSystemGetCudaDriverVersion())
        return {"driver": driver, "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
                "gpu_trouble": "" if cards else _no_card(library),
                "gpus": tuple(_gpu(library, card) for card in cards),
                "p2p": tuple(tuple(None if one is other else _peer(library, one, other) for other in handles)
                             for one in handles),
                "topology": tuple(tuple("self" if one is other else _path(library, one, other) for other in handles)
                                  for one in handles)}


def _no_card(library: Any) -> str:
    """Why there is a driver and no card for us."""
    refused = [f"NVML refuses GPU {card.index}: {card.error}" for card in gpu.every(library) if card.error]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible} names none that is here"]
    return "; ".join(refused or named) or "NVML lists no GPU"


def _gpu(library: Any, card: gpu.Card) -> Gpu:
    if card.error:
        return Gpu(card.index, error=card.error)
    handle = card.handle
    try:
        total, used = gpu.memory(library, handle)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
        name = _text(library.nvmlDeviceGetName(handle))
    except Exception as error:  # lost since it was counted
        return Gpu(card.index, error=gpu.reason(error))

    def ask(name: str, default: Any) -> Any:
        with contextlib.suppress(Exception):  # not every card and driver answers everything
            return getattr(library, name)(handle)
        return default

    return Gpu(index=card.index, name=name, capability=f"{major}.{minor}",
               memory_total=total, memory_used=used,
               pcie_now=(ask("nvmlDeviceGetCurrPcieLinkGeneration", 0), ask("nvmlDeviceGetCurrPcieLinkWidth", 0)),
               pcie_max=(ask("nvmlDeviceGetMaxPcieLinkGeneration", 0), ask("nvmlDeviceGetMaxPcieLinkWidth", 0)),
               pcie_card=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", 0),
               power_limit=ask("nvmlDeviceGetEnforcedPowerLimit", 0) / 1000, uuid=_text(ask("nvmlDeviceGetUUID", "")),
               processes=tuple(int(one.pid) for one in ask("nvmlDeviceGetComputeRunningProcesses", ())),
               power_default=ask("nvmlDeviceGetPowerManagementDefaultLimit", 0) / 1000,
               persistence=_known(ask("nvmlDeviceGetPersistenceMode", None)),
               ecc=_known(ask("nvmlDeviceGetEccMode", (None,))[0]))


def _known(value: int | None) -> bool | None:
    return None if value is None else bool(value)


#: nvml.h: NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK (pynvml's first one is a tuple by mistake, which no call takes)
_READ, _OK = 0, 0


def _peer(library: Any, one: Any, other: Any) -> bool | None:
    with contextlib.suppress(Exception):
        return bool(library.nvmlDeviceGetP2PStatus(one, other, _READ) == _OK)
    return None


#: NVML's nvmlGpuTopologyLevel_t
_LEVELS = {0: "internal", 10: "one switch", 20: "switches", 30: "host bridge", 40: "node", 50: "system"}


def _path(library: Any, one: Any, other: Any) -> str:
    with contextlib.suppress(Exception):
        return _LEVELS.get(int(library.nvmlDeviceGetTopologyCommonAncestor(one, other)), "unknown")
    return "unknown"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
