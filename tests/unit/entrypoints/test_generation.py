"""Both ways of streaming, and the half-way of SGLang 0.5.9, become the same answer."""

from __future__ import annotations

from typing import Any

import pytest

from entrypoints.generation import Generation

IDS = [[5], [6, 7], [8, 9]]
TEXTS = ["A", " server", " answers"]
WHOLE_IDS = [[5], [5, 6, 7], [5, 6, 7, 8, 9]]
WHOLE_TEXTS = ["A", "A server", "A server answers"]


def made(ids: list[list[int]], texts: list[Any]) -> Generation:
    one = Generation()
    for part, text, total in zip(ids, texts, (1, 3, 5), strict=True):
        one.add({"text": text, "output_ids": part, "meta_info": {"completion_tokens": total}})
    return one


@pytest.mark.parametrize(("ids", "texts"), [
    (WHOLE_IDS, WHOLE_TEXTS),
    (IDS, TEXTS),  # --incremental-streaming-output
    (IDS, WHOLE_TEXTS),  # --stream-output of 0.5.9
    (WHOLE_IDS, [None, None, WHOLE_TEXTS[-1]]),
    (IDS, ["A", "", " server answers"]),  # half a character is held back
])
def test_every_way_of_streaming(ids: list[list[int]], texts: list[Any]) -> None:
    one = made(ids, texts)
    assert (one.ids, one.text, one.total) == ([5, 6, 7, 8, 9], "A server answers", 5)


def test_nothing_yet_and_no_tokenizer() -> None:
    assert (Generation().ids, Generation().text, Generation().total) == ([], "", None)
    one = made(IDS, [None, None, None])
    assert (one.ids, one.text) == ([5, 6, 7, 8, 9], "")


def test_an_error_that_comes_with_status_200() -> None:
    with pytest.raises(ValueError, match="error in the stream: aborted"):
        Generation().add({"error": "aborted"})
