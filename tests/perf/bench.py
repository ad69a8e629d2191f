"""`make bench`: what the tool itself costs, against the plainest thing that does the same job, side by side in one run.

    python -m tests.perf.bench [--stack NAME] [--rounds N] [--json FILE] [CASE]...

Cases: start, plan, client need nothing; noop, patch, size need the engine and build the stack first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from buildctl.progress.model import brief
from entrypoints import client
from tests.perf.compare import Comparison, Timing, compare
from tests.registry.server import RegistryServer

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
BUILDCTL = str(Path(PYTHON).with_name("buildctl"))


class Failed(Exception):
    """A command of a case failed; the message is its output."""


@dataclass(frozen=True)
class Result:
    """What a case found: comparisons, and facts that are not times."""

    comparisons: dict[str, Comparison]
    facts: dict[str, object]

    def as_dict(self) -> dict[str, object]:
        """Everything, for a file."""
        return {"comparisons": {title: found.as_dict() for title, found in self.comparisons.items()},
                "facts": self.facts}


def call(*command: str, cwd: Path = ROOT) -> str:
    """Run a command to its end; its stdout. Raises `Failed` with both outputs."""
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def runs(*command: str, cwd: Path = ROOT) -> Callable[[], object]:
    """The command as something to time."""
    return lambda: call(*command, cwd=cwd)


# without an engine


def start(options: argparse.Namespace) -> Result:
    """How long until `--help`, against Python with click alone."""
    return Result({"start": compare({
        "python -c 'import click'": runs(PYTHON, "-c", "import click"),
        "python -c pass": runs(PYTHON, "-c", "pass"),
        "buildctl --help": runs(BUILDCTL, "--help"),
        "buildctl --version": runs(BUILDCTL, "--version"),
    }, 2 * options.rounds)}, {})


def plan(options: argparse.Namespace) -> Result:
    """How long a plan takes, against the start alone."""
    return Result({"plan": compare({
        "buildctl --help": runs(BUILDCTL, "--help"),
        "buildctl list": runs(BUILDCTL, "list"),
        f"buildctl plan --stack {options.stack}": runs(BUILDCTL, "plan", "--stack", options.stack),
    }, options.rounds)}, {})


def load_client(options: argparse.Namespace) -> Result:
    """What the benchmark's client adds to each chunk's latency, and its CPU time per chunk.

    The server streams at a fixed pace. `ours` is the client as benchmarks use it; `readline` parses every chunk as it
    comes, as simple clients do.
    """
    facts: dict[str, object] = {}
    for streams, pace in ((1, 0.01), (16, 0.02), (64, 0.05), (256, 0.2)):
        with null_server(pace) as port:
            for name, run in (("ours", ours), ("readline", readline)):
                added, cpu = asyncio.run(run(port, streams, max(20, int(options.seconds / pace))))
                p50, p99 = statistics.quantiles(added, n=100)[49], statistics.quantiles(added, n=100)[98]
                facts[f"{streams} streams, a chunk per {pace * 1e3:.0f} ms each, {name}"] = (
                    f"added p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, "
                    f"CPU {cpu / len(added) * 1e6:.0f} us per chunk, {len(added)} chunks")
    return Result({}, facts)


@contextlib.contextmanager
def null_server(pace: float) -> Iterator[int]:
    """The null server as a process; its port."""
    with subprocess.Popen([PYTHON, "-m", "tests.perf.nullserver", str(pace)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.terminate()


async def ours(port: int, streams: int, tokens: int) -> tuple[list[float], float]:
    """Seconds added to each chunk, and CPU seconds while requests ran."""
    jobs = [client.Job(str(number), "null", [1, 2, 3], tokens) for number in range(streams)]
    load = await client.generate("127.0.0.1", port, jobs, concurrency=streams, stall=30)
    added = [moment - json.loads(data)["sent"] for _, raw in load.raws
             for moment, data in client.events(client.parse(raw)) if data != b"[DONE]"]
    if len(added) != streams * tokens:
        raise Failed(f"{len(added)} chunks instead of {streams * tokens}: {[raw.error for _, raw in load.raws][:3]}")
    return added, load.cpu_seconds


async def readline(port: int, streams: int, tokens: int) -> tuple[list[float], float]:
    """The same by a client that reads lines and parses each at once."""
    added: list[float] = []
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": tokens}}).encode()

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(client.request_bytes("POST", "/generate", "x", body))
        async for line in reader:
            if line.startswith(b"data: {"):
                sent = json.loads(line[6:])["sent"]
                added.append(time.perf_counter() - sent)
        writer.close()

    cpu = time.process_time()
    await asyncio.gather(*(one() for _ in range(streams)))
    return added, time.process_time() - cpu


# with an engine


def build(stack: str, *more: str, project: Path = ROOT) -> dict[str, Any]:
    """Build a stack by the tool; what it reports with `--json`."""
    command = (BUILDCTL, "--project", str(project), "build", "--stack", stack, "--json", *more)
    report: dict[str, Any] = json.loads(call(*command, cwd=project))
    return report


def noop(options: argparse.Namespace) -> Result:
    """A build without changes, against plain `docker buildx bake` of the rendered files."""
    build(options.stack)
    with tempfile.TemporaryDirectory() as folder:
        rendered = Path(folder) / "rendered"
        call(BUILDCTL, "render", "--stack", options.stack, "--to", str(rendered))
        bake = ("docker", "buildx", "bake", "-f", "docker-bake.json")
        found = compare({"docker buildx bake": runs(*bake, cwd=rendered),
                         "buildctl build": runs(BUILDCTL, "build", "--stack", options.stack)}, options.rounds)
    return Result({"build without changes": found}, {})


def patch(options: argparse.Namespace) -> Result:
    """From one edited line of a patch to the built image, and what a registry then receives."""
    before = {tag for image in build(options.stack)["images"] for tag in image["tags"]}
    facts: dict[str, object] = {}
    times: dict[str, list[float]] = {"buildctl build, nothing changed": [], "buildctl lock": [], "buildctl build": []}
    made: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, RegistryServer(Path(folder) / "registry") as registry:
        project = copy_checkout(Path(folder) / "checkout")
        series = series_of(project, options.stack)
        top = build(options.stack, project=project)["images"][-1]
        call(BUILDCTL, "push", top["tags"][0], "--to", registry.host)
        facts[f"pushed first, {top['tags'][0]}"] = megabytes(stored := used(registry.blobs))
        for number in range(options.rounds):
            times["buildctl build, nothing changed"].append(timed(lambda: build(options.stack, project=project)))
            edit(series, f"measured {number}")
            times["buildctl lock"].append(timed(runs(BUILDCTL, "--project", str(project), "lock", options.stack)))
            start = time.perf_counter()
            report = build(options.stack, project=project)
            times["buildctl build"].append(time.perf_counter() - start)
            made |= {tag for image in report["images"] for tag in image["tags"]}
        steps = [step for step in report["build"]["steps"] if step["state"] == "ran"]
        for step in steps:
            what = " ".join(filter(None, (step["stage"], step["position"], brief(step["instruction"], 70))))
            facts[f"ran: {what}"] = f"{step['seconds']:.1f} s"
        # a changed image is another one: its fixed tag would be refused, so it gets another
        tag = report["images"][-1]["tags"][0]
        renamed = f"{tag.rpartition(':')[0]}:measured"
        call("docker", "tag", tag, renamed)
        made.add(renamed)
        start = time.perf_counter()
        call(BUILDCTL, "push", renamed, "--to", registry.host)
        facts["pushed after one line"] = (f"{megabytes(used(registry.blobs) - stored)} in "
                                          f"{time.perf_counter() - start:.1f} s")
    build(options.stack)  # the names point to the checkout's own images again
    for tag in made - before:
        call("docker", "rmi", tag)
    found = Comparison(tuple(Timing(name, tuple(seconds)) for name, seconds in times.items()))
    return Result({"one line of a patch": found}, facts)


def size(options: argparse.Namespace) -> Result:
    """How big the images are: what the engine says, and what is in their files."""
    facts: dict[str, object] = {}
    for image in build(options.stack)["images"]:
        name = image["tags"][0]
        layers = call("docker", "history", "--human=false", "--format", "{{.Size}}", name).split()
        files = call("docker", "run", "--rm", "--user", "0", "--network", "none", name, "du", "-sxb", "/").split()[0]
        facts[name] = (f"{megabytes(int(files))} in files, {megabytes(sum(map(int, layers)))} in {len(layers)} layers, "
                       f"{megabytes(image['bytes'])} by the engine")
    return Result({}, facts)


def timed(action: Callable[[], object]) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy_checkout(target: Path) -> Path:
    """The checkout's files as they are, uncommitted ones too, without what git ignores."""
    for name in call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if (source := ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def series_of(project: Path, stack: str) -> Path:
    """Folder of the first patch series that a stack names."""
    listed = yaml.safe_load((project / "images" / "stacks" / f"{stack}.yaml").read_text())["patches"]
    return project / "patches" / str(next(iter(listed.values())))


def edit(series: Path, word: str) -> None:
    """Change one line that the last patch of a series adds."""
    file = series / (series / "series").read_text().split()[-1]
    file.write_text(edited(file.read_text(), word))


def edited(patch: str, word: str) -> str:
    """The patch with a comment at the end of a Python line that it adds, in place of an earlier such comment."""
    lines = patch.split("\n")
    for number, line in enumerate(lines):
        code = line.partition("  # measured")[0]
        if code.startswith("+") and not code.startswith("+++") and code[1:].strip() and not set(code) & set("\"'#\\"):
            lines[number] = f"{code}  # {word}"
            return "\n".join(lines)
    raise Failed("no added line of the patch takes a comment")


def used(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def megabytes(count: int) -> str:
    """Bytes for people; small ones in kB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


CASES: dict[str, Callable[[argparse.Namespace], Result]] = {
    "start": start, "plan": plan, "client": load_client, "noop": noop, "patch": patch, "size": size,
}


def main() -> int:
    """Run the cases; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[], help=", ".join(CASES))
    parser.add_argument("--stack", default="cpu-demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run of the client case")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    results, failed = {}, False
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    for name in options.cases or CASES:
        print(f"\n{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
        try:
            result = CASES[name](options)
        except Failed as error:
            failed = True
            print(f"FAILED: {error}")
            continue
        results[name] = result.as_dict()
        for title, comparison in result.comparisons.items():
            print("\n".join(f"  {line}" for line in [title, *comparison.lines()]))
        for title, value in result.facts.items():
            print(f"  {title}: {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
