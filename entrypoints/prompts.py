"""Prompts: the pack that comes with the image, or a user's JSONL; always through the model's own chat template."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entrypoints import client
from entrypoints.errors import BadConfig, InputMissing, Problem, Unusable

SHIPPED = Path(__file__).with_name("prompts.jsonl")
WARM_UP = "warm-up"
#: where common benchmark files keep the question, when there are no `messages`
TEXT_KEYS = ("prompt", "question", "instruction", "text", "turns")


@dataclass(frozen=True)
class Prompt:
    """One conversation that ends with the user's turn."""

    id: str
    stratum: str
    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Pack:
    """Prompts to measure with and, disjoint from them, prompts to warm up with; `sha256` is over the file's bytes."""

    name: str
    sha256: str
    measured: tuple[Prompt, ...]
    warmup: tuple[Prompt, ...]

    def strata(self) -> dict[str, int]:
        """Number of measured prompts in each stratum."""
        names = [prompt.stratum for prompt in self.measured]
        return {name: names.count(name) for name in dict.fromkeys(names)}


def load(path: Path | None = None, *, per_stratum: int = 0) -> Pack:
    """Read a pack; `per_stratum` limits the measured prompts of each stratum (0: all).

    A user's file may lack warm-up prompts: then the shipped ones are used. Raises `InputMissing` or `BadConfig` with
    all bad lines.
    """
    file = path or SHIPPED
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputMissing(Problem(what="cannot read the prompts", where=str(file),
                                   found=error.strerror or str(error), expected="a JSONL file")) from error
    prompts = _parse(data.decode("utf-8", "replace"), str(file))
    measured = [prompt for prompt in prompts if prompt.stratum != WARM_UP]
    warmup = [prompt for prompt in prompts if prompt.stratum == WARM_UP]
    if not measured:
        raise BadConfig(Problem(what="no prompt to measure with", where=str(file), found=f"{len(prompts)} prompts",
                                expected="at least one line with a stratum other than warm-up"))
    if not warmup:
        warmup = list(load().warmup)
    if per_stratum:
        taken: dict[str, int] = {}
        kept = []
        for prompt in measured:
            taken[prompt.stratum] = taken.get(prompt.stratum, 0) + 1
            if taken[prompt.stratum] <= per_stratum:
                kept.append(prompt)
        measured = kept
    return Pack(name="shipped" if path is None else file.name, sha256=hashlib.sha256(data).hexdigest(),
                measured=tuple(measured), warmup=tuple(warmup))


def _parse(text: str, where: str) -> list[Prompt]:
    problems: list[Problem] = []
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            row = json.loads(line)
            prompt = _prompt(row, f"{number:04}")
        except ValueError as error:
            problems.append(Problem(what="not a prompt", where=place, found=str(error),
                                    expected='{"messages": [{"role": "user", "content": "..."}]} or a "prompt"'))
            continue
        if prompt.id in seen:
            problems.append(Problem(what=f"prompt id {prompt.id} twice", where=place,
                                    found=f"first in line {seen[prompt.id]}", expected="one id, one prompt"))
        seen[prompt.id] = number
        prompts.append(prompt)
    if problems:
        raise BadConfig(problems)
    return prompts


def _prompt(row: object, number: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    # batch files of the OpenAI API wrap the request in a body
    inner = row["body"] if isinstance(row.get("body"), dict) else row
    name = str(row.get("id") or row.get("custom_id") or row.get("question_id") or f"line-{number}")
    stratum = str(row.get("stratum") or row.get("category") or "user")
    messages = inner.get("messages")
    if messages is None:
        text = next((inner[key] for key in TEXT_KEYS if inner.get(key)), None)
        if isinstance(text, list):  # MT-Bench: the second turn depends on the first answer, so only the first is used
            text = text[0]
        if not isinstance(text, str):
            raise ValueError("no messages and no text")
        messages = [{"role": "user", "content": text}]
    valid = (isinstance(messages, list) and messages and
             all(isinstance(one, dict) and one.get("role") and one.get("content") for one in messages))
    if not valid:
        raise ValueError("messages need a role and a content each")
    while messages and messages[-1]["role"] == "assistant":  # a reference answer at the end is not a question
        messages = messages[:-1]
    if not messages:
        raise ValueError("no user message")
    return Prompt(name, stratum, tuple(messages))


_GOODS = ("copper wire", "pine boards", "lamp oil", "roof slates", "sail cloth", "window glass", "iron nails", "rope",
          "dried peas", "barley", "printing paper", "ink", "beeswax", "clay pipes", "leather", "brass hinges")
_PLACES = ("the north quay", "the lower store", "the chapel yard", "the mill", "the customs house", "the dry dock",
           "the market hall", "the ferry stage")
_EVENTS = ("arrived a day late because of fog", "was counted twice and found complete", "was wet and dried again",
           "was moved to make room", "was claimed by two merchants", "was paid for in advance", "was sold at once",
           "was weighed again on request", "was left under a tarpaulin overnight", "was sent back for a wrong label")


def long_context(seed: int, tokens: int, count: int = 4) -> tuple[Prompt, ...]:
    """Prompts of about `tokens` tokens (four letters each): a harbour ledger, no two entries alike, and a task.

    Nothing in it is repeated, so neither a prefix cache nor a draft that copies has it easier than with real text.
    """
    made = []
    for number in range(count):
        dice = np.random.default_rng((seed, tokens, number))
        lines: list[str] = []
        size = 0
        while size < 4 * tokens:
            goods, place, event = (str(dice.choice(names)) for names in (_GOODS, _PLACES, _EVENTS))
            lines.append(f"Entry {len(lines) + 1}: lot {dice.integers(10_000, 99_999)}, {dice.integers(2, 400)} units "
                         f"of {goods} at {place}, {event}, signed {chr(65 + int(dice.integers(26)))}"
                         f"{chr(65 + int(dice.integers(26)))}.")
            size += len(lines[-1]) + 1
        text = ("Here is the ledger of a harbour.\n" + "\n".join(lines) + "\nWrite a report of at least three hundred "
                "words: which goods were handled most, where trouble happened, and what you would check first.")
        made.append(Prompt(f"long-{number + 1:02}", "long", ({"role": "user", "content": text},)))
    return tuple(made)


def half(pack: Pack, which: int) -> Pack:
    """Every second prompt of each stratum: 0 for choosing, 1 for confirming; the two have no prompt in common."""
    kept = []
    seen: dict[str, int] = {}
    for prompt in pack.measured:
        place = seen.get(prompt.stratum, 0)
        seen[prompt.stratum] = place + 1
        if place % 2 == which:
            kept.append(prompt)
    if not kept:
        raise BadConfig(Problem(what="too few prompts to choose on one half and confirm on the other",
                                where=pack.name, found=f"{len(pack.measured)} prompts",
                                expected="at least two in a stratum"))
    return dataclasses.replace(pack, name=f"{pack.name}, half {which + 1} of 2", measured=tuple(kept))


def order(pack: Pack, seed: int | Sequence[int]) -> tuple[Prompt, ...]:
    """The measured prompts shuffled by a seed."""
    index = np.random.default_rng(seed).permutation(len(pack.measured))
    return tuple(pack.measured[int(position)] for position in index)


async def render(host: str, port: int, prompts: Sequence[Prompt], *, api_key: str = "",
                 watch: Callable[[], None] | None = None) -> dict[str, tuple[int, ...]]:
    """Token ids of each prompt by the server's own chat template (`/v1/tokenize` with messages).

    `watch` as in `client.generate`. Raises `Unusable` naming the endpoint when the server cannot do that.
    """
    rendered: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        body = {"model": "default", "messages": list(prompt.messages)}
        try:
            response = await client.call(host, port, "POST", "/v1/tokenize", body, api_key=api_key, watch=watch)
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {response.text[:200]}")
            tokens = json.loads(response.text).get("tokens")
            if not isinstance(tokens, list) or not tokens or not all(isinstance(one, int) for one in tokens):
                raise ValueError("no list of token ids")
        except (ValueError, client.StalledError) as error:
            raise Unusable(Problem(
                what="the server does not render chat prompts", where=f"POST /v1/tokenize, prompt {prompt.id}",
                found=str(error), expected="token ids of the chat template",
                todo="the model needs a chat template (--chat-template FILE after --), SGLang 0.5.10 or newer "
                     "the endpoint")) from error
        rendered[prompt.id] = tuple(tokens)
    return rendered


#: runs in the server's interpreter, as SGLang itself renders a chat with a Hugging Face template
_TEMPLATE = """
import json, sys
from transformers import AutoTokenizer
asked = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(asked["model"])
found = {}
for name, messages in asked["prompts"].items():
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    found[name] = [int(one) for one in ids]
print("RENDERED", json.dumps(found))
"""
TEMPLATE_TIMEOUT = 180.0


def render_offline(python: Path, model: str, prompts: Sequence[Prompt],
                   environment: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Token ids by the tokenizer of the server's environment, for servers whose `/v1/tokenize` knows no chats.

    That is so in SGLang 0.5.9. Raises `Unusable` with what the tokenizer said.
    """
    asked = json.dumps({"model": model, "prompts": {one.id: list(one.messages) for one in prompts}})
    said = ""
    try:
        done = subprocess.run([str(python), "-c", _TEMPLATE], input=asked, capture_output=True, text=True,
                              timeout=TEMPLATE_TIMEOUT, env=dict(environment), check=False)
        said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        line = next(line for line in done.stdout.splitlines() if line.startswith("RENDERED "))
        return {name: tuple(ids) for name, ids in json.loads(line[9:]).items()}
    except (OSError, subprocess.TimeoutExpired, StopIteration) as error:
        raise Unusable(Problem(
            what="the chat template cannot be applied", where=model, found=said or str(error),
            expected="a tokenizer with a chat template in the model's folder",
            todo="a model without a chat template needs one beside its tokenizer")) from error


def rendered_digest(rendered: Mapping[str, Sequence[int]]) -> str:
    """SHA-256 over the ids of all prompts, by prompt id."""
    lines = (f"{name} {client.ids_digest(rendered[name])}" for name in sorted(rendered))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def shared_prefix(rendered: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """For each prompt the longest prefix that it shares with another one: what a clean cache may already hold."""
    names = sorted(rendered, key=lambda name: tuple(rendered[name]))
    shared = dict.fromkeys(names, 0)
    for left, right in itertools.pairwise(names):  # in sorted order the longest match is a neighbour
        one, other = rendered[left], rendered[right]
        length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                      min(len(one), len(other)))
        shared[left] = max(shared[left], length)
        shared[right] = max(shared[right], length)
    return shared
