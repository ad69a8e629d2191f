"""Attention against a reference that computes one output number at a time."""

import math
import unittest

import torch

from sgl_kernel import decode_attention_cpu

HEADS, KV_HEADS, DIM, VALUE_DIM, SLOTS, SCALE = 4, 2, 8, 6, 64, 0.35


def reference(q, k, v, logit_cap, visible):
    """q [Hq, D] one query; k, v [T, Hk, ...]; `visible` says which positions count."""
    out = torch.zeros(q.shape[0], v.shape[2])
    for head in range(q.shape[0]):
        kv_head = head * k.shape[1] // q.shape[0]
        weights = {}
        for position in visible:
            score = sum(float(a) * float(b) for a, b in zip(q[head], k[position, kv_head], strict=True)) * SCALE
            weights[position] = math.exp(logit_cap * math.tanh(score / logit_cap) if logit_cap else score)
        for position, weight in weights.items():
            out[head] += weight / sum(weights.values()) * v[position, kv_head]
    return out


class Cache:
    """Two requests of 7 and 4 positions, scattered over the slots; request rows 3 and 1 of the pool."""

    lengths, rows = (7, 4), (3, 1)

    def __init__(self):
        torch.manual_seed(5)
        self.k, self.v = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, VALUE_DIM)
        slots = torch.randperm(SLOTS)
        self.req_to_token = torch.zeros(5, 16, dtype=torch.int32)
        self.slots = []
        for row, length, start in zip(self.rows, self.lengths, (0, 7), strict=True):
            self.slots.append(slots[start : start + length])
            self.req_to_token[row, :length] = self.slots[-1].int()
        self.index = (self.req_to_token, torch.tensor(self.rows), torch.tensor(self.lengths))

    def of(self, i):
        return self.k[self.slots[i]], self.v[self.slots[i]]


def decode(cache, q, out, key=None, value=None, loc=None, cap=0.0, **changes):
    more = {"is_cross_attn": False, "sliding_window_size": 0, "encoder_lens": None, "sinks": None, **changes}
    scales = (more.pop("k_scale", 1.0), more.pop("v_scale", 1.0))
    loc = torch.zeros(0, dtype=torch.int64) if loc is None else loc
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, cache.k, cache.v, *scales, out, key, value, loc, torch.empty(0), *cache.index, SCALE, cap, *more.values()
    )


def extend(cache, q, out, extends, *, cap=0.0, tree_mask=None, causal=True):
    starts = torch.tensor([0, *extends[:-1]]).cumsum(0).int()
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, out, cache.k, cache.v, 1.0, 1.0, *cache.index, torch.tensor(extends).int(), starts,
        max(extends), SCALE, cap, False, 0, None, None, tree_mask, causal,
    )  # fmt: skip


class Decode(unittest.TestCase):
    def test_attends_to_the_whole_sequence(self):
        for cap in (0.0, 2.5):
            with self.subTest(logit_cap=cap):
                cache = Cache()
                q, out = torch.randn(2, HEADS, DIM), torch.zeros(2, HEADS, VALUE_DIM)
                decode(cache, q, out, cap=cap)
                for i, length in enumerate(cache.lengths):
                    torch.testing.assert_close(out[i], reference(q[i], *cache.of(i), cap, range(length)))

    def test_stores_the_new_key_and_value_first(self):
        cache = Cache()
        q, out = torch.randn(2, HEADS, DIM), torch.zeros(2, HEADS, VALUE_DIM)
        key, value = torch.randn(2, KV_HEADS * DIM), torch.randn(2, KV_HEADS * VALUE_DIM)
        loc = torch.stack([slots[-1] for slots in cache.slots])
        untouched = cache.k.clone()
        decode(cache, q, out, key, value, loc)
        torch.testing.assert_close(cache.k[loc], key.view(2, KV_HEADS, DIM))
        torch.testing.assert_close(cache.v[loc], value.view(2, KV_HEADS, VALUE_DIM))
        others = [slot for slot in range(SLOTS) if slot not in loc.tolist()]
        torch.testing.assert_close(cache.k[others], untouched[others])
        for i, length in enumerate(cache.lengths):
            torch.testing.assert_close(out[i], reference(q[i], *cache.of(i), 0.0, range(length)))

    def test_refuses_what_it_does_not_compute(self):
        cache = Cache()
        q, out = torch.randn(2, HEADS, DIM), torch.zeros(2, HEADS, VALUE_DIM)
        for change, words in (
            ({"is_cross_attn": True}, "cross attention"),
            ({"sliding_window_size": 128}, "sliding window of 128"),
            ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
            ({"k_scale": 0.5}, "scaled KV cache"),
        ):
            with self.subTest(words), self.assertRaisesRegex(NotImplementedError, words):
                decode(cache, q, out, **change)

    def test_names_every_missing_thing_at_once(self):
        with self.assertRaisesRegex(NotImplementedError, "cross attention, a sliding window of 4"):
            decode_attention_cpu(*[None] * 3, 1.0, 1.0, *[None] * 8, 1.0, 0.0, True, 4, None, None)


class Extend(unittest.TestCase):
    def test_prefill_is_causal_over_prefix_and_itself(self):
        cache, extends = Cache(), [3, 4]  # the second request has no prefix
        q, out = torch.randn(7, HEADS, DIM), torch.zeros(7, HEADS, VALUE_DIM)
        extend(cache, q, out, extends, cap=1.5)
        row = 0
        for i, count in enumerate(extends):
            for at in range(cache.lengths[i] - count, cache.lengths[i]):
                torch.testing.assert_close(out[row], reference(q[row], *cache.of(i), 1.5, range(at + 1)))
                row += 1

    def test_not_causal_sees_everything(self):
        cache = Cache()
        q, out = torch.randn(7, HEADS, DIM), torch.zeros(7, HEADS, VALUE_DIM)
        extend(cache, q, out, [3, 4], causal=False)
        torch.testing.assert_close(out[0], reference(q[0], *cache.of(0), 0.0, range(7)))

    def test_tree_mask_limits_the_drafts_but_not_the_prefix(self):
        cache = Cache()
        masks = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
        q, out = torch.randn(6, HEADS, DIM), torch.zeros(6, HEADS, VALUE_DIM)
        extend(cache, q, out, [3, 3], tree_mask=masks.flatten())
        for i in range(2):
            prefix = cache.lengths[i] - 3
            for draft in range(3):
                seen = [*range(prefix), *(prefix + j for j in range(3) if masks[i, draft, j])]
                row = 3 * i + draft
                torch.testing.assert_close(out[row], reference(q[row], *cache.of(i), 0.0, seen))


if __name__ == "__main__":
    unittest.main()
