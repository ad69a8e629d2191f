"""Our load client beside public ones, in turns, in one run: against a server that does nothing and the real one.

    python -m tests.perf.clients null --image IMAGE --models FOLDER [--guidellm FILE] [--streams 1 16 64 256]
    python -m tests.perf.clients real --image IMAGE --models FOLDER [--rounds N] [--eagle3]

IMAGE is one of `buildctl build --stack cpu-demo`; `sglang.bench_serving` runs in it. FOLDER holds `target`, made by
`make demo-model`. The other clients are programs of virtual environments of their own; none is a dependency of ours.

Against the real server our client runs a second time in each round as `ours, their way`: it sends text, which the
server has to tokenize, as `sglang.bench_serving` does, and its numbers are computed by that program's definitions. So a
difference between ours and theirs has three parts: what is sent and how it is counted, the program itself, and noise.

CPU per token is what the event loop's run took in the clients of one process, so that imports are no part of it; for
guidellm, which has up to ten, all their CPU time less that of a run with one request of two tokens per stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: streams to seconds between the chunks of one (500 to 1,000 chunks per second in all), tokens of a request, and
#: requests per stream. Short requests: the text in each chunk is the whole one so far
LOADS = {1: (0.002, 128, 40), 16: (0.016, 128, 5), 64: (0.064, 64, 3), 256: (0.256, 32, 2)}
CPU_LINE = "CPU-SECONDS"
#: sglang.bench_serving imports a module of this name for a data set that is not used here; this one also says what CPU
#: time its event loop took
DATASETS = f"""
import asyncio, time
real = asyncio.run
def run(*words, **more):
    before = time.process_time()
    try:
        return real(*words, **more)
    finally:
        print("{CPU_LINE}", time.process_time() - before)
asyncio.run = run
def load_dataset(*words, **more):
    raise RuntimeError("not here")
"""


@dataclass(frozen=True)
class Seen:
    """What a client reports of a run: milliseconds, tokens per second, and its own CPU seconds."""

    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    tok_s: float
    cpu_s: float


class Failed(Exception):
    """A client did not end well; the message is the end of its output."""


def timed(words: Sequence[str], **env: str) -> tuple[str, float]:
    """Output and CPU seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **env},
                          check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise Failed(f"{' '.join(words)[:200]}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done.stdout + done.stderr, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# the clients


async def _ours(port: int, streams: int, count: int, tokens: int, ids: Sequence[Sequence[int]],
                texts: Sequence[str] = ()) -> dict[str, float]:
    """One run; with texts those are sent, and the numbers are by the definitions of `sglang.bench_serving`."""
    from entrypoints import client  # not at the top: this function also runs inside the image
    sent = [{"text": text, "input_ids": None} for text in texts] or [{}]
    jobs = [client.Job(str(place), "bench", ids[place % len(ids)], tokens,
                       {"sampling_params": {"ignore_eos": True}, **sent[place % len(sent)]}) for place in range(count)]
    begin = time.perf_counter()
    load = await client.generate("127.0.0.1", port, jobs, concurrency=streams, stall=120)
    rows = [client.record(job, raw, begin) for job, raw in load.raws]
    bad = [row["error"] for row in rows if row["error"]]
    if bad:
        raise Failed(str(bad[0]))
    way = _their_way if texts else _own_way
    return {**way(rows, [raw.reads[-1][0] - begin for _, raw in load.raws], load.seconds), "cpu_s": load.cpu_seconds}


def _own_way(rows: Sequence[dict[str, Any]], ends: Sequence[float], seconds: float) -> dict[str, float]:
    """As in our reports."""
    from entrypoints import analyse
    gaps = [1e3 * (after[0] - before[0]) for row in rows for before, after in itertools.pairwise(row["chunks"])]
    return {"ttft_ms": statistics.median(1e3 * (row["t_first"] - row["t_send"]) for row in rows),
            "itl_ms": 1e3 / statistics.median(analyse.rate(row) for row in rows),
            "itl_p99_ms": statistics.quantiles(gaps, n=100)[98],
            "tok_s": sum(row["n_tokens_server"] for row in rows) / (max(row["t_last"] for row in rows)
                                                                   - min(row["t_send"] for row in rows))}


def _their_way(rows: Sequence[dict[str, Any]], ends: Sequence[float], seconds: float) -> dict[str, float]:
    """By the definitions of `sglang.bench_serving` (0.5.23, sglang/benchmark/serving.py).

    A request begins before its connection is made and ends with `[DONE]`; a gap counts once for each of its tokens.
    """
    import numpy as np
    gaps = [1e3 * (after[0] - before[0]) / (after[1] - before[1]) for row in rows
            for before, after in itertools.pairwise(row["chunks"]) for _ in range(after[1] - before[1])]
    return {"ttft_ms": statistics.median(1e3 * (row["t_first"] - row["t_queue"]) for row in rows),
            "itl_ms": statistics.median(1e3 * (end - row["t_first"]) / (row["n_tokens_server"] - 1)
                                        for row, end in zip(rows, ends, strict=True)),
            "itl_p99_ms": float(np.percentile(gaps, 99)),
            "tok_s": sum(row["n_tokens_server"] for row in rows) / seconds}


def ours_main(words: Sequence[str]) -> None:
    """`clients.py ours PORT STREAMS COUNT TOKENS [PROMPTS [text]]`: one run of our client, as JSON."""
    port, streams, count, tokens = map(int, words[:4])
    ids: list[list[int]] = [[1, 2, 3]]
    texts: list[str] = []
    if len(words) > 4:
        from entrypoints import client, prompts
        asked = [prompts.Prompt(str(place), "bench", ({"role": "user", "content": text},))
                 for place, text in enumerate(json.loads(Path(words[4]).read_text()))]
        ids = [list(one) for one in asyncio.run(prompts.render("127.0.0.1", port, asked)).values()]
        if words[5:] == ["text"]:
            texts = [json.loads(asyncio.run(client.call("127.0.0.1", port, "POST", "/v1/detokenize", {
                "tokens": one, "skip_special_tokens": False})).text)["text"] for one in ids]
    print(json.dumps(asyncio.run(_ours(port, streams, count, tokens, ids, texts))))


def read_ours(out: str) -> Seen:
    """Our JSON line."""
    return Seen(**json.loads(next(line for line in out.splitlines() if line.startswith("{"))))


def ours(port: int, streams: int, count: int, tokens: int) -> Seen:
    """Our client in a process of its own."""
    return read_ours(timed([sys.executable, __file__, "ours", *map(str, (port, streams, count, tokens))],
                           PYTHONPATH=str(ROOT))[0])


def serving_words(port: int, streams: int, count: int, tokens: int, model: str, data: str, out: str) -> list[str]:
    """The command line of `sglang.bench_serving`."""
    return ["-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1",
            "--port", str(port), "--model", model, "--tokenizer", model, "--dataset-name", "custom", "--dataset-path",
            data, "--num-prompts", str(count), "--sharegpt-output-len", str(tokens), "--max-concurrency", str(streams),
            "--apply-chat-template", "--warmup-requests", "0", "--disable-tqdm", "--output-file", out]


def read_serving(line: str, output: str) -> Seen:
    """Its result file and the CPU time that `DATASETS` printed."""
    said = json.loads(line)
    cpu = next(float(one.split()[1]) for one in output.splitlines() if one.startswith(CPU_LINE))
    return Seen(said["median_ttft_ms"], said["median_tpot_ms"], said["p99_itl_ms"], said["output_throughput"], cpu)


def conversations(folder: Path, texts: Sequence[str]) -> Path:
    """Prompts in the form that `sglang.bench_serving` reads."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps({"conversations": [{"content": text}, {"content": "yes " * 40}]}) + "\n"
                            for text in texts))
    return file


def bench_serving(image: str, models: Path, folder: Path) -> Callable[[int, int, int, int], Seen]:
    """`sglang.bench_serving` in a container that shares the host's network."""
    (folder / "datasets.py").write_text(DATASETS)
    conversations(folder, [f"Tell me about number {place}." for place in range(4096)])

    def run(port: int, streams: int, count: int, tokens: int) -> Seen:
        result = folder / f"serving-{time.monotonic_ns()}.jsonl"
        output, _ = timed(["docker", "run", "--rm", "--network", "host", "--user", "0", "-v", f"{folder}:/bench", "-v",
                           f"{models}:/models:ro", "-e", "PYTHONPATH=/bench", "-e", "SGLANG_USE_CPU_ENGINE=1", "-e",
                           "HF_HUB_OFFLINE=1", "--entrypoint", "/opt/venv/bin/python", image,
                           *serving_words(port, streams, count, tokens, "/models/target", "/bench/data.jsonl",
                                          f"/bench/{result.name}")])
        return read_serving(result.read_text(), output)

    return run


def guidellm(program: Path, models: Path, folder: Path) -> Callable[[int, int, int, int], Seen]:
    """guidellm (0.8) with its concurrent profile."""
    def run(port: int, streams: int, count: int, tokens: int) -> Seen:
        out = folder / f"guidellm-{time.monotonic_ns()}"
        _, cpu = timed([str(program), "run", "--backend",
                        f"kind=openai_http,target=http://127.0.0.1:{port},model=nothing",
                        "--profile", f"kind=concurrent,streams={streams}", "--constraint",
                        f"kind=max_requests,count={count}", "--tokenizer",
                        f"kind=huggingface_auto,model={models / 'target'}", "--data",
                        f"kind=synthetic_text,prompt_tokens=16,output_tokens={tokens}", "--output",
                        f"kind=json,path={out}.json", "--disable-console"], HF_HUB_OFFLINE="1")
        metrics = json.loads(out.with_suffix(".json").read_text())["benchmarks"][0]["metrics"]

        def of(name: str) -> dict[str, Any]:
            return dict(metrics[name]["successful"])

        # its inter-token latency is one mean for each request: there is no p99 of gaps
        return Seen(of("time_to_first_token_ms")["median"], of("inter_token_latency_ms")["median"], math.nan,
                    of("output_tokens_per_second")["mean"], cpu)

    return run


# against a server that does nothing


def against_null(options: argparse.Namespace) -> None:
    """Added latency and CPU per token of every client, for each number of streams."""
    from tests.perf.bench import null_server  # not at the top: this file also runs alone, inside the image
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Callable[[int, int, int, int], Seen]] = {"ours": ours}
        found["sglang.bench_serving"] = bench_serving(options.image, options.models, folder)
        if options.guidellm:
            found["guidellm"] = guidellm(options.guidellm, options.models, folder)
        print("streams  client                 added to TTFT ms  added to a token ms  p99 gap less pace ms  "
              "CPU us per token")
        for streams in options.streams:
            pace, tokens, each = LOADS.get(streams, (0.001 * streams, 64, 3))
            with null_server(pace) as port:
                for client, run in found.items():
                    if client not in (options.only or found):
                        continue
                    try:
                        idle = run(port, streams, streams, 2).cpu_s if client == "guidellm" else 0.0
                        seen = run(port, streams, each * streams, tokens)
                    except (Failed, OSError, KeyError, ValueError, StopIteration) as error:
                        print(f"{streams:7}  {client:21}  failed: {error}", flush=True)
                        continue
                    cost = 1e6 * (seen.cpu_s - idle) / (each * streams * tokens)
                    print(f"{streams:7}  {client:21}  {seen.ttft_ms - 1e3 * pace:16.2f}  "
                          f"{seen.itl_ms - 1e3 * pace:19.3f}  {seen.itl_p99_ms - 1e3 * pace:20.2f}  {cost:16.0f}",
                          flush=True)


# against the real server


def docker(*words: str) -> str:
    """The docker client's output."""
    return timed(["docker", *words])[0]


def ask(name: str, method: str, path: str) -> None:
    """A request to the server, made inside its container; raises `Failed` for any status but 200."""
    docker("exec", name, "/opt/entrypoint/venv/bin/python", "-c", "import sys, urllib.request as u; "
           "u.urlopen(u.Request('http://127.0.0.1:30000' + sys.argv[2], method=sys.argv[1]))", method, path)


def wait_until_it_serves(name: str) -> None:
    """Until the server completes a prompt; raises `Failed` with its log when the container ends."""
    while "true" in docker("inspect", "--format", "{{.State.Running}}", name):
        with contextlib.suppress(Failed):
            return ask(name, "GET", "/health_generate")
        time.sleep(2)
    raise Failed(docker("logs", name)[-2000:])


def ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    """The geometric mean of the ratios of paired rounds, with its t interval."""
    import numpy as np
    from scipy import stats
    logs = np.log(ones) - np.log(others)
    error = float(stats.sem(logs))
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=error) if error else (logs.mean(),) * 2
    return (f"{math.exp(logs.mean()):.3f} (95 % interval {math.exp(low):.3f} to {math.exp(high):.3f}, "
            f"{len(logs)} rounds, ratios vary by {100 * float(logs.std(ddof=1)):.1f} %)")


def against_real(options: argparse.Namespace) -> None:
    """Ours and `sglang.bench_serving` in turns on the same prompts, inside the container of one real server."""
    name = f"clients-{os.getpid()}"
    texts = [f"Question {place}: what would you tell a friend about the number {place * 37}?" for place in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        (Path(folder) / "datasets.py").write_text(DATASETS)
        script = Path(folder) / "tests" / "perf" / "clients.py"
        script.parent.mkdir(parents=True)
        script.write_text(Path(__file__).read_text())
        (Path(folder) / "prompts.json").write_text(json.dumps(texts[:options.count]))
        conversations(Path(folder), texts[:options.count])
        docker("run", "--detach", "--name", name, "-v", f"{options.models}:/models:ro", "-v", f"{folder}:/bench",
               options.image, "serve", "--model", "/models/target", *(
                   ["--draft", "/models/draft", "--serve-arm", "eagle3"] if options.eagle3 else []))
        try:
            wait_until_it_serves(name)
            size = (30000, options.concurrency, options.count, options.tokens)

            def flush() -> None:
                for wait in (1, 2, 4, 8):  # refused while a request is pending
                    with contextlib.suppress(Failed):
                        ask(name, "POST", "/flush_cache")
                        return
                    time.sleep(wait)
                raise Failed("the cache could not be flushed")

            def mine(*more: str) -> Seen:
                out = docker("exec", "-e", "PYTHONPATH=/opt/entrypoint/lib", name, "/opt/entrypoint/venv/bin/python",
                             "/bench/tests/perf/clients.py", "ours", *map(str, size), "/bench/prompts.json", *more)
                return read_ours(out)

            def theirs() -> Seen:
                result = Path(folder) / f"serving-{time.monotonic_ns()}.jsonl"
                out = docker("exec", "-e", "PYTHONPATH=/bench", "-e", "SGLANG_USE_CPU_ENGINE=1", "-e",
                             "HF_HUB_OFFLINE=1", name, "/opt/venv/bin/python",
                             *serving_words(*size, "/models/target", "/bench/data.jsonl", f"/bench/{result.name}"))
                return read_serving(result.read_text(), out)

            clients: dict[str, Callable[[], Seen]] = {
                "ours": mine, "ours, their way": functools.partial(mine, "text"), "sglang.bench_serving": theirs}
            runs: dict[str, list[Seen]] = {client: [] for client in clients}
            print("round  client                  tok/s  TTFT p50 ms  ms per token  p99 gap ms  CPU s")
            for number in range(-1, options.rounds):  # the first round warms up
                turn = list(clients.items())
                for client, run in turn if number % 2 == 0 else turn[::-1]:
                    flush()
                    seen = run()
                    if number >= 0:
                        runs[client].append(seen)
                        print(f"{number + 1:5}  {client:20}  {seen.tok_s:7.1f}  {seen.ttft_ms:11.1f}  "
                              f"{seen.itl_ms:12.2f}  {seen.itl_p99_ms:10.1f}  {seen.cpu_s:5.1f}", flush=True)
            for one, other in itertools.combinations(clients, 2):
                for what in ("tok_s", "ttft_ms", "itl_ms", "itl_p99_ms"):
                    print(f"{one} over {other}, {what}: " + ratio([getattr(seen, what) for seen in runs[one]],
                                                                 [getattr(seen, what) for seen in runs[other]]))
        finally:
            docker("rm", "--force", "--volumes", name)


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.clients", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("null", "real"))
    parser.add_argument("--image", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--guidellm", type=Path)
    parser.add_argument("--only", nargs="+", help="these clients")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=24, help="requests of a run against the real server")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--eagle3", action="store_true", help="the real server speculates")
    options = parser.parse_args()
    options.models = options.models.resolve()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    (against_null if options.what == "null" else against_real)(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours_main(sys.argv[2:])
    else:
        main()
