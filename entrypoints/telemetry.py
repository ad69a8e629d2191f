"""The machine: what it is, and how it does while a block runs. GPUs through NVML, everything else through psutil."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from entrypoints import gpu, host

BOOT = Path("/proc/sys/kernel/random/boot_id")
EVERY = 1.0
#: clock reasons that mean the card was held back: power brake, thermal (hardware, software), hardware slowdown
#: (nvml.h: nvmlClocksThrottleReason*; SwPowerCap 0x4 is normal under load and only reported)
THROTTLE = 0x8 | 0x20 | 0x40 | 0x80
POWER_CAP = 0x4
#: a GPU that is busy at less than this share of its power limit is probably waiting in a spin loop
SPIN_POWER, SPIN_UTIL = 0.30, 95.0
#: PCIe replays per second that spoil a block; one costs some microseconds, so fewer stay far below every margin
REPLAYS = 100.0

Sample = Mapping[str, Any]


def describe() -> dict[str, Any]:
    """What the machine is, without its name."""
    facts = host.read()
    return {"id": identity(facts), "hostname_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
            "cpu": _cpu_model(), "cores_usable": facts.cpus, "ram_gb": round(facts.memory / 1e9, 1),
            "shm_gb": round(facts.shm_total / 1e9, 2), "kernel": platform.release(), "numa_nodes": _numa_nodes(),
            "load_1m": round(os.getloadavg()[0], 2), "driver": facts.driver or None,
            "gpus": [{"name": one.name, "uuid": one.uuid, "cc": one.capability, "mem_total": one.memory_total,
                      "power_limit_w": one.power_limit, "pcie": {"gen_max": one.pcie_max[0],
                                                                 "width_max": one.pcie_max[1]}} for one in facts.gpus],
            "p2p": [list(row) for row in facts.p2p], "topology": [list(row) for row in facts.topology]}


def identity(facts: host.Host) -> str:
    """The same for every container of a machine: its GPUs, or without one this boot of it; and what it may use."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text(encoding="ascii").strip()
    cards = [one.uuid for one in facts.gpus]
    return hashlib.sha256(json.dumps([cards or boot, facts.driver, platform.release(), _cpu_model(), facts.cpus,
                                      round(facts.memory / 1e9)]).encode()).hexdigest()[:32]


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
                platform.machine())


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def cards(library: Any) -> list[dict[str, Any]]:
    """One reading of every GPU; what a card does not answer is None. Watts, MHz, degrees C, bits, pids.

    `error` is NVML's word on a card that does not answer at all.
    """
    found = []
    for card in gpu.cards(library):

        def ask(name: str, *words: Any, card: gpu.Card = card) -> Any:
            with contextlib.suppress(Exception):
                return None if card.error else getattr(library, name)(card.handle, *words)
            return None

        power, load = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetUtilizationRates")
        limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        ecc = ask("nvmlDeviceGetTotalEccErrors", 1, 0)  # uncorrected, since the driver was loaded
        processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
        found.append({
            "power_w": None if power is None else power / 1000, "limit_w": None if limit is None else limit / 1000,
            "temp_c": ask("nvmlDeviceGetTemperature", 0), "sm_mhz": ask("nvmlDeviceGetClockInfo", 1),
            "mem_mhz": ask("nvmlDeviceGetClockInfo", 2), "util": None if load is None else load.gpu,
            "throttle": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            "replays": ask("nvmlDeviceGetPcieReplayCounter"), "ecc": ecc,
            "pcie": [ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetCurrPcieLinkWidth")],
            "pids": sorted(int(one.pid) for one in processes), "error": card.error or None})
    return found


class Sampler:
    """A thread that reads once a second; `now` in the samples is seconds since `origin` (perf_counter)."""

    def __init__(self, origin: float, *, every: float = EVERY,
                 read_gpus: Callable[[], list[dict[str, Any]]] | None = None) -> None:
        self.samples: list[Sample] = []
        self._origin = origin
        self._every = every
        self._read_gpus = read_gpus
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        with gpu.nvml() as library:
            psutil.cpu_percent()  # the first answer is about nothing
            while not self._over.wait(self._every):
                with contextlib.suppress(OSError, psutil.Error):
                    self.samples.append(self._sample(library))

    def _sample(self, library: Any) -> Sample:
        read = self._read_gpus or (lambda: cards(library) if library is not None else [])
        return {"now": round(time.perf_counter() - self._origin, 3), "cpu_percent": psutil.cpu_percent(),
                "load_1m": round(os.getloadavg()[0], 2), "used_gb": round(psutil.virtual_memory().used / 1e9, 3),
                "gpus": read()}


def summarise(samples: Sequence[Sample], spans: Iterable[tuple[float, float]], *, tokens: int = 0,
              own: Iterable[int] = ()) -> dict[str, Any]:
    """Numbers of the time spans in which was measured; pids that are not `own` on a GPU are foreign.

    Energy is mean power times time over all GPUs, in joules.
    """
    inside = [(one, high - low) for low, high in spans for one in samples if low <= one["now"] <= high]
    seconds = sum(high - low for low, high in spans)
    readings = [one for one, _ in inside]
    sampled = samples[-1]["now"] - samples[0]["now"] if samples else 0.0
    result: dict[str, Any] = {"samples": len(readings), "sampled_s": round(sampled, 3),
                              "cpu_percent": _mean(one["cpu_percent"] for one in readings),
                              "load_1m": _mean(one["load_1m"] for one in readings),
                              "cores": len(os.sched_getaffinity(0)),
                              "used_gb_max": max((one["used_gb"] for one in readings), default=None), "gpus": []}
    mine = set(own)
    count = max((len(one["gpus"]) for one in samples), default=0)
    energy = 0.0
    for index in range(count):
        rows = [one["gpus"][index] for one in readings if index < len(one["gpus"])]
        every = [one["gpus"][index] for one in samples if index < len(one["gpus"])]
        power = _mean(row["power_w"] for row in rows)
        energy += (power or 0.0) * seconds
        throttle = 0
        for row in rows:
            throttle |= row["throttle"] or 0
        result["gpus"].append({
            "power_w": {"mean": power, "max": _most(row["power_w"] for row in rows)},
            "limit_w": _most(row["limit_w"] for row in rows), "temp_c_max": _most(row["temp_c"] for row in rows),
            "sm_clock": {"min": _least(row["sm_mhz"] for row in rows), "mean": _mean(row["sm_mhz"] for row in rows)},
            "mem_clock": {"min": _least(row["mem_mhz"] for row in rows)}, "util": _mean(row["util"] for row in rows),
            "throttle_bits_or": throttle, "pcie_under_load": rows[-1]["pcie"] if rows else None,
            "pcie_replay_delta": _growth(row["replays"] for row in every),
            "ecc_delta": _growth(row["ecc"] for row in every),
            "foreign_pids": _foreign({pid for row in rows for pid in row["pids"]}, mine),
            "error": next((row["error"] for row in every if row["error"]), None)})
    result["energy_j"] = round(energy, 3) if energy else None
    result["energy_j_per_token"] = round(energy / tokens, 5) if energy and tokens else None
    return result


def together(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Summaries of several server starts as one: means, lowest clock, highest temperature; watts of all GPUs."""
    cards = [card for one in summaries for card in one["gpus"]]
    watts = [[card["power_w"]["mean"] for card in one["gpus"]] for one in summaries]
    return {"power_w": _mean(sum(each) for each in watts if each and None not in each),
            "energy_j_per_token": _mean(one["energy_j_per_token"] for one in summaries),
            "sm_mhz_min": _least(card["sm_clock"]["min"] for card in cards),
            "temp_c_max": _most(card["temp_c_max"] for card in cards),
            "cpu_percent": _mean(one["cpu_percent"] for one in summaries),
            "load_1m": _mean(one["load_1m"] for one in summaries)}


def _foreign(pids: set[int], mine: set[int]) -> list[int]:
    """Pids that are not ours. In a container NVML may name the host's pids: when it knows none of ours, no word."""
    return sorted(pids - mine) if pids & mine else []


def trace(samples: Sequence[Sample], points: int = 120) -> list[list[float | None]]:
    """[seconds, CPU percent, watts of all GPUs], thinned out for a plot."""
    step = max(1, len(samples) // points)
    return [[one["now"], one["cpu_percent"], _total(card["power_w"] for card in one["gpus"])]
            for one in samples[::step]]


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(sum(known), 1) if known else None


def causes(summary: Mapping[str, Any]) -> list[str]:
    """What spoils a block, independent of its speed."""
    found = []
    for index, card in enumerate(summary["gpus"]):
        if card["error"]:
            found.append(f"GPU {index} does not answer any more: {card['error']}")
        if card["throttle_bits_or"] & THROTTLE:
            found.append(f"GPU {index} was throttled (clock reasons {card['throttle_bits_or']:#x}, "
                         f"at most {card['temp_c_max']} C)")
        if card["foreign_pids"]:
            found.append(f"GPU {index} was used by another process: {', '.join(map(str, card['foreign_pids']))}")
        if card["ecc_delta"]:
            found.append(f"GPU {index}: {card['ecc_delta']} uncorrected memory errors")
        if _replays(card, summary) > REPLAYS:
            found.append(f"GPU {index}: {card['pcie_replay_delta']} PCIe replays, the link is bad")
    return found


def _replays(card: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    return (card["pcie_replay_delta"] or 0) / max(summary.get("sampled_s") or 0.0, 1.0)


def spinning(gpus: Sequence[Mapping[str, Any]]) -> str:
    """«GPU 0 is 100 % busy at 90 of 600 W, ...» for cards of one reading that wait in a loop; "" when none does."""
    return ", ".join(f"GPU {index} is {one['util']:.0f} % busy at {one['power_w']:.0f} of {one['limit_w']:.0f} W"
                     for index, one in enumerate(gpus) if _spins(one["util"], one["power_w"], one["limit_w"]))


def spinning_now() -> str:
    """The same of this moment; "" without a GPU."""
    with gpu.nvml() as library:
        return spinning(cards(library)) if library is not None else ""


def _spins(util: float | None, power: float | None, limit: float | None) -> bool:
    return bool(power and limit and util and util >= SPIN_UTIL and power < SPIN_POWER * limit)


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader should know and what spoils nothing."""
    found = []
    if not summary["gpus"] and (summary["load_1m"] or 0.0) > summary["cores"] + 0.5:
        found.append(f"the machine was busy with other work as well: load above its {summary['cores']} cores")
    for index, card in enumerate(summary["gpus"]):
        power, limit, load = card["power_w"]["mean"], card["limit_w"], card["util"]
        if _spins(load, power, limit):
            found.append(f"GPU {index} is {load:.0f} % busy at {power:.0f} of {limit:.0f} W: it waits in a loop more "
                         "than it computes (all-reduce over PCIe is the usual reason)")
        if card["throttle_bits_or"] & POWER_CAP:
            found.append(f"GPU {index} ran at its power limit of {limit} W")
        if 0 < _replays(card, summary) <= REPLAYS:
            found.append(f"GPU {index}: {card['pcie_replay_delta']} PCIe replays: a riser or slot is marginal")
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(sum(known) / len(known), 3) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    return max(_known(values), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min(_known(values), default=None)


def _growth(values: Iterable[float | None]) -> int | None:
    known = _known(values)
    return int(known[-1] - known[0]) if known else None
