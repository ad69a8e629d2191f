"""Which backend is chosen on which card: the real code of 0.5.9 with its series, and as upstream has it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.patched import loading
from tests.patched.loading import CARDS, SGLANG_059, SM12X

FP8 = "sglang.srt.layers.quantization.fp8_utils"
GEMM = "sglang.srt.layers.deep_gemm_wrapper.configurer"
MOE = "sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_config"
ALL = pytest.mark.parametrize("card", CARDS)
OTHERS = pytest.mark.parametrize("card", [card for card in CARDS if card not in SM12X])


def load(module: str, card: str, given: dict[str, Any] | None = None, *, patched: bool = True, cuda: str = "13.0",
         **utils: Any) -> ModuleType:
    """A module of 0.5.9 on a machine with that card; `utils` are things of `sglang.srt.utils`."""
    known = {**loading.checks(SGLANG_059, card, **utils), "torch": loading.torch(card, cuda), **(given or {})}
    return loading.load(SGLANG_059, module, known, patched=patched)


def server_args(card: str, architecture: str, *, patched: bool = True, cuda: str = "13.0", **utils: Any) -> Any:
    """ServerArgs with its defaults, before anything was decided."""
    here = {"is_flashinfer_available": lambda: True, "is_triton_kernels_available": lambda: True,
            "get_device_name": lambda: "card", "get_bool_env_var": lambda *_: False, **utils}
    module = load("sglang.srt.server_args", card, patched=patched, cuda=cuda, **here)
    module.get_quantization_config = lambda config: "mxfp4"  # type: ignore[attr-defined]
    made = module.ServerArgs.__new__(module.ServerArgs)
    made.model_path, made.ep_size = "m", 1
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]), context_len=4096,
                             is_multimodal=True, get_num_kv_heads=lambda size: 8, is_generation=True)
    made.get_model_config = lambda: config
    made.use_mla_backend = lambda: architecture.startswith("Deepseek")
    return made


# --- attention: not patched, and it must stay that way -------------------------------------------------------------


@pytest.mark.parametrize(("card", "mha", "mla"), [
    ("8.9", "flashinfer", "triton"), ("9.0", "fa3", "fa3"), ("10.0", "trtllm_mha", "flashinfer"),
    ("10.3", "trtllm_mha", "flashinfer"), ("12.0", "flashinfer", "triton"), ("12.1", "flashinfer", "triton"),
])
def test_the_attention_backend_by_card(card: str, mha: str, mla: str) -> None:
    def chosen(architecture: str, patched: bool) -> str:
        args = server_args(card, architecture, patched=patched)
        args._handle_attention_backend_compatibility()
        return str(args.attention_backend)

    for patched in (True, False):
        assert chosen("LlamaForCausalLM", patched) == mha
        assert chosen("DeepseekV3ForCausalLM", patched) == mla


# --- FP8 -----------------------------------------------------------------------------------------------------------


def deep_gemm(card: str, *, patched: bool = True) -> ModuleType:
    environ = SimpleNamespace(envs=SimpleNamespace(SGLANG_ENABLE_JIT_DEEPGEMM=SimpleNamespace(get=lambda: True)))
    return load(GEMM, card, {"sglang.srt.environ": environ}, patched=patched)


@pytest.mark.parametrize(("card", "on", "ue8m0"), [
    ("8.9", False, False), ("9.0", True, False), ("10.0", True, True), ("10.3", True, True), ("12.0", False, False),
    ("12.1", False, False),
])
def test_deep_gemm_by_card(card: str, on: bool, ue8m0: bool) -> None:
    module = deep_gemm(card)

    assert (module.ENABLE_JIT_DEEPGEMM, bool(module.DEEPGEMM_SCALE_UE8M0)) == (on, ue8m0)
    assert module.BUILDCTL_PATCH_DEEPGEMM_GATE.startswith("buildctl patch deepgemm-gate:")


def test_upstream_takes_deep_gemm_on_sm12x_and_requantises_for_it() -> None:
    module = deep_gemm("12.0", patched=False)

    assert (module.ENABLE_JIT_DEEPGEMM, module.DEEPGEMM_SCALE_UE8M0) == (True, True)


def fp8_linear(card: str, *, patched: bool = True, asked: str = "auto", cutlass_env: bool = False) -> str:
    """The function that block-scaled FP8 layers use, by name."""
    envs = SimpleNamespace(SGLANG_ENABLE_FLASHINFER_FP8_GEMM=SimpleNamespace(get=lambda: False),
                           SGLANG_SUPPORT_CUTLASS_BLOCK_FP8=SimpleNamespace(get=lambda: cutlass_env))
    wrapper = deep_gemm(card, patched=patched)
    given = {"sglang.srt.environ": SimpleNamespace(envs=envs), "sglang.srt.layers.deep_gemm_wrapper": wrapper}
    module = load(FP8, card, given, patched=patched, is_flashinfer_available=lambda: True,
                  get_bool_env_var=lambda *_: False)
    module.initialize_fp8_gemm_config(SimpleNamespace(fp8_gemm_runner_backend=asked))
    return str(module.dispatch_w8a8_block_fp8_linear().__name__)


@pytest.mark.parametrize(("card", "expected"), [
    ("8.9", "triton_w8a8_block_fp8_linear"), ("9.0", "deepgemm_w8a8_block_fp8_linear_with_fallback"),
    ("10.0", "deepgemm_w8a8_block_fp8_linear_with_fallback"), ("10.3", "deepgemm_w8a8_block_fp8_linear_with_fallback"),
    ("12.0", "triton_w8a8_block_fp8_linear"), ("12.1", "triton_w8a8_block_fp8_linear"),
])
def test_the_fp8_gemm_by_card(card: str, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    assert fp8_linear(card) == expected
    assert ("buildctl patch fp8-gemm-backend:" in caplog.text) == (card in SM12X)


@OTHERS
def test_the_fp8_gemm_of_other_cards_is_upstreams(card: str) -> None:
    assert fp8_linear(card) == fp8_linear(card, patched=False)


def test_an_explicit_fp8_choice_stands() -> None:
    assert fp8_linear("12.0", asked="cutlass") == "cutlass_w8a8_block_fp8_linear_with_fallback"
    assert fp8_linear("12.0", cutlass_env=True) == "cutlass_w8a8_block_fp8_linear_with_fallback"


# --- MoE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("card", "expected"), [
    ("8.9", "triton_kernel"), ("9.0", "triton_kernel"), ("10.0", "flashinfer_mxfp4"), ("10.3", "flashinfer_mxfp4"),
    ("12.0", "triton_kernel"), ("12.1", "triton_kernel"),
])
def test_the_mxfp4_experts_by_card(card: str, expected: str) -> None:
    args = server_args(card, "GptOssForCausalLM")
    args._handle_model_specific_adjustments()

    assert args.moe_runner_backend == expected


def test_upstream_takes_experts_that_sm12x_has_no_kernels_for() -> None:
    args = server_args("12.0", "GptOssForCausalLM", patched=False)
    args._handle_model_specific_adjustments()

    assert args.moe_runner_backend == "flashinfer_mxfp4"


@pytest.mark.parametrize(("card", "constraints", "plain"), [
    ("9.0", {"split_k": 1}, False), ("10.0", {"is_persistent": True, "epilogue_subtile": 1}, False),
    ("12.0", {"is_persistent": False, "block_k": 128, "num_stages": 1}, True),
    ("12.1", {"is_persistent": False, "block_k": 128, "num_stages": 1}, True),
])
def test_the_mxfp4_weights_keep_a_plain_layout_on_sm12x(card: str, constraints: dict[str, object], plain: bool) -> None:
    details = loading.StandIn(name="triton_kernels.tensor_details")
    details.layout.make_default_matmul_mxfp4_w_layout.return_value = ("swizzled", {})
    details.layout.make_default_matmul_mxfp4_w_scale_layout.return_value = ("swizzled", {})
    details.layout.StridedLayout = "plain"
    flags = loading.StandIn(name="opt_flags")
    tensor = loading.StandIn(name="triton_kernels.tensor")
    module = load("sglang.srt.layers.quantization.mxfp4", card, {
        "triton_kernels.tensor_details": details, "triton_kernels.matmul_ogs_details.opt_flags": flags,
        "triton_kernels.tensor": tensor, "sglang.srt.layers.quantization.base_config.QuantizationConfig": object,
        "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase": object})

    module._swizzle_mxfp4(loading.StandIn(), loading.StandIn(), num_warps=8)

    assert flags.update_opt_flags_constraints.call_args.args == (constraints,)
    assert {call.args[1] for call in tensor.convert_layout.call_args_list} == {"plain" if plain else "swizzled"}


def default_tile(card: str, tokens: int, *, patched: bool = True) -> dict[str, int]:
    arguments = SimpleNamespace(enable_deterministic_inference=False)
    given = {"sglang.srt.server_args": SimpleNamespace(get_global_server_args=lambda: arguments)}
    module = load(MOE, card, given, patched=patched)
    config: dict[str, int] = module.get_default_config(tokens, 64, 2048, 4096, 8, "fp8_w8a8", False, None)
    return config


def shared_memory(tile: dict[str, int]) -> int:
    """Bytes of the tiles that Triton keeps in flight, both operands FP8."""
    return (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"]) * tile["BLOCK_SIZE_K"] * tile["num_stages"]


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("tokens", [1, 64, 65, 8192])
def test_the_default_fp8_tile_fits_the_shared_memory_of_sm12x(card: str, tokens: int,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    assert shared_memory(default_tile(card, tokens)) <= 101_376
    assert ("buildctl patch moe-fp8-smem:" in caplog.text) == (tokens > 64)


@OTHERS
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_default_fp8_tile_of_other_cards_is_upstreams(card: str, tokens: int) -> None:
    assert default_tile(card, tokens) == default_tile(card, tokens, patched=False)


def test_upstreams_default_does_not_fit() -> None:
    assert shared_memory(default_tile("12.0", 65, patched=False)) > 101_376


# --- the cuDNN hint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cuda", "package"), [("13.0", "nvidia-cudnn-cu13"), ("12.8", "nvidia-cudnn-cu12")])
def test_the_cudnn_check_names_the_package_of_this_cuda(cuda: str, package: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    args = server_args("12.0", "Qwen2VLForConditionalGeneration", cuda=cuda, torch_release=(2, 9, 1))
    torch = loading.torch("12.0", cuda)
    torch.backends.cudnn.version.return_value = 91300
    monkeypatch.setitem(type(args).check_torch_2_9_1_cudnn_compatibility.__globals__["__builtins__"], "__import__",
                        lambda *_: torch)

    with pytest.raises(RuntimeError, match="Compatibility Issue") as caught:
        args.check_torch_2_9_1_cudnn_compatibility()

    assert f"pip install '{package}>=9.16'" in str(caught.value)
    assert "buildctl patch cudnn-hint" in str(caught.value)
