"""A load client for one local server: times are taken at the socket read, everything else is parsed afterwards.

Requests go to SGLang's native `/generate` with token ids. Its stream carries, in every chunk, the cumulative
`completion_tokens` of the server and the ids themselves, and in the last one `cached_tokens` and the speculative counts
of exactly this request; the chat route hides the ids and the accept histogram of a stream. The ids come from the
server's own chat template (`prompts.render`), so both arms answer the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11
import numpy as np

from entrypoints.generation import Generation

#: names of the per-request counts in `meta_info`, newest first (SGLang 0.5.23, then 0.5.9)
ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
LAG_TICK = 0.01
#: seconds between two looks at the server while it is waited for
WATCH_EVERY = 0.25
T = TypeVar("T")


class StalledError(Exception):
    """No byte from the server for too long."""


@dataclass(frozen=True)
class Job:
    """One request to make: the prompt by name and as token ids, output tokens at most, other body keys."""

    prompt_id: str
    stratum: str
    input_ids: Sequence[int]
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Raw:
    """What came through the socket: times are `perf_counter` seconds, `reads` are (time, bytes)."""

    t_queue: float
    t_send: float = math.nan
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Response:
    """A parsed HTTP response; `body` keeps the time of the read that completed each piece."""

    status: int
    body: tuple[tuple[float, bytes], ...]

    @property
    def text(self) -> str:
        """The whole body."""
        return b"".join(piece for _, piece in self.body).decode("utf-8", "replace")


class _Exchange(asyncio.Protocol):
    """One connection, one request, until the server closes."""

    def __init__(self, raw: Raw, closed: asyncio.Future[None]) -> None:
        self.raw = raw
        self.closed = closed

    def data_received(self, data: bytes) -> None:
        self.raw.reads.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.raw.error = f"connection lost: {exc or type(exc).__name__}"
        if not self.closed.done():
            self.closed.set_result(None)


def request_bytes(method: str, path: str, host: str, body: bytes = b"", api_key: str = "") -> bytes:
    """The request on the wire. The server is asked to close, so the end needs no parsing while others are timed."""
    headers = [("Host", host), ("Connection", "close"), ("Accept", "*/*")]
    if body:
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if api_key:
        headers.append(("Authorization", f"Bearer {api_key}"))
    connection = h11.Connection(h11.CLIENT)
    parts = [connection.send(h11.Request(method=method, target=path, headers=headers))]
    if body:
        parts.append(connection.send(h11.Data(data=body)))
    parts.append(connection.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


async def exchange(host: str, port: int, payload: bytes, *, stall: float) -> Raw:
    """Send one request and read until the server closes. Raises `StalledError` after `stall` seconds without a byte."""
    loop = asyncio.get_running_loop()
    raw = Raw(t_queue=time.perf_counter())
    closed: asyncio.Future[None] = loop.create_future()
    try:
        transport, _ = await loop.create_connection(lambda: _Exchange(raw, closed), host, port)
    except OSError as error:
        raw.error = f"cannot connect: {error.strerror or error}"
        return raw
    try:
        raw.t_send = time.perf_counter()
        transport.write(payload)
        while not closed.done():
            last = raw.reads[-1][0] if raw.reads else raw.t_send
            left = last + stall - time.perf_counter()
            if left <= 0:
                raise StalledError(f"no byte for {stall:g} s after {len(raw.reads)} reads")
            await asyncio.wait((closed,), timeout=left)
    finally:
        transport.abort()
    return raw


def parse(raw: Raw, method: str = "POST") -> Response:
    """The response in what was read. Raises `ValueError` when it is none or not whole."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, []
    try:
        for moment, data in (*raw.reads, (raw.reads[-1][0] if raw.reads else 0.0, b"")):
            connection.receive_data(data)
            while True:
                event = connection.next_event()
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((moment, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    return Response(status, tuple(body))
                elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                    break
    except h11.RemoteProtocolError as error:
        raise ValueError(f"broken response: {error}") from error
    raise ValueError("the response ended too early" if status else "no response")


def events(response: Response) -> Iterator[tuple[float, bytes]]:
    """Server-sent events as (time of the read that completed it, payload of its data line)."""
    rest = b""
    for moment, piece in response.body:
        rest += piece
        while (cut := rest.find(b"\n\n")) >= 0:
            event, rest = rest[:cut], rest[cut + 2:]
            for line in event.splitlines():
                if line.startswith(b"data:"):
                    yield moment, line[5:].strip()


async def call(host: str, port: int, method: str, path: str, body: object = None, *, stall: float = 60.0,
               api_key: str = "", watch: Callable[[], None] | None = None) -> Response:
    """One plain request. Raises `ValueError` for a connection or a response that is broken, `StalledError` for none.

    `watch` as in `generate`.
    """
    data = b"" if body is None else json.dumps(body).encode()
    request = request_bytes(method, path, f"{host}:{port}", data, api_key)
    work = asyncio.ensure_future(exchange(host, port, request, stall=stall))
    raw = await _attended(work, [] if watch is None else [_watch(watch, WATCH_EVERY)])
    if raw.error and not raw.reads:
        raise ValueError(raw.error)
    return parse(raw, method)


def _first(table: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((table[name] for name in names if table.get(name) is not None), None)


def record(job: Job, raw: Raw, origin: float) -> dict[str, Any]:
    """One line of requests.jsonl from what was read; times are seconds since `origin`.

    `chunks` holds [seconds since the request was sent, cumulative tokens] for every chunk that brought tokens.
    """
    line: dict[str, Any] = {
        "prompt_id": job.prompt_id, "stratum": job.stratum, "max_tokens": job.max_tokens,
        "t_queue": _round(raw.t_queue - origin), "t_send": _round(raw.t_send - origin),
        "t_first": None, "t_last": None, "n_first_chunk": None, "n_tokens_server": None, "n_tokens_client": None,
        "n_prompt": None, "cached_tokens": None, "finish_reason": None, "spec_verify_ct": None,
        "spec_accepted": None, "spec_proposed": None, "accept_histogram": None, "output_ids_sha256": None,
        "error": raw.error or None, "chunks": [], "output_ids": []}
    try:
        response = parse(raw)
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {response.text[:200]}")
        _fill(line, job, response, raw.t_send, origin)
    except ValueError as error:
        line["error"] = line["error"] or str(error)
    return line


def _fill(line: dict[str, Any], job: Job, response: Response, t_send: float, origin: float) -> None:
    made = Generation()
    seen, chunks, done = 0, [], False
    for moment, data in events(response):
        if data == b"[DONE]":
            done = True
            break
        made.add(json.loads(data))
        if made.total is None:
            raise ValueError("contract: meta_info.completion_tokens is absent from the stream")
        if made.total > seen:
            chunks.append((moment, made.total))
            seen = made.total
    if not chunks:
        raise ValueError("the stream brought no tokens")
    meta, ids = made.meta, made.ids
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    line.update(
        t_first=_round(chunks[0][0] - origin), t_last=_round(chunks[-1][0] - origin), n_first_chunk=chunks[0][1],
        n_tokens_server=seen, n_tokens_client=len(ids), n_prompt=meta.get("prompt_tokens"),
        cached_tokens=meta.get("cached_tokens"), finish_reason=kind, spec_verify_ct=meta.get("spec_verify_ct"),
        spec_accepted=_first(meta, ACCEPTED), spec_proposed=_first(meta, PROPOSED),
        accept_histogram=_first(meta, HISTOGRAM), output_ids=ids, output_ids_sha256=ids_digest(ids),
        chunks=[[_round(moment - t_send), total] for moment, total in chunks])
    if not done or kind is None:
        raise ValueError("the stream ended without [DONE] and a finish reason")
    if kind == "abort":
        raise ValueError(f"the server aborted the request: {reason}")
    if line["n_prompt"] is not None and line["n_prompt"] != len(job.input_ids):
        raise ValueError(f"the server counted {line['n_prompt']} prompt tokens, {len(job.input_ids)} were sent")


def answer(raw: Raw) -> str:
    """The whole text of a streamed answer. Raises `ValueError` when there is none or it did not end."""
    made, done = Generation(), False
    for _, data in events(parse(raw)):
        if data == b"[DONE]":
            done = True
            break
        made.add(json.loads(data))
    if not done:
        raise ValueError("the stream ended without [DONE]")
    return made.text


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids, as decimal numbers with blanks between them."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def _round(seconds: float) -> float | None:
    """Microseconds are enough; a time that was never taken is null."""
    return None if math.isnan(seconds) else round(seconds, 6)


@dataclass
class Load:
    """Raw results of a pass, in the order of their ends, and how late the event loop was (seconds, one per tick)."""

    raws: list[tuple[Job, Raw]]
    lags: list[float]
    seconds: float
    cpu_seconds: float

    def lag_p99_ms(self) -> float | None:
        """99th percentile of the event loop's lag."""
        return round(float(np.percentile(self.lags, 99)) * 1e3, 3) if self.lags else None


async def generate(host: str, port: int, jobs: Sequence[Job], *, concurrency: int, stall: float, api_key: str = "",
                   rate: float | None = None, seed: int = 0, watch: Callable[[], None] | None = None,
                   watch_every: float = WATCH_EVERY, done: list[tuple[Job, Raw]] | None = None) -> Load:
    """Run all jobs: closed loop with `concurrency` in flight, or Poisson arrivals at `rate` per second.

    With a rate, `concurrency` still bounds what is in flight, and the time between arrival and sending shows as
    `t_queue` to `t_send`. `watch` is called while requests run and may raise (a dead server): all are cancelled, and
    `done` holds what was finished until then.
    """
    payloads = [request_bytes("POST", "/generate", f"{host}:{port}", _body(job), api_key) for job in jobs]
    finished: list[tuple[Job, Raw]] = [] if done is None else done
    slots = asyncio.Semaphore(concurrency)
    arrivals = np.zeros(len(jobs))
    if rate is not None:
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(jobs)))
    start = time.perf_counter()
    cpu = time.process_time()

    async def one(index: int) -> None:
        arrival = start + float(arrivals[index])
        if rate is not None:
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        async with slots:
            raw = await exchange(host, port, payloads[index], stall=stall)
            if rate is not None:
                raw.t_queue = arrival
            finished.append((jobs[index], raw))

    lags: list[float] = []
    beside = [_lag(lags)] + ([] if watch is None else [_watch(watch, watch_every)])
    await _attended(asyncio.gather(*(one(index) for index in range(len(jobs)))), beside)
    return Load(raws=finished, lags=lags, seconds=time.perf_counter() - start,
                cpu_seconds=time.process_time() - cpu)


def _body(job: Job) -> bytes:
    sampling = {"temperature": 0.0, "max_new_tokens": job.max_tokens, "ignore_eos": False}
    extra = dict(job.extra)
    sampling.update(extra.pop("sampling_params", {}))
    return json.dumps({"input_ids": list(job.input_ids), "sampling_params": sampling, "stream": True, **extra}).encode()


async def _attended(work: asyncio.Future[T], beside: Iterable[Coroutine[Any, Any, None]]) -> T:
    """The result of `work`, or what one of those beside it raises first; nothing goes on after that."""
    others = [asyncio.ensure_future(one) for one in beside]
    everything: list[asyncio.Future[Any]] = [work, *others]
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
        return await work
    finally:
        for future in everything:
            future.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def _lag(into: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_TICK)
        into.append(max(0.0, time.perf_counter() - before - LAG_TICK))


async def _watch(look: Callable[[], None], every: float) -> None:
    while True:
        await asyncio.sleep(every)
        look()
