from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from entrypoints import page, plots, report, result
from tests.unit.entrypoints.test_result import folder


def made(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return result.assemble(folder(tmp_path, 1.1, **more))


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = page.page(made(tmp_path))
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", text)
    assert '<meta name="viewport"' in text


def test_the_page_has_every_plot_and_table(tmp_path: Path) -> None:
    found = made(tmp_path)
    for place, block in enumerate(found["blocks"]):
        block["telemetry"] = {"trace": [[30.0 * place + 5, 40.0, 300.0], [30.0 * place + 15, 80.0, 310.0]]}
    text = page.page(found)
    labels = [one.get("aria-label") for one in pictures(text)]
    assert labels == ["ratios with their intervals", "ratio of each pair of server starts",
                      "decode rate of each prompt in both arms", "decode rate, tok/s", "time to first token, ms",
                      "accepted draft tokens", "timeline of server starts and telemetry"]
    for title in ("Arms", "Comparison", "Evidence", "Output under greedy decoding", "Break-even", "Server starts",
                  "Environment"):
        assert f"<h2>{title}</h2>" in text
    assert found["verdict"]["headline"] in text


def test_every_coordinate_is_a_number_inside_the_picture(tmp_path: Path) -> None:
    for picture in pictures(page.page(made(tmp_path, pairs=2))):
        width, height = map(float, str(picture.get("viewBox")).split()[2:])
        for one in picture.iter():
            for name, value in one.attrib.items():
                if name in {"x", "x1", "x2", "cx"}:
                    assert -1 <= float(value) <= width + 1, (one.tag, one.attrib)
                if name in {"y", "y1", "y2", "cy"}:
                    assert -1 <= float(value) <= height + 1, (one.tag, one.attrib)


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    found = made(tmp_path)
    found["verdict"]["invalid_causes"] = ["<script>alert(1)</script>"]
    found["comparison"][0]["prompt_rates"] = {"<b>": [1.0, 2.0]}
    text = page.page(found)
    assert "<script>" not in text
    assert "<b>" not in text


def test_a_run_without_data_still_has_a_page(tmp_path: Path) -> None:
    run = folder(tmp_path, 1.1)
    for name in ("blocks.jsonl", "requests.jsonl"):
        (run / name).unlink()
    assert "INCONCLUSIVE" in page.page(result.assemble(run))


def test_an_unbounded_interval_runs_out_of_the_plot() -> None:
    text = plots.intervals([("x", 1.1, (None, None), (0.9, None))], 0.02)
    narrow = next(one for one in pictures(text)[0].iter() if one.get("class") == "narrow")
    assert float(str(narrow.get("x2"))) > 400


@pytest.mark.parametrize("values", [[5.0], [1.0, 1.0], [0.0], [-3.0, 7.0], [1e-9, 2e-9], [1e9, 3e9]])
def test_an_axis_has_round_ticks_for_any_values(values: list[float]) -> None:
    axis = plots.Axis(values, 0.0, 100.0)
    assert 2 <= len(axis.ticks()) <= 8
    assert all(-0.01 <= axis(tick) <= 100.01 for tick in axis.ticks())


def test_metrics_are_in_the_text_format_of_prometheus(tmp_path: Path) -> None:
    text = report.prometheus(made(tmp_path))
    assert re.search(r'^sglang_bench_ratio\{candidate="eagle3",concurrency="1"\} 1\.\d+$', text, re.M)
    assert 'sglang_bench_accept_length{arm="eagle3",concurrency="1"} 2.0' in text
    assert 'sglang_bench_accept_length{arm="baseline"' not in text
    assert all(line.startswith("#") or re.fullmatch(r"[a-z_]+\{[^}]*\} \S+", line) for line in text.splitlines())


def test_the_limit_is_told_with_its_inputs_and_a_share_above_one_is_doubted(tmp_path: Path) -> None:
    bench = {"mem_copy_gbs": [100.0], "allreduce": []}
    inputs = {"active_bytes": 1e8, "kv_bytes_per_token": 100, "layers": 4, "tp": 1, "cuda": False, "microbench": bench}
    found = made(tmp_path, limit_inputs=inputs)
    assert found["limit"]["share_of_limit"] == pytest.approx(0.1, rel=0.2)
    for text in (page.page(found), report.markdown(found)):
        assert "Limit of this machine" in text
        assert "not a GPU" in text
        assert "% of it" in text
    inputs["active_bytes"] = 1e10
    assert "an input is wrong" in report.markdown(made(tmp_path / "b", limit_inputs=inputs))


def test_the_limit_with_several_cards_is_that_of_the_all_reduce_that_was_measured(tmp_path: Path) -> None:
    bench = {"mem_copy_gbs": [100.0, 100.0], "allreduce": [{"bytes": 128, "backend": "nccl", "us_median": 25.0}]}
    inputs = {"active_bytes": 1e10, "kv_bytes_per_token": 100, "layers": 4, "tp": 2, "cuda": True, "microbench": bench}
    text = report.markdown(made(tmp_path, limit_inputs=inputs))
    assert "With the all-reduce that was measured, at least" in text
    assert "the server's own all-reduce is faster than the one measured" in text


def test_a_limit_that_is_not_known_has_a_reason(tmp_path: Path) -> None:
    found = made(tmp_path, limit_inputs={"trouble": "the model has no safetensors files"})
    assert "Not known: the model has no safetensors files." in report.markdown(found)
    assert "Not known: the model has no safetensors files." in page.page(found)


def test_the_client_and_missing_fields_are_in_the_report(tmp_path: Path) -> None:
    row = {"streams": 1, "added_ms": {"p50": 0.1, "p99": None}, "cpu_us_per_chunk": 20.0}
    found = made(tmp_path, client_calibration=[row])
    found["software"]["contract"]["missing_fields"] = [{"name": "meta_info.cached_tokens", "consumers": ["proof"]}]
    text = report.markdown(found)
    assert "adds 0.10 ms" in text
    assert "contract: meta_info.cached_tokens is absent" in text
    assert "contract: meta_info.cached_tokens is absent" in page.page(found)


def test_the_machine_is_told_while_it_was_measured_with_energy_for_a_token(tmp_path: Path) -> None:
    found = made(tmp_path)
    card = {"power_w": {"mean": 290.4}, "sm_clock": {"min": 2100}, "temp_c_max": 71}
    for block in found["blocks"]:
        block["telemetry"] = {"samples": 9, "cpu_percent": 12.0, "load_1m": 1.5, "gpus": [card, {
            **card, "sm_clock": {"min": None}}], "energy_j_per_token": 6.25, "trace": []}
    rows = report.telemetry_rows(found)[1]
    assert rows[0] == ("baseline", "581", "6.250", "2100", "71", "12", "1.5")
    assert "| J/token |" in report.markdown(found)
    assert "<td>6.250</td>" in page.page(found)
    for block in found["blocks"]:
        block["telemetry"].update(gpus=[], energy_j_per_token=None)
    assert report.telemetry_rows(found)[1][0] == ("baseline", "-", "-", "-", "-", "12", "1.5")


def test_long_names_of_arms_stay_beside_the_plot_and_inside_the_picture() -> None:
    """Names of sweep arms once ran into the plot and out of the picture."""
    name = "steps3-topk1-draft4 c=16"
    for picture in (plots.intervals([(name, 0.9, (0.8, 1.0), (0.7, 1.1))], 0.02),
                    plots.timeline([(name, [("start", "starting", 0.0, 9.0)])], []),
                    plots.distributions([(name * 4, [1.0, 2.0]), ("b", [1.0, 2.0])], "rate")):
        words = [one for one in pictures(picture)[0].iter("text") if (one.text or "").startswith("steps3")]
        end = float(words[0].attrib["x"]) + len(words[0].text or "") * plots.LETTER
        boxes = [float(one.attrib["x1"]) for one in pictures(picture)[0].iter("line") if one.get("class") == "axis"]
        assert end <= (plots.WIDTH if "b" in [one.text for one in pictures(picture)[0].iter("text")] else min(boxes))
    assert plots.shortened("x" * 100, 100.0).endswith("\N{HORIZONTAL ELLIPSIS}")
    assert plots.label_width(["x" * 100]) == plots.LABEL * plots.WIDTH


def test_the_main_numbers_stand_at_the_top_and_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    found = made(tmp_path)
    names = [name for name, _, _ in report.tiles(found)]
    assert names == ["baseline", "eagle3", "ratio", "accept length"]
    assert report.tiles(found)[3][1:] == ("2.00", f"break-even {found['break_even']['tau_break_even']:.2f}")
    found["comparison"] = []
    found["arms"]["eagle3"]["load_points"]["1"]["spec"]["accept_length"] = None
    assert report.tiles(found)[2:] == [("ratio", "-", "interval unbounded")]
    assert '<div class="tiles">' in page.page(made(tmp_path))


def test_arms_that_show_the_same_evidence_share_a_row(tmp_path: Path) -> None:
    found = made(tmp_path)
    claim = {"claim": "cuda-graphs", "required": False, "state": "active", "declared": "on", "observed": "100 %",
             "effective": None, "reason": "", "sources": []}
    found["evidence"] = [{**claim, "arm": "baseline"}, {**claim, "arm": "eagle3"},
                         {**claim, "arm": "eagle3", "claim": "speculation", "required": True}]
    rows = report.evidence_rows(found)[1]
    assert [row[:3] for row in rows] == [("speculation", "eagle3", "yes"), ("cuda-graphs", "baseline, eagle3", "")]


def test_a_wild_interval_does_not_squeeze_the_others_into_a_point() -> None:
    """Seen on an overloaded machine: two pairs, an interval up to 7e8."""
    picture = plots.intervals([("a", 1.0, (1e-9, 7e8), (1e-9, 7e8)), ("b", 1.5, (1.2, 1.9), (1.1, 2.0))], 0.02)
    dots = [float(one.attrib["cx"]) for one in pictures(picture)[0].iter("circle")]
    assert dots[1] - dots[0] > 20
