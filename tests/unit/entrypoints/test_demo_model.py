"""The demo pair, computed in numpy from the files as written, must behave as its docstring claims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrypoints import demo_model
from entrypoints.demo_model import STARTS, accept_length, blocks, build, main, write

Array = NDArray[Any]

TYPES = {"F32": "<f4", "I64": "<i8", "BOOL": "?"}


def read_safetensors(path: Path) -> dict[str, Array]:
    """The format as its specification says it, offsets checked to be gapless."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    body = data[8 + size :]
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [end for _, end in spans] == [*(start for start, _ in spans[1:]), len(body)]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], TYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def norm(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * weight)


class Pair:
    """Forward passes of a Llama and of an EAGLE-3 draft whose attention and, in the target, MLP give zero."""

    def __init__(self, out: Path) -> None:
        self.target, self.draft = (read_safetensors(out / part / "model.safetensors") for part in ("target", "draft"))
        zero = [w for name, w in self.target.items() if name.endswith(("o_proj.weight", "down_proj.weight"))]
        assert len(zero) == 8
        assert not any(w.any() for w in zero)
        assert not self.draft["midlayer.self_attn.o_proj.weight"].any()

    def says(self, token: int) -> int:
        state = norm(self.target["model.embed_tokens.weight"][token], self.target["model.norm.weight"])
        return int((self.target["lm_head.weight"] @ state).argmax())

    def guesses(self, token: int, topk: int) -> Iterator[list[int]]:
        """Candidates of each draft step after the target has seen `token`."""
        draft = {name.removeprefix("midlayer."): weight for name, weight in self.draft.items()}
        state = draft["fc.weight"] @ np.tile(self.target["model.embed_tokens.weight"][token], 3)
        while True:
            inner = norm(state, draft["post_attention_layernorm.weight"])
            gate = draft["mlp.gate_proj.weight"] @ inner
            gate = gate / (1 + np.exp(-gate))
            state = state + draft["mlp.down_proj.weight"] @ (gate * (draft["mlp.up_proj.weight"] @ inner))
            logits = draft["lm_head.weight"] @ norm(state, draft["norm.weight"])
            best = np.argsort(-logits)[:topk]
            yield [int(i + draft["d2t"][i]) for i in best]

    def accepted(self, token: int, steps: int, topk: int) -> int:
        """Right guesses in a row, any of the candidates counting."""
        wanted = self.says(token)
        for count, (_, candidates) in enumerate(zip(range(steps), self.guesses(token, topk), strict=False)):
            wanted = self.says(wanted)
            if wanted not in candidates:
                return count
        return steps


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    out = tmp_path_factory.mktemp("demo")
    write(build(), out)
    return Pair(out)


def verifications(pair: Pair, token: int, tokens: int, steps: int, topk: int) -> list[int]:
    """Tokens that each verification adds, until `tokens` are there."""
    added: list[int] = []
    while sum(added) < tokens:
        added.append(pair.accepted(token, steps, topk) + 1)
        for _ in range(added[-1]):
            token = pair.says(token)
    return added


@pytest.mark.parametrize(("steps", "topk"), [(3, 2), (3, 1), (1, 1), (5, 4), (5, 8)])
def test_accept_length_two_in_every_setting(pair: Pair, steps: int, topk: int) -> None:
    start = build().tokens.index("<|start-17|>")
    assert verifications(pair, start, 100, steps, topk) == [2] * 50


@pytest.mark.parametrize("accept", ["1", "1.25", "1.5", "2.5", "3.2", "4", "5", "4.99"])
def test_other_accept_lengths_hold_over_whole_periods(accept: str, tmp_path: Path) -> None:
    model = build(Fraction(accept))
    write(model, tmp_path)
    start = model.tokens.index("<|start-0|>")
    period = blocks(Fraction(accept))
    for steps, topk in ((3, 2), (5, 8)):
        added = verifications(Pair(tmp_path), start, sum(period), steps, topk)
        assert Fraction(sum(added), len(added)) == accept_length(Fraction(accept), steps)


def test_short_drafts_cut_long_blocks() -> None:
    assert accept_length(Fraction(4), 3) == 4
    assert accept_length(Fraction(4), 2) == 2  # 3 + 1
    assert accept_length(Fraction(5), 3) == Fraction(5, 2)  # 4 + 1
    assert accept_length(Fraction("1.5"), 1) == Fraction(3, 2)


@pytest.mark.parametrize("accept", ["1", "2", "2.37", "5"])
def test_blocks_have_the_mean_and_differ_by_one(accept: str) -> None:
    lengths = blocks(Fraction(accept))
    assert Fraction(sum(lengths), len(lengths)) == Fraction(accept)
    assert max(lengths) - min(lengths) <= 1


def test_answers_are_long_and_never_repeat(pair: Pair) -> None:
    model = build()
    for start in range(STARTS):
        token = model.tokens.index(f"<|start-{start}|>")
        answer = model.continuation(token, 512)
        assert len(set(answer)) == 512
        assert all(model.tokens[word].startswith("Ġ") for word in answer)
        assert answer[:3] == [pair.says(token), pair.says(pair.says(token)), pair.says(pair.says(pair.says(token)))]


def test_every_token_is_followed_by_the_computed_word(pair: Pair) -> None:
    model = build()
    assert [pair.says(token) for token in range(len(model.tokens))] == [
        model.continuation(token, 1)[0] for token in range(len(model.tokens))
    ]


def test_starts_differ_so_that_prompts_get_different_answers() -> None:
    model = build()
    starts = [model.tokens.index(f"<|start-{i}|>") for i in range(STARTS)]
    assert len({model.continuation(token, 1)[0] for token in starts}) == STARTS


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first, second = (write(build(Fraction("2.5"), 3), tmp_path / name) for name in "ab")
    assert first == second
    for name, sha256 in first["files"].items():
        assert hashlib.sha256((tmp_path / "b" / name).read_bytes()).hexdigest() == sha256
    assert write(build(Fraction("2.5"), 4), tmp_path / "c")["files"] != first["files"]


def test_bytes_do_not_depend_on_the_last_bits_of_a_cosine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = write(build(), tmp_path / "here")
    cos = np.cos
    monkeypatch.setattr(np, "cos", lambda x: cos(x) * (1 + 2**-52))
    assert write(build(), tmp_path / "there") == here


def test_summary_says_what_to_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--accept", "2.5"]) == 0
    assert "accept length 2.5 with speculative-num-steps 3" in capsys.readouterr().out
    summary = json.loads((tmp_path / "demo.json").read_text())
    assert (summary["accept"], summary["seed"]) == (2.5, 0)
    one_step = next(entry for entry in summary["expected"] if entry["speculative-num-steps"] == 1)
    assert one_step["accept_length"] == float(accept_length(Fraction("2.5"), 1))


@pytest.mark.parametrize("accept", ["0.5", "6", "2.001"])
def test_an_impossible_accept_length_is_refused(
    accept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--accept", accept]) == 2
    message = capsys.readouterr().err
    assert "--accept" in message
    assert "expected: 1 to 5, at most two decimals" in message
    assert not list(tmp_path.iterdir())


def test_all_faults_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--accept", "9", "--layers", "2"]) == 2
    message = capsys.readouterr().err
    assert "--accept" in message
    assert "--layers" in message


def test_more_layers_say_the_same_words(tmp_path: Path) -> None:
    write(build(layers=7), tmp_path)
    assert json.loads((tmp_path / "target/config.json").read_text())["num_hidden_layers"] == 7
    assert json.loads((tmp_path / "draft/config.json").read_text())["num_hidden_layers"] == 1
    weights = read_safetensors(tmp_path / "target/model.safetensors")
    assert sum(name.endswith("o_proj.weight") for name in weights) == 7
    assert build(layers=7).continuation(9, 20) == build().continuation(9, 20)


def test_an_unwritable_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main([str(blocker)]) == 2
    assert str(blocker) in capsys.readouterr().err


def test_every_text_can_be_spelled() -> None:
    tokens = build().tokens
    assert len(set(tokens)) == len(tokens)
    assert set(demo_model._byte_letters()) <= set(tokens)
    assert len(set(demo_model._byte_letters())) == 256
    assert demo_model._byte_letters()[ord(" ")] == "Ġ"


def test_draft_vocabulary_is_the_circle(pair: Pair) -> None:
    model = build()
    ids = np.arange(len(model.words)) + pair.draft["d2t"]
    assert sorted(model.words) == ids.tolist()
    assert np.flatnonzero(pair.draft["t2d"]).tolist() == ids.tolist()
