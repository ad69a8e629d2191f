"""result.json from the raw files of a run; used at the end of a run and by `analyze`, so both say the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints import analyse, limit, records
from entrypoints import evidence as evidence_of
from entrypoints.errors import VERDICT_CODES, BadConfig, Problem
from entrypoints.plan import difference, digest, flags_of

SCHEMA_VERSION = 1
#: acceptance thresholds other than 1 make speculation lossy on purpose
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def assemble(folder: Path) -> dict[str, Any]:
    """Read plan, blocks, requests and context of a run and compute everything else.

    Raises `InputMissing` for a folder that is none, `BadConfig` when the plan was changed after it was made.
    """
    plan = records.document(folder / records.PLAN)
    if plan.get("sha256") != digest(plan):
        raise BadConfig(Problem(what="the plan was changed after it was made", where=str(folder / records.PLAN),
                                found=digest(plan), expected=str(plan.get("sha256")),
                                todo="restore the file; a plan is fixed before the first measurement"))
    context = records.document(folder / records.CONTEXT)
    blocks = records.lines(folder / records.BLOCKS)
    requests = records.lines(folder / records.REQUESTS)
    arguments = context.get("resolved_server_args", {})
    lossy = _lossy(plan, arguments, blocks)
    claims: list[dict[str, Any]] = []
    for block in blocks:
        if block["validity"]["ok"]:
            claims = evidence_of.merge(claims, block.get("evidence") or [])
    evidence = [one for one in claims if one["claim"] != "speculation"]
    evidence += _speculation(plan, blocks, requests, arguments)
    quantised = any(table.get("quantization") for table in arguments.values()) or \
        bool((context.get("limit_inputs") or {}).get("quantised"))
    found = analyse.analyse(plan, blocks, requests, evidence=evidence, arms_diff=context.get("arms_diff"), lossy=lossy,
                            quantised=quantised)
    verdict = found.pop("verdict")
    summaries = found.pop("arms")
    status = context.get("status", "running")
    if status in {"aborted", "running"}:
        verdict["invalid_causes"].insert(0, context.get("abort_reason") or "the run did not end")
        verdict["class"] = "invalid"
    elif verdict["class"] == "invalid":
        status = "invalid"
    verdict["reasons"] += _crowded(plan, arguments) + _afterwards(blocks)
    comparison = found["comparison"]
    _effects(plan, comparison, evidence)
    verdict["headline"] = headline(verdict["class"], comparison[0] if comparison else {}, plan)
    verdict["wording_version"] = 1
    return {
        "schema_version": SCHEMA_VERSION, "run_id": plan["run_id"], "started_at": context.get("started_at"),
        "ended_at": context.get("ended_at"), "status": status, "exit_code": VERDICT_CODES[verdict["class"]],
        "raw_sha256": _raw_digest(folder), "plan": plan, "looks_taken": context.get("looks_taken", []),
        "software": {**context.get("software", {}), "contract": _contract(blocks)},
        "machine": context.get("machine", {}),
        "arms": {arm["name"]: {**arm, "resolved_server_args": arguments.get(arm["name"], {}),
                               "load_points": summaries[arm["name"]]} for arm in plan["arms"]},
        "arms_diff": context.get("arms_diff", {}), "settings": context.get("settings", []),
        "prompts": {**plan["prompts"], "rendered_ids_sha256": context.get("rendered_ids_sha256"),
                    "max_tokens": plan["max_tokens"], "ignore_eos": plan["ignore_eos"],
                    "temperature": plan["temperature"]},
        "blocks": blocks, "requests_file": {"path": records.REQUESTS, "count": len(requests),
                                            "sha256": records.file_digest(folder / records.REQUESTS)},
        "evidence": evidence, "limit": _limit(plan, context, requests, summaries),
        "client_calibration": context.get("client_calibration", []), **found, "verdict": verdict}


def _raw_digest(folder: Path) -> str:
    """One hash over the raw files that everything else follows from."""
    names = (records.PLAN, records.CONTEXT, records.BLOCKS, records.REQUESTS)
    return hashlib.sha256("".join(f"{name} {records.file_digest(folder / name)}\n" for name in names).encode()
                          ).hexdigest()


def _crowded(plan: Mapping[str, Any], arguments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Load points above what a server runs at once: there requests wait in its queue."""
    return [f"concurrency {point} is above the {limit_of} requests that {arm} runs at once"
            for arm, table in arguments.items() for point in plan["load_points"]
            if (limit_of := table.get("effective_max_running_requests_per_dp")) and point > limit_of]


def _afterwards(blocks: list[dict[str, Any]]) -> list[str]:
    """What happened to a server after its block was measured: that spoils the next start and not the numbers."""
    found = []
    for block in blocks:
        stop = block["stop"] or {}
        name = f"block {block['index']} ({block['arm']})"
        if stop.get("before_stop") and block["validity"]["ok"]:
            found.append(f"{name}: the server ended by itself after its last answer, exit status {stop['exit_code']}; "
                         "what was measured before counts")
        found += [f"{name}: {one['what']}: {one['found']}" for one in stop.get("left") or []]
    return found


def _limit(plan: Mapping[str, Any], context: Mapping[str, Any], requests: list[dict[str, Any]],
           summaries: Mapping[str, Any]) -> dict[str, Any]:
    """The limit of this machine against the baseline's decode rate of a single stream."""
    base = plan["primary_endpoint"]["baseline"]
    alone = summaries[base].get("1")
    lengths = [row["n_prompt"] + row["n_tokens_server"] / 2 for row in requests
               if row["arm"] == base and row["n_prompt"] and row["n_tokens_server"]]
    return limit.evaluate(context.get("limit_inputs"), context=sum(lengths) / len(lengths) if lengths else 0.0,
                          rate=alone and alone["decode_rate"]["geomean"])


def _contract(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """What some server start should have reported and did not."""
    missing = {one["name"]: one for block in blocks for one in block.get("contract") or []}
    return {"ok": not missing, "missing_fields": [missing[name] for name in sorted(missing)]}


def _lossy(plan: Mapping[str, Any], arguments: Mapping[str, Mapping[str, Any]],
           blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Thresholds that differ from 1 in the resolved arguments or after the measurement."""
    found: dict[str, Any] = {}
    speculative = {arm["name"] for arm in plan["arms"] if arm["speculative"]}
    tables = [arguments.get(name, {}) for name in speculative]
    tables += [block.get("server_info_after") or {} for block in blocks if block["arm"] in speculative]
    for table in tables:
        found.update({name: table[name] for name in THRESHOLDS if table.get(name) not in (None, 1, 1.0)})
    return found


def _speculation(plan: Mapping[str, Any], blocks: list[dict[str, Any]], requests: list[dict[str, Any]],
                 arguments: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Evidence that speculation runs: resolved algorithm, verify rounds in every request, accept length above 1.02."""
    claims = []
    usable = {block["index"] for block in blocks if block["validity"]["ok"]}
    for arm in plan["arms"]:
        if not arm["speculative"]:
            continue
        rows = [row for row in requests if row["arm"] == arm["name"] and row["block"] in usable and not row["error"]]
        declared = arguments.get(arm["name"], {}).get("speculative_algorithm")
        counted = [row for row in rows if (row["spec_verify_ct"] or 0) > 0]
        tau = analyse.speculation(rows)["accept_length"]
        if not rows or tau is None:
            state, reason = "unverified", "no request reported verify rounds"
        elif declared is None:
            state, reason = "inactive", "the server resolved no speculative algorithm"
        elif len(counted) < len(rows):
            state, reason = "fallback", f"{len(rows) - len(counted)} of {len(rows)} requests had no verify round"
        elif tau <= analyse.DEAD_DRAFT:
            state, reason = "inactive", f"accept length {tau:.2f}"
        else:
            state, reason = "active", ""
        claims.append({
            "claim": "speculation", "arm": arm["name"], "required": "speculation" in plan["required_evidence"],
            "declared": declared, "observed": f"{len(counted)} of {len(rows)} requests with verify rounds, "
                                              f"accept length {tau if tau is None else round(tau, 3)}",
            "effective": "the comparison itself", "state": state, "reason": reason,
            "sources": [{"kind": "server_info", "ref": "speculative_algorithm"},
                        {"kind": "requests", "ref": "spec_verify_ct, spec_accepted"}]})
    return claims


def _effects(plan: Mapping[str, Any], comparison: Sequence[Mapping[str, Any]],
             evidence: Sequence[dict[str, Any]]) -> None:
    """What an optimisation is worth, into its claim: by an arm that differs from the baseline in its switch only."""
    flags = {arm["name"]: flags_of(arm["argv"]) for arm in plan["arms"]}
    for one in comparison:
        differ = difference(flags[one["baseline"]], flags[one["candidate"]])
        if len(differ) != 1 or one["ratio"] is None or one["concurrency"] != plan["load_points"][0]:
            continue
        claim = evidence_of.TOGGLES.get(next(iter(differ)))
        ends = one.get("ci") or [None, None]
        worth = f"{percent(one['ratio'])} in {one['candidate']} against {one['baseline']}" + (
            "" if None in ends else f" ({percent(ends[0])} to {percent(ends[1])})")
        for row in evidence:
            if row["claim"] == claim and row["arm"] in (one["baseline"], one["candidate"]):
                row["effective"] = worth


def percent(ratio: float) -> str:
    """A ratio as a signed change: 0.731 is -26.9 %. Beyond a hundredfold the digits mean nothing."""
    if ratio > 100:
        return "over +9900 %"
    return f"{100 * (ratio - 1):+.1f} %"


def _noise_floor(plan: Mapping[str, Any]) -> str:
    """By which noise floor a short run is judged."""
    kept = plan["noise_floor"]
    return f"against the noise floor of {kept['measured_at'][:10]}, {kept['age_days']:.1f} days old"


def headline(verdict: str, comparison: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """One sentence. Never a change without its interval, never «speed-up» for a slower arm."""
    ratio, ends = comparison.get("ratio"), comparison.get("ci") or [None, None]
    candidate, baseline = plan["primary_endpoint"]["candidate"], plan["primary_endpoint"]["baseline"]
    level = f"{100 * (1 - comparison.get('alpha_used', 0.05)):g} % interval"
    if verdict == "invalid":
        return f"INVALID: this run says nothing about {candidate} against {baseline}."
    if ratio is None or None in ends or not all(map(math.isfinite, ends)):
        return f"INCONCLUSIVE: too few server starts for an interval of {candidate} against {baseline}."
    by_floor = comparison.get("interval_from") == "noise floor"
    against = f", {_noise_floor(plan)}" if by_floor else ""
    interval = f"{percent(ratio)} ({level} {percent(ends[0])} to {percent(ends[1])}{against})"
    if verdict == "win":
        return f"WIN: {candidate} decodes faster than {baseline}: {interval}."
    if verdict == "loss":
        return f"LOSS: {candidate} decodes slower than {baseline}: {interval}."
    margin = f"{100 * plan['margin']:g} %"
    if verdict == "equivalent":
        return f"EQUIVALENT: {candidate} and {baseline} are within {margin} of each other: {interval}."
    if plan.get("interval_from") == "noise floor" and not by_floor:
        return (f"INCONCLUSIVE: {candidate} against {baseline}: {percent(ratio)} in {comparison['pairs']} pairs, and "
                "no noise floor of an earlier run here to hold it against; --effort standard measures and keeps one.")
    if comparison.get("verdict", verdict) != verdict:
        return f"INCONCLUSIVE: {candidate} against {baseline}: {interval}, but that hangs on a few odd requests."
    need = comparison.get("pairs_needed_estimate")
    more = f" About {max(need - comparison['pairs'], 1)} more pairs would settle it at this noise." if need else \
        " No reasonable number of pairs would settle it at this noise."
    return f"INCONCLUSIVE: {candidate} against {baseline}: {interval}.{more}"
