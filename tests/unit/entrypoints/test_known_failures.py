"""Failures that users have reported, played by the fault server: the right diagnosis, soon.

The ids are rows of our collection of reports (images, speculation, entrypoints); messages as the reporters gave them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from entrypoints.errors import ServerFault
from entrypoints.readiness import Expect, wait_ready
from tests.unit.entrypoints.serving import MODEL, server
from tests.unit.entrypoints.test_faults import RECOVERABLE

#: seconds within which each diagnosis must be there; the message comes after 0.3 s
SOON = 3.0
TRACE = ["Scheduler hit an exception: Traceback (most recent call last):",
         '|  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 3, in run']

ROWS: list[tuple[str, str, list[str], str, str]] = [
    # id, SGLang, lines, name of the fault, a word that the remedy must hold
    ("K1-1", "0.5.9", ["[sgl_kernel] CRITICAL: Could not load any common_ops library!", *TRACE,
                       "|ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory"],
     "kernel-wheel-cuda-major", "cu130"),
    ("K1-2", "0.5.9", [*TRACE, "|Internal Triton PTX codegen error",
                       "|ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"],
     "ptxas-too-old", "TRITON_PTXAS_PATH"),
    ("K1-3 trtllm", "0.5.9",
     [*TRACE, "|RuntimeError: Error in function 'TllmGenFmhaRunner' at fmhaRunner.cuh:30: Unsupported architecture"],
     "trtllm-attention-on-sm120", "flashinfer"),
    ("K1-3 shared memory", "0.5.9",
     [*TRACE, "|triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, "
              "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."],
     "kernel-shared-memory", "smaller blocks"),
    ("K1-4", "0.5.9", [*TRACE, "|RuntimeError: FlashInfer requires GPUs with sm75 or higher"],
     "toolkit-too-old", "12.9"),
    ("K1-5 compat", "0.5.9",
     [*TRACE, "|RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display "
              "driver / cuda driver combination"], "compat-hides-driver", "compat"),
    ("K1-5 driver", "0.5.9",
     ["|nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a "
      "newer version"], "driver-too-old", "580"),
    ("K2-1", "0.5.9",
     [*TRACE, "|RuntimeError: CRITICAL WARNING: PyTorch 2.9.1 & CuDNN Compatibility Issue Detected"],
     "cudnn-check", "nvidia-cudnn-cu13"),
    ("K2-2", "0.5.9",
     [*TRACE, "|RuntimeError: flashinfer-cubin version (0.6.8.post1) does not match flashinfer version (0.6.10). "
              "Please install the same version of both packages."], "flashinfer-versions", "one version"),
    ("K2-3", "0.5.9", [*TRACE, "|ImportError: libtorch_cuda.so: cannot open shared object file: No such file"],
     "torch-cpu-build", "as built"),
    ("K2-4", "0.5.23", [*TRACE, "|ImportError: common_ops.abi3.so: undefined symbol: _ZN5torch7Library4_defE"],
     "kernel-wheel-abi", "2.14.1"),
    ("K2-6", "0.5.23", [*TRACE, "|ImportError: libtorch_cuda.so: undefined symbol: ncclCommResume"],
     "two-nccl", "nvidia-nccl-cu12"),
    ("K4-6", "0.5.11", [*TRACE, "|RuntimeError: [SymmDeviceMemory] Device does not support multicasting."],
     "no-multicast", "symmetric memory"),
    ("symmetric memory on 0.5.9", "0.5.9", [*TRACE, "|KeyError: 12"], "symm-mem-table", "patch series"),
    ("fusion since 0.5.14", "0.5.23",
     [*TRACE, "|ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."], "fusion-on-sm120",
     "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"),
    ("K6-3c", "0.5.9", ["DetokenizerManager hit an exception: Traceback (most recent call last):"],
     "detokenizer-exception", "traceback"),
    ("K6-5 name", "0.5.9",
     [*TRACE, "|huggingface_hub.errors.HFValidationError: Repo id must use alphanumeric chars... '/weights-draft'"],
     "local-path-as-hub-name", "mount"),
    ("K6-6", "0.5.9",
     [*TRACE, "|torch.distributed.DistBackendError: NCCL error: unhandled system error",
      "|Error while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)"],
     "shared-memory-full", "--shm-size"),
    ("unknown flag", "0.5.9",
     ["|launch_server.py: error: unrecognized arguments: --flashinfer-allreduce-fusion-backend trtllm"],
     "unknown-flag", "--help"),
    ("removed flag", "0.5.23", ["|launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match "
                                "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill"],
     "removed-flag", "--cuda-graph-max-bs-decode"),
    ("out of memory", "0.5.9", [*TRACE, "|torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
     "gpu-out-of-memory", "--mem-fraction-static"),
]


def play(tmp_path: Path, version: str, lines: list[str], then: list[list[Any]]) -> tuple[ServerFault, float]:
    """The error that this server ends with, and the seconds from its first line on."""
    steps = [["after", 0.3], *(["log", line] for line in lines), *then]
    with server(tmp_path, grace=0.5, version=version, starting=None, then=steps) as one:
        with pytest.raises(ServerFault) as caught:
            wait_ready(one, Expect(MODEL), stall=30)
        seconds = time.monotonic() - one.started
    assert one.stop().clean
    return caught.value, seconds


@pytest.mark.parametrize(("row", "version", "lines", "name", "remedy"), ROWS, ids=[row[0] for row in ROWS])
def test_a_failure_is_named_with_our_remedy(tmp_path: Path, row: str, version: str, lines: list[str], name: str,
                                            remedy: str) -> None:
    """The server writes the lines and dies, with status 0 as upstream's teardown does."""
    error, seconds = play(tmp_path, version, lines, [["exit", 0]])
    assert error.diagnosis.fault == name
    assert remedy in error.diagnosis.remedy
    assert error.diagnosis.evidence
    assert error.exit_code == 69
    assert seconds < SOON


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] in {"K1-2", "K1-3 trtllm", "K4-6", "K6-3c"}],
                         ids=lambda row: row[0])
def test_it_is_named_even_while_the_server_lingers(tmp_path: Path, row: Any) -> None:
    """After a scheduler died SGLang waits 65 s for core dumps: nobody should wait with it."""
    error, seconds = play(tmp_path, row[1], row[2], [["hang"]])
    assert error.diagnosis.fault == row[3]
    assert seconds < SOON


def test_exit_0_after_sigquit_is_a_death(tmp_path: Path) -> None:
    """K6-2 (a): before it was ready."""
    line = "Received sigquit from a child process. It usually means the child failed."
    error, seconds = play(tmp_path, "0.5.9", [line], [["exit", 0]])
    assert error.diagnosis.cause == "server died: a child process failed"
    assert seconds < SOON


def test_an_unknown_failure_shows_its_first_exception(tmp_path: Path) -> None:
    lines = [*TRACE, "|FrobnicationError: nobody has seen this", "|During handling of the above exception:",
             "|Traceback (most recent call last):", "|  File x", "|RuntimeError: secondary"]
    error, _ = play(tmp_path, "0.5.23", lines, [["exit", 1]])
    assert error.diagnosis.cause == "FrobnicationError: nobody has seen this"
    assert error.diagnosis.fault == ""
    assert "entrypoint plan" in error.diagnosis.remedy


def test_a_row_of_another_version_does_not_match(tmp_path: Path) -> None:
    """`KeyError: 12` on a version that has the table must not be explained with the table."""
    error, _ = play(tmp_path, "0.5.23", [*TRACE, "|KeyError: 12"], [["exit", 1]])
    assert error.diagnosis.fault == ""
    assert error.diagnosis.cause == "KeyError: 12"


def test_a_server_that_tunes_its_kernels_is_left_alone(tmp_path: Path) -> None:
    """Rejected candidates are logged as errors, and the server goes on."""
    lines = [f"|{line}" for line in RECOVERABLE]
    tuning = "|RuntimeError: out of resource: shared memory, Required: 106496, Hardware limit: 101376"
    with server(tmp_path, log=[*lines, tuning], then=[["after", 0.2], *(["log", line] for line in lines)]) as one:
        wait_ready(one, Expect(MODEL), stall=30)
        while one.log.everything().count(RECOVERABLE[-1]) < 2:
            one.wait(0.05)
        one.check()
    assert one.stop().clean
