"""The toolkit in a compiler's layout, and what is compiled ahead: the pure parts, and the stub with the real linker."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.guards import elf, tool

toolkit = tool("toolkit/toolkit")
ahead = tool("jit/ahead")
reader = tool("guard/elf")

HEADER = """
typedef enum cudaError_enum { CUDA_SUCCESS = 0 } CUresult;
CUresult __attribute__((x)) cuInit(unsigned int Flags);
CUresult cuMemAlloc_v2(void **dptr, unsigned long bytesize);
CUresult cuInit(unsigned int Flags);
int cudaMalloc(void *p);
"""


def test_functions_are_the_drivers_and_not_the_runtimes() -> None:
    assert toolkit.functions(HEADER) == ["cuInit", "cuMemAlloc_v2"]


def test_linkers_find_libraries_by_their_plain_names() -> None:
    assert toolkit.link_names(["libcudart.so.13", "libnvrtc.so.13", "libx.so", "libcudadevrt.a", "README"]) == {
        "libcudart.so": "libcudart.so.13", "libnvrtc.so": "libnvrtc.so.13", "libx.so": "libx.so",
        "libcudadevrt.a": "libcudadevrt.a"}


def test_the_compiler_of_the_wheels_is_found_and_two_are_refused(tmp_path: Path) -> None:
    assert toolkit.wheels_root(tmp_path) is None
    for version in ("cu13", "cu12"):
        (tmp_path / "nvidia" / version / "bin").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/bin/nvcc").touch()
    assert toolkit.wheels_root(tmp_path) == tmp_path / "nvidia/cu13"
    (tmp_path / "nvidia/cu12/bin/nvcc").touch()
    with pytest.raises(SystemExit, match=r"two CUDA versions.*cu12.*cu13"):
        toolkit.wheels_root(tmp_path)


def test_a_stub_can_be_linked_to_and_never_loaded(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    assert compiler, "this test needs gcc"
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda.h").write_text("int cuInit(unsigned int Flags);\n")
    stub = tmp_path / "libcuda.so"
    assert toolkit.make_stub(include, stub) == 1
    with pytest.raises(OSError, match=r"libcuda\.so"):
        ctypes.CDLL(str(stub))
    user = tmp_path / "libuser.so"
    subprocess.run([compiler, "-shared", "-Wl,--no-undefined", "-x", "c", "-", "-x", "none", f"-L{tmp_path}", "-lcuda",
                    "-o", str(user)], input="int cuInit(unsigned int); int f(void) { return cuInit(0); }", text=True,
                   check=True)
    assert "libcuda.so.1" in reader.read(user).needed


def test_only_elf_is_made_unloadable() -> None:
    assert reader  # the same file, with segments, is loadable
    assert toolkit.unloadable(elf())[54:58] == bytes(4)
    with pytest.raises(ValueError, match="not a 64-bit"):
        toolkit.unloadable(b"#!/bin/sh")


@pytest.mark.parametrize(("cpus", "gigabytes", "expected"), [(4, 16, 4), (64, 64, 16), (2, 1, 1), (8, 7, 1)])
def test_jobs_fit_cpus_and_memory(cpus: int, gigabytes: int, expected: int) -> None:
    assert ahead.jobs(cpus, gigabytes << 30) == expected


def test_memory_is_what_the_kernel_or_the_group_allows() -> None:
    meminfo = "MemTotal:       24000000 kB\nMemAvailable:   16000000 kB\n"
    assert ahead.free_memory(meminfo) == 16000000 * 1024
    assert ahead.free_memory(meminfo, "8589934592\n") == 8 << 30
    assert ahead.free_memory(meminfo, "max\n") == 16000000 * 1024


def test_modules_by_pattern_and_near_misses() -> None:
    known = ["norm", "page", "batch_decode_bf16_128", "batch_decode_bf16_256"]
    assert ahead.select(["norm", "batch_decode*128", "norm"], known) == ["norm", "batch_decode_bf16_128"]
    with pytest.raises(SystemExit, match=r"no module 'norms' \(like norm\?\), 'zzz' for"):
        ahead.select(["norms", "zzz"], known)


def test_nothing_is_imported_when_nothing_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules.txt").write_text("\n")
    monkeypatch.setattr("sys.argv", ["ahead.py", str(tmp_path)])
    assert ahead.main() == 0
