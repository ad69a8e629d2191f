"""The engine's side of a push: look an image up, push it, understand the stream (docker SDK).

Shapes recorded from engine 26.1.5 with both image stores. The SDK's push answers HTTP 200 and reports errors inside.
"""

from __future__ import annotations

import json
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

from buildctl import fault as faults
from buildctl.budget import MIB, Layer
from buildctl.errors import EngineError, Problem, UsageError
from buildctl.fault import Fault, Kind
from buildctl.image_config import KEY_LABEL
from buildctl.layers import Pieces
from buildctl.reference import Reference
from buildctl.retry import Failed

if TYPE_CHECKING:
    import docker
    import requests

_DIGEST_LINE = re.compile(r": digest: (sha256:[0-9a-f]{64}) size: (\d+)")


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image in the engine: its id (manifest digest on the containerd store, else config digest), digests, labels,
    and how many layers it has.
    """

    id: str
    digests: frozenset[str]
    labels: Mapping[str, str] = field(default_factory=dict)
    layers: int = 0

    @property
    def key(self) -> str:
        """The content key, empty when it has none."""
        return self.labels.get(KEY_LABEL, "")


@contextmanager
def asking() -> Iterator[None]:
    """Turn the SDK's errors into ours. Raises `EngineError`."""
    import docker.errors
    import requests

    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise EngineError(Problem("the Docker engine does not answer as it should", "engine",
                                  (str(error).splitlines() or [type(error).__name__])[0], "an answer",
                                  "see whether `docker info` answers, then run the same command again")) from None


def local_image(engine: docker.APIClient, name: str) -> LocalImage:
    """Look an image up in the engine. Raises `UsageError` when it is not there, `EngineError`."""
    found = _inspect(engine, name)
    if found is None:
        raise UsageError(Problem("no such image in the engine", name, "", "an image that was built or pulled here",
                                 "build it first; `docker images` lists what there is"))
    digests = frozenset(entry.rpartition("@")[2] for entry in found.get("RepoDigests") or [])
    return LocalImage(found["Id"], digests, (found.get("Config") or {}).get("Labels") or {},
                      len((found.get("RootFS") or {}).get("Layers") or ()))


@contextmanager
def name_removed(engine: docker.APIClient, name: str, source: str) -> Iterator[None]:
    """Take `name`, another name of `source`, away from the engine afterwards, unless it was there before."""
    import docker.errors
    import requests

    existed = _inspect(engine, name) is not None
    try:
        yield
    finally:
        if not existed and name != source:
            with suppress(docker.errors.APIError, requests.exceptions.RequestException):
                engine.remove_image(name, noprune=True)


def _inspect(engine: docker.APIClient, name: str) -> dict[str, Any] | None:
    import docker.errors

    with asking():
        try:
            found: dict[str, Any] = engine.inspect_image(name)  # type: ignore[no-untyped-call]
            return found
        except docker.errors.NotFound:
            return None


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes sent and bytes known so far of an upload, and layers by what became of them."""

    sent: int = 0
    total: int = 0
    pushed: int = 0
    present: int = 0
    mounted: int = 0


NOTHING = Progress()


@dataclass(frozen=True, slots=True)
class Upload:
    """What the engine's push stream said: the digest it pushed (empty: not said) and the counts.

    `index`: of an index that it has in part only, engines from 28 on push the one image that they have.
    """

    digest: str
    progress: Progress
    index: str = ""


def read_stream(lines: Iterable[Mapping[str, Any]], watch: Callable[[Progress], None] | None = None, *,
                patience: float = 600.0, clock: Callable[[], float] = time.monotonic) -> Upload:
    """Follow a push stream to its end. Raises `Failed` for an error inside it (the HTTP status is 200 all the same),
    and when nothing has changed for `patience` seconds: the engine repeats its last line ten times a second, so that
    a push which stands still never looks silent.

    The digest comes as `aux` (graph drivers) or only in the last status text (containerd store).
    """
    layers: dict[str, tuple[str, int, int]] = {}
    digest = index = ""
    moved = clock()
    for line in lines:
        error = line.get("error") or (line.get("errorDetail") or {}).get("message")
        if error:
            raise Failed(faults.of_engine(str(error)))
        status, layer = str(line.get("status", "")), str(line.get("id", ""))
        aux = line.get("aux") or {}
        digest = str(aux.get("Digest", "")) or digest
        index = str((aux.get("originalIndex") or {}).get("digest", "")) or index
        if found := _DIGEST_LINE.search(status):
            digest = found[1]
        detail = line.get("progressDetail") or {}
        before = layers.get(layer, ("", 0, 0))
        now = (status, int(detail.get("current", before[1])), int(detail.get("total", before[2])))
        if not layer or now != before:
            moved = clock()
        elif clock() - moved > patience:
            raise Failed(Fault(Kind.TRANSIENT, f"nothing has moved for {patience:.0f} s"))
        if layer:
            layers[layer] = now
            if watch is not None:
                watch(_progress(layers.values()))
    return Upload(digest, _progress(layers.values()), index)


def _progress(layers: Iterable[tuple[str, int, int]]) -> Progress:
    layers = tuple(layers)

    def count(start: str) -> int:
        return sum(status.startswith(start) for status, _, _ in layers)

    return Progress(sum(sent for _, sent, _ in layers), sum(total for _, _, total in layers), count("Pushed"),
                    count("Layer already exists"), count("Mounted"))


def layers_of(engine: docker.APIClient, image: str) -> list[Layer]:
    """The image's layers with their unpacked sizes: upper bounds of what travels. None where the containerd store has
    the image packed only: it then knows no sizes.
    """
    import docker.errors

    with asking():
        try:
            history: list[dict[str, Any]] = engine.history(image)  # type: ignore[no-untyped-call]
        except docker.errors.NotFound:
            return []
    return [Layer(int(step.get("Size") or 0), str(step.get("CreatedBy") or ""), exact=False)
            for step in reversed(history) if step.get("Size")]


def push(engine: docker.APIClient, source: str, target: Reference, login: Mapping[str, str],
         watch: Callable[[Progress], None] | None = None, *, patience: float = 600.0) -> Upload:
    """Push the local image `source` as `target`. Raises `Failed`, `EngineError`.

    The engine pushes by name: another job on it may give the name to its own image before it is read. What was pushed
    is in the answer.
    """
    import docker.errors
    import requests
    import urllib3.exceptions

    with asking():  # named anew each time: another push on the same engine may have taken the name away
        engine.tag(source, target.name, target.tag)
    try:
        # the stream is silent while nothing but the config is under way: there the SDK's own limit has to do
        with _hanging_up(engine), _limit(engine, patience):
            lines = engine.push(target.name, tag=target.tag, stream=True, decode=True, auth_config=dict(login))
            return read_stream(lines, watch, patience=patience)
    except docker.errors.APIError as error:
        raise Failed(faults.of_engine(str(error.explanation or error))) from None
    # in the middle of a stream the SDK passes on what it reads with
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        text = "no answer for too long" if "timed out" in str(error).lower() else "the engine hung up"
        raise Failed(Fault(Kind.TRANSIENT, text)) from None


@contextmanager
def _limit(engine: docker.APIClient, seconds: float) -> Iterator[None]:
    before = engine.timeout
    engine.timeout = max(1, int(seconds))
    try:
        yield
    finally:
        engine.timeout = before


@contextmanager
def _hanging_up(engine: docker.APIClient) -> Iterator[None]:
    """Close the answers of the requests made inside, whatever happens: the SDK leaves an abandoned stream open, and the
    engine goes on uploading for as long as somebody may be listening.
    """
    answers: list[requests.Response] = []

    def keep(answer: requests.Response, *_: object, **__: object) -> None:
        answers.append(answer)

    hooks = engine.hooks["response"]
    hooks.append(keep)
    try:
        yield
    finally:
        hooks.remove(keep)
        for answer in answers:
            answer.close()


def exact_layers(engine: docker.APIClient, image: str) -> list[Layer]:
    """The layers with their sizes as they travel, read from the engine's export; empty when it keeps none compressed.

    Reads the whole image once: for layers near a limit only.
    """
    documents: dict[str, Any] = {}
    with tarfile.open(fileobj=cast("IO[bytes]", Pieces(engine.get_image(image))), mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isfile() and member.size < MIB and (content := archive.extractfile(member)):
                with suppress(ValueError):
                    documents[name] = json.load(content)
    for document in documents.values():
        layers = document.get("layers") if isinstance(document, dict) else None
        if layers and all(isinstance(layer, dict) and "in-toto" not in layer["mediaType"] for layer in layers):
            makers = _makers(documents.values(), len(layers))
            return [Layer(int(layer["size"]), maker, exact=not str(layer["mediaType"]).endswith("tar"))
                    for layer, maker in zip(layers, makers, strict=True)]
    return []


def _makers(documents: Iterable[Any], count: int) -> list[str]:
    """The step that made each of `count` layers, from the config among the documents; unnamed where they disagree."""
    for document in documents:
        if isinstance(document, dict) and isinstance(document.get("history"), list):
            makers = [str(step.get("created_by", "")) for step in document["history"] if not step.get("empty_layer")]
            if len(makers) == count:
                return makers
    return [""] * count
