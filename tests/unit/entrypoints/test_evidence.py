"""Claims: active only with evidence, and the right reason otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from entrypoints import evidence, measure, trace
from entrypoints.command import CACHES
from entrypoints.evidence import Observation, merge, observe
from entrypoints.image import Patch
from tests.unit.entrypoints import recorded

DUAL: Mapping[str, Any] = {"tp_size": 2, "attention_backend": "flashinfer", "device": "cuda",
                           "disable_custom_all_reduce": False, "enable_torch_symm_mem": False}


def claim(name: str, *, version: str = "0.5.9", info: Mapping[str, Any] = DUAL, **more: Any) -> dict[str, Any]:
    found = observe(Observation("eagle3", version, info, **more))
    return next(one for one in found if one["claim"] == name)


def kernels(*names: str) -> trace.Summary:
    events = [{"ph": "X", "cat": "user_annotation", "name": "step[VERIFY bs=1]"}]
    return trace.summarize([*events, *({"ph": "X", "cat": "kernel", "name": name} for name in names)], "0.5.9")


def test_the_recorded_server() -> None:
    found = {one["claim"]: one for one in observe(Observation(
        "eagle3", recorded.VERSION, recorded.server_info(), log=recorded.log(), jit_files=0))}
    assert found["cuda-graphs"]["state"] == "unsupported"
    assert found["attention-backend"]["declared"] == "intel_amx"
    assert found["attention-backend"]["state"] == "unverified"
    assert found["custom-all-reduce"]["reason"] == "one GPU: nothing to reduce"
    assert found["no-jit-while-measuring"]["state"] == "active"


def test_nothing_is_active_from_a_flag_alone() -> None:
    info = {**DUAL, "enable_flashinfer_allreduce_fusion": True, "enable_torch_symm_mem": True,
            "speculative_algorithm": "EAGLE3"}
    found = observe(Observation("eagle3", "0.5.9", info, environment={"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"},
                                patches=[Patch("sglang", "1.patch", "00", "x", ""), Patch("sglang", "2.patch", "00",
                                                                                            "x", "marker")]))
    assert {one["state"] for one in found} == {"unverified"}
    assert all(one["reason"] for one in found)


def test_graphs_all_some_none_and_off() -> None:
    yes, no = "Decode batch, cuda graph: True, x", "Decode batch, cuda graph: False, x"
    assert claim("cuda-graphs", log=[yes, yes])["state"] == "active"
    some = claim("cuda-graphs", log=[yes, no])
    assert (some["state"], some["observed"]) == ("fallback", "1 of 2 decode lines")
    assert some["sources"][0]["excerpt"] == no
    assert claim("cuda-graphs")["state"] == "unverified"
    assert claim("cuda-graphs", info={**DUAL, "disable_cuda_graph": True})["state"] == "inactive"
    config = {"cuda_graph_config": {"decode": {"backend": "disabled"}}}
    assert claim("cuda-graphs", info={**DUAL, **config})["state"] == "inactive"


def test_symmetric_memory_asked_for_and_refused() -> None:
    """K4-6: asked: symmetric memory; in effect: NCCL."""
    warning = ("TorchSymmMemCommunicator: Device capability 12.0 not supported, communicator is not available.")
    found = claim("torch-symmetric-memory", version="0.5.23", info={**DUAL, "enable_torch_symm_mem": True},
                  log=[warning])
    assert (found["state"], found["declared"], found["observed"]) == ("unsupported", "on", "in effect: NCCL")
    note = claim("torch-symmetric-memory", version="0.5.23", log=[warning])
    assert note["state"] == "inactive"
    assert warning in note["reason"]


def test_symmetric_memory_by_the_marker_of_our_patch() -> None:
    patch = Patch("sglang", "0001-symm-mem.patch", "ab" * 32, "symm-mem", "buildctl patch symm-mem:")
    line = "[2026-12-01 05:00:00 TP0] buildctl patch symm-mem: two-shot all-reduce for 8 ranks"
    found = observe(Observation("b", "0.5.9", {**DUAL, "enable_torch_symm_mem": True}, log=[line], patches=[patch]))
    states = {one["claim"]: one["state"] for one in found}
    assert states["torch-symmetric-memory"] == "unverified", "the line is from its set-up"
    assert states["patch sglang/0001-symm-mem.patch"] == "active"


def test_fusion_set_up_is_not_yet_used() -> None:
    info = {**DUAL, "enable_flashinfer_allreduce_fusion": True}
    line = "FlashInfer workspace initialized for rank 0, backend trtllm"
    found = claim("all-reduce-fusion", info=info, log=[line])
    assert (found["state"], found["observed"]) == ("unverified", "set up")
    fused = "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>"
    used = claim("all-reduce-fusion", info=info, log=[line], trace=kernels(
        *[fused] * 126, *["ncclDevKernel_AllReduce_Sum"] * 2))
    assert used["state"] == "active"
    assert used["observed"] == "126 kernels in the trace, 126 per step; 2 NCCL all-reduces, 2 per step"
    unused = claim("all-reduce-fusion", info=info, log=[line], trace=kernels("ncclDevKernel_AllReduce_Sum"))
    assert (unused["state"], unused["reason"]) == ("inactive", "its kernels are not in the trace")


def test_one_kernel_beside_a_step_of_nccl_is_no_use() -> None:
    """K4-6: what counts is that NCCL has less to do in a step."""
    for claimed, info, environment, kernel in (
            ("all-reduce-fusion", {**DUAL, "enable_flashinfer_allreduce_fusion": True}, {}, "allreduce_fusion_kernel"),
            ("torch-symmetric-memory", {**DUAL, "enable_torch_symm_mem": True}, {}, "two_shot_all_reduce"),
            ("custom-all-reduce", DUAL, {}, "cross_device_reduce_1stage"),
            ("pcie-ipc-all-reduce", DUAL, {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "pcie_ipc_oneshot")):
        for own, state in ((1, "fallback"), (126, "fallback"), (127, "active")):
            seen = kernels(*[kernel] * own, *["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"] * 126)
            found = claim(claimed, info=info, environment=environment, trace=seen)
            assert found["state"] == state, (claimed, own)
        assert found["reason"] == ""
    few = claim("custom-all-reduce", trace=kernels("cross_device_reduce_1stage", *["ncclKernel_AllReduce_Sum"] * 126))
    assert few["reason"] == ("NCCL does most of it: 1 kernels in the trace, 1 per step; "
                             "126 NCCL all-reduces, 126 per step")


def test_fusion_that_fell_back() -> None:
    info = {**DUAL, "flashinfer_allreduce_fusion_backend": "trtllm"}
    line = "FlashInfer workspace preflight probe failed (no multicast). Skipping allreduce fusion."
    found = claim("all-reduce-fusion", version="0.5.23", info=info, log=[line])
    assert (found["state"], found["reason"]) == ("fallback", line)
    gap = claim("all-reduce-fusion", version="0.5.12", info=info, log=["nothing"])
    assert gap["state"] == "unverified"


def test_pcie_ipc_set_up_is_not_yet_used() -> None:
    """FlashInfer's tuning table may leave every shape of a model to NCCL, in silence."""
    on = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
    line = "FlashInfer PCIe-IPC workspace built (world=8, numel=196608)"
    assert claim("pcie-ipc-all-reduce", version="0.5.23", environment=on, log=[line])["state"] == "unverified"
    used = claim("pcie-ipc-all-reduce", version="0.5.23", environment=on, log=[line],
                 trace=kernels("pcie_ipc_allreduce_oneshot"))
    assert used["state"] == "active"
    back = "FlashInfer PCIe-IPC all-reduce failed: x; reductions stay on NCCL"
    assert claim("pcie-ipc-all-reduce", version="0.5.23", environment=on, log=[line, back])["state"] == "fallback"
    old = claim("pcie-ipc-all-reduce", version="0.5.9", environment=on)
    assert "no log lines are known for SGLang 0.5.9" in old["reason"]


def test_custom_all_reduce_on_more_than_two_cards() -> None:
    line = "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs."
    assert claim("custom-all-reduce", log=[line])["state"] == "fallback"
    assert claim("custom-all-reduce", info={**DUAL, "disable_custom_all_reduce": True})["state"] == "inactive"


def test_attention_by_its_kernels() -> None:
    flash = kernels("flashinfer::BatchDecodeWithPagedKVCacheKernel")
    assert claim("attention-backend", trace=flash)["state"] == "active"
    assert claim("attention-backend", trace=kernels("gemm"))["state"] == "inactive"
    assert claim("attention-backend", trace=trace.summarize([]))["reason"] == "the trace holds no GPU kernels"
    assert "no kernel names are known for fa4" in claim(
        "attention-backend", info={**DUAL, "attention_backend": "fa4"}, trace=flash)["reason"]
    assert claim("attention-backend", info={})["declared"] == "not reported"
    assert claim("attention-backend", info={"attention_backend": "a", "decode_attention_backend": "triton"},
                 trace=kernels("_fwd_grouped_kernel_stage1"))["state"] == "active"


def test_the_driver_compiles_too(tmp_path: Path) -> None:
    """PTX that the driver translates in the window lands in its own cache."""
    launch = SimpleNamespace(env={name: str(tmp_path / folder) for name, folder in CACHES.items()})
    block: Any = SimpleNamespace(task=SimpleNamespace(launch=launch))
    for name in ("cuda", "triton"):
        (tmp_path / name / "9a" / "f").mkdir(parents=True)
        (tmp_path / name / "9a" / "f" / "4c1d").touch()
    assert {Path(found).parents[2].name for found in measure._Measuring._compiled(block)} == {"cuda", "triton"}


def test_kernels_compiled_while_measuring() -> None:
    assert claim("no-jit-while-measuring", jit_files=3)["state"] == "inactive"
    assert claim("no-jit-while-measuring")["state"] == "unverified"


def test_required_claims_are_marked() -> None:
    found = observe(Observation("a", "0.5.9", DUAL), required=["cuda-graphs"])
    assert {one["claim"] for one in found if one["required"]} == {"cuda-graphs"}


def test_every_claim_that_a_start_makes_is_known() -> None:
    patches = [Patch("sglang", "1.patch", "00", "x", "")]
    found = [one["claim"] for one in observe(Observation("a", "0.5.9", DUAL, patches=patches))]
    assert ["speculation", *found] == list(evidence.known(patches))


def test_over_several_starts_the_worst_counts() -> None:
    good = observe(Observation("a", "0.5.9", DUAL, jit_files=0))
    bad = observe(Observation("a", "0.5.9", DUAL, jit_files=2))
    other = observe(Observation("b", "0.5.9", DUAL, jit_files=0))
    for parts in (merge(merge([], good), bad), merge(bad, good)):
        assert {one["claim"]: one["state"] for one in parts}["no-jit-while-measuring"] == "inactive"
    assert len(merge(good, other)) == len(good) + len(other)
    assert set(evidence.WORST) >= {one["state"] for one in good}


def test_a_trace_of_one_start_stands_for_the_others() -> None:
    shown = observe(Observation("a", "0.5.9", DUAL, trace=kernels("flashinfer::BatchDecodeWithPagedKVCacheKernel")))
    silent = observe(Observation("a", "0.5.9", DUAL))
    off = observe(Observation("a", "0.5.9", DUAL, trace=kernels("gemm")))
    for starts, state in (((shown, silent), "active"), ((silent, shown), "active"), ((silent, silent), "unverified"),
                          ((shown, silent, off), "inactive"), ((off, silent, shown), "inactive")):
        found: list[dict[str, Any]] = []
        for one in starts:
            found = merge(found, one)
        assert {one["claim"]: one["state"] for one in found}["attention-backend"] == state
