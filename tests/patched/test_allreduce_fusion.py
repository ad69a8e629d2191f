"""allreduce-fusion and its fallback: when it is on, what a declining kernel leads to, what 0.5.23 says instead."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.patched import loading
from tests.patched.loading import CARDS, FLASHINFER_063, SGLANG_0523, SGLANG_059, SM12X


def gate(card: str, *, flag: bool = True, patched: bool = True) -> ModuleType:
    arguments = SimpleNamespace(enable_flashinfer_allreduce_fusion=flag)
    return loading.load(SGLANG_059, "sglang.srt.layers.communicator", {
        **loading.checks(SGLANG_059, card, is_flashinfer_available=lambda: True, get_bool_env_var=lambda *_: False),
        "torch": loading.torch(card),
        "sglang.srt.server_args.get_global_server_args": lambda: arguments,
        "sglang.srt.layers.dp_attention.is_dp_attention_enabled": lambda: False}, patched=patched)


@pytest.mark.parametrize(("card", "on"), [("8.9", False), ("9.0", True), ("10.0", True), ("10.3", True), ("12.0", True),
                                          ("12.1", True)])
def test_the_gate_by_card(card: str, on: bool) -> None:
    assert bool(gate(card).apply_flashinfer_allreduce_fusion(8)) == on


@pytest.mark.parametrize("card", CARDS)
def test_the_gate_is_closed_without_the_flag_and_for_large_batches(card: str) -> None:
    assert not gate(card, flag=False).apply_flashinfer_allreduce_fusion(8)
    assert not gate(card).apply_flashinfer_allreduce_fusion(2049)
    assert not gate(card).apply_flashinfer_allreduce_fusion(0)


@pytest.mark.parametrize("card", [card for card in CARDS if card not in SM12X])
@pytest.mark.parametrize("tokens", [0, 1, 2048, 2049])
def test_the_gate_of_other_cards_is_upstreams(card: str, tokens: int) -> None:
    ours, theirs = (gate(card, patched=patched).apply_flashinfer_allreduce_fusion(tokens) for patched in (True, False))

    assert bool(ours) == bool(theirs)


def test_upstream_takes_the_flag_and_does_nothing() -> None:
    assert not gate("12.0", patched=False).apply_flashinfer_allreduce_fusion(8)


@pytest.mark.parametrize(("card", "said"), [("10.0", False), ("12.0", True), ("12.1", True)])
def test_the_workspace_says_that_the_fused_path_runs(card: str, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    comm = loading.StandIn(name="flashinfer.comm")
    comm.trtllm_create_ipc_workspace_for_all_reduce_fusion.return_value = ("handles", "tensor")
    module = loading.load(SGLANG_059, "sglang.srt.layers.flashinfer_comm_fusion", {
        **loading.checks(SGLANG_059, card, is_flashinfer_available=lambda: True), "torch": loading.torch(card),
        "flashinfer.comm": comm})

    module.FlashInferWorkspaceManager().initialize(8, 0, 2048, 4096)

    assert ("buildctl patch allreduce-fusion:" in caplog.text) == said


# --- the norm ------------------------------------------------------------------------------------------------------


class Norm:
    """The base class of upstream's layers, as far as the norm needs it."""

    def __init__(self) -> None:
        self.weight, self.variance_epsilon = 1.0, 1e-6


def norm(*, declines: bool, world: int = 8, patched: bool = True) -> Any:
    """RMSNorm whose plain form gives back what it was called with; an all-reduce multiplies by the group size."""
    fused = loading.StandIn(name="fused", return_value=(None, None) if declines else ("fused", "residual"))
    module = loading.load(SGLANG_059, "sglang.srt.layers.layernorm", {
        **loading.checks(SGLANG_059, "12.0", get_bool_env_var=lambda *_: False), "torch": loading.torch("12.0"),
        "sglang.srt.layers.utils.MultiPlatformOp": Norm,
        "sglang.srt.distributed.get_tensor_model_parallel_world_size": lambda: world,
        "sglang.srt.distributed.tensor_model_parallel_all_reduce": lambda x: x * world,
        "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm": fused}, patched=patched)
    made = module.RMSNorm.__new__(module.RMSNorm)
    Norm.__init__(made)
    made.forward = lambda x, residual=None, addition=None: (x, residual, addition)
    return made


def test_when_flashinfer_declines_the_norm_all_reduces_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = norm(declines=True)

    assert layer.forward_with_allreduce_fusion(3, 10) == (24, 10, None)
    assert layer.forward_with_allreduce_fusion(3, 10) == (24, 10, None)
    assert caplog.text.count("buildctl patch fused-norm-fallback:") == 1


def test_the_addition_is_added_once() -> None:
    assert norm(declines=True).forward_with_allreduce_fusion(3, 10, 5) == (24, 15, None)


def test_upstream_leaves_a_partial_sum_and_adds_twice() -> None:
    assert norm(declines=True, patched=False).forward_with_allreduce_fusion(3, 10, 5) == (3, 15, 5)


@pytest.mark.parametrize("patched", [True, False])
def test_the_fused_result_and_single_cards_are_as_before(patched: bool) -> None:
    assert norm(declines=False, patched=patched).forward_with_allreduce_fusion(3, 10) == ("fused", "residual")
    assert norm(declines=True, world=1, patched=patched).forward_with_allreduce_fusion(3, 10, 5) == (3, 10, 5)
    assert norm(declines=True, patched=patched).forward_with_allreduce_fusion(3) == (3, None, None)


# --- FlashInfer ----------------------------------------------------------------------------------------------------


def jit_flags(archs: str, monkeypatch: pytest.MonkeyPatch, *, patched: bool = True) -> list[str]:
    """What nvcc is called with for the module of the fused all-reduce; the compilation context is the real one."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", archs)
    context = loading.load(FLASHINFER_063, "flashinfer.compilation_context", {"torch": loading.torch("12.0")})
    core = loading.StandIn(name="flashinfer.jit.core")
    core.current_compilation_context = context.CompilationContext()
    module = loading.load(FLASHINFER_063, "flashinfer.jit.comm", {"flashinfer.jit.core": core}, patched=patched)
    module.gen_trtllm_comm_module()
    if patched:
        assert core.logger.info.call_args.args[0].startswith("buildctl patch trtllm-comm-arch:")
    flags: list[str] = core.gen_jit_spec.call_args.kwargs["extra_cuda_cflags"]
    return flags


@pytest.mark.parametrize(("archs", "expected"), [("12.0a", "sm_120a"), ("12.1a", "sm_121a"), ("9.0a", "sm_90a"),
                                                 ("10.0a", "sm_100a")])
def test_the_module_is_compiled_for_the_card(archs: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(flag.endswith(f"code={expected}") for flag in jit_flags(archs, monkeypatch))


def test_ampere_is_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="No supported CUDA architectures"):
        jit_flags("8.9", monkeypatch)


def test_upstream_refuses_sm12x(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"major versions \[9, 10\]"):
        jit_flags("12.0a", monkeypatch, patched=False)


# --- 0.5.23 --------------------------------------------------------------------------------------------------------


def resolved(card: str, backend: str | None, *, forced_off: bool = False, patched: bool = True) -> dict[str, object]:
    """What the argument pipeline of 0.5.23 changes in its last word on fusion."""
    platform = SimpleNamespace(is_sm120=card in SM12X, is_sm90=card == "9.0", is_sm100=card in ("10.0", "10.3"))
    module = loading.load(SGLANG_0523, "sglang.srt.arg_groups.overrides", {
        "torch": loading.torch(card), "sglang.srt.runtime_context.get_platform": lambda: platform,
        "sglang.srt.arg_groups.resolution.register_post_process": lambda function: function}, patched=patched)
    view = SimpleNamespace(flashinfer_allreduce_fusion_backend=backend,
                           enforce_disable_flashinfer_allreduce_fusion=forced_off)
    found: dict[str, object] = module._enforce_disable_allreduce_fusion(view)
    return found


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("backend", ["auto", "trtllm", "mnnvl", "cutedsl"])
def test_on_sm12x_the_flag_is_taken_back_with_advice(card: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(card, backend) == {"flashinfer_allreduce_fusion_backend": None}
    assert "buildctl patch fusion-flag:" in caplog.text
    assert "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1" in caplog.text


@pytest.mark.parametrize("card", CARDS)
def test_without_the_flag_nothing_is_said(card: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(card, None) == {}
    assert not caplog.text


@pytest.mark.parametrize("card", [card for card in CARDS if card not in SM12X])
@pytest.mark.parametrize("forced_off", [True, False])
def test_other_cards_keep_the_flag_as_upstream(card: str, forced_off: bool) -> None:
    assert resolved(card, "auto", forced_off=forced_off) == resolved(card, "auto", forced_off=forced_off, patched=False)


@pytest.mark.parametrize("backend", ["auto", "trtllm", "mnnvl", "cutedsl"])
def test_upstream_dies_of_the_flag(backend: str) -> None:
    platform = SimpleNamespace(is_sm120=True, is_sm90=False, is_sm100=False)
    module = loading.load(SGLANG_0523, "sglang.srt.layers.flashinfer_comm_fusion", {
        "torch": loading.torch("12.0"), "sglang.srt.runtime_context.get_platform": lambda: platform,
        **loading.checks(SGLANG_0523, "12.0", is_flashinfer_available=lambda: False)})

    with pytest.raises(ValueError, match="requires SM90 or SM10X"):
        module._resolve_backend(backend)
