"""A server that does nothing but stream at a fixed pace, each chunk with the moment at which it was written.

Run as a file in a process of its own (standard library only): prints its port and serves until stdin closes. The
clock is `perf_counter`, which on Linux is the same in every process of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

HEAD = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        writer.write(HEAD)
        count, gap = body["sampling_params"]["max_new_tokens"], body["gap"]
        due = time.perf_counter()
        for number in range(1, count + 1):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            reason = {"type": "length"} if number == count else None
            event = {"sent": time.perf_counter(), "output_ids": [number],
                     "meta_info": {"completion_tokens": number, "prompt_tokens": len(body["input_ids"]),
                                   "cached_tokens": 0, "finish_reason": reason}}
            writer.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
    writer.close()


async def main() -> None:
    """Listen on a free port, say which, and end when stdin is closed."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
