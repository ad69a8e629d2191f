"""result.json as one HTML file that needs nothing else: readable offline, on paper and on a phone. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entrypoints import plots, report

Result = Mapping[str, Any]

STYLE = """
:root{--bg:#fff;--fg:#1c1f24;--soft:#5c6570;--line:#c8ced6;--card:#f5f7f9;--one:#7a8594;--two:#0b6bcb;--three:#b3541e;
--four:#6a3fb5;--shade:#dfe8d8;--win:#1a7f37;--loss:#b3261e;--other:#8a6d00}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ee;--soft:#9aa5b3;--line:#3a424c;--card:#1d2228;
--one:#93a0b0;--two:#5aa9f5;--three:#e58d55;--four:#b094ee;--shade:#2b3a26;--win:#4cc26a;--loss:#f2837b;--other:#d9b949}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1rem;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.35rem;line-height:1.3;border-left:.4rem solid var(--mark);padding-left:.8rem;margin:.5rem 0 1rem}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
.win{--mark:var(--win)}.loss{--mark:var(--loss)}.equivalent,.inconclusive,.invalid{--mark:var(--other)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:.5rem;padding:.75rem}
figcaption{color:var(--soft);font-size:.9rem;margin-bottom:.4rem}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--fg)}svg .name{fill:var(--soft)}
.axis{stroke:var(--line)}.zero{stroke:var(--soft);stroke-dasharray:4 3}.mean{stroke:var(--two);stroke-width:1.5}
.margin{fill:var(--shade)}.narrow{stroke:var(--two);stroke-width:5}.wide{stroke:var(--two);stroke-width:1.5}
.candidate{fill:var(--two)}.bar{fill:var(--two)}
polyline{fill:none;stroke-width:1.8}.curve0{stroke:var(--one)}.curve1{stroke:var(--two)}.curve2{stroke:var(--three)}
.curve3{stroke:var(--four)}line.curve0,line.curve1,line.curve2,line.curve3{stroke-width:2.5}
.starting{fill:var(--line)}.warming{fill:var(--three)}.measuring{fill:var(--two)}.stopping{fill:var(--one)}
.spoilt{fill:var(--loss)}
.scroll{overflow-x:auto}.scroll+.scroll{margin-top:1.2rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,10rem),1fr));gap:.75rem;margin:1rem 0}
.tiles div{background:var(--card);border-radius:.5rem;padding:.6rem .75rem;overflow-wrap:anywhere}
.tiles span{display:block;color:var(--soft);font-size:.85rem}.tiles strong{display:block;font-size:1.25rem}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:max-content;min-width:100%}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th,td{max-width:17rem;overflow-wrap:break-word}
th{color:var(--soft);font-weight:600}
code{font-size:.85em;overflow-wrap:anywhere}
ul{padding-left:1.2rem}.invalid-cause{color:var(--loss)}
footer{color:var(--soft);font-size:.85rem;margin-top:2rem;overflow-wrap:anywhere}
"""


def page(result: Result) -> str:
    """report.html."""
    verdict = result["verdict"]
    body = [f'<h1 class="{_safe(verdict["class"])}">{_safe(verdict["headline"])}</h1>', _tiles(result),
            f"<p>{_plain(report.about(result))}</p>", _reasons(result), '<div class="cards">',
            *_figures(result), "</div>"]
    for title, part in (("Arms", _arms(result)), ("Comparison", _comparison(result)), ("Evidence", _evidence(result)),
                        ("Output under greedy decoding", _output(result)), ("Break-even", _break_even(result)),
                        ("Limit of this machine", _limit(result)), ("Server starts", _blocks(result)),
                        ("Environment", _environment(result))):
        if part:
            body += [f"<h2>{title}</h2>", part]
    body.append(f"<footer>Run {_safe(result['run_id'])}. Plan {_safe(result['plan']['sha256'])}. Raw data "
                f"{_safe(result['raw_sha256'])}. Everything here follows from the files beside this page: "
                "<code>entrypoint analyze DIR</code> computes it again.</footer>")
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
            f"<title>{_safe(verdict['class'])}: {_safe(result['run_id'])}</title><style>{STYLE}</style></head>\n<body>"
            + "\n".join(part for part in body if part) + "</body></html>\n")


def _safe(value: object) -> str:
    return html.escape(str(value))


def _plain(markdown: str) -> str:
    return _safe(markdown).replace("`", "")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{_safe(one)}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{_safe(one)}</td>" for one in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _reasons(result: Result) -> str:
    items = [f'<li{" class=invalid-cause" if invalid else ""}>{_safe(text)}</li>'
             for invalid, text in report.reasons(result)]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _tiles(result: Result) -> str:
    tiles = (f"<div><span>{_safe(name)}</span><strong>{_safe(value)}</strong><span>{_safe(what)}</span></div>"
             for name, value, what in report.tiles(result))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{_safe(caption)}</figcaption>{picture}</figure>"


def _figures(result: Result) -> list[str]:
    known = [one for one in result["comparison"] if one["ratio"] is not None]
    made: list[str] = []
    if known:
        first = known[0]
        margin = result["plan"]["margin"]
        rows = [(f"{one['candidate']} c={one['concurrency']}", one["ratio"], one["ci"], one["ci95_general"])
                for one in known]
        made.append(_figure("Ratio to the baseline. Thick: these prompts; thin: prompts like these (95 %). Shaded: "
                            "margin of equivalence.", plots.intervals(rows, margin)))
        ratios = [(pair, math.exp(value)) for pair, value in
                  zip(first["pair_ids"], first["pair_log_ratios"], strict=True)]
        made.append(_figure("Each pair of server starts. The line is their mean.",
                            plots.pairs(ratios, first["ratio"], margin)))
        points = [(name, one, other) for name, (one, other) in first["prompt_rates"].items()]
        made.append(_figure("Each prompt, decode rate in both arms. Above the line the candidate is faster.",
                            plots.scatter(points, (first["baseline"], first["candidate"]))))
    point = str(result["plan"]["load_points"][0])
    for key, name in (("decode_rate", "decode rate, tok/s"), ("ttft_ms", "time to first token, ms")):
        curves = [(arm, one["load_points"][point]["distributions"][key]) for arm, one in result["arms"].items()]
        curves = [(arm, values) for arm, values in curves if values]
        if curves:
            made.append(_figure(f"Requests up to this {name.split(',', maxsplit=1)[0]} (concurrency {point}).",
                                plots.distributions(curves, name)))
    for arm, one in result["arms"].items():
        histogram = one["load_points"][point]["spec"]["histogram"]
        if histogram:
            length = one["load_points"][point]["spec"]["accept_length"]
            made.append(_figure(f"{arm}: accepted draft tokens per verify round, accept length {length:.3f}.",
                                plots.bars(histogram, "accepted draft tokens")))
    if result["blocks"]:
        made.append(_figure("Server starts: grey start, orange warm-up, blue measured, red does not count.",
                            _timeline(result)))
    return made


def _timeline(result: Result) -> str:
    rows = []
    moments: list[float] = []
    cpu: list[float] = []
    power: list[tuple[float, float]] = []
    for block in result["blocks"]:
        begin, end = block["t_start"], block.get("t_end") or block["t_start"]
        ready = begin + (block["t_ready_s"] or end - begin)
        warm = ready + ((block["warmup"] or {}).get("seconds") or 0.0)
        measured = min(end, warm + sum(one["duration_s"] for one in block["passes"]))
        stretches = [("start", "starting", begin, min(ready, end)),
                     ("warm-up", "warming", min(ready, end), min(warm, end)),
                     ("measured", "measuring" if block["validity"]["ok"] else "spoilt", min(warm, end), measured),
                     ("stop", "stopping", measured, end)]
        rows.append((f"{block['index']} {block['arm']}", stretches))
        for moment, percent, watts in (block.get("telemetry") or {}).get("trace", []):
            moments.append(moment)
            cpu.append(percent)
            if watts is not None:
                power.append((moment, watts))
    curves = [("CPU", "%", moments, cpu), ("GPU power", "W", [one for one, _ in power], [one for _, one in power])]
    return plots.timeline(rows, curves)


def _arms(result: Result) -> str:
    head, rows = report.arm_rows(result)
    return f"{_table(head, rows)}<p>{_safe(report.RATE)}</p>"


def _comparison(result: Result) -> str:
    head, rows = report.comparison_rows(result)
    text = _table(head, rows)
    strata_head, strata = report.strata_rows(result)
    text += _table(strata_head, strata) if strata else ""
    floor = report.noise_floor(result)
    return text + (f"<p>{_plain(floor)}</p>" if floor else "")


def _evidence(result: Result) -> str:
    head, rows = report.evidence_rows(result)
    return _table(head, rows) if rows else "<p>None collected.</p>"


def _output(result: Result) -> str:
    same = result["equivalence"]
    if not same:
        return ""
    head, rows = report.output_rows(result)
    text = f"<p>State: <strong>{_safe(same['state'])}</strong></p>" + _table(head, rows)
    line = report.task_line(result)
    return text + (f"<p>{_safe(line)}</p>" if line else "")


def _break_even(result: Result) -> str:
    return f"<p>{_plain(report.break_even(result))}</p>"


def _limit(result: Result) -> str:
    return f"<p>{_plain(report.limit(result))}</p>"


def _blocks(result: Result) -> str:
    telemetry = report.telemetry_rows(result)
    return _table(*report.block_rows(result)) + (_table(*telemetry) if telemetry[1] else "")


def _environment(result: Result) -> str:
    text = _table(("", ""), report.environment_rows(result))
    for name, arm in result["arms"].items():
        text += f"<p>{_safe(name)}: <code>{_safe(' '.join(arm['argv']))}</code></p>"
    return text
