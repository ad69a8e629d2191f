"""A fresh runner: `make bench-fresh`. An engine that has nothing, in a network of its own, and a registry that has all.

    python -m tests.perf.fresh [--stack NAME] [--lock FILE]

Nothing changed, then one line of one patch changed: by buildctl, which goes on from stages under their keys, and by
`docker buildx bake` of the same files with a registry cache (`mode=max`). Bytes are those of the engine's network
device.
Needs root, and an engine here with the stack built: the registry is filled from it. `--lock` is held during each
measurement, so that several users of one machine do not measure each other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.second import SecondEngine
from tests.perf.bench import BUILDCTL, Failed, call, copy_checkout, edit, megabytes, series_of
from tests.registry.server import RegistryServer

IMAGE = "sglang"
TOOLS = ("buildctl", "bake with registry cache")


@dataclass(frozen=True)
class Measured:
    """One build on a fresh engine: seconds, bytes that the engine received and sent, steps that ran."""

    what: str
    seconds: float
    received: int
    sent: int
    ran: str

    def line(self) -> str:
        """A row of the table."""
        return (f"| {self.what} | {self.seconds:.1f} | {self.ran} | {megabytes(self.received)} | "
                f"{megabytes(self.sent)} |")


def prepare(project: Path, stack: str, word: str = "") -> tuple[Path, Path]:
    """A copy of the checkout with tags of its own, and its rendering; with a word, one line of a patch is another."""
    copy_checkout(project)
    path = project / "images" / "stacks" / f"{stack}.yaml"
    path.write_text(re.sub(r"^tag: .*", f"tag: fresh-{os.getpid()}", path.read_text(), flags=re.MULTILINE))
    if word:
        edit(series_of(project, stack), word)
    call(BUILDCTL, "--project", str(project), "lock", stack)
    rendered = project.with_name(f"{project.name}-rendered")
    call(BUILDCTL, "--project", str(project), "render", "--stack", stack, "--to", str(rendered))
    return project, rendered


def run(command: list[str], cwd: Path, **env: str) -> tuple[str, str]:
    """Run a command to its end; stdout and stderr. Raises `Failed`."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout, done.stderr


def measure(what: str, engine: SecondEngine, lock: Path | None, action: Callable[[], str]) -> Measured:
    """Time an action; `action` returns which steps ran."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        before, start = engine.traffic(), time.perf_counter()
        ran = action()
        seconds, after = time.perf_counter() - start, engine.traffic()
    found = Measured(what, seconds, after[0] - before[0], after[1] - before[1], ran)
    print(found.line(), flush=True)
    return found


def by_us(project: Path, stack: str, place: str, engine: SecondEngine) -> str:
    """`buildctl build --push` on that engine; the steps that ran."""
    words = [BUILDCTL, "--project", str(project), "build", IMAGE, "--stack", stack, "--push", place, "--json",
             "--progress", "quiet"]
    record = json.loads(run(words, project, DOCKER_HOST=engine.host)[0])["build"]
    return "none" if record is None else ", ".join(
        sorted(f"{step['stage']} {step['position']}" for step in record["steps"]
               if step["state"] == "ran" and step["kind"] == "instruction"))


def bake(folder: Path, place: str, host: str | None) -> str:
    """`docker buildx bake --push` with a registry cache; the steps that ran."""
    cache = f"type=registry,ref={place}/cache:{IMAGE}"
    words = ["docker", *(["--host", host] if host else []), "buildx", "bake", "-f", "docker-bake.json", "--progress",
             "plain", f"{IMAGE}-image", "--push", "--set", f"*.tags={place}/{IMAGE}:latest", "--set",
             f"*.cache-from={cache}", "--set", f"*.cache-to={cache},mode=max,compression=zstd"]
    numbers: dict[str, str] = {}
    cached: set[str] = set()
    for line in run(words, folder, BUILDX_BAKE_ENTITLEMENTS_FS="0")[1].splitlines():
        number, _, rest = line.partition(" ")
        if rest.startswith("[") and "/" in rest.partition("]")[0] and "internal" not in rest:
            numbers[number] = " ".join(rest[1:].partition("]")[0].split()[-2:])
        if rest == "CACHED":
            cached.add(number)
    return ", ".join(sorted({name for number, name in numbers.items() if number not in cached})) or "none"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.fresh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", default="cpu-demo")
    parser.add_argument("--lock", type=Path, help="held during each measurement")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="measure this one only")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project, rendered_first = prepare(folder / "checkout", options.stack)
        changed, rendered_changed = prepare(folder / "changed", options.stack, f"measured {time.time_ns()}")
        with RegistryServer(folder / "registry") as near:
            made = json.loads(call(BUILDCTL, "--project", str(project), "build", IMAGE, "--stack", options.stack,
                                   "--push", f"{near.host}/ours", "--json", cwd=project))
            call("docker", "rmi", *made["images"][0]["tags"])  # the cache stays
            print("registry filled by buildctl", flush=True)
            if TOOLS[1] in (options.tool or TOOLS):
                bake(rendered_first, f"{near.host}/bake", None)
                call("docker", "rmi", f"{near.host}/bake/{IMAGE}:latest")
                print("registry filled by bake", flush=True)
        print("| build on an empty engine | seconds | steps that ran | received | sent |\n|---|--:|---|--:|--:|")
        for what, tree, rendered in (("nothing changed", project, rendered_first),
                                     ("one line of a patch", changed, rendered_changed)):
            for tool in options.tool or TOOLS:
                with (SecondEngine(folder / "engine") as engine,
                      RegistryServer(folder / "registry", address=engine.gateway) as registry):
                    def action(tool: str = tool, tree: Path = tree, rendered: Path = rendered,
                               engine: SecondEngine = engine, host: str = registry.host) -> str:
                        if tool == "buildctl":
                            return by_us(tree, options.stack, f"{host}/ours", engine)
                        return bake(rendered, f"{host}/bake", engine.host)

                    measure(f"{tool}: {what}", engine, options.lock, action)
    return 0


if __name__ == "__main__":
    sys.exit(main())
