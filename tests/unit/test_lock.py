"""Locks: written, read, refused, partitioned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import lock as locks
from buildctl import stack
from buildctl.errors import ManifestError
from buildctl.lock import LockedBase, Overlap, Unlocked, partition
from tests.unit.projects import STACK, make, ready, wheel


def test_a_lock_reads_as_it_was_written(tmp_path: Path) -> None:
    project, loaded, lock = ready(tmp_path)
    lock = replace(lock, wheels=(*lock.wheels, wheel("unread", requires=None, size=None)),
                   unlocked=(Unlocked("x", "x==1", "torch", "special"),), overlaps=(Overlap("a", "b", 2, ("p", "q")),),
                   base=LockedBase("registry", image="debian", digest="sha256:12"))
    locks.path_of(loaded).write_text(locks.dump(lock))
    read = locks.load(loaded, project)
    assert set(read.wheels) == set(lock.wheels)
    assert replace(read, wheels=()) == replace(lock, wheels=())
    assert locks.dump(read) == locks.dump(lock)


def test_what_a_lock_does_not_say_is_not_in_the_file(tmp_path: Path) -> None:
    project, loaded, _ = ready(tmp_path)
    data = json.loads(locks.path_of(loaded).read_text())
    assert "unlocked" not in data
    assert "overlaps" not in data
    assert "time" not in locks.path_of(loaded).read_text()
    assert project.shown(locks.path_of(loaded)) == "images/stacks/small.lock"


@pytest.mark.parametrize(("section", "old", "new"), [
    ("requirements", "sglang: [sglang==0.5]", "sglang: [sglang==0.6]"),
    ("requirements", "prerelease: []", "prerelease: [x]"),
    ("base", "suite: bookworm", "suite: trixie"),
    ("base", "{suite: bookworm}", "{suite: bookworm, snapshot: 20261201T000000Z}"),
    ("profile", "mem-fraction-static: 0.5", "mem-fraction-static: 0.6"),
])
def test_a_stale_lock_says_which_part_moved_on(tmp_path: Path, section: str, old: str, new: str) -> None:
    text = STACK.replace("local:", "prerelease: []\nlocal:")
    project, loaded, _ = ready(tmp_path, text)
    loaded.path.write_text(text.replace(old, new))
    with pytest.raises(ManifestError) as caught:
        locks.load(stack.load(project, "small"), project)
    (problem,) = caught.value.problems
    assert (problem.what, problem.found) == ("the lock of 'small' is stale", f"changed since: {section}")
    assert "buildctl lock small" in problem.todo


@pytest.mark.parametrize(("path", "section"), [
    ("patches/sglang/0.5/0001-change.patch", "patches"), ("images/sglang/packages/ours/pyproject.toml", "local"),
    ("images/runtime/image.yaml", "entrypoint"), ("images/tools/image.yaml", "tools")])
def test_files_beside_the_stack_count(tmp_path: Path, path: str, section: str) -> None:
    project, loaded, lock = ready(tmp_path)
    file = tmp_path / path
    file.write_text(file.read_text().replace("[h11]", "[h12]").replace("[uv]", "[uw]") + "\n# more\n")
    assert locks.stale_sections(lock, stack.load(project, "small"), project) == [section]
    hint = "no resolver" if section == "patches" else "buildctl lock"
    with pytest.raises(ManifestError, match=hint):
        locks.load(stack.load(project, "small"), project)
    assert loaded.name == "small"


def test_caches_are_no_sources(tmp_path: Path) -> None:
    project, loaded, lock = ready(tmp_path)
    cache = project.images / "sglang" / "packages" / "ours" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"x")
    assert locks.stale_sections(lock, loaded, project) == []
    assert not locks.counts(Path("a/b.egg-info/PKG-INFO"))


def test_a_missing_lock(tmp_path: Path) -> None:
    project = make(tmp_path)
    with pytest.raises(ManifestError, match="stack 'small' has no lock") as caught:
        locks.load(stack.load(project, "small"), project)
    assert caught.value.exit_code == 3


def edited(text: str, **changes: object) -> str:
    data = json.loads(text)
    data.pop("sha256")
    data.update(changes)
    return json.dumps({**data, "sha256": locks.digest(data)})


@pytest.mark.parametrize(("change", "what"), [
    (lambda text: text.replace('"2.0+cpu"', '"2.1+cpu"'), "changed by hand or damaged"),
    (lambda text: text[:-20], "not valid JSON"),
    (lambda text: "[]", "a form that this buildctl does not know"),
    (lambda text: text.replace('"schema": 1', '"schema": 99'), "a form that this buildctl does not know"),
    (lambda text: edited(text, wheels=[{"name": "x"}]), "lacks a part"),
    (lambda text: edited(text, patches={"sglang": {}}), "lacks a part"),
    (lambda text: edited(text, overlaps=[{"first": "a"}]), "lacks a part"),
])
def test_broken_locks_are_refused(tmp_path: Path, change: object, what: str) -> None:
    project, loaded, _ = ready(tmp_path)
    path = locks.path_of(loaded)
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(ManifestError, match=what) as caught:
        locks.read(path, project)
    assert "buildctl lock small" in caught.value.problems[0].todo
    assert caught.value.problems[0].where.startswith("images/stacks/small.lock")


def test_a_lock_that_cannot_be_read(tmp_path: Path) -> None:
    project, loaded, _ = ready(tmp_path)
    locks.path_of(loaded).write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="cannot read the lock"):
        locks.read(locks.path_of(loaded), project)


def test_versions_and_wheels(tmp_path: Path) -> None:
    _, loaded, lock = ready(tmp_path)
    lock = replace(lock, unlocked=(Unlocked("sgl-kernel", "sgl-kernel==0.3.21+cu130", "sglang", "special"),
                                   Unlocked("open", "open>=1", "sglang", "special"),
                                   Unlocked("any", "any==1.*", "sglang", "special")))
    assert (lock.version("Torch"), lock.version("none")) == ("2.0+cpu", None)
    assert (lock.version("sgl_kernel"), lock.version("open"), lock.version("any")) == ("0.3.21+cu130", None, None)
    found = lock.wheel("sglang")
    assert found is not None
    assert found.layer == "sglang"
    assert lock.wheel("sgl-kernel") is None
    assert [wheel.name for wheel in lock.share("torch")] == ["torch", "needed"]
    assert loaded.layer("torch").name == "torch"


def test_open_ends(tmp_path: Path) -> None:
    _, _, lock = ready(tmp_path)
    assert lock.open_ends == ()
    lock = replace(lock, base=LockedBase("registry", image="nvidia/cuda:13.0.1-devel-ubuntu24.04"),
                   unlocked=(Unlocked("x", "x==1", "torch", "special"),))
    assert lock.open_ends == ("base nvidia/cuda:13.0.1-devel-ubuntu24.04", "x==1 of index 'special'")


def test_the_part_of_a_lower_chain(tmp_path: Path) -> None:
    _, loaded, lock = ready(tmp_path)
    lock = replace(lock, unlocked=(Unlocked("x", "x==1", "sglang", "special"),),
                   overlaps=(Overlap("torch", "helper", 1, ("p",)), Overlap("torch", "needed", 1, ("p",))))
    part = locks.restrict(lock, loaded.layers[:2])
    assert [wheel.name for wheel in part.wheels] == ["torch", "needed"]
    assert (part.patches, part.unlocked, part.inputs) == ({}, (), {})
    assert [pair.second for pair in part.overlaps] == ["needed"]
    assert locks.restrict(lock, loaded.layers).patches == lock.patches


def test_partition_gives_each_package_to_the_first_layer_that_needs_it() -> None:
    via = {"torch": frozenset({".", "flashinfer"}), "numpy": frozenset({"torch", "sglang"}),
           "flashinfer": frozenset({".", "sglang"}), "sglang": frozenset({"."}), "orphan": frozenset[str](),
           "loop": frozenset({"numpy", "loop"})}
    layers: dict[str, tuple[str, ...]] = {"cuda": (), "torch": ("Torch[x]==2",), "flashinfer": ("flashinfer",),
                                          "sglang": ("sglang", "absent")}
    assert partition(layers, via) == {"torch": "torch", "numpy": "torch", "loop": "torch", "flashinfer": "flashinfer",
                                      "sglang": "sglang", "orphan": "sglang"}
