"""What the client itself adds to every time: measured against a server that does nothing, before each benchmark.

`python -m entrypoints.calibrate 1 16 64 256` prints the table for these numbers of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entrypoints import analyse, client
from entrypoints.errors import Bug, Problem

SERVER = Path(__file__).with_name("nullserver.py")
#: seconds between the chunks of a stream, and chunks of a stream
GAP, CHUNKS = 0.01, 40


@contextlib.contextmanager
def null_server() -> Iterator[int]:
    """A null server in its own process; gives its port."""
    process = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.strip().isdigit():
            raise Bug(Problem(what="the null server did not start", found=line or f"exit status {process.wait()}"))
        yield int(line)
    finally:
        process.terminate()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def measure(streams: Sequence[int], *, gap: float = GAP, chunks: int = CHUNKS) -> list[dict[str, Any]]:
    """Added latency in ms (from the server's write to our stamp) and CPU per chunk for each number of streams."""
    rows = []
    with null_server() as port:
        for count in streams:
            jobs = [client.Job(f"null-{place}", "null", (1, 2, 3), chunks, {"gap": gap}) for place in range(count)]
            load = asyncio.run(client.generate("127.0.0.1", port, jobs, concurrency=count, stall=30.0))
            added: list[float] = []
            for _, raw in load.raws:
                for moment, data in client.events(client.parse(raw)):
                    if data != b"[DONE]":
                        added.append(1e3 * (moment - json.loads(data)["sent"]))
            failed = sum(bool(client.record(job, raw, 0.0)["error"]) for job, raw in load.raws)
            rows.append({"streams": count, "chunks": len(added), "failed": failed,
                         "added_ms": analyse.quantiles(added, (50, 99), 4), "loop_lag_p99_ms": load.lag_p99_ms(),
                         "cpu_us_per_chunk": round(1e6 * load.cpu_seconds / max(len(added), 1), 2),
                         "pace_error_pct": _pace(load, gap)})
    return rows


def _pace(load: client.Load, gap: float) -> float | None:
    """How far the measured decode rate is from the true one, percent."""
    rows = [client.record(job, raw, 0.0) for job, raw in load.raws]
    rates = [analyse.rate(row) for row in rows if analyse.measurable(row)]
    return round(100 * (float(np.median(rates)) * gap - 1), 4) if rates else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    head = ("streams", "added p50 ms", "p99 ms", "lag p99 ms", "CPU us/chunk", "rate error %")
    lines = ["{:>8} {:>13} {:>8} {:>11} {:>13} {:>13}".format(*head)]
    lines += [f"{row['streams']:>8} {row['added_ms']['p50']:>13.3f} {row['added_ms']['p99']:>8.3f} "
              f"{row['loop_lag_p99_ms'] or 0:>11.3f} {row['cpu_us_per_chunk']:>13.1f} {row['pace_error_pct']:>13.3f}"
              for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure([int(word) for word in sys.argv[1:]] or [1, 16, 64, 256])))
