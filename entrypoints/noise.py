"""The noise floor: how much two arms with the same flags differ on this machine (A/A), kept for the next run.

A control arm (the baseline again) runs in the first pairs. Its log ratios to the baseline have the true mean 0, so
their root mean square is the deviation of one pair, with as many degrees of freedom as pairs. It is kept in the cache
folder and used again only where all that it depends on is the same: machine, image, model, flags, prompts, load.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints import records
from entrypoints.errors import CannotWrite, EntrypointError

FOLDER = "noise-floor"
#: pairs in which the control arm runs: those before the first look of `standard` and `thorough`
CONTROL_PAIRS = 4
#: with at most so many pairs a run cannot know its own noise, and only a noise floor gives a verdict
FEW_PAIRS = 2
#: days after which a machine is measured again (drivers, firmware, dust)
MAX_AGE = 30.0
CONTROL = "control"


def identity(document: Mapping[str, Any], machine: Mapping[str, Any],
             model: Mapping[str, str | None]) -> dict[str, Any]:
    """What a noise floor depends on, from a plan without one; the seeds of a run are no part of it.

    `model` is what `models.identity` says.
    """
    base = document["primary_endpoint"]["baseline"]
    (argv,) = (arm["argv"] for arm in document["arms"] if arm["name"] == base)
    if "--random-seed" in argv:
        place = argv.index("--random-seed")
        argv = [*argv[:place], *argv[place + 2:]]
    return {"machine": machine.get("id"), "image": document["image"]["key"], "model": dict(model),
            "argv": argv, "environment": document.get("environment", {}),
            "load_points": document["load_points"], "rate": document["rate"],
            "passes": document["passes"], "max_tokens": document["max_tokens"],
            "prompts": [document["prompts"]["sha256"], document["prompts"]["ids"]]}


def name(who: Mapping[str, Any]) -> str:
    """File name of the noise floor of an identity."""
    return hashlib.sha256(json.dumps(who, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def find(cache: Path, who: Mapping[str, Any], now: str) -> dict[str, Any] | None:
    """The noise floor that was kept for exactly this identity, with its age in days; None when there is none."""
    try:
        kept = records.document(cache / FOLDER / name(who))
    except EntrypointError:
        return None
    if kept.get("identity") != who or not kept.get("points"):
        return None
    age = days(str(kept["measured_at"]), now)
    return {**kept, "age_days": age} if 0 <= age <= MAX_AGE else None


def days(then: str, now: str) -> float:
    """Days between two times of a run."""
    form = "%Y-%m-%dT%H:%M:%SZ"
    passed = datetime.datetime.strptime(now, form) - datetime.datetime.strptime(then, form)
    return round(passed.total_seconds() / 86_400, 2)


def points(comparisons: Sequence[Mapping[str, Any]], control: str) -> dict[str, Any]:
    """Concurrency to deviation (log ratio of one pair), degrees of freedom, ratio and interval of a control arm."""
    found: dict[str, Any] = {}
    for one in comparisons:
        logs = one.get("pair_log_ratios") or []
        if one["candidate"] == control and len(logs) >= FEW_PAIRS:
            found[str(one["concurrency"])] = {
                "sd": round(math.sqrt(sum(value * value for value in logs) / len(logs)), 8), "df": len(logs),
                "ratio": one["ratio"], "ci": one["ci"]}
    return found


def keep(cache: Path, who: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Write what a valid run with a control arm found; gives "" or why that was not possible."""
    control = next((arm["name"] for arm in found["plan"]["arms"] if arm["control"]), None)
    table = points(found["comparison"], control) if control else {}
    if not table or found["verdict"]["class"] == "invalid":
        return ""
    kept = {"schema": 1, "identity": dict(who), "measured_at": found["ended_at"], "run_id": found["run_id"],
            "plan_sha256": found["plan"]["sha256"], "points": table}
    try:
        (cache / FOLDER).mkdir(parents=True, exist_ok=True)
        records.write(cache / FOLDER / name(who), records.dump(kept))
    except (OSError, CannotWrite) as error:
        return str(error)
    return ""
