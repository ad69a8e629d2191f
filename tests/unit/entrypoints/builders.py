"""Made-up raw data of a run: plan, blocks and requests with a known truth."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

STRATA = ("chat", "code", "math", "rewrite")


def plan(pairs: int = 4, **more: Any) -> dict[str, Any]:
    """A plan with the two usual arms."""
    return {
        "run_id": "r", "arms": [
            {"name": "baseline", "flags": {}, "argv": ["python"], "speculative": False, "control": False},
            {"name": "eagle3", "flags": {}, "argv": ["python"], "speculative": True, "control": False}],
        "primary_endpoint": {"metric": "decode_rate", "concurrency": 1, "baseline": "baseline", "candidate": "eagle3"},
        "load_points": [1], "prompts": {"count": 48}, "passes": 1, "max_tokens": 300, "effort": "standard",
        "looks": [pairs],
        "alpha_per_look": 0.05, "margin": 0.02, "order_seed": 1, "required_evidence": [], **more}


def block(index: int, pair: int, arm: str, causes: tuple[str, ...] = (), slot: int | None = None) -> dict[str, Any]:
    """A block that is valid unless it has causes."""
    return {"index": index, "slot": index if slot is None else slot, "pair": pair, "arm": arm, "passes": [],
            "port": 1, "pids": [], "t_start": 30.0 * index, "t_end": 30.0 * index + 25, "ready_evidence": {},
            "flush": [],
            "stop": None, "telemetry": None, "warmup": {"windows": [], "seconds": 1.0}, "t_ready_s": 10.0,
            "validity": {"ok": not causes, "causes": list(causes)}}


def request(block_index: int, pair: int, arm: str, prompt: str, rate: float, *, tokens: int = 300, tau: float = 0.0,
            send: float = 0.0, ttft: float = 0.05, **more: Any) -> dict[str, Any]:
    """A request that decodes at `rate`; `tau` above 0 makes it speculative."""
    dice = np.random.default_rng(int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16))
    last = ttft + (tokens - 1) / rate
    step = max(1, round(tau))
    counts = [1, *range(1 + step, tokens, step), tokens]
    rounds = len(counts) - 1
    row = {"block": block_index, "pair": pair, "arm": arm, "pass": 0, "concurrency": 1, "prompt_id": prompt,
           "stratum": prompt.partition("-")[0], "max_tokens": tokens, "t_queue": send, "t_send": send,
           "t_first": send + ttft, "t_last": send + last, "n_first_chunk": 1, "n_tokens_server": tokens,
           "n_tokens_client": tokens, "n_prompt": 20, "cached_tokens": 0, "finish_reason": "length",
           "spec_verify_ct": None, "spec_accepted": None, "spec_proposed": None, "accept_histogram": None,
           "output_ids": [int(one) for one in dice.integers(10, 2000, tokens)], "error": None,
           "chunks": [[ttft + (count - 1) / rate, count] for count in counts]}
    if tau:
        accepted = round(rounds * (tau - 1))
        row.update(spec_verify_ct=rounds, spec_accepted=accepted, spec_proposed=5 * rounds,
                   accept_histogram=[rounds - accepted, accepted])
    return {**row, **more}


def prompts(count: int = 8) -> list[str]:
    """Names spread over the four strata."""
    return [f"{STRATA[place % 4]}-{place:02}" for place in range(count)]


def run(ratio: float, pairs: int = 4, *, noise: float = 0.005, seed: int = 1, count: int = 8, tau: float = 2.0,
        base: float = 100.0) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Plan, blocks and requests of a whole run whose true ratio is `ratio`, `noise` the restart deviation."""
    dice = np.random.default_rng(seed)
    blocks: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for pair in range(pairs):
        for arm in ("baseline", "eagle3") if pair % 2 == 0 else ("eagle3", "baseline"):
            index = len(blocks)
            blocks.append(block(index, pair, arm))
            factor = float(np.exp(dice.normal(0, noise))) * (ratio if arm == "eagle3" else 1.0)
            spec = tau if arm == "eagle3" else 0.0
            rows += [request(index, pair, arm, name, base * factor * (1 + place / 50), tau=spec)
                     for place, name in enumerate(prompts(count))]
    return plan(pairs), blocks, rows
