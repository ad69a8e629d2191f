"""One container from creation to removal: what goes in, its output, its end, what comes out.

The docker client runs it, so that what `--dry-run` prints is what is done. Files go in and come out as archives over
the engine's API and never by a mount of a results folder: that works with an engine on another machine, needs no folder
that the container's user may write, and what comes out belongs to the caller.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from buildctl import interrupts
from buildctl.engine import Engine
from buildctl.errors import EngineError, Interrupted, Problem, ResourceError, UsageError

#: seconds that the container has to end on TERM before it is killed: two servers may have to be stopped
GRACE = 120
_NEVER = "0001-01-01T00:00:00Z"
Output = Literal["through", "stderr", "capture"]


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. `options` are flags of `docker run`, `words` follow the image.

    `environment` maps variables to values that never appear in a command line.
    """

    name: str
    image: str
    options: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def arguments(self) -> tuple[str, ...]:
        """The words after `docker run` or `docker create`."""
        named = tuple(word for name in self.environment for word in ("--env", name))
        return ("--name", self.name, *self.options, *named, self.image, *self.words)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended. `output` is its stdout where that was captured."""

    code: int
    out_of_memory: bool
    output: str = ""


def mount(kind: str, target: str, source: str = "", *, readonly: bool = False) -> tuple[str, str]:
    """`--mount` and its value; commas and quotes in paths are quoted as docker's CSV reader wants it."""
    parts = [f"type={kind}", *([f"source={source}"] if source else []), f"target={target}",
             *(["readonly"] if readonly else [])]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(parts)
    return "--mount", text.getvalue()


def hardened() -> tuple[str, ...]:
    """Flags that every container of ours gets: nothing to write but /tmp and volumes, no capability, no way to more.

    /tmp allows execution: compilers that run in the container load what they wrote there.
    """
    return ("--read-only", "--tmpfs", "/tmp:exec", "--cap-drop", "ALL",  # noqa: S108 - the container's own
            "--security-opt", "no-new-privileges", "--pull", "never", "--stop-timeout", str(GRACE))


class Container:
    """A container that is created on entering and removed, with its unnamed volumes, on leaving."""

    def __init__(self, engine: Engine, spec: Spec, say: Callable[[str], None]) -> None:
        self._engine, self._spec, self._say = engine, spec, say
        self._docker = program()
        self._keep = False

    def __enter__(self) -> Container:
        """Create it.

        :raises UsageError: a folder to mount is not there.
        :raises EngineError: the engine refuses.
        """
        done = self._run("create", *self._spec.arguments())
        if done.returncode != 0:
            self._remove()
            raise refusal(done.stderr, self._spec)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            self._remove()

    def put(self, files: Mapping[str, Path], folder: str) -> None:
        """Copy files and folders into a volume, owned by the container's user; the names are those below `folder`.

        :raises EngineError: the engine does not take them.
        """
        from docker.errors import APIError

        user = str((self._inspect().get("Config") or {}).get("User") or "0").partition(":")[0]
        owner = int(user) if user.isdigit() else 0

        def owned(one: tarfile.TarInfo) -> tarfile.TarInfo:
            one.uid = one.gid = owner
            one.uname = one.gname = ""
            one.mode |= 0o600 | (0o100 if one.isdir() else 0)
            return one

        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w") as tar:
                for name, path in files.items():
                    tar.add(path, name, filter=owned)
            archive.seek(0)
            try:
                taken = self._engine.client.put_archive(self._spec.name, folder, archive)
            except (APIError, OSError) as error:
                taken, why = False, str(error)
            else:
                why = "no reason"
        if not taken:
            raise EngineError(Problem("the engine does not take files", f"{self._spec.name}:{folder}", why,
                                      "a writable volume with free space", "see the engine's disk and log"))

    def run(self, output: Output = "through") -> Ended:
        """Start it, follow it to its end.

        :param output: where its stdout goes; stderr goes through in any case.
        :raises EngineError: it could not be started.
        :raises Interrupted: by the user; the container was stopped and has ended, its files can be collected.
        """
        process: subprocess.Popen[str] | None = None
        try:
            with interrupts.held():
                process = self._start(output)
            text = process.stdout.read() if process.stdout else ""
            process.wait()
            while (state := self._inspect()["State"]).get("Running"):
                self._say("the output of the container was lost; it goes on, and is waited for")
                self._run("wait", self._spec.name)
        except KeyboardInterrupt:
            self._stop()
            raise Interrupted(Problem("interrupted", self._spec.name)) from None
        finally:
            if process is not None:
                _end(process)
        if state.get("StartedAt") == _NEVER:
            raise refusal(str(state.get("Error") or "no reason"), self._spec)
        return Ended(int(state["ExitCode"]), bool(state.get("OOMKilled")), text)

    def collect(self, source: str, target: Path) -> None:
        """Copy the content of a folder of the container, running or not, into a folder here; it belongs to the caller.

        On failure the container stays, so that nothing is lost.

        :raises ResourceError: the disk here is full.
        :raises EngineError: it cannot be copied for another reason.
        :raises Interrupted: by the user.
        """
        target.mkdir(parents=True, exist_ok=True)
        todo = f"docker cp {self._spec.name}:{source}/. DIR && docker rm -v {self._spec.name}"
        try:
            done = self._run("cp", f"{self._spec.name}:{source}/.", str(target))
        except KeyboardInterrupt:
            self._keep = True
            raise Interrupted(Problem("interrupted while the results were fetched from the container, which is kept",
                                      str(target), todo=todo)) from None
        if done.returncode != 0:
            self._keep = True
            full = "no space" in done.stderr
            raise (ResourceError if full else EngineError)(Problem(
                "the results could not be fetched from the container, which is kept", str(target), _last(done.stderr),
                "a copy of its files", todo))

    def _start(self, output: Output) -> subprocess.Popen[str]:
        into = subprocess.PIPE if output == "capture" else sys.stderr if output == "stderr" else None
        # a session of its own: an interrupt reaches the container once, from us
        return subprocess.Popen([self._docker, "start", "--attach", self._spec.name], stdin=subprocess.DEVNULL,
                                stdout=into, start_new_session=True, text=True)

    def _stop(self) -> None:
        """TERM, and KILL after the grace time; a second interrupt kills at once."""
        self._say("stopping the container; what it measured is kept (again: kill it)")
        try:
            self._run("stop", "--time", str(GRACE), self._spec.name)
        except KeyboardInterrupt:
            self._run("kill", self._spec.name)

    def _inspect(self) -> dict[str, Any]:
        from docker.errors import APIError

        try:
            found: dict[str, Any] = self._engine.client.inspect_container(self._spec.name)
        except (APIError, OSError) as error:
            self._keep = True
            raise EngineError(Problem("the engine says nothing of the container", self._spec.name, _last(str(error)),
                                      "its state", "if it still runs, its results lie in it: `docker ps -a`")) from None
        return found

    def _remove(self) -> None:
        self._run("rm", "--force", "--volumes", self._spec.name)

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._docker, *words], env={**os.environ, **self._spec.environment},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              start_new_session=True)


def _end(process: subprocess.Popen[str]) -> None:
    """The attached client ends with its container; killed when it does not."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


def program() -> str:
    """The docker client. Raises `EngineError`."""
    found = shutil.which("docker")
    if found is None:
        raise EngineError(Problem("no docker client", "PATH", "", "docker",
                                  "`make engine` installs one on Debian and Ubuntu"))
    return found


#: words of the engine; error, what is wrong, what is expected, what to do
_REFUSALS: tuple[tuple[tuple[str, ...], type[EngineError | UsageError], str, str, str], ...] = (
    (("could not select device driver",), EngineError, "the engine has no GPU runtime",
     "an engine that hands GPUs to containers (--gpus)",
     "install the NVIDIA driver and nvidia-container-toolkit on the engine's host, run "
     "`nvidia-ctk runtime configure --runtime=docker`, restart the engine"),
    (("nvidia-container", "nvidia-cdi", "CDI device"), EngineError, "the engine's GPU runtime refuses the container",
     "a container with GPUs",
     "`docker run --rm --gpus all IMAGE nvidia-smi` shows whether any container gets them; look at the driver and at "
     "nvidia-container-toolkit on the engine's host"),
    (("bind source path does not exist",), UsageError, "a folder to mount is not there on the engine's host",
     "a folder with config.json", "name a folder of the machine that the engine runs on"),
    (("No such image",), UsageError, "no such image in the engine", "an image that was built or pulled",
     "build it, or `docker pull` it"),
    (("",), EngineError, "the engine refuses the container", "a container that starts", "see the engine's log"))


def refusal(said: str, spec: Spec) -> EngineError | UsageError:
    """The error for a container that could not be created or started, from the engine's words."""
    text = _last(said)
    kind, what, expected, todo = next(row[1:] for row in _REFUSALS if any(word in text for word in row[0]))
    return kind(Problem(what, spec.image, text, expected, todo))


def _last(text: str) -> str:
    """The engine's own words: the last line that says anything, without the hint at --help."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "--help" not in line]
    return lines[-1].removeprefix("Error response from daemon: ") if lines else "no reason"


def unfit(names: Iterable[str], environ: Mapping[str, str]) -> list[Problem]:
    """What is wrong with variables that are to be passed on by name."""
    problems = []
    for name in names:
        if not name.isidentifier() or not name.isascii():
            problems.append(Problem(
                "variables are passed on by name", "--env", name.partition("=")[0], "NAME of a variable set here",
                "export it and give its name: a value in a command line is seen by everybody"))
        elif name not in environ:
            problems.append(Problem("this variable is not set", "--env", name, "a variable of this environment",
                                    f"export {name}=..."))
    return problems
