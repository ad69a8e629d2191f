"""Planning a push: what is refused before the network is asked, and what is said on the way."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from typing import Any, cast

import docker
import docker.errors
import pytest

from buildctl.budget import GB
from buildctl.commands.push import Speaker, jobs_for, jobs_of
from buildctl.engine import Engine
from buildctl.errors import AuthError, Problem, UsageError
from buildctl.fault import Fault, Kind
from buildctl.push import Job, Publisher, Result, Watcher
from buildctl.reference import parse, parse_target
from buildctl.registry import Registry
from buildctl.retry import Retry
from buildctl.upload import Progress

DIGEST = "sha256:" + "ab" * 32


class Client:
    """An engine that has one image with layers of the given sizes; nobody keeps 11 GB for a test.

    `compressed` None: the engine keeps layers unpacked only, as graph drivers do.
    """

    def __init__(self, unpacked: list[int], compressed: list[int] | None) -> None:
        self.unpacked, self.compressed = unpacked, compressed
        self.layers = len(unpacked)
        self.exports = 0

    def history(self, image: str) -> list[dict[str, Any]]:
        steps = [{"Size": size, "CreatedBy": f"RUN step {number}"} for number, size in enumerate(self.unpacked)]
        return [{"Size": 0, "CreatedBy": "ENTRYPOINT"}, *reversed(steps)]

    def get_image(self, image: str) -> Iterator[bytes]:
        self.exports += 1
        kind = "application/vnd.oci.image.layer.v1.tar"
        sizes = self.unpacked if self.compressed is None else self.compressed
        manifest = {"layers": [{"size": size, "mediaType": kind + ("" if self.compressed is None else "+zstd")}
                               for size in sizes]}
        history = [{"created_by": f"RUN step {number}"} for number, _ in enumerate(sizes)]
        config = {"history": [*history, {"created_by": "ENTRYPOINT", "empty_layer": True}]}
        files = {"blobs/sha256/1": b"not json", "blobs/sha256/2": json.dumps(manifest).encode(),
                 "blobs/sha256/3": json.dumps(config).encode(), "index.json": b"[]"}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        yield buffer.getvalue()


class Warnings(Watcher):
    def __init__(self) -> None:
        self.seen: list[Problem] = []

    def warn(self, problem: Problem) -> None:
        self.seen.append(problem)


class NoNetwork(Exception):
    pass


class Offline(Publisher):
    def registry(self, host: str) -> Registry:
        raise NoNetwork(host)


def with_client(client: Client) -> Engine:
    engine = Engine()
    engine._client = cast("docker.APIClient", client)
    return engine


def plan(client: Client, target: str = "ghcr.io/team/a:1", rate: float = 0.0) -> list[Problem]:
    """Plan a push; the warnings, once planning gets as far as the network."""
    watcher = Warnings()
    local = {"Id": DIGEST, "RepoDigests": [], "RootFS": {"Layers": [DIGEST] * client.layers}}
    client.inspect_image = lambda name: local  # type: ignore[attr-defined]
    with pytest.raises(NoNetwork):
        Offline(with_client(client), watcher=watcher).plan([Job("a:1", parse(target))], rate=rate)
    return watcher.seen


def test_a_layer_over_the_limit_is_refused_before_the_network_is_asked() -> None:
    engine = Client([3 * GB, 15 * GB], [2 * GB, 11 * GB])
    with pytest.raises(AuthError, match=r"layer 2 of 2 \(RUN step 1\)"):
        plan(engine)


def test_what_counts_is_the_size_that_travels() -> None:
    engine = Client([3 * GB, 15 * GB], [1 * GB, 6 * GB])
    assert plan(engine) == []
    assert engine.exports == 1


def test_small_layers_are_not_exported_to_be_measured() -> None:
    engine = Client([3 * GB] * 14, None)
    assert plan(engine) == []
    assert engine.exports == 0


def test_a_store_that_has_the_image_packed_only_is_measured_by_its_export() -> None:
    """The containerd store has no history of an image whose snapshots are gone (`snapshot ... does not exist`)."""
    class Packed(Client):
        def history(self, image: str) -> list[dict[str, Any]]:
            raise docker.errors.NotFound("snapshot sha256:ab does not exist: not found")

    with pytest.raises(AuthError, match=r"layer 2 of 2 \(RUN step 1\)"):
        plan(Packed([3 * GB, 15 * GB], [2 * GB, 11 * GB]))
    assert plan(Packed([1], [1]), "registry.example/a:1") == []


def test_a_store_that_cannot_tell_gets_a_warning() -> None:
    assert "15.00 GB unpacked" in str(plan(Client([15 * GB], None))[0])


def test_a_registry_without_a_known_limit_is_not_measured() -> None:
    engine = Client([15 * GB], [15 * GB])
    assert plan(engine, "registry.example/a:1") == []
    assert engine.exports == 0


@pytest.mark.parametrize("target", ["registry.example/a:1", "ghcr.io/team/a:1"])
def test_too_many_layers_are_refused_for_every_registry(target: str) -> None:
    engine = Client([1] * 120, [1] * 120)
    engine.layers = 128  # the history does not tell empty layers from settings
    with pytest.raises(AuthError) as caught:
        plan(engine, target)
    (problem,) = caught.value.problems
    assert (problem.what, problem.found, problem.expected) == ("the image has too many layers", "128", "at most 127")
    engine.layers = 127
    assert plan(engine, target) == []


def test_a_slow_line_is_warned_of() -> None:
    assert "700 s at 10.0 MB/s" in str(plan(Client([7 * GB], [7 * GB]), rate=10e6)[0])


def test_one_tag_is_wanted_once() -> None:
    job = Job("a:1", parse("ghcr.io/a:1"), moving=("1",))
    with pytest.raises(UsageError, match="want the same tag"):
        Offline(with_client(Client([], None))).plan([job])


# ---------------------------------------------------------------------- the command


def test_one_job_per_image_and_target() -> None:
    jobs = jobs_for(("a:1", "x.io/team/b:2"), [parse_target("ghcr.io/t"), parse_target("y.io")], ("v1",), ("latest",))
    assert [str(job.target) for job in jobs] == ["ghcr.io/t/a:1", "y.io/a:1", "ghcr.io/t/b:2", "y.io/b:2"]
    assert jobs[0].aliases == ("v1",)
    assert jobs[0].moving == ("latest",)
    assert [str(job.target) for job in jobs_for(("ghcr.io/a:1",), [])] == ["ghcr.io/a:1"]


def test_images_of_a_stack_go_under_their_key_and_their_version_moves() -> None:
    jobs = jobs_of([("a:1-cpu", "a:key-12")], [parse_target("ghcr.io/t"), parse_target("y.io")], moving=("latest",))
    assert [str(claim) for claim in jobs[0].claims] == ["ghcr.io/t/a:key-12", "ghcr.io/t/a:1-cpu", "ghcr.io/t/a:latest"]
    assert [job.source for job in jobs] == ["a:key-12", "a:key-12"]
    with pytest.raises(UsageError, match="--to"):
        jobs_of([("a:1-cpu", "a:key-12")], [])


def test_nothing_to_push_is_said() -> None:
    with pytest.raises(UsageError, match="nothing to push"):
        jobs_for((), [parse_target("ghcr.io")])


def test_all_wrong_references_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        jobs_for(("a:1", "ghcr.io/b", f"ghcr.io/c@{DIGEST}"), [])
    assert [problem.where for problem in caught.value.problems] == ["a:1", "ghcr.io/b", f"ghcr.io/c@{DIGEST}"]


@pytest.mark.parametrize("live", [False, True])
def test_what_happens_is_said_on_stderr(live: bool, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker(live)
    speaker.note("a note")
    speaker.warn(Problem("something"))
    speaker.retry("ghcr.io", Retry(2, 6, 1.5, Fault(Kind.TRANSIENT, "502 Bad Gateway")))
    for sent in (1, 2):
        speaker.progress("ghcr.io/a:1", Progress(sent * 1_000_000, 4_000_000))
    target = parse("ghcr.io/a:1")
    speaker.done(Result("upload", target, "a:1", DIGEST, Progress(pushed=2, present=1), seconds=3.2))
    speaker.done(Result("keep", target, "a:1", DIGEST))
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "attempt 2 of 6 failed: 502 Bad Gateway; next in 1.5 s" in seen.err
    assert "warning: something" in seen.err
    assert "pushed in 3.2 s; layers: 2 sent, 1 there before, 0 mounted" in seen.err
    assert "already there" in seen.err
    assert ("1 of 4 MB" in seen.err) is live
    assert "2 of 4 MB" not in seen.err, "not more often than a person can read"
