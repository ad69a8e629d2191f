"""Memory bandwidth and all-reduce latency, measured where the server will run. Run as a file by the server's python.

    python microbench.py DEVICE WORLD BYTES...

prints one JSON object. DEVICE is `cuda` or `cpu`; WORLD processes (one per GPU) do the all-reduce of BYTES with NCCL
or gloo. Needs torch only.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
REPEATS = 20
#: all-reduces in a row that are timed together: a server replays them in a graph and waits for none of them
ROW = 100


def copy_gbs(torch: Any, device: str, index: int) -> float:
    """GB/s of a device copy, bytes read and bytes written counted; median of some repeats."""
    place = torch.device(device, index) if device == "cuda" else torch.device("cpu")
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        if device == "cuda":
            torch.cuda.synchronize(place)
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - begin)
    return 2 * COPY_BYTES[device] / statistics.median(seconds[2:]) / 1e9


def all_reduce(rank: int, world: int, device: str, sizes: Sequence[int], port: int, results: Any) -> None:
    """One rank: median and worst time of an all-reduce in microseconds for each size, put into the queue by rank 0."""
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch import distributed  # type: ignore[import-not-found, unused-ignore]

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
    if device == "cuda":
        torch.cuda.set_device(rank)
    rows = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 2), dtype=torch.bfloat16, device=device)
        times = []
        for _ in range(REPEATS):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(ROW):
                distributed.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - begin) / ROW)
        rows.append({"bytes": size, "backend": distributed.get_backend(),
                     "us_median": round(statistics.median(times[2:]), 2), "us_max": round(max(times[2:]), 2)})
    if rank == 0:
        results.put(rows)
    distributed.barrier()
    distributed.destroy_process_group()


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch import multiprocessing as processes  # type: ignore[import-not-found, unused-ignore]

    device, world, sizes = words[0], int(words[1]), [int(word) for word in words[2:]]
    found: dict[str, Any] = {"device": device, "mem_copy_gbs": [], "allreduce": []}
    for index in range(world if device == "cuda" else 1):
        found["mem_copy_gbs"].append(round(copy_gbs(torch, device, index), 1))
    if world > 1 and sizes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = processes.get_context("spawn").SimpleQueue()
        processes.spawn(all_reduce, args=(world, device, sizes, port, results), nprocs=world)
        found["allreduce"] = results.get()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
