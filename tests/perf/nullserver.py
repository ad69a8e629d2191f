"""A server that computes nothing: it streams chunks of SGLang's `/generate` at a fixed pace, each with its send time.

What a client adds to a chunk's latency is the time from the send to the client's read. Both are CLOCK_MONOTONIC of one
machine. Run as `python -m tests.perf.nullserver PACE`; prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: float) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    request = json.loads(await reader.readexactly(length))
    tokens = request["sampling_params"]["max_new_tokens"]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                 b"Connection: close\r\n\r\n")
    begin = time.perf_counter()
    for number in range(1, tokens + 1):
        await asyncio.sleep(begin + number * pace - time.perf_counter())
        meta = {"completion_tokens": number, "prompt_tokens": len(request["input_ids"]), "cached_tokens": 0,
                "finish_reason": {"type": "length"} if number == tokens else None}
        body = {"output_ids": [number], "meta_info": meta, "sent": time.perf_counter()}
        _chunk(writer, f"data: {json.dumps(body)}\n\n".encode())
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


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
