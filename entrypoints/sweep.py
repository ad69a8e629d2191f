"""Find the best EAGLE-3 setting without fooling oneself: choose on one half of the prompts, confirm on the other.

The best of several noisy numbers is too good by chance. So the choice is made from one start of each setting, and its
numbers are thrown away for the verdict: the chosen setting meets the baseline in fresh starts, on prompts that had no
part in the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from entrypoints import analyse, records, run
from entrypoints.errors import Invalid, Problem, Usage
from entrypoints.image import Image
from entrypoints.settings import Settings

NAMES = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")


def parse(settings: Settings, image: Image) -> dict[str, str]:
    """Name to flags of each setting of the sweep. Raises `Usage` with every bad one."""
    base = next((dict(flags) for flags in image.profile.arms.values() if "speculative-algorithm" in flags),
                {"speculative-algorithm": "EAGLE3"})
    found: dict[str, str] = {}
    problems = []
    for text in settings.sweep:
        parts = text.replace(",", " ").split()
        numbers = [int(part) for part in parts if part.isdigit()]
        if len(parts) != 3 or len(numbers) != 3 or 0 in numbers:
            problems.append(Problem(what=f"bad setting {text}", where="--sweep", expected="STEPS,TOPK,DRAFT_TOKENS",
                                    todo="for instance --sweep 3,1,4 --sweep 5,4,8"))
            continue
        steps, topk, tokens = numbers
        if topk == 1 and tokens != steps + 1:
            problems.append(Problem(what=f"bad setting {text}", where="--sweep", found=f"{tokens} draft tokens",
                                    expected=f"{steps + 1}: a chain (top-k 1) has a token for each step, and one"))
            continue
        flags = {**base, **dict(zip(NAMES, numbers, strict=True))}
        found[f"steps{steps}-topk{topk}-draft{tokens}"] = " ".join(f"--{name} {value}" for name, value in flags.items())
    if not problems and len(found) < 2:
        problems.append(Problem(what="a sweep needs at least two settings", where="--sweep", found=str(len(found))))
    if problems:
        raise Usage(problems)
    return found


def unfinished(folder: Path) -> bool:
    """Whether a run is the selection of a sweep: to resume it is to go on to the confirmation."""
    return "sweep" in records.document(folder / records.CONTEXT)


def confirm(settings: Settings, image: Image, environ: Mapping[str, str], err: TextIO) -> run.Runner:
    """Measure every setting once, choose, and give the runner that confirms the choice.

    The selection is a run with a folder of its own; its table and hashes are in the plan of the second. A setting that
    does not start or fails is not chosen, and the table says why.

    :param settings: with a sweep, or with the folder of a selection to resume.
    :raises Usage: the selection to resume is over, its confirmation is a run of its own.
    """
    if settings.resume:
        context = records.document(Path(settings.resume) / records.CONTEXT)
        if after := context.get("confirmed_by"):
            raise Usage(Problem(what="this selection is over, its choice is confirmed in a run of its own",
                                where="--resume", found=settings.resume, expected=after, todo="resume that folder"))
        settings = run.resumed(settings, {"values": context["sweep"]})
    arms = parse(settings, image)
    first = dataclasses.replace(settings, arm=tuple(f"{name}={flags}" for name, flags in arms.items()), pairs=1,
                                passes=1, concurrency=settings.concurrency[:1], sweep=(), noise_floor="off",
                                task_check=0)
    choosing = run.Runner(image, first, environ, err, half=0)
    choosing.note("sweep", run.values(settings))
    choosing.say(f"sweep: {len(arms)} settings, one start each; the best is confirmed afterwards")
    choosing.go()
    table = ranking(choosing.folder)
    for row in table:
        if row["why"]:
            choosing.say(f"sweep: {row['arm']} cannot be chosen: {row['why']}")
    if not table or table[0]["tok_s"] is None:
        raise Invalid(Problem(what="no setting of the sweep could be measured", where=str(choosing.folder),
                              todo="see the causes in its report.md"))
    best = table[0]["arm"]
    choosing.say(f"sweep: {best} is the fastest with {table[0]['tok_s']:.1f} tok/s on its half of the prompts")
    baseline = next(iter(image.profile.arms))
    second = dataclasses.replace(settings, arm=(baseline, f"{best}={arms[best]}"), sweep=(), resume="")
    confirming = run.Runner(image, second, environ, err, half=1, selection={
        "folder": choosing.folder.name, "plan_sha256": choosing.plan["sha256"],
        "requests_sha256": records.file_digest(choosing.folder / records.REQUESTS), "table": table})
    choosing.note("confirmed_by", confirming.folder.name)
    run.publish(choosing.folder)  # the hash in its result covers the note
    confirming.remains = choosing.remains
    return confirming


def ranking(folder: Path) -> list[dict[str, Any]]:
    """Arms of a selection run, fastest first; one that drafts nothing or failed goes last, without a number."""
    document = records.document(folder / records.PLAN)
    blocks = records.lines(folder / records.BLOCKS)
    usable = {block["index"] for block in blocks if block["validity"]["ok"]}
    requests = [row for row in records.lines(folder / records.REQUESTS) if row["block"] in usable]
    rows = []
    for arm in document["arms"]:
        mine = [row for row in requests if row["arm"] == arm["name"]]
        summary = analyse.arm_summary(mine)
        tau = summary["spec"]["accept_length"]
        causes = [cause for block in blocks if block["arm"] == arm["name"] for cause in block["validity"]["causes"]]
        why = ""
        if not mine:
            why = "; ".join(causes) or "not measured"
        elif summary["errors"]:
            why = f"{summary['errors']} of {len(mine)} requests failed"
        elif tau is None or tau <= analyse.DEAD_DRAFT:
            why = "no accept length" if tau is None else f"accept length {tau:.2f}"
        rows.append({"arm": arm["name"], "tok_s": None if why else summary["decode_rate"]["geomean"],
                     "accept_length": tau, "cycle_ms": summary["spec"]["cycle_ms"], "why": why})
    return sorted(rows, key=lambda row: -(row["tok_s"] or 0.0))

