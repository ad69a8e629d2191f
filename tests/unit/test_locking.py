"""Making locks: real uv, real indexes on this machine, made-up wheels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from buildctl import base as bases
from buildctl import compose, debian, locking, stack
from buildctl import lock as locks
from buildctl.errors import CompatibilityError, ManifestError, NetworkError, PatchError, Problem, UsageError
from buildctl.host import Host
from buildctl.lock import Lock, LockedBase
from buildctl.locking import Wish
from buildctl.project import Project
from buildctl.registry import Registry
from tests.unit import archive
from tests.unit.index import Index
from tests.unit.projects import STACK, make
from tests.unit.test_debian import needs_apt

SOURCE = "one = 1\ntwo = 2\nthree = 3\n"
PARSER = "def add_cli_args(parser):\n" + "".join(
    f"    parser.add_argument('--{name}', type={kind})\n" for name, kind in
    [("mem-fraction-static", "float"), ("max-running-requests", "int"), ("speculative-algorithm", "str"),
     ("speculative-num-steps", "int"), ("speculative-eagle-topk", "int"), ("speculative-num-draft-tokens", "int"),
     *((f"filler-{number}", "str") for number in range(100))]) + \
    "    parser.add_argument('--enable-metrics', action='store_true')\n"
SERVER = {"sglang/a.py": SOURCE, "sglang/srt/server_args.py": PARSER}


class World:
    """A project, the public index, a special one, and a wheelhouse with SGLang's source."""

    def __init__(self, root: Path, public: Index, special: Index, text: str = STACK) -> None:
        self.public, self.special, self.cache = public, special, root / "cache"
        self.house = root / "house"
        public.add("sglang", "0.5", ["torch==2.0", "lib>=1"], files=SERVER)
        public.add("lib", "1.0")
        public.add("torch", "2.0")
        special.add("torch", "2.0+cu130", ["lib"], files={"torch/lib.so": "one"})
        for name, version in (("h11", "0.16"), ("uv", "0.9")):
            public.add(name, version)
        public.write(self.house, "sglang-0.5-py3-none-any.whl")
        self.project: Project = make(root / "project", text.replace("https://index.example/simple", special.url))

    @property
    def host(self) -> Host:
        return self.public.host(self.house)

    @property
    def stack(self) -> stack.Stack:
        return stack.load(self.project, "small")

    def edit(self, old: str, new: str) -> None:
        """Change the stack file."""
        path = self.project.stacks / "small.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def make(self, wish: Wish | None = None, base: str = "bootstrap") -> locking.Made:
        return locking.make(self.stack, self.project, self.host, self.cache, wish=wish, base=base)

    def write(self, wish: Wish | None = None, base: str = "bootstrap") -> Lock:
        made = self.make(wish, base)
        locking.write(made, locks.path_of(self.stack))
        return made.lock

    @property
    def bytes(self) -> bytes:
        return locks.path_of(self.stack).read_bytes()


@pytest.fixture(autouse=True)
def no_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks this machine's mirror."""
    monkeypatch.setattr(debian, "available", lambda: False)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with Index() as public, Index() as special:
        yield World(tmp_path, public, special)


def test_a_lock_from_nothing(world: World) -> None:
    made = world.make()
    lock = made.lock
    assert set(made.sections) == {"requirements", "entrypoint", "tools", "profile", "base", "patches", "local"}
    assert {wheel.name: (wheel.version, wheel.index, wheel.layer) for wheel in lock.wheels} == {
        "torch": ("2.0+cu130", "special", "torch"), "lib": ("1.0", "public", "torch"),
        "sglang": ("0.5", "public", "sglang")}
    requires = {wheel.name: wheel.requires for wheel in lock.wheels}
    assert requires == {"torch": (), "lib": (), "sglang": ("lib>=1", "torch==2.0")}
    assert [wheel.name for wheel in (*lock.entrypoint, *lock.tools)] == ["h11", "uv"]
    assert lock.patches["sglang"].tree
    assert lock.base == LockedBase("bootstrap", suite="bookworm")
    assert (lock.unlocked, lock.overlaps, lock.epoch > 0) == ((), (), True)


def test_the_same_inputs_give_the_same_bytes_and_ask_nobody(world: World) -> None:
    world.write()
    first = world.bytes
    world.public.log.clear()
    world.public.add("lib", "2.0")
    made = world.make()
    locking.write(made, locks.path_of(world.stack))
    assert (made.sections, world.bytes, world.public.log) == ((), first, [])
    locks.path_of(world.stack).unlink()
    world.write()
    assert world.bytes != first
    assert not list(world.project.stacks.glob("*.tmp"))


def test_only_what_changed_moves(world: World) -> None:
    world.write()
    world.public.add("lib", "2.0")
    world.public.add("h11", "0.17")
    world.public.add("extra", "1.0")
    world.edit("sglang: [sglang==0.5]", "sglang: [sglang==0.5, extra]")
    made = world.make()
    assert made.sections == ("requirements",)
    assert made.lock.version("lib") == "1.0"
    assert made.lock.version("extra") == "1.0"
    assert made.lock.entrypoint[0].version == "0.16"


def test_upgrade_of_one_package_and_of_all(world: World) -> None:
    world.write()
    for name in ("lib", "h11"):
        world.public.add(name, "9.0")
    assert world.make(Wish(upgrade=("lib",))).lock.version("lib") == "9.0"
    one = world.make(Wish(upgrade=("lib",)))
    assert (one.sections, one.lock.entrypoint[0].version) == (("requirements",), "0.16")
    everything = world.make(Wish(upgrade_all=True)).lock
    assert (everything.version("lib"), everything.entrypoint[0].version) == ("9.0", "9.0")
    with pytest.raises(UsageError, match="no package 'libb' to upgrade") as caught:
        world.make(Wish(upgrade=("libb",)))
    assert "did you mean 'lib'?" in str(caught.value)


def test_upgrade_without_a_lock(world: World) -> None:
    with pytest.raises(UsageError, match="there is no lock yet"):
        world.make(Wish(upgrade=("lib",)))


def test_exclude_newer(world: World) -> None:
    world.public.add("lib", "2.0", uploaded="2026-11-30T00:00:00Z")
    assert world.make(Wish(exclude_newer="2026-11-01T00:00:00Z")).lock.version("lib") == "1.0"
    assert world.make().lock.version("lib") == "2.0"


@pytest.mark.parametrize(("text", "expected"), [
    ("", ""), ("7d", "2026-11-24T12:00:00Z"), ("12 h", "2026-12-01T00:00:00Z"), ("2w", "2026-11-17T12:00:00Z"),
    ("2026-11-30", "2026-11-30T00:00:00Z"), ("2026-11-30T12:00:00+02:00", "2026-11-30T10:00:00Z")])
def test_ages_and_dates(text: str, expected: str) -> None:
    assert locking.moment(text, datetime(2026, 12, 1, 12, tzinfo=UTC)) == expected


def test_neither_age_nor_date() -> None:
    with pytest.raises(UsageError, match="neither an age nor a date"):
        locking.moment("yesterday")
    assert locking.moment("1h").endswith("Z")
    assert locking.names(["Under_Score"]) == ("under-score",)


# --- indexes out of reach --------------------------------------------------------------------------------------------


def test_what_comes_from_an_index_out_of_reach_is_left_unlocked(world: World) -> None:
    world.special.faults["/simple/torch/"] = 503
    lock = world.write()
    (entry,) = lock.unlocked
    assert (entry.name, entry.requirement, entry.layer, entry.index) == ("torch", "torch==2.0", "torch", "special")
    assert [wheel.name for wheel in lock.wheels] == ["lib", "sglang"]
    first = world.bytes
    world.write()
    assert world.bytes == first
    with pytest.raises(ManifestError, match="not complete") as caught:
        locking.refuse_unlocked(world.stack, world.project, lock)
    assert caught.value.exit_code == 3
    assert "torch==2.0 of index 'special'" in str(caught.value)
    assert "--allow-unlocked" in str(caught.value)
    # with access the lock becomes whole
    world.special.faults.clear()
    whole = world.write()
    assert (whole.unlocked, whole.version("torch")) == ((), "2.0+cu130")
    locking.refuse_unlocked(world.stack, world.project, whole)


def test_a_whole_lock_never_loses_what_it_has(world: World) -> None:
    world.write()
    first = world.bytes
    world.special.faults["/simple/torch/"] = 503
    world.edit("sglang: [sglang==0.5]", "sglang: [sglang==0.5, lib]")
    with pytest.raises(NetworkError) as caught:
        world.write()
    assert caught.value.exit_code == 11
    assert world.bytes == first


def test_the_public_index_is_down(world: World) -> None:
    world.public.faults["/simple/sglang/"] = 503
    world.house = world.project.root  # no wheel there to fall back to
    with pytest.raises(NetworkError):
        world.write()
    assert not locks.path_of(world.stack).exists()
    assert not list(world.project.stacks.glob("*.tmp"))


def test_requirements_that_do_not_fit_write_nothing(world: World) -> None:
    world.edit("torch: [torch==2.0]", "torch: [torch==2.0, lib<1]")
    with pytest.raises(CompatibilityError, match="do not fit together"):
        world.write()
    assert not locks.path_of(world.stack).exists()


# --- METADATA, files, profile ----------------------------------------------------------------------------------------


def test_an_override_shows_in_what_is_required(world: World) -> None:
    """torch pins an old cuDNN; the stack overrides it with a reason (user-reports K2-1)."""
    world.special.add("torch", "2.0+cu130", ["nvidia-cudnn-cu13==9.13.0.50"])
    for version in ("9.13.0.50", "9.16.0.29"):
        world.public.add("nvidia-cudnn-cu13", version)
    assert world.make().lock.version("nvidia-cudnn-cu13") == "9.13.0.50"
    world.edit("local:", "overrides: [{requirement: nvidia-cudnn-cu13==9.16.0.29, reason: Conv3d}]\nlocal:")
    lock = world.make().lock
    torch = lock.wheel("torch")
    assert torch is not None
    assert (lock.version("nvidia-cudnn-cu13"), torch.requires) == ("9.16.0.29", ("nvidia-cudnn-cu13==9.13.0.50",))


def test_two_wheels_with_one_file(world: World) -> None:
    world.public.add("lib", "1.0", files={"torch/lib.so": "another"})
    (pair,) = world.make().lock.overlaps
    assert (pair.first, pair.second, pair.paths) == ("lib", "torch", ("torch/lib.so",))
    world.write()
    assert world.make().lock.overlaps == (pair,)


def test_a_lock_without_facts_is_made_anew(world: World) -> None:
    lock = world.write()
    old = replace(lock, wheels=tuple(replace(wheel, requires=None) for wheel in lock.wheels))
    locks.path_of(world.stack).write_text(locks.dump(old))
    made = world.make()
    assert (made.sections, made.lock) == (("requirements",), lock)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("mem-fraction-static: 0.5", "mem-fraction: 0.5, mem-fraction-statics: 1", "has no flag --mem-fraction-statics"),
    ("max-running-requests: 4", "max-running-requests: many", "takes a number"),
    ("enable-metrics: true", "enable-metrics: 3", "takes no value")])
def test_the_profile_is_held_against_the_locked_server(world: World, old: str, new: str, message: str) -> None:
    world.write()
    world.edit(old, new)
    with pytest.raises(ManifestError, match="changed since: profile"):
        locks.load(world.stack, world.project)
    first = world.bytes
    with pytest.raises(CompatibilityError, match=message) as caught:
        world.write()
    assert caught.value.exit_code == 4
    assert "images/stacks/small.yaml, profile.server" in str(caught.value)
    assert world.bytes == first


def test_a_changed_profile_alone_is_no_new_resolution(world: World) -> None:
    world.write()
    world.edit("mem-fraction-static: 0.5", "mem-fraction-static: 0.6")
    assert world.make().sections == ("profile",)


def test_a_stack_without_sglang_has_no_flags_to_check(world: World) -> None:
    world.edit("sglang: [sglang==0.5]", "sglang: []")
    world.edit("patches:\n  sglang: sglang/0.5\n", "")
    assert [wheel.name for wheel in world.make().lock.wheels] == ["lib", "torch"]


# --- patches and base ------------------------------------------------------------------------------------------------


def test_a_series_needs_its_package(world: World) -> None:
    world.edit("sglang: [sglang==0.5]", "sglang: []")
    with pytest.raises(ManifestError, match="patches 'sglang' but does not install it"):
        world.make()


def test_patches_are_checked_against_the_locked_wheel(world: World) -> None:
    lock = world.write()
    found = locking.check_patches(world.stack, world.project, lock, world.host, world.cache)
    checked = found["sglang"]
    assert checked is not None
    assert checked.tree_sha256 == lock.patches["sglang"].tree
    with pytest.raises(ManifestError, match="knows no series"):
        locking.check_patches(world.stack, world.project, replace(lock, patches={}), world.host, world.cache)
    patch = world.project.patches / "sglang" / "0.5" / "0001-change.patch"
    patch.write_text(patch.read_text().replace("-two = 2", "-two = 22"))
    with pytest.raises(PatchError):
        world.make()


def test_a_base_that_no_registry_gives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> None:
        raise NetworkError(Problem("down"))

    monkeypatch.setattr(Registry, "head", nobody)
    assert world.make(base="auto").lock.base.source == "bootstrap"
    with pytest.raises(NetworkError, match=r"docker login docker\.io") as error:
        world.make(base="registry")
    assert error.value.problems[0].where == "debian:bookworm-slim"
    world.edit("\n  bootstrap: {suite: bookworm}", "")
    lock = world.write(base="auto")
    assert (lock.base, lock.open_ends) == (LockedBase("registry", image="debian:bookworm-slim"),
                                           ("base debian:bookworm-slim",))
    with pytest.raises(ManifestError, match="cannot come from a bootstrap"):
        world.make(base="bootstrap")


def test_a_base_from_a_registry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        digest = "sha256:" + "12" * 32

    asked: list[str] = []

    def head(registry: Registry, repository: str, tag: str) -> type[Found]:
        asked.append(f"{registry.base} {repository}:{tag}")
        return Found

    monkeypatch.setattr(Registry, "head", head)
    lock = world.write(base="auto")
    assert asked == ["https://registry-1.docker.io library/debian:bookworm-slim"]
    assert lock.base == LockedBase("registry", image="debian:bookworm-slim", digest=Found.digest)
    monkeypatch.setattr(Registry, "head", lambda *_: None)
    assert world.make(base="auto").lock.base == lock.base
    locks.path_of(world.stack).unlink()
    with pytest.raises(ManifestError, match="does not have the base"):
        world.make(base="registry")
    # the digest stands in the lock once, and in the Dockerfile
    for name in ("debian", "debian:bookworm-slim"):
        world.edit(world.stack.base.image or "", f"{name}@{Found.digest}")
        lock = world.write(base="registry")
        assert lock.base == LockedBase("registry", image=name, digest=Found.digest)
        text = compose.compose(world.project, world.stack, lock, world.host).dockerfile
        assert f"FROM {name}@{Found.digest} AS base\n" in text


def test_a_base_without_an_image_is_a_bootstrap(world: World) -> None:
    world.edit("  image: debian:bookworm-slim\n", "")
    assert world.make(base="auto").lock.base.source == "bootstrap"
    with pytest.raises(ManifestError, match="cannot come from a registry"):
        world.make(base="registry")


# --- Debian ----------------------------------------------------------------------------------------------------------


@needs_apt
def test_debian_packages_are_those_of_the_mirror_until_asked_again(world: World, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("UV_NO_CACHE", "1")
    mirror = tmp_path / "mirror"
    monkeypatch.setattr(bases, "sources", lambda _: [archive.write(mirror)])
    lock = world.write()
    assert {place: list(packages) for place, packages in lock.debian.items()} == {
        "base": ["apt", "dpkg", "libc6"], "cuda": ["python3", "python3-minimal"], "tools": ["tini"]}
    first = world.bytes
    # the mirror moves on: the lock does not, and it stays current
    newer = [text.replace("3.11.2", "3.11.9") for text in archive.SYSTEM]
    monkeypatch.setattr(bases, "sources", lambda _: [archive.write(mirror, newer)])
    assert (world.make().sections, world.write() and world.bytes) == ((), first)
    assert locks.load(world.stack, world.project) == lock
    made = world.make(Wish(upgrade_debian=True))
    assert made.sections == ("debian",)
    assert made.lock.debian["cuda"]["python3"].startswith("3.11.9 ")
    assert world.make(Wish(upgrade_all=True)).lock.debian == made.lock.debian
    # another base asks again; one of a registry needs no such list
    world.edit("{suite: bookworm}", "{suite: bookworm, include: [ca-certificates]}")
    assert "ca-certificates" in world.write().debian["base"]
    world.edit("\n  bootstrap: {suite: bookworm, include: [ca-certificates]}", "")
    monkeypatch.setattr(Registry, "head", lambda *_: type("Found", (), {"digest": "sha256:" + "12" * 32}))
    assert world.make(base="registry").lock.debian == {}


def test_where_there_is_no_apt_the_lock_does_without(world: World) -> None:
    lock = world.write()
    assert lock.debian == {}
    assert '"debian": {' not in locks.dump(lock).partition('"inputs"')[0]
