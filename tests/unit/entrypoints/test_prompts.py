from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoints import prompts
from entrypoints.errors import BadConfig, InputMissing


def test_the_shipped_pack_has_four_strata_of_twelve_and_a_disjoint_warm_up() -> None:
    pack = prompts.load()
    assert pack.strata() == {"chat": 12, "code": 12, "math": 12, "rewrite": 12}
    texts = [prompt.messages[-1]["content"] for prompt in (*pack.measured, *pack.warmup)]
    assert len(set(texts)) == len(texts) == 64
    assert len(pack.warmup) >= 8
    assert len(pack.sha256) == 64


def test_a_share_of_each_stratum_is_the_first_ones() -> None:
    pack = prompts.load(per_stratum=2)
    assert [prompt.id for prompt in pack.measured] == [
        f"{name}-0{number}" for name in ("chat", "code", "math", "rewrite") for number in (1, 2)]


@pytest.mark.parametrize(("line", "expected"), [
    ({"messages": [{"role": "user", "content": "a"}]}, "a"),
    ({"custom_id": "x", "body": {"messages": [{"role": "user", "content": "b"}]}}, "b"),
    ({"question_id": 81, "category": "writing", "turns": ["c", "second"]}, "c"),
    ({"task_id": "HumanEval/0", "prompt": "d"}, "d"),
    ({"question": "e", "answer": "5"}, "e"),
    ({"instruction": "f", "output": "x"}, "f"),
    ({"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "answer"}]}, "g"),
])
def test_common_forms_of_prompt_files_are_read(tmp_path: Path, line: dict[str, object], expected: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(line) + "\n\n")
    pack = prompts.load(file)
    assert [one.messages[-1]["content"] for one in pack.measured] == [expected]
    assert pack.warmup, "the shipped warm-up serves when the file has none"


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ok", "id": "a"}\nnot json\n[1]\n{"x": 1}\n{"messages": [{"role": "user"}]}\n'
                    '{"prompt": "again", "id": "a"}\n{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with pytest.raises(BadConfig) as caught:
        prompts.load(file)
    assert [problem.where.rpartition(":")[2] for problem in caught.value.problems] == ["2", "3", "4", "5", "6", "7"]


def test_a_missing_or_empty_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputMissing):
        prompts.load(tmp_path / "none.jsonl")
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(BadConfig, match="no prompt to measure with"):
        prompts.load(tmp_path / "e.jsonl")


def test_the_order_is_a_shuffle_that_a_seed_repeats() -> None:
    pack = prompts.load()
    one, again, other = (prompts.order(pack, (1, pair)) for pair in (0, 0, 1))
    assert one == again != other
    assert sorted(one, key=lambda prompt: prompt.id) == sorted(pack.measured, key=lambda prompt: prompt.id)


def test_the_shared_prefix_is_the_longest_with_any_other_prompt() -> None:
    shared = prompts.shared_prefix({"a": (1, 2, 3, 9), "b": (1, 2, 4), "c": (1, 2, 3, 5, 6), "d": (7,), "e": (1, 2)})
    assert shared == {"a": 3, "c": 3, "b": 2, "d": 0, "e": 2}
    assert prompts.shared_prefix({"only": (1, 2)}) == {"only": 0}


def test_the_digest_follows_the_ids_and_not_the_order() -> None:
    one = prompts.rendered_digest({"a": (1, 2), "b": (3,)})
    assert one == prompts.rendered_digest({"b": (3,), "a": (1, 2)})
    assert one != prompts.rendered_digest({"a": (1, 2), "b": (4,)})


def test_long_prompts_follow_the_seed_and_repeat_nothing() -> None:
    one, again, other = (prompts.long_context(seed, 2000, 2) for seed in (1, 1, 2))
    assert one == again != other
    for prompt in one:
        text = prompt.messages[0]["content"]
        assert 8000 <= len(text) <= 8800
        lines = text.splitlines()[1:-1]
        assert len(set(lines)) == len(lines)
    assert [prompt.stratum for prompt in one] == ["long", "long"]
