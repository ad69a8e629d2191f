from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from entrypoints import client

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
JOB = client.Job("chat-01", "chat", (1, 2, 3), 8)


async def with_server(handler: Handler, use: Callable[[int], Awaitable[Any]]) -> Any:
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await handler(reader, writer)
            writer.close()
        except BaseException:
            writer.transport.abort()
            raise

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        return await use(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the next turn of the loop


def event(total: int, ids: list[int], **meta: Any) -> bytes:
    body = {"output_ids": ids, "meta_info": {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 0,
                                             "finish_reason": None, **meta}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def raw(*pieces: bytes, gap: float = 0.1, head: bytes = HEAD, end: bytes = b"0\r\n\r\n") -> client.Raw:
    reads = [(1.0 + gap * place, piece) for place, piece in enumerate((head, *map(chunk, pieces), end))]
    return client.Raw(t_queue=0.9, t_send=0.95, reads=reads)


DONE = b"data: [DONE]\n\n"
FINISH = {"finish_reason": {"type": "length"}, "spec_verify_ct": 2, "spec_num_correct_drafts": 2,
          "spec_num_proposed_drafts": 10, "spec_correct_drafts_histogram": [0, 2]}


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_becomes_times_and_counts_of_the_server(cumulative: bool) -> None:
    parts = [[5], [6, 7], [8, 9]]
    lists = [[5], [5, 6, 7], [5, 6, 7, 8, 9]] if cumulative else parts
    line = client.record(JOB, raw(event(1, lists[0]), event(3, lists[1]), event(5, lists[2], **FINISH), DONE), 0.0)
    assert line["error"] is None
    assert (line["n_first_chunk"], line["n_tokens_server"], line["n_tokens_client"]) == (1, 5, 5)
    assert line["output_ids"] == [5, 6, 7, 8, 9]
    assert (line["t_send"], line["t_first"], line["t_last"]) == (0.95, 1.1, 1.3)
    assert line["chunks"] == [[0.15, 1], [0.25, 3], [0.35, 5]]
    assert (line["spec_verify_ct"], line["spec_accepted"], line["accept_histogram"]) == (2, 2, [0, 2])


def test_counts_of_an_older_server_are_read_under_their_old_names() -> None:
    old = {"finish_reason": {"type": "stop"}, "spec_verify_ct": 3, "spec_accept_token_num": 4,
           "spec_draft_token_num": 9, "spec_accept_histogram": [1, 2]}
    line = client.record(JOB, raw(event(1, [5]), event(2, [5, 6], **old), DONE), 0.0)
    assert (line["spec_accepted"], line["spec_proposed"], line["accept_histogram"]) == (4, 9, [1, 2])


def test_an_event_split_over_two_reads_is_timed_by_the_read_that_completes_it() -> None:
    data = event(1, [5])
    line = client.record(JOB, raw(data[:20], data[20:], event(2, [5, 6], **FINISH), DONE), 0.0)
    assert line["t_first"] == pytest.approx(1.2)


@pytest.mark.parametrize(("pieces", "head", "end", "error"), [
    ((event(1, [5]),), HEAD, b"", "ended too early|without sending complete"),
    ((event(1, [5]), DONE), HEAD, b"0\r\n\r\n", "without \\[DONE\\] and a finish reason"),
    ((event(1, [5], **FINISH),), HEAD, b"0\r\n\r\n", "without \\[DONE\\]"),
    ((DONE,), HEAD, b"0\r\n\r\n", "no tokens"),
    ((b'data: {"error": {"message": "boom"}}\n\n',), HEAD, b"0\r\n\r\n", "boom"),
    ((b'data: {"output_ids": [1]}\n\n',), HEAD, b"0\r\n\r\n", "contract: meta_info.completion_tokens is absent"),
    ((event(1, [5], finish_reason={"type": "abort"}), DONE), HEAD, b"0\r\n\r\n", "aborted"),
    ((event(1, [5], **{**FINISH, "prompt_tokens": 9}), DONE), HEAD, b"0\r\n\r\n", "counted 9 prompt tokens, 3 were"),
    ((b"busy",), HEAD.replace(b"200 OK", b"503 Busy"), b"0\r\n\r\n", "HTTP 503: busy"),
    ((), b"not http\r\n\r\n", b"", "broken response"),
])
def test_everything_that_is_no_whole_answer_is_an_error_with_its_reason(
        pieces: tuple[bytes, ...], head: bytes, end: bytes, error: str) -> None:
    import re
    line = client.record(JOB, raw(*pieces, head=head, end=end), 0.0)
    assert line["error"]
    assert re.search(error, line["error"]), line["error"]
    json.dumps(line, allow_nan=False)


def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    line = client.record(JOB, client.Raw(t_queue=0.0, error="cannot connect: refused"), 0.0)
    assert line["error"] == "cannot connect: refused"
    assert line["t_send"] is None
    assert math.isnan(client.Raw(0.0).t_send)


async def _slow(writer: asyncio.StreamWriter, tokens: int, gap: float) -> None:
    writer.write(HEAD)
    for number in range(1, tokens + 1):
        await asyncio.sleep(gap)
        meta = FINISH if number == tokens else {}
        writer.write(chunk(event(number, list(range(number)), **meta)))
        await writer.drain()
    writer.write(chunk(DONE) + b"0\r\n\r\n")
    await writer.drain()


def test_closed_loop_keeps_exactly_so_many_requests_in_flight() -> None:
    running, most = 0, 0

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await _slow(writer, 4, 0.005)
        running -= 1

    load = asyncio.run(with_server(handler, lambda port: client.generate(
        "127.0.0.1", port, [JOB] * 12, concurrency=3, stall=5.0)))
    assert most == 3
    assert len(load.raws) == 12
    lines = [client.record(job, one, 0.0) for job, one in load.raws]
    assert all(line["error"] is None and line["n_tokens_server"] == 4 for line in lines)
    assert load.lag_p99_ms() is not None


def test_poisson_arrivals_follow_the_seed_and_waiting_shows_as_queueing() -> None:
    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _slow(writer, 2, 0.02)

    def go() -> list[float]:
        load = asyncio.run(with_server(handler, lambda port: client.generate(
            "127.0.0.1", port, [JOB] * 10, concurrency=1, stall=5.0, rate=100.0, seed=7)))
        queued = sorted(one.t_queue for _, one in load.raws)
        assert max(one.t_send - one.t_queue for _, one in load.raws) > 0.02, "one at a time: the others waited"
        return [after - before for before, after in itertools.pairwise(queued)]

    assert go() == pytest.approx(go(), abs=1e-9)


def test_silence_is_noticed_and_what_was_finished_is_kept() -> None:
    calls = 0

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await _slow(writer, 2, 0.001)
        else:
            writer.write(HEAD + chunk(event(1, [5])))
            await writer.drain()
            await asyncio.sleep(30)

    done: list[tuple[client.Job, client.Raw]] = []
    began = time.monotonic()
    with pytest.raises(client.StalledError, match=r"no byte for 0\.3 s after 1 reads"):
        asyncio.run(with_server(handler, lambda port: client.generate(
            "127.0.0.1", port, [JOB] * 4, concurrency=1, stall=0.3, done=done)))
    assert time.monotonic() - began < 3
    assert len(done) == 1


def test_the_watch_ends_everything_at_once() -> None:
    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    def dead() -> None:
        raise RuntimeError("the server died")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the server died"):
        asyncio.run(with_server(handler, lambda port: client.generate(
            "127.0.0.1", port, [JOB] * 2, concurrency=2, stall=20.0, watch=dead, watch_every=0.02)))
    assert time.monotonic() - began < 3


def test_a_plain_call_ends_when_the_server_is_dead() -> None:
    """SGLang 0.5.9: the scheduler was killed, the HTTP process lives and answers nothing."""
    async def handler(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    def dead() -> None:
        raise RuntimeError("dead")

    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(with_server(handler, lambda port: client.call("127.0.0.1", port, "GET", "/", stall=600.0,
                                                                  watch=dead)))


def test_a_plain_call_sends_key_and_body_and_reads_the_answer() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 201 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()

    found = asyncio.run(with_server(handler, lambda port: client.call(
        "127.0.0.1", port, "POST", "/x", {"a": 1}, api_key="k")))
    assert (found.status, found.text) == (201, "hi")
    wire = client.request_bytes("POST", "/x", "h:1", b"{}", "k")
    assert b"authorization: bearer k" in wire.lower()
    with pytest.raises(ValueError, match="cannot connect"):
        asyncio.run(client.call("127.0.0.1", 1, "GET", "/"))
