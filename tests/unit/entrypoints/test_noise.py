from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrypoints import analyse, models, noise, plan, prompts, records, result, run, telemetry
from entrypoints.errors import Usage
from entrypoints.host import Gpu, Host
from tests.unit.entrypoints import builders
from tests.unit.entrypoints.test_plan import made, settings

NOW = "2026-12-01T10:00:00Z"
MACHINE = {"id": "m1"}
HUB = {"name": "hub/name", "sha256": None, "revision": "a"}


def document(**more: Any) -> dict[str, Any]:
    wanted = settings(**more)
    return plan.make(made(), wanted, plan.arms(made(), wanted), prompts.load(), run_id="r", created=NOW)


def with_control(ratio: float, again: float, pairs: int = 4, spread: float = 0.002) -> dict[str, Any]:
    """The analysis of a run whose control arm runs at `again` times the baseline."""
    doc, blocks, rows = builders.run(ratio, pairs, noise=spread)
    doc["arms"].append({"name": "control", "flags": {}, "argv": [], "speculative": False, "control": True})
    for pair in range(pairs):
        blocks.append(builders.block(2 * pairs + pair, pair, "control"))
        factor = 100.0 * again * (1 + spread * (-1) ** pair)
        rows += [builders.request(2 * pairs + pair, pair, "control", name, factor * (1 + place / 50))
                 for place, name in enumerate(builders.prompts())]
    found = analyse.analyse(doc, blocks, rows)
    return {**found, "plan": doc, "ended_at": NOW, "run_id": "r1"}


def kept(tmp_path: Path, who: dict[str, Any], now: str = NOW) -> dict[str, Any] | None:
    found = with_control(1.1, 1.0)
    found["plan"]["sha256"] = "0" * 64
    assert noise.keep(tmp_path, who, found) == ""
    return noise.find(tmp_path, who, now)


def test_a_control_arm_gives_a_noise_floor_that_is_kept_and_found_again(tmp_path: Path) -> None:
    who = noise.identity(document(), MACHINE, HUB)
    floor = kept(tmp_path, who, "2026-12-03T22:00:00Z")
    assert floor is not None
    assert floor["points"]["1"]["df"] == 4
    assert 0.0005 < floor["points"]["1"]["sd"] < 0.01
    assert floor["age_days"] == 2.5


@pytest.mark.parametrize("other", [
    {"machine": {"id": "m2"}}, {"model": {**HUB, "revision": "b"}}, {"settings": {"max_tokens": 16}},
    {"settings": {"concurrency": (4,)}}, {"settings": {"prompts_per_stratum": 2}}, {"settings": {"passes": 1}},
    {"settings": {"extra": ("--page-size", "16")}}], ids=str)
def test_a_noise_floor_never_crosses_machines_images_models_flags_or_loads(tmp_path: Path,
                                                                         other: dict[str, Any]) -> None:
    assert kept(tmp_path, noise.identity(document(), MACHINE, HUB)) is not None
    if "settings" in other and "prompts_per_stratum" in other["settings"]:
        changed = document()
        changed["prompts"] = {**changed["prompts"], "ids": changed["prompts"]["ids"][:4]}
    else:
        changed = document(**other.get("settings", {}))
    who = noise.identity(changed, other.get("machine", MACHINE), other.get("model", HUB))
    assert noise.find(tmp_path, who, NOW) is None


def test_another_image_is_another_identity_and_another_seed_is_not() -> None:
    one = document()
    other = {**one, "image": {**one["image"], "key": "1" * 64}}
    assert noise.identity(one, MACHINE, HUB) != noise.identity(other, MACHINE, HUB)
    assert noise.identity(one, MACHINE, HUB) == noise.identity(document(seed=7), MACHINE, HUB)


def test_an_old_or_a_damaged_noise_floor_is_none(tmp_path: Path) -> None:
    who = noise.identity(document(), MACHINE, HUB)
    assert kept(tmp_path, who, "2027-01-15T10:00:00Z") is None
    assert kept(tmp_path, who, "2026-11-01T10:00:00Z") is None, "from the future: a clock is wrong"
    (tmp_path / noise.FOLDER / noise.name(who)).write_text("{")
    assert noise.find(tmp_path, who, NOW) is None


def test_an_invalid_run_keeps_no_noise_floor_and_a_full_disk_is_said(tmp_path: Path) -> None:
    who = noise.identity(document(), MACHINE, HUB)
    found = with_control(1.1, 1.05)
    assert found["noise_floor"]["significant"]
    assert "differs from the baseline by a factor of 1.0497" in found["verdict"]["invalid_causes"][0]
    assert noise.keep(tmp_path, who, found) == ""
    assert not (tmp_path / noise.FOLDER).exists()
    good = with_control(1.1, 1.0)
    good["plan"]["sha256"] = "0"
    (tmp_path / "file").write_text("")
    assert "Not a directory" in noise.keep(tmp_path / "file", who, good)


def quick(ratios: tuple[float, float], floor: dict[str, Any] | None) -> dict[str, Any]:
    """A run of two pairs under a plan of `--effort quick`."""
    doc, blocks, rows = builders.run(1.0, 2, noise=0.0)
    for row in rows:
        if row["arm"] == "eagle3":
            row["t_last"] = row["t_first"] + (row["t_last"] - row["t_first"]) / ratios[row["pair"]]
    doc.update(interval_from="noise floor", noise_floor=floor and {
        "points": {"1": floor}, "measured_at": "2026-11-29T10:00:00Z", "age_days": 2.0, "run_id": "r0"})
    return {**analyse.analyse(doc, blocks, rows), "plan": doc}


FLOOR = {"sd": 0.02, "df": 4, "ratio": 1.001, "ci": [0.98, 1.02]}


def test_two_pairs_say_nothing_without_a_noise_floor_however_large_the_ratio() -> None:
    found = quick((2.0, 2.0), None)
    assert found["verdict"]["class"] == "inconclusive"
    assert found["verdict"]["reasons"][0] == analyse.NO_FLOOR
    line = result.headline("inconclusive", found["comparison"][0], found["plan"])
    assert line == ("INCONCLUSIVE: eagle3 against baseline: +100.0 % in 2 pairs, and no noise floor of an earlier "
                    "run here to hold it against; --effort standard measures and keeps one.")


@pytest.mark.parametrize(("ratios", "verdict"), [
    ((1.09, 1.10), "win"), ((0.90, 0.92), "loss"), ((1.02, 1.03), "inconclusive"), ((1.0, 1.3), "inconclusive")])
def test_two_pairs_are_judged_by_the_noise_floor_and_say_so(ratios: tuple[float, float], verdict: str) -> None:
    found = quick(ratios, FLOOR)
    one = found["comparison"][0]
    assert found["verdict"]["class"] == one["verdict"] == verdict
    assert one["interval_from"] == "noise floor"
    assert one["df"] == 4
    assert (analyse.ABOVE_FLOOR in found["verdict"]["reasons"]) is (ratios == (1.0, 1.3))
    line = result.headline(verdict, one, found["plan"])
    assert "against the noise floor of 2026-11-29, 2.0 days old)" in line
    assert found["noise_floor"] == {
        "source": "kept from an earlier run", "restart_cv": one["restart_cv"], "aa_ratio": 1.001, "aa_ci": [0.98, 1.02],
        "pair_sd": 0.02, "pairs": 4, "measured_at": "2026-11-29T10:00:00Z", "age_days": 2.0, "run_id": "r0",
        "significant": False}


def test_a_noise_floor_of_nothing_judges_equal_pairs_only() -> None:
    silent = {**FLOOR, "sd": 0.0}
    assert quick((1.1, 1.1), silent)["verdict"]["class"] == "win"
    assert quick((1.1, 1.2), silent)["verdict"]["class"] == "inconclusive"


def test_the_control_arm_runs_in_the_first_pairs_and_is_in_the_plan_from_the_start(tmp_path: Path) -> None:
    wanted = settings(cache=str(tmp_path), model="m")
    arms, floor = run.noise_floor(made(), wanted, plan.arms(made(), wanted), prompts.load(), NOW, {})
    assert [arm.name for arm in arms] == ["baseline", "eagle3", "control"]
    assert floor is None
    doc = plan.make(made(), wanted, arms, prompts.load(), run_id="r", created=NOW)
    assert [slot for slot, _, _ in doc["order"]] == list(range(len(doc["order"])))
    assert sorted(pair for _, pair, name in doc["order"] if name == "control") == [0, 1, 2, 3]
    assert sorted(pair for _, pair, name in doc["order"] if name == "eagle3") == list(range(8))
    assert doc["interval_from"] == "pairs"
    assert plan.with_control(arms) == arms
    with pytest.raises(Usage, match="an arm called control that is none"):
        plan.with_control(plan.arms(made(), settings(arm=("baseline", "control=--attention-backend triton"))))


@pytest.mark.parametrize(("more", "control"), [
    ({"effort": "quick"}, False), ({"pairs": 5}, False), ({"noise_floor": "off"}, False),
    ({"effort": "thorough"}, True), ({"effort": "quick", "noise_floor": "measure"}, True)], ids=str)
def test_when_the_noise_floor_is_measured(tmp_path: Path, more: dict[str, Any], control: bool) -> None:
    wanted = settings(cache=str(tmp_path), model="m", **more)
    arms, _ = run.noise_floor(made(), wanted, plan.arms(made(), wanted), prompts.load(), NOW, {})
    assert ("control" in [arm.name for arm in arms]) is control


def test_a_kept_noise_floor_saves_the_control_arm_and_is_written_into_the_plan(tmp_path: Path) -> None:
    wanted = settings(cache=str(tmp_path), effort="quick", model="m")
    who = noise.identity(document(effort="quick", model="m"), telemetry.describe(), models.identity("m", {}))
    assert kept(tmp_path, who) is not None
    arms, floor = run.noise_floor(made(), wanted, plan.arms(made(), wanted), prompts.load(), NOW, {})
    assert len(arms) == 2
    assert floor is not None
    doc = plan.make(made(), wanted, arms, prompts.load(), run_id="r", created=NOW, floor=floor)
    assert doc["noise_floor"]["run_id"] == "r1"
    assert doc["interval_from"] == "noise floor"
    longer = settings(cache=str(tmp_path), effort="standard", model="m")
    assert len(run.noise_floor(made(), longer, plan.arms(made(), longer), prompts.load(), NOW, {})[0]) == 2


def test_a_machine_is_known_by_its_gpus_and_without_them_by_its_boot(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(*uuids: str, cpus: int = 8) -> Host:
        return Host(cpus=cpus, memory=10**11, shm_total=0, shm_free=0, memlock=-1, uid=0,
                    gpus=tuple(Gpu(0, "n", "12.0", 1, 0, uuid=uuid) for uuid in uuids))

    boot = tmp_path / "boot_id"
    monkeypatch.setattr(telemetry, "BOOT", boot)
    seen = {}
    for text in ("one", "two"):
        boot.write_text(text)
        seen[text] = (telemetry.identity(facts()), telemetry.identity(facts("GPU-1")))
    assert seen["one"][0] != seen["two"][0]
    assert seen["one"][1] == seen["two"][1]
    assert telemetry.identity(facts("GPU-1")) != telemetry.identity(facts("GPU-2"))
    assert telemetry.identity(facts("GPU-1")) != telemetry.identity(facts("GPU-1", cpus=4))


def test_the_report_says_where_the_noise_floor_comes_from() -> None:
    from entrypoints import report
    here = report.noise_floor(with_control(1.1, 1.0))
    assert here.startswith("Noise floor: the baseline against itself differs by ")
    assert here.endswith("control arm of this run.")
    assert report.noise_floor(quick((1.1, 1.1), FLOOR)).endswith(
        "measured 2.0 days ago in run `r0` on this machine with this image.")
    assert report.noise_floor(quick((1.1, 1.1), None)) == ""


def test_what_cannot_be_read_is_no_noise_floor(tmp_path: Path) -> None:
    assert noise.find(tmp_path, {"machine": "m"}, NOW) is None
    (tmp_path / noise.FOLDER).mkdir()
    records.write(tmp_path / noise.FOLDER / noise.name({"machine": "m"}), records.dump({"identity": {"machine": "x"}}))
    assert noise.find(tmp_path, {"machine": "m"}, NOW) is None


def test_the_plan_for_people_says_where_the_noise_floor_comes_from(tmp_path: Path) -> None:
    def line(**more: Any) -> str:
        text = run.render_plan(run.describe(settings(cache=str(tmp_path), model="m", **more), made(), {}))
        (found,) = (line for line in text.splitlines() if line.startswith("noise "))
        return found

    assert line() == "noise  control runs in 4 pairs"
    assert line(pairs=5) == "noise  no noise floor is measured, and none is kept for this"
    assert line(effort="quick").endswith("none is kept for this: no verdict but inconclusive")
    who = noise.identity(run.describe(settings(cache=str(tmp_path), model="m", effort="quick"), made(), {}),
                         telemetry.describe(), models.identity("m", {}))
    found = with_control(1.1, 1.0)
    found["plan"]["sha256"], found["ended_at"] = "0", run._now()
    assert noise.keep(tmp_path, who, found) == ""
    assert line(effort="quick") == "noise  the noise floor of run r1 is used, 0.0 days old"
