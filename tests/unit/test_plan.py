"""Plans: what is new, same or changed, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import plan
from buildctl.compose import compose
from tests.unit.projects import ready
from tests.unit.test_compose import NO_HOST, again


def test_a_plan_says_what_changed_and_why(tmp_path: Path) -> None:
    project, loaded, lock = ready(tmp_path)
    composition = compose(project, loaded, lock, NO_HOST)
    first = plan.make(composition, (), {})
    assert [change.state for change in first.changes] == ["new", "new", "new"]
    assert first.disk > plan.DISK_FLOOR

    record = tmp_path / "record.json"
    plan.write_record(record, composition.images)
    same = plan.make(composition, (), plan.read_record(record))
    assert same.todo == ()
    assert same.disk == 0

    path = project.patches / "sglang" / "0.5" / "0001-change.patch"
    path.write_text(path.read_text().replace('"changed"', '"changed twice"'))
    changed = plan.make(again(tmp_path), (), plan.read_record(record))
    assert [(change.image.name, change.state, change.chain) for change in changed.changes] == [
        ("cuda", "same", False), ("torch", "same", False), ("sglang", "changed", True)]
    assert changed.changes[2].reasons[0] == "layers/sglang/patches"

    (project.entrypoints / "__init__.py").write_text("")
    entry = plan.make(again(tmp_path), ["torch"], plan.read_record(record))
    assert [(change.state, change.chain, change.reasons) for change in entry.changes] == [
        ("changed", False, ("stage entrypoint",))]
    assert entry.disk == plan.DISK_FLOOR
    # an image brings what lies below it: four wheels of 1,000 bytes
    assert plan.make(composition, ["sglang"], {}).disk == plan.DISK_FLOOR + 6 * 4000
    assert plan.make(composition, ["torch"], {}).disk == plan.DISK_FLOOR + 6 * 2000


@pytest.mark.parametrize(("resumed", "built", "pulled"), [
    ((), 4000, 0), (("torch",), 2000, 2000), (("sglang-unpatched", "tools"), 2000, 2000), (("sglang",), 0, 4000),
    (("cuda-system",), 4000, 0)])
def test_what_comes_from_a_registry_takes_less_disk(tmp_path: Path, resumed: tuple[str, ...], built: int,
                                                    pulled: int) -> None:
    composition = compose(*ready(tmp_path), NO_HOST)
    wanted = int(plan.DISK_FLOOR + plan.DISK_FACTOR * built + plan.PULLED_FACTOR * pulled)
    assert plan.disk(composition, ["sglang"], (), resumed) == wanted
    torch = [image.chain.value for image in composition.images if image.name == "torch"]
    assert plan.disk(composition, ["torch"], torch, resumed) == plan.DISK_FLOOR


def test_a_plan_as_json(tmp_path: Path) -> None:
    project, loaded, lock = ready(tmp_path)
    data = plan.make(compose(project, loaded, lock, NO_HOST), ("torch",), {}).as_dict()
    assert data["images"][0]["wheels"] == 2
    assert data["images"][0]["wheel_bytes"] == 2000
    assert data["images"][0]["largest"][0] == {"name": "needed", "version": "1.0", "bytes": 1000}
    assert data["targets"] == ["cpu"]


def test_an_unreadable_record_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert plan.read_record(path) == {}
    path.write_text("[1]")
    assert plan.read_record(path) == {}
    path.write_text("{")
    assert plan.read_record(path) == {}
