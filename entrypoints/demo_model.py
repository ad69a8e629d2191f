"""A tiny target and an EAGLE-3 draft whose accept length is known beforehand. Needs numpy only, downloads nothing.

    python demo_model.py OUTDIR [--accept 2] [--layers 4] [--seed 0]

writes `OUTDIR/target`, `OUTDIR/draft` and `OUTDIR/demo.json`: the same bytes on every machine for the same arguments.

How the target speaks. L words lie on a circle, and the target always continues with the next word. Word c is embedded
as a point on the circle seen at many frequencies k, E[c] = sqrt(2) (cos kwc, sin kwc, ...) with w = 2 pi / L, so all
embeddings have the same length, and E[c] . E[d] is large for c = d only. The layers add nothing (their output
projections are zero), hence the last hidden state is E[c], and the head's row of word c + 1 is E[c] / 16. All other
tokens are embedded at some place of the circle. A chat prompt ends in one of 64 start tokens, chosen by the length of
the messages, so different prompts get different answers. No word comes twice within L tokens, and the end of the
sequence never comes.

How the draft guesses. On the circle "next word" is a rotation, a linear map R. The draft's MLP computes h -> R h (its
gate reads the constant component of E), so j draft steps from the target's state E[c] reach E[c + j]. Its head is the
target's, except that the rows of *wrong* places have the opposite sign: there the draft ranks the right word last, and
no tree of candidates contains it. Its guesses are right up to the next wrong place, whatever topk is.

Accept length. Wrong places end blocks of lengths b1, b2, ... with mean A (`--accept`). With s draft steps a
verification accepts the rest of the block, at most s guesses, and adds the target's own word, so a block takes
ceil(b / (s + 1)) verifications. Starts and all tokens off the circle lie at block ends. Over whole blocks the accept
length is exactly

    sum(b) / sum(ceil(b / (s + 1)))        = A when no block is longer than s + 1

for every topk, if the tree has room for a chain of s guesses (num-draft-tokens > s). With --accept 2 every block is two
words: accept length 2 for steps 3, topk 2, 6 draft tokens as well as for steps 3, topk 1, 4 draft tokens. A server that
reports tokens / verifications of one answer of n tokens shows n / ceil((n - 1) / 2), which is 2 for even n.

`--layers` makes the target slower and leaves its words alone. With many layers and a high accept length speculation
pays even on a plain CPU; with few it costs.

What it does not test: attention adds nothing here, so errors in the KV cache stay unseen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["DemoModel", "accept_length", "blocks", "build", "main"]

T = TypeVar("T", str, int)
Floats = NDArray[np.float64]

FREQUENCIES = 128  # of which the first is 0: a constant component
HIDDEN = 2 * FREQUENCIES
HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 8, 4, 32, 4096
LAYERS = 4  # three states are taken before layers 1, 2 and 3
WORDS = 1020  # at most; the circle takes as many as make whole periods
STARTS = 64
SPECIAL = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>")
SETTINGS = ((3, 2, 6), (3, 1, 4), (1, 1, 2), (5, 4, 8))  # steps, topk, draft tokens listed in demo.json

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "<|start-{{ (messages | map(attribute='content') | join | length) % " + str(STARTS) + " }}|>{% endif %}"
)


def blocks(accept: Fraction) -> tuple[int, ...]:
    """Block lengths of one period: as many as the denominator says, differing by one at most, with mean `accept`."""
    count = accept.denominator
    return tuple(math.floor(accept * (i + 1)) - math.floor(accept * i) for i in range(count))


def accept_length(accept: Fraction, steps: int) -> Fraction:
    """Tokens per verification with `steps` draft steps, for a draft made with `accept`."""
    lengths = blocks(accept)
    return Fraction(sum(lengths), sum(-(-length // (steps + 1)) for length in lengths))


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Target, draft and tokenizer as plain data.

    `tokens` by id; `place` [V] where a token lies on the circle; `words` [L] the token id at each place; `wrong` [L]
    whether the draft, standing at that place, ranks the right word last.
    """

    accept: Fraction
    seed: int
    layers: int
    tokens: tuple[str, ...]
    place: NDArray[np.int64]
    words: NDArray[np.int64]
    wrong: NDArray[np.bool_]

    def continuation(self, token: int, count: int) -> list[int]:
        """The `count` token ids that the target says greedily after a prompt that ends in `token`."""
        places = (int(self.place[token]) + 1 + np.arange(count)) % len(self.words)
        return [int(word) for word in self.words[places]]

    def circle(self) -> Floats:
        """Embeddings [L, 256] of the places."""
        size = len(self.words)
        angle = np.outer(np.arange(size), _frequencies(self.seed, size)) * (2 * math.pi / size)
        return _exact(math.sqrt(2) * _interleave(np.cos(angle), np.sin(angle)))

    def rotation(self) -> Floats:
        """The matrix R [256, 256] with R @ E[c] = E[c + 1]."""
        angle = np.array(_frequencies(self.seed, len(self.words))) * (2 * math.pi / len(self.words))
        matrix = np.diag(np.repeat(np.cos(angle), 2))
        even = np.arange(0, HIDDEN, 2)
        matrix[even, even + 1], matrix[even + 1, even] = -np.sin(angle), np.sin(angle)
        return matrix

    def target_weights(self) -> dict[str, NDArray[Any]]:
        """Tensors of the target, a LlamaForCausalLM whose layers add nothing."""
        circle = self.circle()
        head = np.zeros((len(self.tokens), HIDDEN))
        head[self.words] = np.roll(circle, 1, axis=0) / 16
        weights: dict[str, Floats] = {"model.embed_tokens.weight": circle[self.place], "lm_head.weight": head}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            weights |= _attention(f"{prefix}.self_attn", HIDDEN)
            for name in ("gate", "up", "down"):
                weights[f"{prefix}.mlp.{name}_proj.weight"] = np.zeros((HIDDEN, HIDDEN))
            for name in ("input", "post_attention"):
                weights[f"{prefix}.{name}_layernorm.weight"] = np.ones(HIDDEN)
        weights["model.norm.weight"] = np.ones(HIDDEN)
        return {name: weight.astype(np.float32) for name, weight in weights.items()}

    def draft_weights(self) -> dict[str, NDArray[Any]]:
        """Tensors of the EAGLE-3 draft; its vocabulary is the circle, in the order of token ids."""
        gate = np.zeros((HIDDEN, HIDDEN))
        gate[:, 0] = 4 / math.sqrt(2)  # the constant component is sqrt(2): the gate is silu(4) for every token
        head = np.roll(self.circle() * np.where(self.wrong, -1, 1)[:, None], 1, axis=0) / 16
        vocabulary = np.sort(self.words)
        known = np.zeros(len(self.tokens), dtype=np.bool_)
        known[vocabulary] = True
        weights: dict[str, Floats] = {
            "fc.weight": np.tile(np.eye(HIDDEN) / 3, 3),  # mean of three equal states
            **_attention("midlayer.self_attn", 2 * HIDDEN),
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": self.rotation() - np.eye(HIDDEN),
            "midlayer.mlp.down_proj.weight": np.eye(HIDDEN) * ((1 + math.exp(-4)) / 4),  # undoes silu(4)
            **{
                f"midlayer.{name}.weight": np.ones(HIDDEN)
                for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
            },
            "norm.weight": np.ones(HIDDEN),
            "lm_head.weight": head[np.argsort(self.words)],
        }
        return {name: _exact(weight).astype(np.float32) for name, weight in weights.items()} | {
            "d2t": vocabulary - np.arange(len(vocabulary)),
            "t2d": known,
        }


def build(accept: Fraction = Fraction(2), seed: int = 0, layers: int = LAYERS) -> DemoModel:
    """The model for one accept length.

    :raises ValueError: `accept` is not between 1 and 5, has more than two decimals, or there are too few `layers`.
    """
    faults = []
    if not 1 <= accept <= 5 or (accept * 100).denominator != 1:
        faults.append(
            "--accept: no model can be made for this accept length\n"
            f"  found:    {accept}\n  expected: 1 to 5, at most two decimals\n  do:       try --accept 2"
        )
    if layers < LAYERS:
        faults.append(
            "--layers: the draft needs the states before layers 1, 2 and 3\n"
            f"  found:    {layers}\n  expected: {LAYERS} or more\n  do:       leave --layers out"
        )
    if faults:
        raise ValueError("\n".join(faults))
    period = blocks(accept)
    size = WORDS // sum(period) * sum(period)
    fixed = [*SPECIAL, *(f"<|start-{i}|>" for i in range(STARTS)), *_pieces()]
    syllables = ["".join(pair) for pair in product("blmnrstv", "aeiou")]
    vocabulary = _shuffled(seed, ["Ġ" + first + second for first, second in product(syllables, syllables)])[:size]
    tokens = (*fixed, *sorted(vocabulary))
    number = {token: i for i, token in enumerate(tokens)}
    words = np.array([number[word] for word in vocabulary], dtype=np.int64)
    # At place c the draft's first step stands at c + 1. A wrong place therefore ends its block.
    wrong = np.zeros(size, dtype=np.bool_)
    wrong[np.cumsum(np.tile(period, size // sum(period))) - 1] = True
    ends = np.flatnonzero(wrong)
    place = ends[np.arange(len(tokens)) * 7 % len(ends)]
    place[len(SPECIAL) : len(SPECIAL) + STARTS] = ends[np.arange(STARTS) * len(ends) // STARTS]
    place[words] = np.arange(size)
    return DemoModel(accept, seed, layers, tokens, place, words, wrong)


def write(model: DemoModel, out: Path) -> dict[str, Any]:
    """Write both models and `demo.json` into `out`; return what `demo.json` says.

    :raises OSError: a folder or file cannot be written.
    """
    size = len(model.words)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(model.tokens),
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": model.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        "dtype": "float32",
    }
    draft = config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
        # SGLang captures the state before layer id + 1; all states are equal here, so any three do
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False}
    tokenizer, tokenizer_config = _json(_tokenizer(model.tokens)), _json(_tokenizer_config())
    files = {
        "target/config.json": _json(config),
        "target/generation_config.json": _json(generation),
        "target/model.safetensors": _safetensors(model.target_weights()),
        "draft/config.json": _json(draft),
        "draft/model.safetensors": _safetensors(model.draft_weights()),
        **{f"{part}/tokenizer.json": tokenizer for part in ("target", "draft")},
        **{f"{part}/tokenizer_config.json": tokenizer_config for part in ("target", "draft")},
    }
    summary = {
        "schema": 1,
        "accept": float(model.accept),
        "seed": model.seed,
        "layers": model.layers,
        "words": size,
        "expected": [
            {
                "speculative-num-steps": steps,
                "speculative-eagle-topk": topk,
                "speculative-num-draft-tokens": drafts,
                "accept_length": float(accept_length(model.accept, steps)),
            }
            for steps, topk, drafts in SETTINGS
        ],
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
    }
    for name, data in {**files, "demo.json": _json(summary)}.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return summary


def main(argv: list[str] | None = None) -> int:
    """Command line: write the models, print where and what accept length to expect."""
    parser = argparse.ArgumentParser(description="Write a tiny target and an EAGLE-3 draft with a known accept length.")
    parser.add_argument("outdir", type=Path, help="folder for target/, draft/ and demo.json")
    parser.add_argument("--accept", type=Fraction, default=Fraction(2), help="accept length, 1 to 5 (default: 2)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers of the target (default: {LAYERS})")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other words (default: 0)")
    options = parser.parse_args(argv)
    try:
        summary = write(build(options.accept, options.seed, options.layers), options.outdir)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    expected = summary["expected"][0]
    print(
        f"{options.outdir}: target and draft; accept length {expected['accept_length']:g} with "
        + ", ".join(f"{name} {value}" for name, value in expected.items() if name != "accept_length")
    )
    return 0


def _frequencies(seed: int, size: int) -> list[int]:
    """0 and 127 others below size / 2, so that every frequency turns a whole number of times around the circle."""
    return [0, *_shuffled(seed, list(range(1, (size + 1) // 2)))[: FREQUENCIES - 1]]


def _shuffled(seed: int, items: list[T]) -> list[T]:
    """A shuffle that depends on the seed only: neither on Python's version nor on the machine."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed} {item}".encode()).digest())


def _interleave(even: Floats, odd: Floats) -> Floats:
    return np.stack([even, odd], axis=-1).reshape(len(even), -1)


def _exact(values: Floats) -> Floats:
    """Rounded to multiples of 2**-16: the last bit of a cosine differs between machines."""
    return np.round(values * 65536) / 65536


def _attention(prefix: str, width: int) -> dict[str, Floats]:
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    weights = {f"{prefix}.{name}_proj.weight": np.zeros((count, width)) for name, count in rows.items()}
    return weights | {f"{prefix}.o_proj.weight": np.zeros((HIDDEN, HEADS * HEAD_DIM))}


def _byte_letters() -> list[str]:
    """One printable letter for each byte, as byte-level tokenizers spell them: the table of GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _pieces() -> list[str]:
    """Pieces for prompts: all bytes, and pairs of small letters, with or without the space before a word."""
    small = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return [*_byte_letters(), *("Ġ" + letter for letter in small), *(a + b for a, b in product(small, small))]


def _tokenizer(tokens: tuple[str, ...]) -> dict[str, Any]:
    """`tokenizer.json`: all pieces cost the same, so a text becomes as few tokens as can be."""
    special = len(SPECIAL) + STARTS
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(tokens[:special])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "Unigram",
            "unk_id": SPECIAL.index("<pad>"),
            "vocab": [[token, -100.0 if i < special else -1.0] for i, token in enumerate(tokens)],
            "byte_fallback": False,
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _safetensors(tensors: dict[str, NDArray[Any]]) -> bytes:
    """The format of github.com/huggingface/safetensors: length of the header, header in JSON, padding, data."""
    names = {"float32": "F32", "int64": "I64", "bool": "BOOL"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):  # keeps data aligned
        raw = tensor.astype(tensor.dtype.newbyteorder("<")).tobytes()
        header[name] = {
            "dtype": names[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


if __name__ == "__main__":
    sys.exit(main())
