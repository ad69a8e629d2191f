"""NVML through a stand-in module: what it says, what it refuses, and that it is not there."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from entrypoints import check, gpu, host, telemetry
from entrypoints.errors import Unusable
from tests.unit.entrypoints.test_check import image


class Refused(Exception):
    """NVMLError as the binding raises it: the library's code, and its words for it."""

    WORDS: ClassVar = {3: "Not Supported", 4: "Insufficient Permissions", 8: "Insufficient External Power",
                       15: "GPU is lost"}

    def __init__(self, value: int = 3) -> None:
        super().__init__(self.WORDS[value])
        self.value = value


def lost(card: int, value: int = 15, *, handle: bool = True, **changes: Any) -> types.ModuleType:
    """The same two cards; one of them was lost: before its handle was asked for, or after."""
    made = library(**changes)

    def but(name: str) -> Any:
        answer = getattr(made, name)

        def ask(*words: Any) -> Any:
            if card in words[:2 if "P2P" in name or "Topology" in name else 1]:
                raise Refused(value)
            return answer(*words)

        return ask

    for name in [name for name in vars(made) if name.startswith("nvmlDevice") and name != "nvmlDeviceGetCount"]:
        if handle or name != "nvmlDeviceGetHandleByIndex":
            setattr(made, name, but(name))
    return made


def library(**changes: Any) -> types.ModuleType:
    """A pynvml with two cards, 0 and 1; the second knows nothing about its link."""
    def refuse(*_: object) -> Any:
        raise Refused

    module = types.ModuleType("pynvml")
    memory = types.SimpleNamespace(total=96 * 2**30, used=2**30, free=95 * 2**30)
    known: dict[str, Any] = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlDeviceGetMemoryInfo": lambda _: memory,
        "nvmlDeviceGetCudaComputeCapability": lambda _: (12, 0), "nvmlDeviceGetName": lambda _: b"RTX",
        "nvmlSystemGetDriverVersion": lambda: "580.95.05", "nvmlSystemGetCudaDriverVersion": lambda: 13020,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda card: 5 if card == 0 else refuse(),
        "nvmlDeviceGetCurrPcieLinkWidth": lambda card: 16 if card == 0 else refuse(),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5, "nvmlDeviceGetGpuMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 600000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 600000,
        "nvmlDeviceGetPersistenceMode": lambda card: 1 if card == 0 else refuse(),
        "nvmlDeviceGetEccMode": lambda card: [0, 0] if card == 0 else refuse(),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [types.SimpleNamespace(pid=7)],
        "NVML_P2P_CAPS_INDEX_READ": (0,), "NVML_P2P_STATUS_OK": 0,  # a tuple, as in nvidia-ml-py 13.615
        "nvmlDeviceGetP2PStatus": lambda one, other, index: [0 if one < other else 1][index],
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 40 if one < other else refuse(), **changes}
    for name, value in known.items():
        setattr(module, name, value)
    return module


def test_two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    found = host.read()
    assert (found.driver, found.driver_cuda) == ("580.95.05", "13.2")
    first, second = found.gpus
    assert first == host.Gpu(0, "RTX", "12.0", 96 * 2**30, 2**30, (5, 16), (5, 16), 5, 600.0, (7,),
                             power_default=600.0, persistence=True, ecc=False)
    assert (second.persistence, second.ecc) == (None, None)
    assert second.pcie_now == (0, 0)
    assert found.p2p == ((None, True), (False, None))
    assert found.topology == (("self", "node"), ("unknown", "self"))
    assert gpu.used_memory() == (2**30, 2**30)


def test_peers_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise Refused
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetP2PStatus=refuse))
    assert host.read().p2p == ((None, None), (None, None))


def test_no_library_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Refused
    for module in (None, library(nvmlInit=refuse)):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert gpu.used_memory() == ()
        assert host.read().gpus == ()


@pytest.mark.parametrize(("visible", "indices"), [
    ("", [0, 1]), ("1", [1]), ("1,0", [0, 1]), ("GPU-1b", [1]), ("GPU-0, 1", [0, 1]), ("MIG-7", [0, 1]), ("7", []),
])
def test_only_the_cards_that_cuda_may_use_count(monkeypatch: pytest.MonkeyPatch, visible: str,
                                                indices: list[int]) -> None:
    """NVML ignores CUDA_VISIBLE_DEVICES: a neighbour's memory on another card is none of ours."""
    module = library(nvmlDeviceGetUUID=lambda card: b"GPU-0a" if card == 0 else "GPU-1b")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one.index for one in host.read().gpus] == indices
    assert len(gpu.used_memory()) == len(gpu.holders()) == len(indices)


def test_a_card_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGX Spark: NVML refuses the question."""
    def refuse(_: object) -> Any:
        raise Refused
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetMemoryInfo=refuse))
    assert gpu.used_memory() == (0, 0)
    assert [one.memory_total for one in host.read().gpus] == [0, 0]


def test_who_uses_a_card_as_far_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {0: [types.SimpleNamespace(pid=os.getpid()), types.SimpleNamespace(pid=2**22 - 1)], 1: []}
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetComputeRunningProcesses=users.__getitem__))
    first, second = gpu.holders()
    assert f"(pid {os.getpid()}), pid {2**22 - 1} outside this container" in first
    assert second == gpu.UNKNOWN
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.holders() == ()


@pytest.mark.parametrize("handle", [True, False])
def test_a_lost_card_is_one_line_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handle: bool) -> None:
    """NVML documents both words for nvmlDeviceGetHandleByIndex; any later call may say them too."""
    monkeypatch.setitem(sys.modules, "pynvml", lost(1, 15 if handle else 8, handle=handle))
    found = host.read()
    assert [one.error for one in found.gpus] == ["", "GPU is lost" if handle else "Insufficient External Power"]
    assert found.p2p == ((None, None), (None, None))
    findings = list(check.gpus(found, image(tmp_path, targets=["sm120"], cuda="13.0"), 2))
    (failed,) = [one for one in findings if one.state == "fail"]
    assert (failed.name, failed.found) == ("gpu lost", f"GPU 1: {found.gpus[1].error}")
    assert check.exit_code(findings) == 69
    with pytest.raises(Unusable, match="gpu lost"):
        check.before_start(findings, measuring=False)
    assert gpu.used_memory() == (2**30, None), "not known, and not zero"
    assert len(gpu.holders()) == 2
    first, second = telemetry.cards(sys.modules["pynvml"])
    assert first["limit_w"] == 600.0
    assert (second["limit_w"], second["pids"]) == (None, [])
    assert telemetry.spinning_now() == ""


def test_all_cards_lost_is_still_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise Refused(15)
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetHandleByIndex=refuse,
                                                       nvmlSystemGetDriverVersion=refuse))
    findings = list(check.gpus(host.read(), image(tmp_path, targets=["sm120"], cuda="13.0"), 2))
    assert "GPU 0: GPU is lost; GPU 1: GPU is lost" in check.render(findings)
    assert telemetry.describe()["gpus"][0]["mem_total"] == 0
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetCount=refuse))
    assert gpu.used_memory() == ()
    assert host.read().gpu_trouble == "NVML lists no GPU"


def test_cards_that_this_container_may_not_use_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts them and refuses their handle; CUDA numbers only the others."""
    monkeypatch.setitem(sys.modules, "pynvml", lost(0, 4))
    assert [(one.index, one.error) for one in host.read().gpus] == [(1, "")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [one.index for one in host.read().gpus] == [1]
    monkeypatch.setitem(sys.modules, "pynvml", lost(0, 4, nvmlDeviceGetCount=lambda: 1))
    assert host.read().gpu_trouble == "NVML refuses GPU 0: Insufficient Permissions"
    monkeypatch.setitem(sys.modules, "pynvml", library())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert host.read().gpu_trouble == "CUDA_VISIBLE_DEVICES=7 names none that is here"


@pytest.mark.parametrize(("visible", "used"), [
    ("GPU-0a", (2**30,)), ("GPU-1b", (None,)), ("GPU-0a,GPU-1b", (2**30, None)), ("1", (None,)), ("0", (2**30,))])
def test_a_lost_card_that_somebody_else_uses_is_none_of_ours(monkeypatch: pytest.MonkeyPatch, visible: str,
                                                             used: tuple[int | None, ...]) -> None:
    module = lost(1, nvmlDeviceGetUUID=lambda card: b"GPU-0a" if card == 0 else "GPU-1b")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.used_memory() == used
