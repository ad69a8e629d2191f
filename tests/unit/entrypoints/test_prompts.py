from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from entrypoints import prompts
from entrypoints.errors import BadConfig, InputMissing, Unusable


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


class Template:
    """A server that renders chats, or says something else."""

    def __init__(self, status: int = 200, body: object = None) -> None:
        self.status, self.body = status, body
        self.seen: list[dict[str, object]] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        self.seen.append(asked)
        text = json.dumps(self.body if self.body is not None else
                          {"tokens": [7, *map(ord, asked["messages"][-1]["content"][:4])]})
        writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    async def render(self, pack: prompts.Pack) -> dict[str, tuple[int, ...]]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        async with server:
            return await prompts.render("127.0.0.1", server.sockets[0].getsockname()[1], pack.measured)


def test_prompts_are_rendered_by_the_servers_own_template() -> None:
    template, pack = Template(), prompts.load(per_stratum=1)
    rendered = asyncio.run(template.render(pack))
    assert list(rendered) == [prompt.id for prompt in pack.measured]
    assert all(ids[0] == 7 and len(ids) == 5 for ids in rendered.values())
    assert template.seen[0]["messages"] == list(pack.measured[0].messages)


@pytest.mark.parametrize(("status", "body"), [(404, {"detail": "Not Found"}), (400, {"error": "no chat template"}),
                                              (200, {"tokens": []}), (200, {"tokens": ["a"]}), (200, {})])
def test_a_server_without_a_template_is_named_with_what_it_said(status: int, body: object) -> None:
    with pytest.raises(Unusable, match=r"/v1/tokenize, prompt chat-01: the server does not render"):
        asyncio.run(Template(status, body).render(prompts.load(per_stratum=1)))


def test_half_of_a_pack_is_every_second_prompt_of_each_stratum() -> None:
    pack = prompts.load()
    one, other = prompts.half(pack, 0), prompts.half(pack, 1)
    assert not {prompt.id for prompt in one.measured} & {prompt.id for prompt in other.measured}
    assert one.strata() == other.strata() == {"chat": 6, "code": 6, "math": 6, "rewrite": 6}


@pytest.mark.parametrize(("script", "said"), [
    ("#!/bin/sh\necho 'ValueError: no chat_template' >&2\nexit 1\n", "ValueError: no chat_template"),
    ("", "Permission")])
def test_a_tokenizer_without_a_template_says_so(tmp_path: Path, script: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    if script:
        python.chmod(0o755)
    with pytest.raises(Unusable, match=said):
        prompts.render_offline(python, "m", prompts.load(per_stratum=1).measured, {})


def test_the_tokenizer_of_the_server_renders_each_prompt_under_its_name(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/t.py\n")
    python.chmod(0o755)
    (tmp_path / "t.py").write_text("import json, sys\nasked = json.load(sys.stdin)\nprint('noise')\n"
                                   "print('RENDERED', json.dumps({name: [1, 2] for name in asked['prompts']}))\n")
    pack = prompts.load(per_stratum=1)
    assert prompts.render_offline(python, "m", pack.measured, {}) == {one.id: (1, 2) for one in pack.measured}
