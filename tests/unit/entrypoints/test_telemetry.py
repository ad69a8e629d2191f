from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoints import telemetry


class Nvml:
    """A made-up library with one card; what is not set raises, as old cards do."""

    def __init__(self, **values: Any) -> None:
        self.values = {"nvmlDeviceGetPowerUsage": 300_000, "nvmlDeviceGetEnforcedPowerLimit": 600_000,
                       "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80), "nvmlDeviceGetTemperature": 60,
                       "nvmlDeviceGetClockInfo": 2400, "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
                       "nvmlDeviceGetPcieReplayCounter": 3,
                       "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=10)], **values}

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        return lambda *_: self.values[name]


def samples(count: int = 5, **changes: Any) -> list[dict[str, Any]]:
    made = []
    for second in range(count):
        card = {**telemetry.cards(Nvml())[0], **{key: value[second] if isinstance(value, list) and key != "pids"
                                                 else value for key, value in changes.items()}}
        made.append({"now": float(second), "cpu_percent": 10.0 * second, "load_1m": 1.0, "used_gb": 4.0,
                     "gpus": [card]})
    return made


def test_a_card_that_does_not_answer_a_question_says_none() -> None:
    card = telemetry.cards(Nvml())[0]
    assert (card["power_w"], card["limit_w"], card["util"], card["ecc"]) == (300.0, 600.0, 80, None)
    assert card["pids"] == [10]


def test_only_the_measured_time_counts() -> None:
    found = telemetry.summarise(samples(), [(1.0, 2.0), (3.5, 4.0)], tokens=450, own=[10])
    assert found["samples"] == 3
    assert found["cpu_percent"] == pytest.approx((10 + 20 + 40) / 3, abs=1e-3)
    assert found["energy_j"] == pytest.approx(450.0)
    assert found["energy_j_per_token"] == pytest.approx(1.0)
    assert telemetry.causes(found) == []
    assert telemetry.warnings(found) == []


@pytest.mark.parametrize(("change", "text"), [
    ({"throttle": 0x20}, "GPU 0 was throttled"), ({"throttle": 0x80}, "GPU 0 was throttled"),
    ({"pids": [10, 77]}, "used by another process: 77"), ({"replays": [3, 3, 4, 4, 5000]}, "4997 PCIe replays"),
    ({"ecc": [0, 0, 0, 1, 1]}, "1 uncorrected memory errors"),
    ({"error": [None, None, None, "GPU is lost", "GPU is lost"]}, "GPU 0 does not answer any more: GPU is lost")])
def test_a_cause_in_the_machine_spoils_a_block_whatever_its_speed(change: dict[str, Any], text: str) -> None:
    found = telemetry.summarise(samples(**change), [(0.0, 5.0)], own=[10, 11])
    assert text in " ".join(telemetry.causes(found))


def test_pids_of_another_namespace_are_no_foreigners() -> None:
    found = telemetry.summarise(samples(pids=[4711]), [(0.0, 5.0)], own=[10])
    assert telemetry.causes(found) == []


def test_a_spin_loop_and_a_power_limit_are_warnings() -> None:
    spin = telemetry.summarise(samples(util=100, power_w=140.0, throttle=4), [(0.0, 5.0)], own=[10])
    text = " ".join(telemetry.warnings(spin))
    assert "waits in a loop" in text
    assert "power limit of 600.0 W" in text
    assert telemetry.causes(spin) == []


def test_a_few_replays_are_a_note() -> None:
    """A riser that repeats a packet now and then costs microseconds."""
    found = telemetry.summarise(samples(replays=[3, 3, 4, 4, 5]), [(0.0, 5.0)], own=[10])
    assert telemetry.causes(found) == []
    assert telemetry.warnings(found) == ["GPU 0: 2 PCIe replays: a riser or slot is marginal"]


def test_cards_that_wait_in_a_loop_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = telemetry.cards(Nvml())[0]
    hung = {**card, "util": 100, "power_w": 90.0}
    assert telemetry.spinning([card, hung]) == "GPU 1 is 100 % busy at 90 of 600 W"
    assert telemetry.spinning([{**hung, "limit_w": None}]) == ""
    monkeypatch.setattr(telemetry, "cards", lambda _: [hung])
    assert telemetry.spinning_now() == ""
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None))
    assert telemetry.spinning_now() == "GPU 0 is 100 % busy at 90 of 600 W"


def test_a_machine_without_gpu_and_spans_without_samples_give_nulls() -> None:
    rows = [{**one, "gpus": []} for one in samples()]
    found = telemetry.summarise(rows, [(9.0, 10.0)])
    assert (found["samples"], found["cpu_percent"], found["energy_j"], found["gpus"]) == (0, None, None, [])
    assert telemetry.trace(rows)[0] == [0.0, 0.0, None]
    assert len(telemetry.trace(samples() * 100, points=50)) <= 63
    assert telemetry.describe()["cores_usable"] >= 1


def test_the_sampler_reads_beside_and_ends() -> None:
    origin = time.perf_counter()
    seen: list[int] = []

    def cards() -> list[dict[str, Any]]:
        seen.append(1)
        return telemetry.cards(Nvml())

    with telemetry.Sampler(origin, every=0.01, read_gpus=cards) as sampler:
        while len(sampler.samples) < 3:
            time.sleep(0.005)
    assert [one["now"] for one in sampler.samples] == sorted(one["now"] for one in sampler.samples)
    assert sampler.samples[0]["gpus"][0]["power_w"] == 300.0
    assert not sampler._thread.is_alive()


def test_a_busy_machine_without_gpu_is_told() -> None:
    rows = [{**one, "gpus": [], "load_1m": 500.0} for one in samples()]
    assert "busy with other work" in telemetry.warnings(telemetry.summarise(rows, [(0.0, 5.0)]))[0]
