"""result.json as a page for people. Pure: everything on it is in the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entrypoints.result import percent

Result = Mapping[str, Any]


def markdown(result: Result) -> str:
    """report.md."""
    parts = [f"# {result['verdict']['headline']}", _about(result), _reasons(result), "## Arms", _arms(result),
             "## Comparison", _comparisons(result), "## Pairs", _pairs(result), "## Evidence", _evidence(result),
             "## Output", _output(result), "## Break-even", _break_even(result), "## Blocks", _blocks(result),
             "## Environment", _environment(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _about(result: Result) -> str:
    plan = result["plan"]
    valid = sum(block["validity"]["ok"] for block in result["blocks"])
    pairs = result["comparison"][0]["pairs"] if result["comparison"] else 0
    text = (f"Run `{result['run_id']}`: {pairs} pairs of server starts ({valid} valid starts), "
            f"{plan['prompts']['count']} prompts, {plan['passes']} passes, at most {plan['max_tokens']} tokens, "
            f"greedy, concurrency {', '.join(map(str, plan['load_points']))}. "
            f"Margin of equivalence {100 * plan['margin']:g} %.")
    if plan["effort"] == "quick" or pairs < 4:
        text += (f" With {pairs} pairs only a large effect shows; `--effort standard` measures until the answer holds.")
    return text


def _reasons(result: Result) -> str:
    verdict = result["verdict"]
    lines = [f"- **invalid**: {cause}" for cause in verdict["invalid_causes"]]
    lines += [f"- note: {note}" for note in verdict["reasons"]]
    lines += [f"- left out: block {one['block']} ({one['arm']}): {'; '.join(one['causes'])}"
              for one in verdict["excluded_blocks"]]
    return "\n".join(lines)


def _arms(result: Result) -> str:
    rows = []
    for name, arm in result["arms"].items():
        for point, one in arm["load_points"].items():
            rows.append((name, point, number(one["decode_rate"]["geomean"]), number(one["decode_rate"]["median"]),
                         number(one["total_tok_s"]), number(one["ttft_ms"]["p50"], 1), number(one["ttft_ms"]["p99"], 1),
                         number(one["interchunk_ms"]["p50"], 1), number(one["tokens_per_chunk"]),
                         number(one["spec"]["accept_length"], 3), one["requests"], one["errors"]))
    return table(("arm", "concurrency", "tok/s", "median", "total tok/s", "TTFT p50 ms", "p99", "chunk p50 ms",
                  "tokens/chunk", "accept length", "requests", "errors"), rows) + (
        "\n\ntok/s is the decode rate of one stream: tokens after the first chunk over the time after it, by the "
        "server's own count, geometric mean over requests.")


def _comparisons(result: Result) -> str:
    rows = [(one["candidate"], one["concurrency"], one["pairs"],
             "-" if one["ratio"] is None else f"{one['ratio']:.4f}", interval(one.get("ci")),
             interval(one.get("ci95_general")), number(one.get("p_t"), 4), number(one.get("p_signflip"), 4),
             number(one.get("mde_pct"), 1), one["verdict"]) for one in result["comparison"]]
    text = table(("candidate", "concurrency", "pairs", "ratio", "interval (these prompts)", "95 % (prompts like these)",
                  "p (t)", "p (sign flip)", "smallest visible %", "verdict"), rows)
    strata = [(one["candidate"], one["concurrency"], name, number(part["ratio"], 4), interval(part["ci95"]),
               part["prompts"]) for one in result["comparison"] for name, part in one.get("strata", {}).items()]
    if strata:
        head = ("candidate", "concurrency", "stratum", "ratio", "95 % (descriptive)", "prompts")
        text += "\n\n" + table(head, strata)
    return text


def _pairs(result: Result) -> str:
    if not result["comparison"]:
        return "No pair was completed."
    names = {pair: number for number, pair in enumerate(result["comparison"][0].get("pair_ids", []))}
    logs = result["comparison"][0].get("pair_log_ratios", [])
    first: dict[int, str] = {}
    for block in result["blocks"]:
        if block["validity"]["ok"]:
            first.setdefault(block["pair"], block["arm"])
    rows = [(pair, first.get(pair, "-"), percent(math.exp(logs[place]))) for pair, place in names.items()]
    return table(("pair", "first", "change"), rows) if rows else "No pair was completed."


def _evidence(result: Result) -> str:
    rows = [(one["claim"], one.get("arm", ""), one["state"], one["declared"], one["observed"], one["reason"])
            for one in result["evidence"]]
    return table(("claim", "arm", "state", "declared", "observed", "reason"), rows) if rows else "None collected."


def _output(result: Result) -> str:
    same = result["equivalence"]
    if not same:
        return ""
    rows = []
    for label, part in (("baseline against itself", same["aa"]), ("candidate against baseline", same["ab"])):
        if part:
            rows.append((label, part["compared"], f"{100 * part['exact_share']:.1f} %",
                         f"{part['hazard_per_token']:.1e}", f"{100 * part['early_split_share']:.1f} %"))
    return f"State: **{same['state']}**.\n\n" + table(
        ("", "answers compared", "identical", "splits per token", "split within 8 tokens"), rows)


def _break_even(result: Result) -> str:
    one = result["break_even"]
    if not one:
        return "Not known: no accept length."
    return (f"The baseline takes {one['t_base_ms']:.2f} ms for a token, a draft-and-verify cycle "
            f"{one['t_cycle_ms']:.2f} ms. Break-even accept length {one['tau_break_even']:.2f}, measured "
            f"{one['tau']:.2f}. A win of 10 % needs "
            f"an accept length of {one['tau_for_plus_10pct']:.2f}, or a cycle of "
            f"{one['cycle_ms_for_plus_10pct']:.2f} ms.")


def _blocks(result: Result) -> str:
    rows = []
    for block in result["blocks"]:
        warm = block["warmup"] or {}
        rows.append((block["index"], block["pair"], block["arm"], number(block["t_ready_s"], 1),
                     len(warm.get("windows", [])), number(warm.get("seconds"), 1),
                     number(sum(one["duration_s"] for one in block["passes"]), 1),
                     "valid" if block["validity"]["ok"] else "; ".join(block["validity"]["causes"])))
    return table(("block", "pair", "arm", "ready s", "warm-up windows", "warm-up s", "measured s", "validity"), rows)


def _environment(result: Result) -> str:
    image = result["plan"]["image"]
    rows: list[tuple[str, object]] = [("image", f"{image['image']} {image['version']} ({image['stack']})"),
                                      ("content key", image["key"]), ("plan sha256", result["plan"]["sha256"]),
                                      ("raw sha256", result["raw_sha256"])]
    rows += [(name, value) for name, value in sorted(image["packages"].items())]
    rows += [(name, value) for name, value in sorted(result["machine"].items()) if isinstance(value, str | int | float)]
    text = table(("", ""), rows)
    for name, arm in result["arms"].items():
        text += f"\n\n{name}: `{' '.join(arm['argv'])}`"
    forced = result["arms_diff"].get("allowed", {})
    if forced:
        text += "\n\nResolved arguments that differ (all follow from speculation): " + ", ".join(
            f"`{key}` {pair[0]} / {pair[1]}" for key, pair in forced.items()) + "."
    return text


def summary(result: Result) -> str:
    """A few lines for a terminal: headline and the table of arms."""
    parts = [result["verdict"]["headline"], _arms(result).split("\n\n", maxsplit=1)[0], _reasons(result)]
    return "\n".join(part for part in parts if part)
