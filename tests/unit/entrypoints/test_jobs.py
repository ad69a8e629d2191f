"""Compilers of a server: how many fit (user-reports K1-6), what stays as the user has said it."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoints import jobs
from tests.unit.guards import tool

GB = 1 << 30


@pytest.mark.parametrize(("cpus", "memory", "threads", "expected"), [
    (4, 16, 1, 4), (4, 16, 2, 2), (64, 64, 1, 16), (64, 64, 8, 2), (2, 1, 1, 1), (2, 64, 4, 1)])
def test_jobs_fit_cpus_and_memory(cpus: int, memory: int, threads: int, expected: int) -> None:
    found = jobs.jobs(cpus, memory * GB, threads)
    assert found == expected
    assert found == 1 or (found * threads <= cpus and found * threads * jobs.PER_JOB <= memory * GB)


def test_build_and_server_have_one_formula() -> None:
    ahead = tool("jit/ahead")
    assert ahead.PER_JOB == jobs.PER_JOB
    for cpus in (1, 2, 3, 8, 64, 256):
        for memory in (0, 1, 4, 7, 16, 64, 2048):
            assert ahead.jobs(cpus, memory * GB) == jobs.jobs(cpus, memory * GB)


def test_a_server_gets_what_nobody_has_said() -> None:
    assert jobs.variables({}, 64, 64 * GB) == {"MAX_JOBS": "16", "NVCC_THREADS": "1"}
    assert jobs.variables({"NVCC_THREADS": "2"}, 4, 16 * GB) == {"MAX_JOBS": "2"}
    assert jobs.variables({"FLASHINFER_NVCC_THREADS": "4"}, 8, 64 * GB) == {"MAX_JOBS": "2", "NVCC_THREADS": "4"}
    assert jobs.variables({"MAX_JOBS": "99"}, 4, 16 * GB) == {"NVCC_THREADS": "1"}
    assert jobs.variables({"MAX_JOBS": "", "NVCC_THREADS": "many"}, 4, 16 * GB) == {"MAX_JOBS": "4"}
    assert int(jobs.variables({})["MAX_JOBS"]) >= 1


@pytest.mark.parametrize(("environ", "words"), [
    ({}, ()), ({"MAX_JOBS": "4"}, ()), ({"MAX_JOBS": "-1"}, ()),
    ({"NVCC_THREADS": "8"}, ("MAX_JOBS=1, 8 threads each", "32 GiB")),
    ({"MAX_JOBS": "2", "NVCC_THREADS": "8"}, ("MAX_JOBS=2, 8 threads each", "64 GiB", "16 GiB of memory")),
    ({"MAX_JOBS": "64"}, ("MAX_JOBS=64, 1 thread each", "256 GiB"))])
def test_explicit_values_that_do_not_fit_are_named(environ: dict[str, str], words: tuple[str, ...]) -> None:
    said = jobs.too_many(environ, 16 * GB)
    assert bool(said) == bool(words)
    for word in words:
        assert word in said


@pytest.mark.parametrize(("files", "expected"), [
    ({"cpu.max": "max 100000\n"}, 8), ({"cpu.max": "250000 100000\n"}, 3), ({"cpu.max": "1000 100000\n"}, 1),
    ({"cpu.max": "nonsense\n"}, 8), ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2), ({}, 8)])
def test_cpus_are_those_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str],
                                     expected: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert jobs.processors(tmp_path) == expected
