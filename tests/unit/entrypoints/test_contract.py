"""What we use of SGLang is there, or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoints import contract
from tests.unit.entrypoints import recorded

META = {"prompt_tokens": 6, "completion_tokens": 32, "cached_tokens": 0, "finish_reason": None, "spec_verify_ct": 16,
        "spec_accept_length": 2.0, "spec_correct_drafts_histogram": [0, 16]}


def test_the_recorded_server_keeps_the_contract() -> None:
    assert contract.missing_live(recorded.VERSION, server_info=recorded.server_info(), meta_info=META,
                                 conditions=["speculative"]) == []


def test_a_missing_field_is_named_with_what_suffers() -> None:
    meta = {key: value for key, value in META.items() if key != "spec_verify_ct"}
    missing = contract.missing_live(recorded.VERSION, server_info=recorded.server_info(), meta_info=meta,
                                    conditions=["speculative"])
    assert [one.as_dict() for one in missing] == [
        {"kind": "field", "name": "meta_info.spec_verify_ct", "consumers": ["accept length", "claim speculation"],
         "required": False}]


def test_what_was_not_asked_for_is_not_judged() -> None:
    assert contract.missing_live("0.5.23", server_info=recorded.server_info()) == []
    paths = {one.name for one in contract.load() if one.kind == "endpoint"} - {"/ready"}
    newer = contract.missing_live("0.5.23", server_info=recorded.server_info(), paths=paths)
    assert [one.name for one in newer] == ["/ready"]
    assert contract.missing_live("0.5.9", server_info=recorded.server_info(), paths=paths) == []


def test_metrics_are_expected_only_where_they_are_on() -> None:
    info = recorded.server_info()
    assert contract.missing_live("0.5.23", server_info=info, metrics=set()) == []
    missing = contract.missing_live("0.5.23", server_info=info, metrics={"sglang:generation_tokens_total"},
                                    conditions=["metrics"])
    assert [one.name for one in missing] == ["sglang:cuda_graph_passes_total"]


def test_the_source_must_hold_every_text(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    literals = [one.literal for one in contract.load() if one.literal and one.applies("0.5.23")]
    (package / "a.py").write_text("\n".join(literals[1:]), encoding="utf-8")
    assert [one.literal for one in contract.missing_in_source(package, "0.5.23")] == literals[:1]
    (package / "b.py").write_text(literals[0], encoding="utf-8")
    assert contract.missing_in_source(package, "0.5.23") == []


def test_log_patterns_have_a_claim_or_a_reader() -> None:
    known = {"decode-line", "decode-graph"}
    for entry in contract.load():
        if entry.kind == "pattern":
            assert entry.pattern is not None
            states = {"active", "fallback", "unsupported", "setup"}
            assert entry.name in known or (entry.claim and entry.state in states)


def test_a_mistake_in_the_file_is_loud() -> None:
    with pytest.raises(ValueError, match="unknown keys"):
        contract.parse('[[endpoint]]\nname = "/x"\ncolour = "red"')
