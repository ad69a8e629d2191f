"""The table of known failures as a table."""

from __future__ import annotations

import re

import pytest

from entrypoints import faults
from entrypoints.faults import explain, first_cause, in_range, is_end, load, match, parse, version_key
from tests.unit.entrypoints import recorded


def test_a_healthy_log_matches_nothing() -> None:
    assert [line for line in recorded.log() if match(line, load(), recorded.VERSION)] == []
    assert explain(recorded.log(), load(), recorded.VERSION) == faults.Explanation()


def test_harmless_lines_that_look_like_failures() -> None:
    for line in ("Ignore import error when loading sglang.srt.models.x: No module named 'cutlass'",
                 "Port 30000 is already in use, trying port 30001",
                 "server_args={'model_path': 'CUDA out of memory'}",
                 'INFO:     127.0.0.1:5 - "GET /health?x=Scheduler hit an exception HTTP/1.1" 200 OK',
                 "SymmMemCommunicator: Device capability 12.0 not supported, communicator is not available."):
        assert match(line, load()) is None, line


#: what Inductor's autotuner logs for a candidate that does not fit, and FlashInfer where it does without
RECOVERABLE = (
    "E1201 10:11:12.131415 77 torch/_inductor/select_algorithm.py:2100] [0/0] No valid triton configs. OutOfResources: "
    "out of resource: shared memory, Required: 110592, Hardware limit: 101376. Reducing block sizes or `num_stages` "
    "may help.",
    "Exception No valid triton configs. OutOfResources: out of resource: shared memory, Required: 110592, Hardware "
    "limit: 101376 for benchmark choice TritonTemplateCaller(/x.py, BLOCK_M=128)",
    "[Autotuner]: Skipping tactic <runner> 3, due to failure while profiling: Error in function 'TllmGenFmhaRunner': "
    "Unsupported architecture",
    "Failed to initialize FlashInfer workspace (backend=trtllm): [SymmDeviceMemory] Device does not support "
    "multicasting. Disabling flashinfer allreduce fusion permanently.")


def test_what_an_autotuner_tries_in_vain_is_neither_an_end_nor_a_cause() -> None:
    for line in RECOVERABLE:
        assert match(line, load()) is None, line
        assert not is_end(line, load())
    death = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert explain([*RECOVERABLE, death], load()).fault == "gpu-out-of-memory"


def test_only_the_servers_own_word_is_an_end() -> None:
    """Any other text may be in a log of a server that tried something and goes on."""
    assert {row.name for row in load() if row.fatal} == {
        "scheduler-exception", "detokenizer-exception", "child-crashed", "child-failed"}
    assert all(row.symptom for row in load() if row.fatal)
    assert is_end("Scheduler hit an exception: RuntimeError: CUDA out of memory", load()), "a cause in the same line"
    assert not is_end("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, "
                      "Hardware limit: 101376", load())


def test_rows_are_well_formed() -> None:
    names = [row.name for row in load()]
    assert len(set(names)) == len(names)
    for row in load():
        fields = set(re.findall(r"{(\w+)}", row.cause + row.remedy))
        assert fields <= set(row.pattern.groupindex), row.name
        assert row.cause, row.name
        assert row.remedy, row.name
        if row.since and row.before:
            assert version_key(row.since) < version_key(row.before)


def test_a_cause_comes_before_a_symptom_and_the_earliest_before_a_later() -> None:
    lines = ["Received sigquit from a child process.", "|x", "RuntimeError: CUDA out of memory",
             "Error 803: system has unsupported display driver / cuda driver combination"]
    hit = first_cause(lines, load())
    assert hit is not None
    assert hit.fault.name == "gpu-out-of-memory"
    only = first_cause(lines[:1], load())
    assert only is not None
    assert only.fault.symptom
    both = match("Scheduler hit an exception: RuntimeError: CUDA out of memory", load())
    assert both is not None
    assert both.fault.name == "gpu-out-of-memory"


def test_groups_fill_cause_and_remedy() -> None:
    hit = match("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", load())
    assert hit is not None
    assert hit.cause.startswith("ptxas too old for sm_121a")
    assert "{" not in hit.remedy


@pytest.mark.parametrize(("version", "since", "before", "inside"), [
    ("0.5.9", "", "0.5.14", True), ("0.5.14", "", "0.5.14", False), ("0.5.23", "0.5.14", "", True),
    ("0.5.14.post1", "0.5.14", "0.5.15", True), ("0.5.9+cu130", "0.5.9", "0.5.10", True), ("", "9", "1", True),
])
def test_version_ranges(version: str, since: str, before: str, inside: bool) -> None:
    assert in_range(version, since, before) is inside


def test_a_mistake_in_the_table_is_loud() -> None:
    with pytest.raises(ValueError, match="unknown keys"):
        parse('[[fault]]\nname = "x"\npattern = "y"\ncause = "z"\nremedy = "r"\nfatl = true')
