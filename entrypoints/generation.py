"""What one streamed `/generate` request brought so far, whichever way the server streams.

Ids and text come whole with every event; with `--incremental-streaming-output` (SGLang 0.5.10 and later) each event
has only what is new, and with `--stream-output` (before) the ids are new and the text is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any


class Generation:
    """Token ids, text and `meta_info` of one answer; `add` takes its events in order."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.meta: Mapping[str, Any] = {}
        self._texts: list[str] = []

    def add(self, message: Mapping[str, Any]) -> None:
        """Take the JSON of one event. Raises `ValueError` for an error that is streamed with status 200."""
        if "error" in message:
            raise ValueError(f"error in the stream: {message['error']}")
        self.meta = message.get("meta_info") or {}
        part = message.get("output_ids") or []
        whole = self.total is None or len(part) == self.total
        self.ids = list(part) if whole else self.ids + list(part)
        if text := message.get("text"):
            self._texts.append(str(text))

    @property
    def total(self) -> int | None:
        """Output tokens so far as the server counts them, in both ways of streaming; None when it does not say."""
        total = self.meta.get("completion_tokens")
        return total if isinstance(total, int) else None

    @property
    def text(self) -> str:
        """The text so far; "" from a server without a tokenizer."""
        if all(later.startswith(earlier) for earlier, later in itertools.pairwise(self._texts)):
            return self._texts[-1] if self._texts else ""
        return "".join(self._texts)
