"""The check on machines that we have not: facts are injected."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from entrypoints import check, contract
from entrypoints.check import Finding, exit_code, render, tensor_parallel
from entrypoints.errors import CannotWrite, InputMissing, Unusable
from entrypoints.host import Gpu, Host, memory_limit, read
from entrypoints.image import Image, load
from entrypoints.settings import Settings, resolve
from tests.unit.entrypoints.image import write

GIB = 2**30
AGREEMENT = check.agreement
BARE = Host(cpus=2, memory=24 * GIB, shm_total=64 * 2**20, shm_free=64 * 2**20, memlock=-1, uid=1000)
PAIRS = tuple(tuple(None if i == j else True for j in range(8)) for i in range(8))
BOX = Host(cpus=128, memory=1024 * GIB, shm_total=64 * GIB, shm_free=64 * GIB, memlock=-1, uid=1000,
           driver="580.95.05", driver_cuda="13.0", p2p=PAIRS,
           topology=tuple(tuple("self" if i == j else "node" for j in range(8)) for i in range(8)),
           gpus=tuple(Gpu(index=n, name="NVIDIA RTX PRO 6000 Blackwell", capability="12.0", memory_total=96 * GIB,
                          memory_used=0, pcie_now=(1, 16), pcie_max=(5, 16), pcie_card=5, power_limit=600,
                          power_default=600, persistence=True, ecc=True)
                      for n in range(8)))


def image(tmp_path: Path, **changes: Any) -> Image:
    pinned = {"pytest": importlib.metadata.version("pytest")}
    return load(write(tmp_path, **{"packages": pinned, **changes}))


def settings(tmp_path: Path, *words: str) -> Settings:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "results").mkdir(exist_ok=True)
    return resolve(["--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "results"), *words], {})


@pytest.fixture(autouse=True)
def no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is not installed where the tests run: its source is judged in a test of its own."""
    monkeypatch.setattr(check, "agreement", lambda *_: Finding("contract", "skip", "not here"))


def states(host: Host, tmp_path: Path, *words: str, **changes: Any) -> dict[str, Finding]:
    changes = {"targets": ["sm120"], "cuda": "13.0", **changes}
    found = check.run(host, image(tmp_path, **changes), settings(tmp_path, *words), {})
    return {one.name: one for one in found}


def change(host: Host, index: int, **more: Any) -> Host:
    cards = list(host.gpus)
    cards[index] = dataclasses.replace(cards[index], **more)
    return dataclasses.replace(host, gpus=tuple(cards))


def test_a_good_box_of_eight(tmp_path: Path) -> None:
    found = states(BOX, tmp_path, "--", "--tp", "8")
    assert {one.state for one in found.values()} <= {"ok", "skip"}, render(list(found.values()))
    assert found["gpu count"].needed == "8 (--tp)"
    assert found["pcie link"].found == "gen 5 x16"
    assert exit_code(found.values()) == 0


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    found = states(BARE, tmp_path, targets=["cpu"], cuda=None)
    assert found["gpu"].state == "ok"
    assert "no GPU, none needed" in found["gpu"].found
    wrong = states(BARE, tmp_path)
    assert wrong["gpu"].state == "fail"
    assert "--gpus all" in wrong["gpu"].remedy
    assert exit_code(wrong.values()) == 69
    blind = states(dataclasses.replace(BARE, gpu_trouble="a GPU device is there, but NVML does not answer"), tmp_path)
    assert blind["gpu"].found.startswith("a GPU device is there")


@pytest.mark.parametrize(("host", "name", "state", "found"), [
    (dataclasses.replace(BOX, driver="570.10"), "driver", "fail", "570.10"),
    (dataclasses.replace(BOX, driver="unknown"), "driver", "fail", "unknown"),
    (dataclasses.replace(BOX, gpus=BOX.gpus[:4]), "gpu count", "fail", "4"),
    (change(BOX, 3, capability="10.0", name="B200"), "gpu capability", "fail", "B200"),
    (change(BOX, 1, processes=(77,)), "gpu processes", "warn", "GPU 1: pid 77"),
    (change(BOX, 2, memory_used=90 * GIB), "gpu memory", "fail", "GPU 2: 90.0 of 96 GiB used"),
    (change(BOX, 4, power_limit=300), "gpu power", "warn", "GPU 4: 300 of 600 W"),
    (change(BOX, 4, persistence=False), "gpu settings", "warn", "persistence off on GPU 4, ECC on"),
    (change(BOX, 4, ecc=False), "gpu settings", "warn", "persistence on, ECC off and on"),
    (dataclasses.replace(BOX, p2p=((None, False), (True, None))), "p2p", "warn", "no peer access for 1 of"),
    (dataclasses.replace(BOX, p2p=((None, None), (None, None))), "p2p", "warn", "unknown"),
    (change(BOX, 5, pcie_now=(5, 8)), "pcie link", "warn", "GPU 5: gen 5 x8 of gen 5 x16"),
    # a narrow or old slot: NVML's maximum is that of card and slot together
    (change(BOX, 5, pcie_now=(1, 8), pcie_max=(5, 8)), "pcie link", "warn", "GPU 5: gen 5 x8 of gen 5 x16"),
    (change(BOX, 5, pcie_max=(4, 16)), "pcie link", "warn", "GPU 5: gen 4 x16 of gen 5 x16"),
    (dataclasses.replace(BOX, shm_total=64 * 2**20, shm_free=64 * 2**20), "shared memory", "fail", "64 MiB in all"),
    (dataclasses.replace(BOX, shm_free=100 * 2**20), "shared memory", "fail", "100 MiB free of 64 GiB"),
    (dataclasses.replace(BOX, shm_total=8 * GIB, shm_free=8 * GIB), "shared memory", "warn", "8.0 of 8.0 GiB"),
    (dataclasses.replace(BOX, memlock=8 * 2**20), "memlock", "warn", "8.0 MiB"),
])
def test_a_bad_box_is_told_what_to_do(tmp_path: Path, host: Host, name: str, state: str, found: str) -> None:
    """K6-6 among others: nearly full with old segments."""
    one = states(host, tmp_path, "--", "--tp", "8")[name]
    assert one.state == state
    assert found in one.found
    assert one.remedy
    assert one.needed


def test_what_a_card_does_not_say_is_no_failure(tmp_path: Path) -> None:
    """A DGX Spark has no memory of its own, and NVML says no link."""
    spark = dataclasses.replace(BOX.gpus[0], memory_total=0, pcie_now=(0, 0), pcie_max=(0, 0), pcie_card=0)
    two = dataclasses.replace(BOX, gpus=(spark, dataclasses.replace(spark, index=1)))
    found = states(two, tmp_path, "--", "--tp", "2")
    assert (found["gpu memory"].state, found["gpu memory"].found) == ("ok", "the machine's own memory")
    assert (found["pcie link"].state, found["pcie link"].found) == ("warn", "unknown")
    assert states(BOX, tmp_path)["gpu memory"].found == "96 GiB free each"


def test_shared_memory_of_one_gpu_is_a_note(tmp_path: Path) -> None:
    """K6-6: 64 MB and TP 1."""
    small = dataclasses.replace(BOX, shm_total=64 * 2**20, shm_free=64 * 2**20)
    one = states(small, tmp_path)["shared memory"]
    assert one.state == "warn"
    assert one.remedy == "docker run --ipc=host, or --shm-size=32g"
    assert "p2p" not in states(small, tmp_path)


def test_only_the_gpus_of_the_server_are_judged(tmp_path: Path) -> None:
    """Half of the box serves something else: no reason to refuse."""
    half = BOX
    for index in range(4):
        half = change(half, index, memory_used=90 * GIB, processes=(77,), capability="8.9")
    second = states(half, tmp_path, "--", "--tp", "4", "--base-gpu-id", "4")
    assert {second[name].state for name in ("gpu count", "gpu capability", "gpu memory")} == {"ok"}
    assert second["gpu processes"].state == "warn"
    assert states(half, tmp_path, "--", "--tp", "4")["gpu memory"].state == "fail"
    assert states(half, tmp_path, "--", "--tp", "8", "--base-gpu-id", "4")["gpu count"].found == (
        "8, 4 from --base-gpu-id 4 on")


def test_tensor_times_pipeline(tmp_path: Path) -> None:
    built = image(tmp_path)
    assert tensor_parallel(built, settings(tmp_path, "--", "--tp", "4", "--dp", "2")) == 8
    assert tensor_parallel(built, settings(tmp_path, "--", "--tp", "4", "--dp", "4", "--enable-dp-attention")) == 4
    assert tensor_parallel(built, settings(tmp_path, "--", "--tp", "16", "--nnodes", "2")) == 8
    assert tensor_parallel(built, settings(tmp_path)) == 1
    assert tensor_parallel(built, settings(tmp_path, "--", "--tensor-parallel-size=4", "--pp", "2")) == 8
    assert tensor_parallel(built, settings(tmp_path, "--", "--tp", "all")) == 1


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = states(BARE, tmp_path, "--results", str(tmp_path / "file" / "none"))
    assert found["results"].state == "fail"
    assert states(BARE, tmp_path, "--results", str(tmp_path / "not-yet"))["results"].state == "ok"
    assert found["cache"].state == "ok"
    assert found["kernel cache"].found.startswith("cold")
    (tmp_path / "cache" / "abababababababab" / "triton").mkdir(parents=True)
    assert states(BARE, tmp_path)["kernel cache"].found.startswith("warm")


def test_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": GIB})
    monkeypatch.setattr("entrypoints.check.shutil.disk_usage", lambda _: usage)
    assert states(BARE, tmp_path)["results"].state == "warn"


def test_models_and_their_exit_code(tmp_path: Path) -> None:
    found = states(BOX, tmp_path, "--model", "/none", "--draft", "/none2")
    assert found["model"].state == "fail"
    assert found["draft"].state == "fail"
    assert exit_code(found.values()) == 66
    assert states(BOX, tmp_path)["model"].state == "skip"
    hub = states(BOX, tmp_path, "--model", "org/model")
    assert hub["model"].found == "org/model: not looked at: on the hub"


def test_integrity_of_patches_packages_and_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Path(pytest.__file__).parents[1]
    patched = "pytest/__main__.py"
    text = f"Description: x\n---\n--- a/{patched}\n+++ b/{patched}\n@@ -1 +1 @@\n"
    folder = tmp_path / "patches" / "pytest"
    folder.mkdir(parents=True)
    (folder / "0001-x.patch").write_text(text, encoding="utf-8")
    digest = hashlib.sha256((site / patched).read_bytes()).hexdigest()
    tree = hashlib.sha256(f"{digest}  {patched}\n".encode()).hexdigest()
    good = {"package": "pytest", "name": "0001-x.patch", "sha256": hashlib.sha256(text.encode()).hexdigest()}

    def look(**changes: Any) -> dict[str, Finding]:
        built = image(tmp_path, **{"patches": [good], "trees": {"pytest": tree}, **changes})
        return {one.name: one for one in check.integrity(built, tmp_path / "patches")}

    assert {one.state for one in look().values()} == {"ok", "skip"}
    assert look(trees={"pytest": "00" * 32})["tree pytest"].state == "fail"
    assert look(patches=[{**good, "sha256": "00"}])["patches"].state == "fail"
    gone = look(patches=[{**good, "name": "0002-gone.patch"}])
    assert "No such file" in gone["patches"].found
    assert gone["tree pytest"].state == "fail"
    other = look(packages={"pytest": "1.0", "nothing-like-it": "2"})["packages"]
    assert other.state == "fail"
    assert "nothing-like-it absent instead of 2" in other.found
    assert look(python="/no/python")["packages"].state == "fail"
    assert look(python="/bin/false")["packages"].found == "no output"


def test_the_contract_against_the_installed_source(tmp_path: Path) -> None:
    entries = [one for one in contract.load() if one.literal and one.applies("0.5.23")]
    required = [one.literal for one in entries if one.required]

    def judge(*literals: str) -> Finding:
        (tmp_path / "all.py").write_text("\n".join(literals), encoding="utf-8")
        return AGREEMENT(tmp_path, "0.5.23")

    assert judge(*(one.literal for one in entries)).state == "ok"
    some = judge(*required)
    assert some.state == "warn"
    assert "/start_profile (unavailable: trace)" in some.found
    assert judge().state == "fail"
    assert AGREEMENT(tmp_path / "none", "0.5.23").state == "fail"


def test_an_absent_patched_file_changes_the_tree(tmp_path: Path) -> None:
    assert check.effective_tree(tmp_path, ["a"]) != check.effective_tree(tmp_path, [])


def test_failures_stop_a_start_and_warnings_are_handed_on(tmp_path: Path) -> None:
    """K6-6: /dev/shm of 64 MB and TP 2 is refused before the server starts."""
    small = dataclasses.replace(BOX, shm_total=64 * 2**20, shm_free=64 * 2**20, memlock=0)
    two = list(states(small, tmp_path, "--", "--tp", "2").values())
    with pytest.raises(Unusable, match="--shm-size=32g"):
        check.before_start(two, measuring=False)
    one = list(states(small, tmp_path).values())
    assert [found.name for found in check.before_start(one, measuring=True)] == ["shared memory", "memlock"]
    busy = list(states(change(BOX, 0, memory_used=90 * GIB), tmp_path).values())
    with pytest.raises(Unusable, match="gpu memory"):
        check.before_start(busy, measuring=True)
    assert [found.name for found in check.before_start(busy, measuring=False)] == ["gpu memory"]
    with pytest.raises(InputMissing):
        check.before_start(list(states(BOX, tmp_path, "--model", "/none").values()), measuring=False)
    (tmp_path / "file").touch()
    nowhere = list(states(BOX, tmp_path, "--results", str(tmp_path / "file" / "x")).values())
    with pytest.raises(CannotWrite):
        check.before_start(nowhere, measuring=True)
    assert exit_code(nowhere) == 73
    built = image(tmp_path)
    names = {found.name for found in check.run(BARE, built, settings(tmp_path), {}, whole=False)}
    assert "packages" not in names


def test_rendering(tmp_path: Path) -> None:
    text = render([Finding("a", "ok", "fine"), Finding("b", "fail", "bad", "good", "mend it"),
                   Finding("c", "warn", "so so", "", "")])
    assert text.splitlines() == [
        "ok    a                  fine", "fail  b                  bad (needed: good)",
        "                         do: mend it", "warn  c                  so so", "1 ok, 1 warn, 1 fail"]
    assert Finding("a", "ok", "fine").as_dict()["remedy"] == ""


def test_the_offline_switch_is_shown(tmp_path: Path) -> None:
    built = image(tmp_path)
    found = {one.name: one for one in check.run(BARE, built, settings(tmp_path), {"HF_HUB_OFFLINE": "1"})}
    assert found["hub"].found.startswith("offline")


def test_this_machine() -> None:
    host = read()
    assert host.cpus >= 1
    assert host.memory > 0
    assert host.shm_total >= host.shm_free > 0


def test_memory_limits_of_both_cgroup_versions(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1048576 kB\n")
    assert memory_limit(tmp_path, meminfo) == GIB
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1024\n")
    assert memory_limit(tmp_path, meminfo) == 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, meminfo) == 1024
    (tmp_path / "memory.max").write_text("2048\n")
    assert memory_limit(tmp_path, meminfo) == 2048
    assert memory_limit(tmp_path, tmp_path / "none") == 0


def test_compilers_that_do_not_fit_are_warned_about(tmp_path: Path) -> None:
    """2 jobs of 8 threads on 16 GB asked for about 48 GB (user-reports K1-6)."""
    small = dataclasses.replace(BOX, cpus=4, memory=16 * GIB)
    built = image(tmp_path, targets=["sm120"], cuda="13.0")
    (wrong,) = check.compilers(small, built, {"MAX_JOBS": "2", "NVCC_THREADS": "8"})
    assert (wrong.state, wrong.found) == ("warn", "MAX_JOBS=2, 8 threads each: about 64 GiB while kernels compile, "
                                                  "with 16 GiB of memory")
    assert "MAX_JOBS=4 and NVCC_THREADS=1" in wrong.remedy
    (fine,) = check.compilers(small, built, {"MAX_JOBS": "4", "NVCC_THREADS": "1"})
    assert (fine.state, fine.found) == ("ok", "MAX_JOBS=4, NVCC_THREADS=1")
    assert not list(check.compilers(small, image(tmp_path, targets=["cpu"]), {"MAX_JOBS": "99"}))
