"""Builds against an engine of known answers: what is skipped, what is refused, what is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import base, building, plan
from buildctl.building import Request
from buildctl.compose import Composition, compose
from buildctl.engine import Baked, Builder, Collision, Engine, Facts, LocalImage
from buildctl.errors import AuditError, BuildError, EngineError, Interrupted, Problem, ResourceError, UsageError
from buildctl.host import Host
from buildctl.progress import BuildRecord
from buildctl.project import Project
from buildctl.reference import Target
from tests.unit.projects import ready
from tests.unit.test_compose import NO_HOST


class KnownEngine(Engine):
    """Answers from a table; a bake puts into the table what it is told to make."""

    def __init__(self, *, makes: bool = True, free: int | None = None, store: bool = True) -> None:
        super().__init__()
        self.there: dict[str, LocalImage] = {}
        self.baked: list[dict[str, Any]] = []
        self.makes, self.free, self.store = makes, free, store
        self.composition: Composition | None = None
        self.key = ""
        self.more: dict[str, str] = {}
        self.untagged: list[str] = []
        self.fails: BaseException | None = None

    def untag(self, reference: str) -> None:
        self.untagged.append(reference)
        if self.fails is not None:
            raise EngineError(Problem("gone"))

    def facts(self) -> Facts:
        return Facts("26.1", self.store, "/var/lib/docker", self.free)

    def image(self, reference: str) -> LocalImage | None:
        return self.there.get(reference)

    def images(self, label: str) -> list[LocalImage]:
        return [image for image in self.there.values() if label in image.labels]

    def bake(self, folder: Path, targets: Sequence[str], log: Path, **rest: Any) -> Baked:
        self.baked.append({"folder": folder, "targets": list(targets), "log": log, **rest})
        assert (folder / "Dockerfile").is_file()
        if self.fails is not None:
            raise self.fails
        digests = dict(self.more)
        for image in self.composition.images if self.composition and self.makes else ():
            if image.stage not in targets:
                continue
            digests[image.stage] = f"sha256:{image.name}"
            labels: Mapping[str, str] = {**image.labels, "buildctl.key": self.key or image.key.value}
            for tag in image.tags:
                self.there[tag] = LocalImage("sha256:id", f"sha256:{image.name}", labels, 100, image.tags)
        return Baked(BuildRecord((), 3, 2, 1.0), digests)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Project, Composition, KnownEngine]:
    project, loaded, lock = ready(tmp_path)
    composition = compose(project, loaded, lock, NO_HOST)
    tar = tmp_path / "base.tar"
    tar.write_text("base")
    monkeypatch.setattr(base, "ensure", lambda *_: tar)
    engine = KnownEngine()
    engine.composition = composition
    return project, composition, engine


def build(parts: tuple[Project, Composition, KnownEngine], request: Request | None = None,
          host: Host = NO_HOST) -> building.Outcome:
    project, composition, engine = parts
    return building.build(project, composition, host, engine, request or Request(), project.root, lambda _: None)


def test_a_build_is_proved_recorded_and_not_repeated(parts: tuple[Project, Composition, KnownEngine]) -> None:
    project, composition, engine = parts
    first = build(parts)
    assert [(built.image.name, built.state, built.digest) for built in first.images] == [
        ("cuda", "built", "sha256:cuda"), ("torch", "built", "sha256:torch"), ("sglang", "built", "sha256:sglang")]
    assert (project.work / "small" / "context" / "base" / "base.tar").read_text() == "base"
    assert first.as_dict()["images"][0]["state"] == "built"
    record = plan.read_record(project.work / "small" / "record.json")
    assert plan.make(composition, (), record).todo == ()

    second = build(parts)
    assert [built.state for built in second.images] == ["present", "present", "present"]
    assert second.baked is None
    assert second.as_dict()["build"] is None
    assert len(engine.baked) == 1

    third = build(parts, Request(no_cache=True))
    assert third.baked is not None
    assert engine.baked[1]["no_cache"] is True


def test_only_what_is_asked_for_and_missing_is_built(parts: tuple[Project, Composition, KnownEngine]) -> None:
    _, composition, engine = parts
    build(parts, Request(("torch",)))
    assert engine.baked[0]["targets"] == ["torch-image"]
    build(parts)
    assert engine.baked[1]["targets"] == ["cuda-image", "sglang-image"]
    del engine.there[composition.image("cuda").tags[1]]
    build(parts)
    assert engine.baked[2]["targets"] == ["cuda-image"]


def test_the_index_reaches_the_build_as_a_secret(parts: tuple[Project, Composition, KnownEngine]) -> None:
    build(parts, host=Host(None, "https://u:p@index.example", None, ()))
    assert "u:p@" in parts[2].baked[0]["environment"]["BUILDCTL_INDEX_CONFIG"]
    assert "u:p@" not in (parts[2].baked[0]["folder"] / "docker-bake.json").read_text()


@pytest.mark.parametrize(("store", "builder", "settings"), [
    (True, None, []), (False, None, ["*.output=type=docker"]), (True, "remote", ["*.output=type=docker"]),
    (True, "default", [])])
def test_the_output_fits_the_image_store(parts: tuple[Project, Composition, KnownEngine], store: bool,
                                         builder: str | None, settings: list[str]) -> None:
    parts[2].store = store
    driver = "docker" if builder == "default" else "remote"
    build(parts, Request(builder=Builder(builder, driver, ()) if builder else None))
    assert parts[2].baked[0]["settings"] == settings


def test_a_build_that_ends_well_without_an_image_is_a_failure(parts: tuple[Project, Composition, KnownEngine]) -> None:
    parts[2].makes = False
    with pytest.raises(AuditError, match="the image is not there") as error:
        build(parts)
    assert error.value.exit_code == 7
    assert len(error.value.problems) == 6


def test_an_image_with_another_key_is_a_failure(parts: tuple[Project, Composition, KnownEngine]) -> None:
    parts[2].key = "somebody else's"
    with pytest.raises(AuditError, match="not the one that was planned"):
        build(parts)


def test_another_run_may_have_built_the_same_key_at_the_same_time(
        parts: tuple[Project, Composition, KnownEngine]) -> None:
    """Two jobs on one engine: the tag has the other one's digest, and the content that was planned."""
    _, composition, engine = parts
    build(parts)
    (image, *_) = composition.images
    for tag in image.tags:
        engine.there[tag] = replace(engine.there[tag], digest="sha256:other")
    assert building.prove(engine, [image])[image.name].digest == "sha256:other"


def test_a_full_disk_is_found_before_anything_is_written(parts: tuple[Project, Composition, KnownEngine],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    parts[2].free = 1000
    with pytest.raises(ResourceError, match=r"found:    0\.0 GB free") as error:
        build(parts)
    assert error.value.exit_code == 8
    assert not (parts[0].work / "small" / "context").exists()
    monkeypatch.setenv(building.FREE_DISK, "100000000000")
    assert build(parts).baked is not None


def test_a_folder_with_something_else_in_it_is_left_alone(parts: tuple[Project, Composition, KnownEngine]) -> None:
    folder = parts[0].work / "small" / "context"
    folder.mkdir(parents=True)
    (folder / "precious").write_text("keep")
    with pytest.raises(UsageError, match="something else than a rendering"):
        build(parts)
    assert (folder / "precious").read_text() == "keep"


FAR = Builder("far", "remote", ("tcp://b:1",))
HOME = Target("registry.example", "team")


class NoEngine(KnownEngine):
    """Nobody may ask the engine for anything."""

    def facts(self) -> Facts:
        raise AssertionError

    def image(self, reference: str) -> LocalImage | None:
        raise AssertionError

    def images(self, label: str) -> list[LocalImage]:
        raise AssertionError


def test_a_builder_that_pushes_by_itself_needs_no_engine(parts: tuple[Project, Composition, KnownEngine]) -> None:
    project, composition, _ = parts
    engine = NoEngine()
    engine.composition = composition
    chain = {stage.target: f"sha256:{stage.stage}" for stage in composition.chain}
    engine.more = chain
    outcome = build((project, composition, engine),
                    Request(("sglang",), builder=FAR, straight_to=HOME, plain_http=True, chain=True))
    assert [(built.state, built.digest, built.size) for built in outcome.images] == [("pushed", "sha256:sglang", 0)]
    assert outcome.straight_to == HOME
    settings = engine.baked[0]["settings"]
    assert "sglang-image.tags=registry.example/team/sglang" in settings
    assert ("chain-cuda-system.output=type=image,push=true,push-by-digest=true,store=false,oci-mediatypes=true,"
            "compression=zstd,registry.insecure=true") in settings
    assert len(settings) == 2 * len(engine.baked[0]["targets"])
    engine.more = {}
    with pytest.raises(AuditError, match="names no digest") as error:
        build((project, composition, engine), Request(("sglang",), builder=FAR, straight_to=HOME, chain=True))
    assert len(error.value.problems) == len(composition.chain)


def test_stages_have_names_of_their_run_in_the_engine(parts: tuple[Project, Composition, KnownEngine]) -> None:
    """Two jobs on one engine publish the same stages; each takes away its own names only."""
    outcome = build(parts, Request(chain=True))
    assert set(outcome.names) == {stage.tag for stage in outcome.chain}
    assert all(name.startswith(f"{tag}-") for tag, name in outcome.names.items())
    assert parts[2].baked[0]["settings"] == [
        f"{stage.target}.tags={outcome.names[stage.tag]}" for stage in outcome.chain]
    again = build(parts, Request(chain=True, no_cache=True))
    assert not set(again.names.values()) & set(outcome.names.values())


@pytest.mark.parametrize("fails", [BuildError(Problem("a step failed")), Interrupted(Problem("interrupted")),
                                   KeyboardInterrupt()], ids=["a step", "an interrupt", "an interrupt of ours"])
def test_a_build_that_fails_takes_its_names_of_stages_away(parts: tuple[Project, Composition, KnownEngine],
                                                           fails: BaseException) -> None:
    """Even one whose engine is gone ends with what went wrong first."""
    engine = parts[2]
    engine.fails = fails
    with pytest.raises(type(fails)):
        build(parts, Request(chain=True))
    assert len(engine.untagged) == len(parts[1].chain)
    assert engine.untagged == [setting.partition("=")[2] for setting in engine.baked[0]["settings"]]


def test_a_build_that_is_not_proved_takes_its_names_of_stages_away(
        parts: tuple[Project, Composition, KnownEngine]) -> None:
    parts[2].makes = False
    with pytest.raises(AuditError):
        build(parts, Request(chain=True))
    assert len(parts[2].untagged) == len(parts[1].chain)
    parts[2].makes, parts[2].untagged = True, []
    outcome = build(parts, Request(chain=True))
    assert parts[2].untagged == [], "they are to be published"
    building.release(parts[2], outcome.names.values())
    assert parts[2].untagged == list(outcome.names.values())


def test_the_disk_is_checked_where_the_build_runs(parts: tuple[Project, Composition, KnownEngine],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder's disk cannot be seen: that is said. The engine's, where the images go, can."""
    project, composition, engine = parts
    said: list[str] = []

    def attempt(request: Request) -> None:
        building.build(project, composition, NO_HOST, engine, request, project.root, said.append)

    engine.free = 10**12
    attempt(Request(builder=FAR))
    assert said == ["disk: builder far: cannot be seen from here; about 1.5 GB should be free "
                    "(BUILDCTL_FREE_DISK=BYTES states it)"]
    engine.free = 1000
    monkeypatch.setenv(building.FREE_DISK, "2000")
    # the record of the last build says nothing of another builder
    with pytest.raises(ResourceError) as error:
        attempt(Request(builder=FAR, no_cache=True))
    assert [problem.where for problem in error.value.problems] == ["builder far (BUILDCTL_FREE_DISK)",
                                                                  "/var/lib/docker"]


def test_the_disk_is_that_for_what_this_engine_lacks(parts: tuple[Project, Composition, KnownEngine]) -> None:
    """After `docker system prune -a`, or with another engine, the record of the last build says nothing."""
    project, composition, engine = parts
    layer = {"cuda": 0, "torch": 2 * 10**9, "sglang": 2 * 10**9}  # bytes of wheels

    def needed(*images: str) -> int:
        """The disk that a build asks for, by a disk that is too small."""
        engine.free = 0
        with pytest.raises(ResourceError) as error:
            build((project, composition, engine), Request(images))
        engine.free = None
        return round(float(error.value.problems[0].expected.split()[1]) * 1e9)

    def gigabytes(*layers: str) -> int:
        return round((plan.DISK_FLOOR + plan.DISK_FACTOR * sum(layer[name] for name in layers)) / 1e8) * 10**8

    wheels = tuple(replace(wheel, size=10**9) for wheel in composition.lock.wheels)
    composition = replace(composition, images=tuple(
        replace(image, wheels=tuple(one for one in wheels if one.layer == image.name)) for image in composition.images))
    engine.composition = composition
    whole = gigabytes("cuda", "torch", "sglang")
    assert needed() == whole
    # an image brings what lies below it
    assert (needed("sglang"), needed("torch"), needed("cuda")) == (whole, gigabytes("torch"), gigabytes("cuda"))
    build((project, composition, engine))
    engine.there = {tag: image for tag, image in engine.there.items() if not tag.startswith("cuda")}
    assert needed() == plan.DISK_FLOOR  # its layers are below those that are there
    engine.there = {tag: image for tag, image in engine.there.items() if tag.startswith("torch")}
    assert needed("sglang") == gigabytes("sglang")
    # pulled, or built from another checkout: no cache that is known of
    (project.work / "small" / "record.json").unlink()
    assert needed("sglang") == whole
    build((project, composition, engine))
    engine.there.clear()
    assert needed() == whole


def test_a_build_that_another_one_got_in_the_way_of_is_done_again(
        parts: tuple[Project, Composition, KnownEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = parts[2], KnownEngine.bake
    asked: list[bool] = []

    def bake(self: KnownEngine, folder: Path, targets: Sequence[str], log: Path, **rest: Any) -> Baked:
        asked.append(rest["no_cache"])
        if len(asked) < collisions:
            raise Collision(Problem('image "cuda:1": already exists'))
        return real(self, folder, targets, log, **rest)

    monkeypatch.setattr(KnownEngine, "bake", bake)
    collisions = 3
    assert build(parts, Request(no_cache=True)).baked is not None
    assert (asked, len(engine.baked)) == ([True, False, False], 1)
    collisions = 100
    with pytest.raises(Collision):
        build(parts, Request(no_cache=True))
