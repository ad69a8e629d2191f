"""Reading profiler traces: a real one of the CPU, made-up ones with GPU kernels."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from entrypoints import trace
from entrypoints.probe import NoAnswer
from tests.unit.entrypoints import recorded


def kernel(name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 1, "dur": 2}


def step(name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": 1, "dur": 2}


def test_a_real_cpu_trace_has_steps_and_no_kernels() -> None:
    found = trace.summarize(trace.read(recorded.trace_file()), recorded.VERSION)
    assert found.steps == 4
    assert not found.on_gpu
    assert found.per_step("nccl-all-reduce") == 0
    assert found.graph_launches == 0


def test_kernels_are_counted_by_family_and_step() -> None:
    events = [step("step[DECODE bs=1]"), step("step[DECODE bs=1]"), step("step[DRAFT bs=1]"),
              *[kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")] * 128,
              *[kernel("void flashinfer::BatchDecodeWithPagedKVCacheKernel<1, 2>")] * 64,
              kernel("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>"),
              {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch"}, {"ph": "i", "cat": "kernel", "name": "x"}]
    found = trace.summarize(events, "0.5.9")
    assert found.steps == 2
    assert found.per_step("nccl-all-reduce") == 64
    assert found.per_step("attention-flashinfer") == 32
    assert found.families["fused-all-reduce"] == 1
    assert found.graph_launches == 1
    shown = found.as_dict(top=1)
    assert list(shown["kernels"].values()) == [128]


def test_steps_of_the_profiler_itself_and_no_steps() -> None:
    assert trace.summarize([step("ProfilerStep#3"), step("ProfilerStep#4")]).steps == 2
    none = trace.summarize([kernel("gemm")])
    assert none.steps == 0
    assert none.per_step("nccl-all-reduce") is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[1, 2", b"\x1f\x8b broken", b'{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="no profiler trace"):
        trace.read(path)


def test_a_plain_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([kernel("a"), 3]))
    assert trace.read(path) == [kernel("a")]


class Profiled:
    """A server that writes a trace when it is asked to, rank 1 before rank 0."""

    def __init__(self, status: int = 200, content: bytes | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/start_profile" and status == 200:
                    for rank, name in ((1, "rank one"), (0, "rank zero")):
                        data = gzip.compress(json.dumps({"traceEvents": [kernel(name)]}).encode())
                        Path(order["output_dir"], f"17-TP-{rank}.trace.json.gz").write_bytes(
                            data if content is None else content)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> int:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self.server.server_port

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_taking_a_trace_reads_the_first_rank(tmp_path: Path) -> None:
    with Profiled() as port:
        found = trace.take(port, tmp_path / "trace", gpu=True)
    assert found.kernels == {"rank zero": 1}
    assert found.files == ("17-TP-0.trace.json.gz", "17-TP-1.trace.json.gz")


def test_a_server_that_does_not_profile(tmp_path: Path) -> None:
    with Profiled(status=404) as port, pytest.raises(NoAnswer, match="404"):
        trace.take(port, tmp_path, gpu=False)


def test_a_trace_that_stays_damaged(tmp_path: Path) -> None:
    with Profiled(content=b"cut") as port, pytest.raises(NoAnswer, match="no profiler trace"):
        trace.take(port, tmp_path, gpu=False, patience=0.5)
