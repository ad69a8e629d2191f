"""result.json as a page for people. Pure: everything on it is in the result."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entrypoints import task, telemetry
from entrypoints.result import percent

Result = Mapping[str, Any]


Rows = tuple[tuple[str, ...], list[tuple[object, ...]]]


def markdown(result: Result) -> str:
    """report.md."""
    parts = [f"# {result['verdict']['headline']}", about(result), _reasons(result), "## Arms",
             table(*arm_rows(result)), RATE, "## Comparison", table(*comparison_rows(result)),
             _optional(strata_rows(result)), noise_floor(result),
             "## Pairs", _optional(pair_rows(result)) or "No pair was completed.",
             "## Evidence", _optional(evidence_rows(result)) or "None collected.",
             "## Output under greedy decoding", _output(result), "## Break-even", break_even(result),
             "## Limit of this machine", limit(result),
             "## Server starts", table(*block_rows(result)), _optional(telemetry_rows(result)),
             "## Environment", _environment(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


RATE = ("tok/s is the decode rate of one stream: tokens after the first chunk over the time after it, by the "
        "server's own count, geometric mean over requests.")


def _optional(rows: Rows) -> str:
    return table(*rows) if rows[1] else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, columns padded so that it reads well in a terminal too."""
    cells = [[str(one) for one in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(head), *cells]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, cells)])


def number(value: object, digits: int = 2) -> str:
    """A number with fixed digits; «-» for what is not known."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def interval(ends: Sequence[float | None] | None) -> str:
    """Both ends of a ratio as changes."""
    if not ends or ends[0] is None or ends[1] is None:
        return "unbounded"
    return f"{percent(ends[0])} to {percent(ends[1])}"


def about(result: Result) -> str:
    """What was done, in a few sentences."""
    plan = result["plan"]
    valid = sum(block["validity"]["ok"] for block in result["blocks"])
    pairs = result["comparison"][0]["pairs"] if result["comparison"] else 0
    text = (f"Run `{result['run_id']}`: {_count(pairs, 'pair')} of server starts ({_count(valid, 'valid start')}), "
            f"{_count(plan['prompts']['count'], 'prompt')}, {_count(plan['passes'], 'pass')}, "
            f"at most {plan['max_tokens']} tokens, "
            f"greedy, {_load(plan)}. "
            f"Margin of equivalence {100 * plan['margin']:g} %.")
    if selection := plan.get("selection"):
        listed = ", ".join(f"{row['arm']} {row['why'] or number(row['tok_s'], 1) + ' tok/s'}"
                           for row in selection["table"])
        text += (f" The candidate was chosen among {len(selection['table'])} settings on other prompts in run "
                 f"`{selection['folder']}` ({listed}); none of that enters the verdict.")
    if plan["effort"] == "quick" or pairs < 4:
        text += (f" With {_count(pairs, 'pair')} only a large effect shows; `--effort standard` measures until the "
                 "answer holds.")
    return text


def _load(plan: Result) -> str:
    points = ", ".join(map(str, plan["load_points"]))
    if plan.get("rate"):
        return f"{plan['rate']:g} random arrivals a second with at most {points} in flight"
    return f"concurrency {points}"


def _count(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}{'es' if noun.endswith('s') else 's'}"


def reasons(result: Result) -> list[tuple[bool, str]]:
    """What a reader must know beside the headline; True marks a cause that makes the run invalid."""
    verdict = result["verdict"]
    return [*((True, cause) for cause in verdict["invalid_causes"]), *((False, note) for note in verdict["reasons"]),
            *((False, f"contract: {one['name']} is absent, unavailable: {', '.join(one['consumers'])}")
              for one in result["software"].get("contract", {}).get("missing_fields", [])),
            *((False, f"left out: block {one['block']} ({one['arm']}): {'; '.join(one['causes'])}")
              for one in verdict["excluded_blocks"])]


def _reasons(result: Result) -> str:
    return "\n".join(f"- **invalid**: {text}" if invalid else f"- note: {text}" for invalid, text in reasons(result))


def arm_rows(result: Result) -> Rows:
    """One row for each arm and load point."""
    rows: list[tuple[object, ...]] = []
    for name, arm in result["arms"].items():
        for point, one in arm["load_points"].items():
            rows.append((name, point, number(one["decode_rate"]["geomean"]), number(one["decode_rate"]["median"]),
                         number(one["total_tok_s"]), number(one["ttft_ms"]["p50"], 1), number(one["ttft_ms"]["p99"], 1),
                         number(one["interchunk_ms"]["p50"], 1), number(one["tokens_per_chunk"]),
                         number(one["spec"]["accept_length"], 3), one["requests"], one["errors"]))
    return ("arm", "concurrency", "tok/s", "median", "total tok/s", "TTFT p50 ms", "p99", "chunk p50 ms",
            "tokens/chunk", "accept length", "requests", "errors"), rows


def tiles(result: Result) -> list[tuple[str, str, str]]:
    """The numbers that matter most as (name, value, what it is): both rates, their ratio, accept length."""
    end, point = result["plan"]["primary_endpoint"], str(result["plan"]["load_points"][0])
    found = []
    for name in (end["baseline"], end["candidate"]):
        rate = result["arms"][name]["load_points"][point]["decode_rate"]["geomean"]
        found.append((name, f"{number(rate, 1)} tok/s", f"one stream, concurrency {point}"))
    one = result["comparison"][0] if result["comparison"] else {}
    found.append(("ratio", number(one.get("ratio"), 3), f"interval {interval(one.get('ci'))}"))
    length = result["arms"][end["candidate"]]["load_points"][point]["spec"]["accept_length"]
    if length is not None:
        even = result["break_even"]
        found.append(("accept length", number(length, 2),
                      f"break-even {even['tau_break_even']:.2f}" if even else "tokens per verify round"))
    return found


def comparison_rows(result: Result) -> Rows:
    """One row for each candidate and load point."""
    return ("candidate", "concurrency", "pairs", "ratio", "verdict", "interval (these prompts)",
            "95 % (prompts like these)", "p (t)", "p (sign flip)", "smallest visible %"), [
        (one["candidate"], one["concurrency"], one["pairs"], number(one["ratio"], 4), one["verdict"],
         interval(one.get("ci")), interval(one.get("ci95_general")), number(one.get("p_t"), 4),
         number(one.get("p_signflip"), 4), number(one.get("mde_pct"), 1)) for one in result["comparison"]]


def strata_rows(result: Result) -> Rows:
    """Ratios within each kind of prompt; those of a control say nothing about prompts."""
    controls = {name for name, arm in result["arms"].items() if arm.get("control")}
    return ("candidate", "concurrency", "stratum", "ratio", "95 % (descriptive)", "prompts"), [
        (one["candidate"], one["concurrency"], name, number(part["ratio"], 4), interval(part["ci95"]), part["prompts"])
        for one in result["comparison"] if one["candidate"] not in controls
        for name, part in one.get("strata", {}).items()]


def noise_floor(result: Result) -> str:
    """How much the baseline differs from itself on this machine, in a sentence; "" when nothing is known."""
    one = result["noise_floor"]
    if one["pair_sd"] is None:
        return ""
    text = (f"Noise floor: the baseline against itself differs by {percent(one['aa_ratio'])} "
            f"({interval(one['aa_ci'])}) over {one['pairs']} pairs, {100 * one['pair_sd']:.2f} % from pair to pair; ")
    if one["source"] == "control arm":
        return text + "control arm of this run."
    return text + f"measured {one['age_days']:.1f} days ago in run `{one['run_id']}` on this machine with this image."


def pair_rows(result: Result) -> Rows:
    """The primary comparison pair by pair."""
    head = ("pair", "first", "change")
    if not result["comparison"]:
        return head, []
    one = result["comparison"][0]
    first: dict[int, str] = {}
    for block in result["blocks"]:
        if block["validity"]["ok"]:
            first.setdefault(block["pair"], block["arm"])
    return head, [(pair + 1, first.get(pair, "-"), percent(math.exp(value))) for pair, value in
                  zip(one.get("pair_ids", []), one.get("pair_log_ratios", []), strict=True)]


def evidence_rows(result: Result) -> Rows:
    """What shows that each claim holds, one row for arms that show the same; what nobody asked for is in the JSON."""
    arms: dict[tuple[object, ...], list[str]] = {}
    for one in result["evidence"]:
        if one.get("required") or one.get("reason") != "not asked for":
            row = (one["claim"], "yes" if one.get("required") else "", one["state"], _said(one["declared"]),
                   _said(one["observed"]), _said(one["effective"]), one.get("reason") or "")
            arms.setdefault(row, []).append(one.get("arm") or "")
    order = sorted(arms, key=lambda row: row[1] != "yes")
    return ("claim", "arm", "required", "state", "declared", "observed", "effective", "reason"), [
        (row[0], ", ".join(dict.fromkeys(filter(None, arms[row]))), *row[1:]) for row in order]


def _said(value: object) -> str:
    return "-" if value in (None, "") else str(value)


def output_rows(result: Result) -> Rows:
    """Base against itself and candidate against base."""
    rows: list[tuple[object, ...]] = []
    same = result["equivalence"] or {"aa": None, "ab": None}
    for label, part in (("baseline against itself", same["aa"]), ("candidate against baseline", same["ab"])):
        if part:
            rows.append((label, part["compared"], f"{100 * part['exact_share']:.1f} %",
                         f"{part['hazard_per_token']:.1e}", f"{100 * part['early_split_share']:.1f} %"))
    return ("", "answers compared", "identical", "splits per token", "split within 8 tokens"), rows


def _output(result: Result) -> str:
    same = result["equivalence"]
    if not same:
        return ""
    return "\n\n".join([f"State: **{same['state']}**.", table(*output_rows(result)), task_line(result)]).strip()


def task_line(result: Result) -> str:
    """What came of the task check; "" when none was made."""
    found, end = (result["equivalence"] or {}).get("task"), result["plan"]["primary_endpoint"]
    return task.line(found, end["baseline"], end["candidate"]) if found else ""


def break_even(result: Result) -> str:
    """What would have to be different for a win."""
    one = result["break_even"]
    if not one:
        return "Not known: no accept length."
    return (f"The baseline takes {one['t_base_ms']:.2f} ms for a token, a draft-and-verify cycle "
            f"{one['t_cycle_ms']:.2f} ms. Break-even accept length {one['tau_break_even']:.2f}, measured "
            f"{one['tau']:.2f}. A win of 10 % needs an accept length of {one['tau_for_plus_10pct']:.2f}, or a cycle of "
            f"{one['cycle_ms_for_plus_10pct']:.2f} ms.")


def limit(result: Result) -> str:
    """How far from what the hardware allows."""
    one = result["limit"]
    if "trouble" in one:
        return f"Not known: {one['trouble']}."
    share, shared = one.get("share_of_limit"), "all-reduce" in one["parts_ms"]
    text = (f"{'With the all-reduce that was measured, at' if shared else 'At'} least {one['t_total_ms']:.3f} ms per "
            f"token on this machine ({one['limit_tok_s']:.0f} tok/s): "
            + ", ".join(f"{name} {value:.3f} ms" for name, value in one["parts_ms"].items()) + ".")
    if share is not None:
        text += f" The baseline reaches {100 * share:.0f} % of it."
    if share is not None and share > 1:
        text += (" More than that: the server's own all-reduce is faster than the one measured." if shared else
                 " More than the limit: an input is wrong.")
    return text + " " + " ".join(f"{row['name']}: {row['value']} ({row['source']})." for row in one["inputs"])


def block_rows(result: Result) -> Rows:
    """One row for each server start."""
    rows: list[tuple[object, ...]] = []
    for block in result["blocks"]:
        warm = block["warmup"] or {}
        rows.append((block["index"], block["pair"] + 1, block["arm"], number(block["t_ready_s"], 1),
                     len(warm.get("windows", [])), number(warm.get("seconds"), 1),
                     number(sum(one["duration_s"] for one in block["passes"]), 1),
                     "valid" if block["validity"]["ok"] else "; ".join(block["validity"]["causes"])))
    return ("block", "pair", "arm", "ready s", "warm-up windows", "warm-up s", "measured s", "validity"), rows


def telemetry_rows(result: Result) -> Rows:
    """One row for each arm: what the machine did while it was measured, over its valid starts."""
    rows: list[tuple[object, ...]] = []
    for arm in result["arms"]:
        seen = [block["telemetry"] for block in result["blocks"]
                if block["arm"] == arm and block["validity"]["ok"] and (block["telemetry"] or {}).get("samples")]
        if not seen:
            continue
        one = telemetry.together(seen)
        rows.append((arm, number(one["power_w"], 0), number(one["energy_j_per_token"], 3), number(one["sm_mhz_min"], 0),
                     number(one["temp_c_max"], 0), number(one["cpu_percent"], 0), number(one["load_1m"], 1)))
    return ("arm", "W of all GPUs", "J/token", "lowest SM MHz", "highest GPU C", "CPU %", "load"), rows


#: packages that a speed may hang on; result.json has all
_DECISIVE = re.compile(r"(torch|triton|transformers|flashinfer|sglang|sgl)(-|$)"
                       r"|nvidia-(cuda-runtime|cublas|cudnn|nccl|nvshmem)(-|$)")


def environment_rows(result: Result) -> list[tuple[object, ...]]:
    """Image, packages, machine, hashes."""
    image = result["plan"]["image"]
    rows: list[tuple[object, ...]] = [("image", f"{image['image']} {image['version']} ({image['stack']})"),
                                      ("content key", image["key"]), ("plan sha256", result["plan"]["sha256"]),
                                      ("raw sha256", result["raw_sha256"])]
    rows += [(name, version) for name, version in sorted(image["packages"].items()) if _DECISIVE.match(name)]
    rows += [(name, value or "(empty)") for name, value in result["plan"].get("environment", {}).items()]
    rows += [("machine id" if name == "id" else name, value) for name, value in sorted(result["machine"].items())
             if isinstance(value, str | int | float)]
    rows += [(f"GPU {index}", f"{one['name']}, compute capability {one['cc']}, {one['power_limit_w']:.0f} W")
             for index, one in enumerate(result["machine"].get("gpus") or [])]
    rows += [(f"client, {one['streams']} streams",
              f"adds {number(one['added_ms']['p50'])} ms (p99 {number(one['added_ms']['p99'])} ms) to a time, "
              f"{one['cpu_us_per_chunk']:.0f} us of CPU for a chunk (null server)")
             for one in result.get("client_calibration", [])]
    forced = result["arms_diff"].get("allowed", {})
    rows += [(f"differs: {key}", f"{pair[0]} / {pair[1]}") for key, pair in forced.items()]
    return rows


def _environment(result: Result) -> str:
    text = table(("", ""), environment_rows(result))
    return text + "".join(f"\n\n{name}: `{' '.join(arm['argv'])}`" for name, arm in result["arms"].items())


def summary(result: Result) -> str:
    """A few lines for a terminal: headline and the table of arms."""
    parts = [result["verdict"]["headline"], table(*arm_rows(result)), _reasons(result)]
    return "\n".join(part for part in parts if part)


def prometheus(result: Result) -> str:
    """The main numbers in Prometheus text format, for a node exporter's textfile folder."""
    lines = []
    for name, text in (("verdict", "1 for the verdict of the run"), ("ratio", "decode rate over that of the baseline"),
                       ("decode_tokens_per_second", "geometric mean of one stream"),
                       ("ttft_seconds", "median time to first token"), ("accept_length", "tokens per verify round")):
        lines += [f"# HELP sglang_bench_{name} {text}", f"# TYPE sglang_bench_{name} gauge"]
        lines += [f"sglang_bench_{name}{{{labels}}} {value}" for labels, value in _series(result, name)]
    return "\n".join(lines) + "\n"


def _series(result: Result, name: str) -> list[tuple[str, float]]:
    if name == "verdict":
        return [(f'verdict="{result["verdict"]["class"]}",run="{result["run_id"]}"', 1)]
    if name == "ratio":
        return [(f'candidate="{one["candidate"]}",concurrency="{one["concurrency"]}"', one["ratio"])
                for one in result["comparison"] if one["ratio"] is not None]
    rows = []
    for arm, both in result["arms"].items():
        for point, one in both["load_points"].items():
            values = {"decode_tokens_per_second": one["decode_rate"]["geomean"],
                      "accept_length": one["spec"]["accept_length"],
                      "ttft_seconds": one["ttft_ms"]["p50"] and one["ttft_ms"]["p50"] / 1e3}
            if values[name] is not None:
                rows.append((f'arm="{arm}",concurrency="{point}"', values[name]))
    return rows
