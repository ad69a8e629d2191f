from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoints import limit


def safetensors(file: Path, **tensors: int) -> None:
    header, at = {}, 0
    for name, size in tensors.items():
        header[name.replace("__", ".")] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


DENSE = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 2, "torch_dtype": "bfloat16"}


def test_a_token_reads_one_row_of_the_embedding_and_all_other_weights(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", model__embed_tokens__weight=10_000, lm_head__weight=10_000)
    safetensors(tmp_path / "b.safetensors", model__layers__0__mlp__weight=5_000)
    tensors = limit.tensor_bytes(tmp_path)
    assert sum(tensors.values()) == 25_000
    assert limit.active_bytes(tensors, DENSE) == 15_100
    tied = {name: size for name, size in tensors.items() if "lm_head" not in name}
    assert limit.active_bytes(tied, DENSE) == 15_000, "a tied embedding is read whole, as the head"


def test_a_mixture_reads_its_share_of_the_experts_and_the_shared_one() -> None:
    config = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2}
    tensors = {"model.layers.0.mlp.experts.0.up.weight": 800, "model.layers.0.mlp.experts.1.up.weight": 800,
               "model.layers.0.mlp.shared_experts.up.weight": 100, "lm_head.weight": 50}
    assert limit.active_bytes(tensors, config) == 1600 * 2 // 8 + 150


@pytest.mark.parametrize(("change", "size"), [
    ({}, 2 * 4 * 2 * 8 * 2), ({"torch_dtype": "float32"}, 2 * 4 * 2 * 8 * 4), ({"head_dim": 32}, 2 * 4 * 2 * 32 * 2),
    ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 4 * 576 * 2)])
def test_the_cache_grows_by_keys_and_values_of_each_layer(change: dict[str, Any], size: int) -> None:
    assert limit.kv_bytes_per_token({**DENSE, **change}) == size
    assert limit.kv_bytes_per_token({"text_config": {**DENSE, **change}}) == size


def test_the_split_of_a_mixture_on_eight_cards_is_that_of_the_design() -> None:
    """32 B active parameters at 4 bit, 61 layers, 8 cards at 83 % of 1792 GB/s (design: 344 tok/s at 8 us)."""
    bench = {"mem_copy_gbs": [0.83 * 1792] * 8,
             "allreduce": [{"bytes": 14336, "backend": "nccl", "us_median": 8.0, "us_max": 9.0}]}
    given = {"active_bytes": 16.2e9, "kv_bytes_per_token": 0, "layers": 61, "tp": 8, "cuda": True, "microbench": bench}
    found = limit.evaluate(given, context=500, rate=172.0)
    assert found is not None
    assert found["parts_ms"]["all-reduce"] == pytest.approx(0.976)
    assert found["limit_tok_s"] == pytest.approx(344, rel=0.05)
    assert found["share_of_limit"] == pytest.approx(0.5, rel=0.05)
    assert [row["name"] for row in found["inputs"]] == ["bandwidth", "weights read", "KV read", "all-reduce", "launch"]


def test_without_a_measurement_there_is_no_limit(tmp_path: Path) -> None:
    assert limit.evaluate(None, context=1, rate=1.0) == {"trouble": "the run ended before it"}
    assert limit.evaluate({"microbench": {"trouble": "x"}}, context=1, rate=1.0) == {
        "trouble": "the microbenchmark failed: x"}
    found = limit.inputs(None, Path("/p"), cuda=False, tp=1, environment={})
    assert limit.evaluate(found, context=1, rate=1.0) == found
    assert "not here before" in found["trouble"]
    assert "no safetensors" in limit.inputs(tmp_path, Path("/p"), cuda=False, tp=1, environment={})["trouble"]
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    found = limit.inputs(tmp_path, Path("/p"), cuda=False, tp=1, environment={})
    assert found == {"trouble": "model.safetensors is no safetensors file, or not whole", "quantised": True}
    (tmp_path / "model.safetensors").write_text("")
    assert "not whole" in limit.inputs(tmp_path, Path("/p"), cuda=False, tp=1, environment={})["trouble"]


def test_models_that_say_themselves_that_they_are_quantised() -> None:
    assert limit.quantised({"text_config": {"compression_config": {"format": "x"}}})
    assert not limit.quantised({"text_config": {"hidden_size": 1}, "quantization_config": None})


@pytest.mark.parametrize(("script", "trouble"), [
    ("import sys; sys.exit('no torch here')", "no torch here"), ("print('x')", "Expecting value"),
    ("import time; time.sleep(60)", "no answer within 1 s")])
def test_a_microbenchmark_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str,
                                              trouble: str) -> None:
    broken = tmp_path / "m.py"
    broken.write_text(script)
    monkeypatch.setattr(limit, "MICROBENCH", broken)
    found = limit.measure(Path(sys.executable), device="cpu", world=1, sizes=[], environment={}, timeout=1)
    assert trouble in found["trouble"]
    assert "trouble" in limit.measure(tmp_path / "none", device="cpu", world=1, sizes=[], environment={})
