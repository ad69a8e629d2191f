"""How fast this machine could decode one stream at best: bytes that must move, over the bandwidth that was measured.

Time = weights read once, over all GPUs, plus the KV cache, plus two all-reduces for each layer under tensor
parallelism, plus the launch. On one GPU that is a lower bound on the time of a token, and no prediction; with several
it is what NCCL's all-reduce allows, which other ways can beat. Each input says where it comes from.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints import models

MICROBENCH = Path(__file__).with_name("microbench.py")
TIMEOUT = 180.0
#: launch of a decode step with CUDA graphs; given, not measured
LAUNCH_MS = 0.5
_EXPERT = re.compile(r"\.experts\.(\d+)\.|\.experts\.(gate_up|down|gate|up)_proj")


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Name to bytes of every tensor, from the headers of the safetensors files; {} when there are none.

    Raises `ValueError` for a file that is none.
    """
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            start = handle.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else file.stat().st_size
            if size > file.stat().st_size - 8:
                raise ValueError(f"{file.name} is no safetensors file, or not whole")
            header = json.loads(handle.read(size))
        for name, one in header.items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                found[name] = end - begin
    return found


def active_bytes(tensors: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Bytes of weights that one token reads: all but the embedding's other rows and the experts it does not visit."""
    text = config.get("text_config") or config
    experts = next((text[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if text.get(key)), 0)
    used = text.get("num_experts_per_tok") or 0
    total = 0.0
    head = any("lm_head" in name for name in tensors)
    for name, size in tensors.items():
        if "embed_tokens" in name and head:
            total += size / max(1, text.get("vocab_size") or 1)
        elif experts and used and _EXPERT.search(name) and "shared" not in name:
            total += size * used / experts
        elif not re.search(r"visual|vision_tower|\bmtp\b", name):
            total += size
    return round(total)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of the KV cache that each earlier token adds to what a new one reads (16 bit, or as the model's dtype)."""
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers") or 0
    size = 4 if "32" in str(text.get("dtype") or text.get("torch_dtype") or "") else 2
    if text.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        return int(layers * (text["kv_lora_rank"] + (text.get("qk_rope_head_dim") or 0)) * size)
    heads = text.get("num_attention_heads") or 1
    width = text.get("head_dim") or (text.get("hidden_size") or 0) // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * width * size)


def measure(python: Path, *, device: str, world: int, sizes: Sequence[int], environment: Mapping[str, str],
            timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run the microbenchmark with the server's python; `{"trouble": ...}` when that does not work."""
    words = [str(python), str(MICROBENCH), device, str(world), *map(str, sizes)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=dict(environment),
                              check=False)
    except subprocess.TimeoutExpired:
        return {"trouble": f"no answer within {timeout:g} s"}
    except OSError as error:
        return {"trouble": str(error)}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError) as error:
        return {"trouble": (done.stderr.strip().splitlines() or [str(error)])[-1]}


def inputs(model: Path | None, python: Path, *, cuda: bool, tp: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What `evaluate` needs from this machine and this model; `{"trouble": ...}` where something of it is not known.

    :param model: the model's folder; None for one that is not on this disk yet.
    """
    if model is None:
        return {"trouble": "the model's files were not here before the first start"}
    config = models.config(model)
    try:
        tensors = tensor_bytes(model)
    except (OSError, ValueError) as error:
        return {"trouble": str(error), "quantised": quantised(config)}
    if not tensors:
        return {"trouble": "the model has no safetensors files", "quantised": quantised(config)}
    text = config.get("text_config") or config
    message = int(text.get("hidden_size") or 0) * 2
    bench = measure(python, device="cuda" if cuda else "cpu", world=tp if cuda else 1,
                    sizes=[message, 4 * message] if tp > 1 else [], environment=environment)
    return {"active_bytes": active_bytes(tensors, config), "kv_bytes_per_token": kv_bytes_per_token(config),
            "layers": text.get("num_hidden_layers") or 0, "tp": tp, "cuda": cuda, "microbench": bench,
            "quantised": quantised(config)}


def quantised(config: Mapping[str, Any]) -> bool:
    """Whether a model's own config.json says that its weights are quantised; SGLang then needs no flag for it."""
    text = config.get("text_config") or {}
    return any(one.get(key) for one in (config, text) for key in ("quantization_config", "compression_config"))


def evaluate(given: Mapping[str, Any] | None, *, context: float, rate: float | None) -> dict[str, Any]:
    """The limit and its parts in ms, or `{"trouble": ...}`.

    `context` is the mean number of earlier tokens, `rate` the baseline's tok/s.
    """
    if not given:
        return {"trouble": "the run ended before it"}
    if "trouble" in given:
        return {"trouble": given["trouble"]}
    if not given["microbench"].get("mem_copy_gbs"):
        return {"trouble": f"the microbenchmark failed: {given['microbench'].get('trouble', 'no bandwidth')}"}
    bench, cards = given["microbench"], given["tp"] if given["cuda"] else 1
    bandwidth = min(bench["mem_copy_gbs"])
    parts = {"weights": 1e3 * given["active_bytes"] / (cards * bandwidth * 1e9),
             "KV cache": 1e3 * given["kv_bytes_per_token"] * context / (cards * bandwidth * 1e9),
             "all-reduce": 0.0, "launch": LAUNCH_MS if given["cuda"] else 0.0}
    where = "measured copy on the GPU" if given["cuda"] else "measured copy in this CPU's memory, not a GPU"
    rows = [{"name": "bandwidth", "value": f"{bandwidth:.1f} GB/s", "source": where},
            {"name": "weights read", "value": f"{given['active_bytes'] / 1e9:.3f} GB", "source": "safetensors headers"},
            {"name": "KV read", "value": f"{given['kv_bytes_per_token'] * context / 1e9:.4f} GB",
             "source": f"config.json, {context:.0f} tokens of context"}]
    if given["tp"] > 1 and bench.get("allreduce"):
        small = bench["allreduce"][0]
        parts["all-reduce"] = 2 * given["layers"] * small["us_median"] / 1e3
        rows.append({"name": "all-reduce", "value": f"{small['us_median']:.1f} us for {small['bytes']} bytes",
                     "source": f"measured with {small['backend']}, 2 for each of {given['layers']} layers"})
    if given["cuda"]:
        rows.append({"name": "launch", "value": f"{LAUNCH_MS} ms", "source": "given, not measured"})
    total = sum(parts.values())
    return {"parts_ms": {name: round(value, 5) for name, value in parts.items() if value}, "inputs": rows,
            "t_total_ms": round(total, 5), "limit_tok_s": round(1e3 / total, 2),
            "share_of_limit": round(rate * total / 1e3, 4) if rate else None}
