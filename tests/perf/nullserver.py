"""A server that computes nothing: it streams at a fixed pace, as SGLang's `/generate` or as OpenAI's chat route.

What a client adds to a latency is the time from the send (`sent`, on `/generate`) to the client's read. Both are
CLOCK_MONOTONIC of one machine. Run as `python -m tests.perf.nullserver PACE`; prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HEAD = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n")
MODELS = {"object": "list", "data": [{"id": "nothing", "object": "model", "created": 0, "owned_by": "nobody"}]}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: float) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
        request = json.loads(await reader.readexactly(length) or b"{}")
        path = head.split()[1]
        if path == b"/generate":
            await _stream(writer, pace, request["sampling_params"]["max_new_tokens"], _native(request))
        elif path == b"/v1/chat/completions":
            await _stream(writer, pace, request.get("max_completion_tokens") or request.get("max_tokens") or 16, _chat)
        else:
            body = json.dumps(MODELS if path == b"/v1/models" else {"internal_states": [{}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
    writer.close()


async def _stream(writer: asyncio.StreamWriter, pace: float, tokens: int,
                  events: Callable[[int, int], Iterator[dict[str, Any]]]) -> None:
    writer.write(HEAD)
    begin = time.perf_counter()
    for number in range(1, tokens + 1):
        await asyncio.sleep(max(0.0, begin + number * pace - time.perf_counter()))
        for event in events(number, tokens):
            _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _native(request: dict[str, Any]) -> Callable[[int, int], Iterator[dict[str, Any]]]:
    def events(number: int, tokens: int) -> Iterator[dict[str, Any]]:
        meta = {"completion_tokens": number, "prompt_tokens": len(request.get("input_ids") or "123"),
                "cached_tokens": 0, "finish_reason": {"type": "length"} if number == tokens else None}
        yield {"text": " word" * number, "output_ids": list(range(number)), "meta_info": meta,
               "sent": time.perf_counter()}

    return events


def _chat(number: int, tokens: int) -> Iterator[dict[str, Any]]:
    base = {"id": "0", "object": "chat.completion.chunk", "created": 0, "model": "nothing"}
    yield {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": " word"},
                                "finish_reason": "length" if number == tokens else None}]}
    if number == tokens:
        yield {**base, "choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": tokens,
                                                "total_tokens": 16 + tokens}}


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main(pace: float) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(lambda reader, writer: _serve(reader, writer, pace), "127.0.0.1", 0,
                                        backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
