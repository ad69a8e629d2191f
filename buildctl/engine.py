"""Docker: BuildKit by `docker buildx bake` as a subprocess, everything else through the SDK.

The SDK has no BuildKit (docker-py #2230), buildx has no inspect worth parsing: each does what it is good at.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from buildctl import dial, interrupts
from buildctl.errors import (
    AuthError,
    BuildctlError,
    BuildError,
    EngineError,
    Interrupted,
    NetworkError,
    Problem,
    ResourceError,
    UsageError,
)
from buildctl.progress import BuildRecord, Cause, Mode, Progress
from buildctl.registry import is_local, plain_http

if TYPE_CHECKING:
    import docker


class Collision(EngineError):
    """Another build gave an image the same name at the same moment; doing it again helps."""


_ERRORS: Mapping[Cause, type[BuildctlError]] = {
    Cause.STEP: BuildError, Cause.DEFINITION: BuildError, Cause.DISK: ResourceError, Cause.MEMORY: ResourceError,
    Cause.BASE: BuildError, Cause.NETWORK: NetworkError, Cause.AUTH: AuthError, Cause.REFUSED: AuthError,
    Cause.ENGINE: EngineError, Cause.COLLISION: Collision}
_HINT = "start it (`make engine` installs and starts one on Debian and Ubuntu), or set DOCKER_HOST"
#: how long buildx may take to clean up after an interrupt, in seconds
_GRACE = 15.0


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image as the engine describes it. `size` in bytes, as the engine counts."""

    id: str
    digest: str
    labels: Mapping[str, str]
    size: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine says of itself."""

    version: str
    containerd_store: bool
    #: its folder; with its address in front when that is not of this machine
    root: str
    #: free bytes on the engine's disk; None when it is not this machine's
    free: int | None


@dataclass(frozen=True, slots=True)
class Builder:
    """A buildx builder: its driver and where its nodes are."""

    name: str
    driver: str
    endpoints: tuple[str, ...]

    @property
    def keeps_images(self) -> bool:
        """Whether images stay in an engine; other builders must be told to load or push them."""
        return self.driver == "docker"


@dataclass(frozen=True, slots=True)
class Baked:
    """A finished build: what it did, and the digest of each target."""

    record: BuildRecord
    digests: Mapping[str, str]


def connect(timeout: float = 600) -> docker.APIClient:
    """The SDK's client for the engine that `docker` would use.

    :param timeout: seconds without any answer.
    :raises EngineError: no engine answers.
    """
    import docker
    from docker.errors import DockerException
    from docker.utils import kwargs_from_env

    program = Engine().program() if dial.context() else None
    address = dial.address(program)
    dialer: dial.Dialer | None = None
    try:
        if address.startswith(("unix://", "http+unix://")):
            # asked first, because the SDK leaks its socket when nobody listens
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(address.partition("unix://")[2])
            settings: dict[str, Any] = {"base_url": address}
        elif program is None and not address.startswith("ssh://"):
            settings = dict(kwargs_from_env())
        else:
            dialer = dial.Dialer(program or Engine().program())
            settings = {"base_url": dialer.address}
        client = docker.APIClient(**settings, version="auto", timeout=int(timeout))
    except PermissionError:
        raise EngineError(Problem("this user may not talk to the Docker engine", address, found="permission denied",
                                  expected="membership of the group docker, or root",
                                  todo="add the user to the group, log in again")) from None
    except (OSError, DockerException) as error:
        found = _first(error)
        if dialer is not None:
            found = dialer.complaint or found
            dialer.close()
        raise EngineError(Problem("the Docker engine does not answer", address, found=found,
                                  expected="a running engine", todo=_HINT)) from None
    if dialer is not None:
        weakref.finalize(client, dialer.close)
    return client


class Engine:
    """The engine that the docker client's settings point to."""

    def __init__(self, timeout: float = 600) -> None:
        self._timeout = timeout
        self._client: docker.APIClient | None = None
        self._told: Mapping[str, Any] | None = None

    @property
    def client(self) -> docker.APIClient:
        """The SDK's client, connected.

        :raises EngineError: no engine answers.
        """
        if self._client is None:
            self._client = connect(self._timeout)
        return self._client

    def close(self) -> None:
        """Close the connections, if there are any."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def insecure(self, host: str) -> bool:
        """Whether a registry is spoken to in plain HTTP: it is on this machine, or the engine is told to.

        Without an engine only the first counts.
        """
        if is_local(host):
            return True
        if self._told is None:
            try:
                self._told = self._ask("info").get("RegistryConfig") or {}
            except EngineError:
                self._told = {}
        return plain_http(host, self._told)

    def facts(self) -> Facts:
        """Version, image store and disk.

        :raises EngineError: no engine answers.
        """
        info = self.info()
        status = {row[0]: row[1] for row in info.get("DriverStatus") or ()}
        root = str(info.get("DockerRootDir", ""))
        # a socket may lead to a virtual machine or out of a container: then the engine has another name than we
        local = info.get("Name") == socket.gethostname() and Path(root).is_dir() and not self.away
        return Facts(str(info.get("ServerVersion", "?")),
                     str(status.get("driver-type", "")).startswith("io.containerd.snapshotter"),
                     root if local else f"{dial.context() or os.environ.get('DOCKER_HOST') or dial.DEFAULT}: {root}",
                     shutil.disk_usage(root).free if local else None)

    def info(self) -> dict[str, Any]:
        """The engine's own words (`docker info`).

        :raises EngineError: no engine answers.
        """
        return self._ask("info")

    @property
    def away(self) -> bool:
        """Whether the engine is reached over a network."""
        return not dial.address(self.program() if dial.context() else None).startswith(("unix://", "http+unix://"))

    def image(self, reference: str) -> LocalImage | None:
        """An image by tag or id, None when the engine has none.

        :raises EngineError: no engine answers.
        """
        from docker.errors import ImageNotFound

        try:
            found = self._ask("inspect_image", reference)
        except ImageNotFound:
            return None
        digests = [text.partition("@")[2] for text in found.get("RepoDigests") or ()]
        labels = (found.get("Config") or {}).get("Labels") or {}
        return LocalImage(found["Id"], digests[0] if digests else "", dict(labels),
                          int(found.get("Size", 0)), tuple(found.get("RepoTags") or ()))

    def images(self, label: str) -> list[LocalImage]:
        """All tagged images that carry a label.

        :raises EngineError: no engine answers.
        """
        found = cast(list[dict[str, Any]], self._ask("images", filters={"label": label}))
        return [LocalImage(one["Id"], "", dict(one.get("Labels") or {}), int(one.get("Size", 0)),
                           tuple(one.get("RepoTags") or ())) for one in found if one.get("RepoTags")]

    def export(self, reference: str) -> Iterator[bytes]:
        """An image as `docker save` writes it: a tar with config, manifest and layers.

        :raises UsageError: the engine has no such image.
        :raises EngineError: no engine answers, or it stops in the middle.
        """
        import requests
        import urllib3.exceptions
        from docker.errors import APIError, NotFound

        try:
            yield from self.client.get_image(reference)
        except NotFound:
            raise UsageError(Problem("no such image in the engine", reference, "", "an image that was built or pulled "
                                     "here", "build it first; `docker images` lists what there is")) from None
        except (APIError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise EngineError(Problem("the Docker engine does not hand out the image", reference, found=_first(error),
                                      expected="a whole image", todo="run the same command again")) from None

    def file(self, reference: str, path: str) -> bytes | None:
        """A file of an image, None when the image or the file is not there. Nothing of the image runs.

        :raises EngineError: no engine answers.
        """
        from docker.errors import NotFound

        try:
            container = self._ask("create_container", reference, command=["none"])["Id"]
        except NotFound:
            return None
        try:
            chunks, _ = self.client.get_archive(container, path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                member = archive.extractfile(archive.getmembers()[0])
                return member.read() if member else None
        except NotFound:
            return None
        finally:
            self.client.remove_container(container, v=True, force=True)

    def untag(self, reference: str) -> None:
        """Take a name from an image; the content stays. A name that is not there is no error."""
        from docker.errors import APIError

        with contextlib.suppress(APIError):
            self.client.remove_image(reference, noprune=True)

    def bake(self, folder: Path, targets: Sequence[str], log: Path, *, show: Mode = "auto",
             builder: str | None = None, no_cache: bool = False, settings: Sequence[str] = (),
             environment: Mapping[str, str] | None = None) -> Baked:
        """Build targets of `docker-bake.json` in `folder`.

        :param log: file for the whole log.
        :param show: how progress is shown on stderr.
        :param settings: overrides as `--set` takes them.
        :param environment: variables that bake reads secrets from.
        :raises BuildctlError: of the class that fits the first true error.
        :raises Collision: another build was naming the same image.
        :raises Interrupted: interrupted; buildx was told and waited for.
        """
        with tempfile.NamedTemporaryFile(prefix="buildctl-metadata-", suffix=".json") as metadata:
            command = [self.program(), "buildx", "bake", "--file", "docker-bake.json", "--progress", "rawjson",
                       "--metadata-file", metadata.name]
            if builder:
                command += ["--builder", builder]
            if no_cache:
                command.append("--no-cache")
            for setting in settings:
                command += ["--set", setting]
            record = _follow([*command, *targets], folder, log, show, environment or {})
            try:
                found = json.loads(Path(metadata.name).read_text() or "{}")
            except ValueError:
                found = {}
        return Baked(record, {target: str(values.get("containerimage.digest", ""))
                              for target, values in found.items() if isinstance(values, dict)})

    def builder(self, name: str) -> Builder:
        """A buildx builder.

        :raises EngineError: buildx knows no such builder, it does not answer, or it keeps its images in another engine
            than this one.
        """
        done = subprocess.run([self.program(), "buildx", "inspect", name], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, check=False)
        fields = [(key.strip(), value.strip()) for key, colon, value in
                  (line.partition(":") for line in done.stdout.splitlines()) if colon]
        driver = dict(fields).get("Driver")
        if done.returncode != 0 or driver is None:
            raise EngineError(Problem(f"the builder '{name}' cannot be used", "buildx",
                                      found=(done.stderr.strip().splitlines() or ["no answer"])[-1],
                                      expected="a builder that `docker buildx ls` shows",
                                      todo="create it with `docker buildx create --name ...`"))
        found = Builder(name, driver, tuple(value for key, value in fields if key == "Endpoint"))
        # buildx starts nodes of the other drivers when it needs them
        if driver == "remote" and not any(value == "running" for key, value in fields if key == "Status"):
            raise EngineError(Problem(f"no node of the builder '{name}' answers", "buildx",
                                      found=", ".join(found.endpoints), expected="a running buildkitd",
                                      todo="start it, or correct the address (`docker buildx ls`)"))
        here = dial.context() or "default"
        if found.keeps_images and set(found.endpoints) - {here}:
            raise EngineError(Problem(f"the builder '{name}' keeps its images in another engine than docker talks to",
                                      "buildx", found=", ".join(found.endpoints), expected=here,
                                      todo=f"`DOCKER_CONTEXT={name} buildctl build ...` without --builder"))
        return found

    def program(self) -> str:
        """The docker client that knows buildx; another one earlier on PATH may not.

        :raises EngineError: there is none.
        """
        seen = []
        for folder in dict.fromkeys(os.environ.get("PATH", "").split(os.pathsep)):
            path = shutil.which("docker", path=folder)
            if path is None:
                continue
            seen.append(path)
            done = subprocess.run([path, "buildx", "version"], capture_output=True, check=False,
                                  stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return path
        raise EngineError(Problem("no docker client with buildx", "PATH", found=", ".join(seen) or "no docker at all",
                                  expected="docker with the buildx plugin",
                                  todo="`make engine` installs both on Debian and Ubuntu"))

    def _ask(self, call: str, *arguments: str, **options: object) -> dict[str, Any]:
        from docker.errors import APIError, NotFound

        try:
            return cast(dict[str, Any], getattr(self.client, call)(*arguments, **options))
        except NotFound:
            raise
        except (APIError, OSError) as error:  # errors of requests are OSErrors
            raise EngineError(Problem("the Docker engine does not answer", "engine", found=_first(error),
                                      expected="an answer", todo=_HINT)) from None


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _follow(command: Sequence[str], folder: Path, log: Path, show: Mode, environment: Mapping[str, str]) -> BuildRecord:
    """Run buildx, follow its stream, and turn its end into an error or a record."""
    env = {**os.environ, **environment, "BUILDX_BAKE_ENTITLEMENTS_FS": "0", "BUILDKIT_PROGRESS": "rawjson"}
    with Progress(log=log, mode=show) as progress:
        process: subprocess.Popen[bytes] | None = None
        try:
            with interrupts.held():
                # a session of its own: an interrupt reaches buildx once, from us, and in order
                process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
            stream = cast(BinaryIO, process.stderr)
            while data := os.read(stream.fileno(), 65536):
                progress.feed(data)
            code = process.wait()
        except KeyboardInterrupt:
            if process is not None:
                _stop(process)
            progress.finish(130)
            raise Interrupted(Problem("the build was interrupted", todo="run the same command again: finished steps "
                                      "are kept in the cache")) from None
        finally:
            if process is not None:
                if process.poll() is None:
                    _stop(process)
                cast(BinaryIO, process.stderr).close()
        record = progress.finish(code)
    if code != 0:
        error = record.error
        if error is None:  # buildx canceled the build on its own, for instance because the engine went away
            raise BuildError(Problem("docker buildx failed without saying why", "build", found=f"exit status {code}",
                                     todo=f"whole log: {log}"))
        raise _ERRORS[error.cause](error.problem(str(log)))
    return record


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
