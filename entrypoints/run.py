"""`benchmark` and `analyze`: plan, server starts, records, analysis, report; what was measured is never lost."""

from __future__ import annotations

import dataclasses
import datetime
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from entrypoints import (
    calibrate,
    equivalence,
    flags,
    health,
    limit,
    measure,
    models,
    noise,
    page,
    plan,
    prompts,
    records,
    report,
    resolve,
    result,
    signals,
    task,
    telemetry,
)
from entrypoints.check import tensor_parallel
from entrypoints.command import HIDDEN, server_environment, tuning
from entrypoints.errors import (
    VERDICT_CODES,
    BadConfig,
    Deadline,
    EntrypointError,
    InputMissing,
    Invalid,
    Problem,
    ServerFault,
    Terminated,
)
from entrypoints.image import Image
from entrypoints.readiness import Expect, identity, key_of
from entrypoints.settings import Settings
from entrypoints.supervise import Launch, StopReport, free_port

#: blocks that may be measured again for a cause, in a whole run
RERUNS = 2
#: faults that another start, on other ports, does not meet again
PASSING = frozenset({"port-taken"})
#: before anything is known: seconds of a start and tokens per second of one stream
ASSUMED_START, ASSUMED_RATE = 120.0, 60.0
BEAT = 2.0
#: splits looked at in one server start
FORKS = 32
SETTLED = frozenset({"win", "loss", "equivalent"})


def benchmark(settings: Settings, image: Image, *, environ: Mapping[str, str] = os.environ,
              out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run or resume a benchmark; the exit code says the verdict. The report goes to `out`, progress to `err`.

    Raises the errors of `errors`; `Terminated` passes through after the servers are gone and the files are written.
    """
    from entrypoints import sweep
    if sweep.unfinished(Path(settings.resume)) if settings.resume else settings.sweep:
        runner = sweep.confirm(settings, image, environ, err or sys.stderr)
    else:
        runner = Runner(image, settings, environ, err or sys.stderr)
    found = runner.go()
    runner.keep_noise_floor(found)
    return _report(found, runner.folder, settings, out or sys.stdout)


def analyze(folder: Path, settings: Settings, *, out: TextIO | None = None) -> int:
    """Compute verdict and report again from the raw files of a run."""
    return _report(publish(folder), folder, settings, out or sys.stdout)


def _report(found: Mapping[str, Any], folder: Path, settings: Settings, out: TextIO) -> int:
    out.write(records.dump(found) if settings.json else report.markdown(found))
    out.write("" if settings.json else f"\nFiles: {folder}\n")
    verdict = found["verdict"]["class"]
    return 0 if settings.exit_zero_on_valid and verdict != "invalid" else VERDICT_CODES[verdict]


def describe(settings: Settings, image: Image, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The plan that `benchmark` would follow; starts and writes nothing."""
    now, pack = _now(), _pack(settings)
    arms, floor = noise_floor(image, settings, plan.arms(image, settings), pack, now, environ)
    document = plan.make(image, settings, arms, pack, run_id="not-run", created=now, floor=floor,
                         more=_tuning(image, settings, environ))
    document["estimate_seconds"] = round(plan.estimate(document, start_seconds=ASSUMED_START, rate=ASSUMED_RATE))
    return document


def _tuning(image: Image, settings: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    return {"environment": tuning(server_environment(image, environ, cache_root=Path(settings.cache)))}


def noise_floor(image: Image, settings: Settings, made: tuple[plan.Arm, ...], pack: prompts.Pack, now: str,
                environ: Mapping[str, str]) -> tuple[tuple[plan.Arm, ...], dict[str, Any] | None]:
    """The arms, with a control where the noise floor is to be measured, and the one that was kept, if it is to be used.

    `auto` measures where the effort allows it and no fitting one is kept; a fixed number of pairs and `quick` use what
    there is.
    """
    kept = None
    if settings.noise_floor == "auto":
        draft = plan.make(image, settings, made, pack, run_id="", created=now, more=_tuning(image, settings, environ))
        model = models.identity(settings.model, environ, Path(settings.cache) / "huggingface")
        kept = noise.find(Path(settings.cache), noise.identity(draft, telemetry.describe(), model), now)
    big = settings.effort != "quick" and not settings.pairs
    if settings.noise_floor == "measure" or (settings.noise_floor == "auto" and kept is None and big):
        made = plan.with_control(made)
    return made, kept


def _noise_line(document: Mapping[str, Any]) -> str:
    """Where the noise floor comes from, for people."""
    control = next((arm["name"] for arm in document["arms"] if arm["control"]), None)
    if control:
        return f"{control} runs in {sum(name == control for _, _, name in document['order'])} pairs"
    if kept := document["noise_floor"]:
        return f"the noise floor of run {kept['run_id']} is used, {kept['age_days']:.1f} days old"
    return "no noise floor is measured, and none is kept for this" + (
        ": no verdict but inconclusive" if document["interval_from"] == "noise floor" else "")


def render_plan(document: Mapping[str, Any]) -> str:
    """The plan for people: command lines, what differs, order of starts, time."""
    first, *others = document["arms"]
    lines = []
    for arm in document["arms"]:
        lines += [f"arm {arm['name']}{' (control: same flags as the baseline)' if arm['control'] else ''}",
                  f"  {' '.join(arm['argv'])}"]
    for arm in others:
        differ = plan.difference(plan.flags_of(first["argv"]), plan.flags_of(arm["argv"]))
        lines += [f"difference of {arm['name']} from {first['name']}"]
        lines += [f"  --{key}: {there if here is None else f'{here} -> {there}'}" for key, (here, there)
                  in differ.items()] or ["  none"]
    if document["environment"]:
        lines += ["environment of both", *(f"  {name}={value}" for name, value in document["environment"].items())]
    looks = ", ".join(map(str, document["looks"]))
    prompts_used = document["prompts"]
    lines += [f"order  {' '.join(name for _, _, name in document['order'])}",
              f"looks  after {looks} pairs, level {document['alpha_per_look']} each "
              f"({document['alpha_total']} in all), margin {100 * document['margin']:g} %",
              f"load   {prompts_used['count']} prompts x {document['passes']} passes at concurrency "
              f"{', '.join(map(str, document['load_points']))}, at most {document['max_tokens']} tokens",
              f"noise  {_noise_line(document)}",
              f"task   {document['task_check']['problems'] or 'no'} word problems in both arms",
              f"time   at most about {_duration(document['estimate_seconds'])}, if a start takes {ASSUMED_START:.0f} s "
              f"and a stream makes {ASSUMED_RATE:.0f} tok/s"]
    return "\n".join(lines)


def _pack(settings: Settings) -> prompts.Pack:
    pack = prompts.load(Path(settings.prompts) if settings.prompts else None, per_stratum=settings.prompts_per_stratum)
    if settings.long_context:
        first, *more = prompts.long_context(settings.seed, settings.long_context,
                                            1 + (settings.prompts_per_stratum or 4))
        # what a long prefill compiles is compiled before anything is measured
        warm = dataclasses.replace(first, stratum=prompts.WARM_UP)
        pack = dataclasses.replace(pack, measured=(*pack.measured, *more), warmup=(warm, *pack.warmup),
                                   name=f"{pack.name} and {len(more)} long ones (seed {settings.seed})")
    return pack


def publish(folder: Path) -> dict[str, Any]:
    """Assemble the result and write result.json, report.md, report.html and metrics.prom."""
    found = result.assemble(folder)
    records.write(folder / records.RESULT, records.dump(found))
    records.write(folder / records.REPORT, report.markdown(found))
    records.write(folder / records.PAGE, page.page(found))
    records.write(folder / records.METRICS, report.prometheus(found))
    return found


class Runner:
    """One benchmark run and its folder."""

    def __init__(self, image: Image, settings: Settings, environ: Mapping[str, str], err: TextIO, *,
                 half: int | None = None, selection: Mapping[str, Any] | None = None) -> None:
        self.image = image
        self.half = half
        self.selection = selection
        self.environ = environ
        self.err = err
        self.begin = self.origin = time.perf_counter()
        self.context: dict[str, Any] = {}
        self.rendered: dict[str, tuple[int, ...]] = {}
        self.remains: Callable[[], StopReport] = StopReport.nothing
        if settings.resume:
            self.folder = Path(settings.resume)
            self.context = records.document(self.folder / records.CONTEXT)
            settings = resumed(settings, self.context)
        self.settings = settings
        self.pulse = _Pulse()
        if wrong := models.problems(settings.model, settings.draft, environ, Path(settings.cache) / "huggingface"):
            raise InputMissing(wrong)
        self.arms = plan.arms(image, settings)
        self.floor: dict[str, Any] | None = None
        if settings.resume:
            stored = records.document(self.folder / records.PLAN)
            self.half, self.selection = stored.get("half"), stored.get("selection")
            self.origin -= _passed(self.folder)
        self.pack = _pack(settings) if self.half is None else prompts.half(_pack(settings), self.half)
        if settings.resume:
            self.floor = stored.get("noise_floor")
            if any(arm["control"] for arm in stored["arms"]):
                self.arms = plan.with_control(self.arms)
        else:
            self.arms, self.floor = noise_floor(image, settings, self.arms, self.pack, _now(), environ)
        self.by_name = {arm.name: arm for arm in self.arms}
        self._judge_flags()
        self.plan = self._same_plan(stored) if settings.resume else self._new_plan()

    # ------------------------------------------------------------------ plan

    def _new_plan(self) -> dict[str, Any]:
        now = _now()
        run_id = f"{now.replace('-', '').replace(':', '')}-{secrets.token_hex(2)}"
        document = self._make(run_id, now)
        # under a hidden name until plan and context are in it: a run's folder can be read at every moment
        self.folder = records.create(Path(self.settings.results), f".{run_id}")
        records.write(self.folder / records.PLAN, records.dump(document))
        self.context = {
            "started_at": now, "ended_at": None, "status": "running", "abort_reason": None,
            "settings": [list(row) for row in self.settings.shown()],
            "values": values(self.settings),
            "machine": telemetry.describe(), "software": {"image": document["image"]}, "resolved_server_args": {},
            "arms_diff": {"allowed": {}, "forbidden": {}}, "looks_taken": [], "rendered_ids_sha256": None,
            "evidence": []}
        self._save_context()
        self.folder = self.folder.rename(self.folder.with_name(run_id))
        return document

    def _make(self, run_id: str, created: str) -> dict[str, Any]:
        more = {key: value for key, value in (("half", self.half), ("selection", self.selection),
                                              ("environment", tuning(self._environment()))) if value is not None}
        return plan.make(self.image, self.settings, self.arms, self.pack, run_id=run_id, created=created,
                         floor=self.floor, more=more)

    def _same_plan(self, stored: dict[str, Any]) -> dict[str, Any]:
        again = self._make(stored["run_id"], stored["created_at"])
        wrong = plan.difference(stored, again)
        wrong.pop("sha256", None)
        if wrong:
            raise BadConfig(Problem(what=f"the run cannot be resumed: {', '.join(wrong)} changed",
                                    where=str(self.folder), expected="the same image, models, prompts and flags",
                                    todo="start a new run"))
        records.mend(self.folder / records.BLOCKS)
        records.mend(self.folder / records.REQUESTS)
        records.mend(self.folder / records.TELEMETRY)
        self.context.update(status="running", abort_reason=None, ended_at=None)
        return stored

    def note(self, name: str, value: Any) -> None:
        """Keep something beside the plan: context.json, for those who continue this run."""
        self.context[name] = value
        self._save_context()

    def _save_context(self) -> None:
        records.write(self.folder / records.CONTEXT, records.dump(self.context))

    # ------------------------------------------------------------------- run

    def go(self) -> dict[str, Any]:
        """Measure until the plan is fulfilled or settled; the result. Every way out leaves a readable folder."""
        self.say(f"run {self.plan['run_id']}, plan {self.plan['sha256'][:12]}, results in {self.folder}")
        seconds = plan.estimate(self.plan, start_seconds=ASSUMED_START, rate=ASSUMED_RATE)
        self.say(f"{len(self.plan['order'])} server starts at most; about {_duration(seconds)} if a start takes "
                 f"{ASSUMED_START:.0f} s and a stream makes {ASSUMED_RATE:.0f} tok/s (better after the first start)")
        self._same_models()
        self.pulse.start()
        try:
            if not self.context.get("client_calibration"):
                self.context["client_calibration"] = calibrate.measure(sorted(set(self.plan["load_points"])))
                self.context["limit_inputs"] = limit.inputs(
                    models.folder(self.settings.model, self.environ, Path(self.settings.cache) / "huggingface"),
                    self.image.python, cuda=self.image.cuda is not None,
                    tp=tensor_parallel(self.image, self.settings), environment=self._environment())
                self._save_context()
            self._measure()
        except Terminated as stop:
            self._end("aborted", str(stop))
            self._try_publish()
            raise
        except Deadline as late:
            self._end("aborted", str(late.problems[0].what))
            self._try_publish()
            raise
        except Invalid as refusal:
            self._end("invalid", str(refusal.problems[0].what))
            self._try_publish()
            raise
        except EntrypointError as error:
            self._end("aborted", "; ".join(map(_short, error.problems)))
            self._try_publish()
            raise
        except BaseException as error:
            self._end("aborted", f"{type(error).__name__}: {error}".splitlines()[0])
            self._try_publish()
            raise
        finally:
            self.pulse.stop()
        with signals.held():  # the numbers are whole: a stop waits until they are written
            self._end("complete", None)
            return publish(self.folder)

    def _models(self) -> dict[str, dict[str, str | None]]:
        cache = Path(self.settings.cache) / "huggingface"
        return {role: models.identity(name, self.environ, cache)
                for role, name in (("model", self.settings.model), ("draft", self.settings.draft)) if name}

    def _same_models(self) -> None:
        """Which models these are, by content; a resumed run must have the same."""
        now, before = self._models(), self.context["software"].get("models") or {}
        wrong = [role for role, one in now.items() for key in ("sha256", "revision")
                 if None not in (known := before.get(role, {}).get(key), one[key]) and known != one[key]]
        if wrong:
            raise BadConfig(Problem(what=f"the run cannot be resumed: {', '.join(wrong)} changed",
                                    where=str(self.folder), found=str([now[role] for role in wrong]),
                                    expected=str([before[role] for role in wrong]), todo="start a new run"))
        self.context["software"]["models"] = now

    def _judge_flags(self) -> None:
        """Before anything starts: users' flags by the server's own parser, both arms by its own resolution."""
        if self.settings.extra or any("=" in one for one in self.settings.arm):
            self.say("asking the server's parser about the flags")
            commands = {arm.name: arm.command(self.settings.port) for arm in self.arms}
            if why := flags.validate(self.image, commands, self._environment()):
                self.say(f"flags not judged beforehand: {why}")
        if self.image.cuda is not None:
            self.say("asking SGLang what it would make of both command lines")
            if not resolve.refuse_unequal(self.image.python, self.arms, self._environment()):
                self.say("no answer without a server: the arguments are compared once both have started")

    def _measure(self) -> None:
        done = records.lines(self.folder / records.BLOCKS)
        valid = {block["slot"] for block in done if block["validity"]["ok"]}
        reruns = sum(not block["validity"]["ok"] for block in done)
        index = 1 + max((row["index"] for row in done), default=-1)
        index = max(index, 1 + max((row["block"] for row in records.lines(self.folder / records.REQUESTS)), default=-1))
        for slot, pair, name in self.plan["order"]:
            while slot not in valid:
                if reruns > RERUNS and not self._choosing:
                    self.say(f"{reruns} blocks did not count: none is measured again")
                    return
                record, fatal = self._block(index, slot, pair, name)
                index += 1
                if record["validity"]["ok"]:
                    valid.add(slot)
                else:
                    self.say(f"block {record['index']} does not count: {'; '.join(record['validity']['causes'])}")
                    reruns += 1
                if fatal or reruns > RERUNS:
                    if not self._choosing:
                        return
                    break  # the other settings of a sweep have not failed
            if self._settled(slot, valid):
                return

    @property
    def _choosing(self) -> bool:
        """Whether this is the selection of a sweep, where a setting that fails is only not chosen."""
        return self.half == 0

    def _block(self, index: int, slot: int, pair: int, name: str) -> tuple[dict[str, Any], bool]:
        arm = self.by_name[name]
        self._require_clean()
        port = free_port()
        init_port = free_port(but=port)
        self.say(f"block {slot + 1} of {len(self.plan['order'])}, pair {pair + 1}: starting {name}")
        launch = Launch(argv=arm.command(port, init_port), env=self._environment(), cwd=self.folder,
                        log=self.folder / f"server-{index:02}-{name}.log", port=port, init_port=init_port)
        key = key_of(launch.argv) or self.settings.api_key
        expect = Expect(model=self.settings.model, api_key=key, arguments=identity(launch.argv))
        job = measure.Task(
            index=index, slot=slot, pair=pair, arm=arm, launch=launch, expect=expect, plan=self.plan, pack=self.pack,
            render=self._render,
            origin=self.origin, stall=self.settings.stall_seconds, ready_seconds=self.settings.ready_seconds or None,
            grace=self.settings.grace_seconds, api_key=key,
            forks=self._forks() if arm is self.arms[0] else (), patches=self.image.patches,
            trace=self._trace_folder(index, name), problems=self._problems(name))
        requests = self.folder / records.REQUESTS
        outcome = measure.run(job, save=lambda row: records.append(requests, row),
                              say=lambda line: self.say(f"  {name}: {line}"), on_ready=self._on_ready(arm),
                              in_time=self._in_time)
        with signals.held():
            for sample in outcome.samples:
                records.append(self.folder / records.TELEMETRY, {"block": index, **sample})
            records.append(self.folder / records.BLOCKS, outcome.record)
        if outcome.interrupted:
            raise outcome.interrupted
        self.remains = outcome.remains
        for left in outcome.record["stop"]["left"]:
            self.say(f"  {name}: {left['what']}: {left['found']}")
        failed = sum(one["errors"] for one in outcome.record["passes"])
        if failed:
            self.say(f"  {name}: {failed} requests failed")
        passing = isinstance(outcome.fatal, ServerFault) and outcome.fatal.diagnosis.fault in PASSING
        return outcome.record, (outcome.fatal is not None and not passing) or failed > 0

    def _require_clean(self) -> None:
        """What the last server left behind would spoil the next start: wait for it once more, then end the run."""
        self.remains().require_clean()

    def _render(self, wanted: Sequence[prompts.Prompt]) -> dict[str, tuple[int, ...]]:
        """Once for all server starts: the tokenizer does not change between them."""
        if new := [one for one in wanted if one.id not in self.rendered]:
            self.rendered.update(prompts.render_offline(self.image.python, self.settings.model, new,
                                                        self._environment()))
        return {one.id: self.rendered[one.id] for one in wanted}

    def _problems(self, name: str) -> tuple[task.Problem, ...]:
        """What to ask the first valid start of each of the two primary arms."""
        end, check = self.plan["primary_endpoint"], self.plan["task_check"]
        if name not in (end["baseline"], end["candidate"]) or \
                task.results(records.lines(self.folder / records.BLOCKS), name) is not None:
            return ()
        return task.problems(check["seed"], check["problems"])

    def _environment(self) -> dict[str, str]:
        return server_environment(self.image, self.environ, cache_root=Path(self.settings.cache))

    def _trace_folder(self, index: int, name: str) -> Path | None:
        """One trace for each arm, when asked for: of its first start that counts."""
        known = any(block["arm"] == name and block["validity"]["ok"]
                    for block in records.lines(self.folder / records.BLOCKS))
        return self.folder / f"trace-{index:02}-{name}" if self.settings.trace and not known else None

    def _forks(self) -> list[dict[str, Any]]:
        """Splits between the primary arms in the pairs so far, at most `FORKS`, not yet looked at."""
        blocks = records.lines(self.folder / records.BLOCKS)
        usable = {block["index"]: block["pair"] for block in blocks if block["validity"]["ok"]}
        known = {(one["prompt_id"], one["index"]) for block in blocks for one in block.get("ties") or []}
        point, end = self.plan["load_points"][0], self.plan["primary_endpoint"]
        answers: dict[tuple[str, int], dict[str, list[int]]] = {}
        for row in records.lines(self.folder / records.REQUESTS):
            if row["block"] in usable and row["pass"] == 0 and row["concurrency"] == point and not row["error"]:
                answers.setdefault((row["arm"], row["pair"]), {})[row["prompt_id"]] = row["output_ids"]
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for pair in sorted(set(usable.values())):
            for fork in equivalence.forks(answers.get((end["baseline"], pair), {}),
                                          answers.get((end["candidate"], pair), {})):
                found.setdefault((fork["prompt_id"], fork["index"]), fork)
        return [fork for key, fork in found.items() if key not in known][:FORKS]

    def _on_ready(self, arm: plan.Arm) -> Any:
        """Refuse a server whose resolved arguments or rendered prompts are not those of the comparison."""

        def check(outcome: measure.Outcome) -> None:
            self.say(f"  {arm.name}: ready after {outcome.record['t_ready_s']:.1f} s")
            known = self.context["resolved_server_args"]
            if arm.name in known and (wrong := plan.difference(known[arm.name], outcome.arguments)):
                raise Invalid(Problem(what=f"{arm.name} resolved other arguments than at its first start",
                                      where="/server_info", found=str(wrong), expected="the same at every start"))
            known[arm.name] = outcome.arguments
            self.context["software"]["server_version"] = outcome.server_info.get("version")
            base = self.arms[0]
            for other in self.arms[1:]:
                if base.name in known and other.name in known:
                    found = plan.check_resolved(base, other, known[base.name], known[other.name])
                    for kind in ("allowed", "forbidden"):
                        self.context["arms_diff"][kind].update(found[kind])
                    self._save_context()
                    if found["forbidden"]:
                        raise plan.refuse(base, other, found["forbidden"])
            digest = self.context["rendered_ids_sha256"]
            if digest not in (None, outcome.rendered_sha256):
                raise Invalid(Problem(what="the server renders the prompts to other tokens than before",
                                      where=arm.name, found=outcome.rendered_sha256, expected=digest,
                                      todo="the chat template must be the same in all arms"))
            self.context["rendered_ids_sha256"] = outcome.rendered_sha256
            self._save_context()

        return check

    def _in_time(self) -> None:
        limit = self.settings.deadline_seconds
        if limit and time.perf_counter() - self.begin > limit:
            raise Deadline(Problem(what=f"the deadline of {limit:g} s was reached", where="benchmark",
                                   todo="what was measured is kept; --resume DIR goes on"))

    def _settled(self, slot: int, valid: set[int]) -> bool:
        """After the latest whole pair: say where we are, and at a planned look whether that is enough.

        A resumed run comes by here with pairs that it had, and perhaps with a part of the next one.
        """
        last = {pair: slot for slot, pair, _ in self.plan["order"]}
        open_pairs = {pair for slot, pair, _ in self.plan["order"] if slot not in valid}
        whole = [pair for pair in last if pair not in open_pairs]
        if not whole or slot != last[max(whole)]:
            return False
        done = len(whole)
        if taken := next((look for look in self.context["looks_taken"] if look["pairs"] == done), None):
            return bool(taken["settled"])  # what a look has said stands: looking again is no new evidence
        self._save_context()
        found = result.assemble(self.folder)
        first = found["comparison"][0]
        left = (time.perf_counter() - self.origin) / done * (self.plan["max_pairs"] - done)
        self.say(f"after {first['pairs']} pairs: ratio {report.number(first['ratio'], 4)}, "
                 f"interval {report.interval(first.get('ci'))}" + (f", at most {_duration(left)} left" if left else ""))
        if done not in self.plan["looks"]:
            return False
        causes = found["verdict"]["invalid_causes"][1:]  # the first one is that the run has not ended
        for cause in causes:
            self.say(f"no verdict can come of this run any more: {cause}")
        settled = bool(causes) or found["outliers"]["verdict"] == first["verdict"] in SETTLED
        self.context["looks_taken"].append({"pairs": done, "verdict": first["verdict"], "ratio": first["ratio"],
                                            "ci": first.get("ci"), "alpha": self.plan["alpha_per_look"],
                                            "settled": settled})
        self._save_context()
        return settled

    # ------------------------------------------------------------------- end

    def keep_noise_floor(self, found: Mapping[str, Any]) -> None:
        """What a valid run with a control arm says about the machine, for the next runs on it."""
        who = noise.identity(self.plan, self.context["machine"], self.context["software"]["models"]["model"])
        if why := noise.keep(Path(self.settings.cache), who, found):
            self.say(f"the noise floor was not kept: {why}")

    def _end(self, status: str, reason: str | None) -> None:
        self.context["software"]["models"] = self._models()  # a hub name has a revision once it was downloaded
        self.context.update(status=status, abort_reason=reason, ended_at=_now())
        self._save_context()

    def _try_publish(self) -> None:
        """A partial result beside the error; nothing here may hide the error itself."""
        try:
            publish(self.folder)
        except (EntrypointError, OSError, ValueError, KeyError) as error:
            self.say(f"no partial report: {error}")

    def say(self, line: str) -> None:
        """One line of progress."""
        passed = int(time.perf_counter() - self.origin)
        self.err.write(f"[{passed // 60:3}:{passed % 60:02}] {line}\n")
        self.err.flush()
        self.pulse.phase = line


def _passed(folder: Path) -> float:
    """Seconds on the clock of a run until now: what is measured after a pause comes after what was measured before."""
    times = [block["t_end"] for block in records.lines(folder / records.BLOCKS)]
    times += [row[name] for row in records.lines(folder / records.REQUESTS) for name in ("t_send", "t_last")]
    return max((moment for moment in times if moment is not None), default=0.0)


def _short(problem: Problem) -> str:
    """One line of a report: where, what, found."""
    found = problem.found.splitlines()[0] if problem.found else ""
    return ": ".join(part for part in (problem.where, problem.what, found) if part)


def resumed(now: Settings, context: Mapping[str, Any]) -> Settings:
    """The settings of the run that is resumed; only what does not change the measurement comes from now."""
    values = dict(context.get("values") or {})
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    for name in ("resume", "api_key", "json", "exit_zero_on_valid", "stall_seconds", "ready_seconds",
                 "deadline_seconds", "grace_seconds", "cache"):
        values[name] = getattr(now, name)
    shown = now.masked()
    for name, again in (("extra", "the same words after --"), ("arm", "every --arm")):
        kept = values.get(name, ())
        if not any(HIDDEN in word for word in kept):
            continue
        if getattr(shown, name) != kept:
            raise BadConfig(Problem(what="the run had a secret among its server flags, which is not kept",
                                    where="--resume", expected=" ".join(kept), todo=f"give {again} again"))
        values[name] = getattr(now, name)
    known = {one.name for one in dataclasses.fields(Settings)}
    return Settings(**{key: value for key, value in values.items() if key in known}, sources=now.sources)


def values(settings: Settings) -> dict[str, Any]:
    """The settings for `--resume`, without secrets."""
    hidden, safe = {"sources", "api_key", "resume"}, settings.masked()
    return {one.name: getattr(safe, one.name) for one in dataclasses.fields(safe) if one.name not in hidden}


class _Pulse:
    """Beats for `entrypoint health` while the main thread waits for sockets."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(BEAT)
        health.forget()

    def _beat(self) -> None:
        while not self._over.is_set():
            health.beat(self.phase)
            self._over.wait(BEAT)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{max(minutes, 1)} min"
