"""One block: a server start with its warm-up and its measured passes.

What spoils a block is recorded as a cause (never a speed); what ends the run is raised.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entrypoints import analyse, client, equivalence, evidence, processes, prompts, task, telemetry, trace
from entrypoints.command import CACHES
from entrypoints.errors import Deadline, Diagnosis, NotReady, ServerDied, ServerFault, Terminated, Unusable
from entrypoints.image import Patch
from entrypoints.plan import Arm, resolved
from entrypoints.probe import NoAnswer
from entrypoints.readiness import Expect, changed, wait_ready
from entrypoints.supervise import Launch, Server, StopReport

FLUSH_TRIES = 8
FLUSH_PAUSE = 0.25
#: the compiled-kernel caches that must not grow while measuring; other programs' files may come into the general one
JIT_CACHES = tuple(name for name in CACHES if name != "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Task:
    """What a block needs to know; `index` counts server starts, `slot` is the place in the plan's order."""

    index: int
    slot: int
    pair: int
    arm: Arm
    launch: Launch
    expect: Expect
    plan: Mapping[str, Any]
    pack: prompts.Pack
    #: renders chats without the server, for versions that cannot
    render: Callable[[Sequence[prompts.Prompt]], dict[str, tuple[int, ...]]]
    origin: float
    stall: float
    ready_seconds: float | None
    grace: float
    api_key: str = ""
    #: the image's patches, whose markers are looked for in the log
    patches: Sequence[Patch] = ()
    #: where to put a profiler trace, taken after the measurement; None for no trace
    trace: Path | None = None
    #: splits between the arms to look at on this (baseline) server, see `equivalence.forks`
    forks: Sequence[Mapping[str, Any]] = ()
    #: problems of the task check to ask on this server
    problems: Sequence[task.Problem] = ()


@dataclass
class Outcome:
    """What came of a block: its record, the resolved arguments, the rendered prompts, and what ended it early.

    `remains` waits once more for what its server left behind. `interrupted`: a signal came while the server was being
    stopped, or the deadline after its passes; the block was measured whole, so it is kept before that is obeyed.
    """

    record: dict[str, Any]
    remains: Callable[[], StopReport] = StopReport.nothing
    arguments: dict[str, Any] = field(default_factory=dict)
    server_info: Mapping[str, Any] = field(default_factory=dict)
    rendered_sha256: str = ""
    samples: list[telemetry.Sample] = field(default_factory=list)
    fatal: Unusable | None = None
    interrupted: Terminated | Deadline | None = None


Save = Callable[[Mapping[str, Any]], None]
Say = Callable[[str], None]


def run(task: Task, *, save: Save, say: Say, on_ready: Callable[[Outcome], None],
        in_time: Callable[[], None] = lambda: None) -> Outcome:
    """Start, warm up, measure, stop. `save` takes each request's record, `on_ready` may refuse the server by raising.

    `in_time` is called all the while and may raise `Deadline`; once all passes are measured, that is in the outcome,
    too, and the block counts. A `ServerFault` does not leave this function: it
    is in the outcome, with what was measured before. The server is stopped in every case.
    """
    record: dict[str, Any] = {
        "index": task.index, "slot": task.slot, "pair": task.pair, "arm": task.arm.name, "port": task.launch.port,
        "pids": [], "t_start": round(time.perf_counter() - task.origin, 3), "t_ready_s": None, "ready_evidence": {},
        "warmup": None, "flush": [], "passes": [], "stop": None, "telemetry": None,
        "validity": {"ok": False, "causes": []}}
    outcome = Outcome(record)
    causes: list[str] = record["validity"]["causes"]
    version = str(task.plan["image"]["packages"].get("sglang", ""))
    server = Server(task.launch, grace=task.grace, version=version)
    sampler = telemetry.Sampler(task.origin)
    try:
        server.start()
        record["pids"] = [server.pid]
        ready = wait_ready(server, task.expect, stall=task.stall, deadline=task.ready_seconds, on_progress=say,
                           in_time=in_time)
        record["t_ready_s"] = round(ready.seconds, 3)
        record["ready_evidence"] = dict(ready.evidence)
        record["contract"] = (ready.evidence.get("contract") or {}).get("missing", [])
        outcome.server_info = ready.server_info
        outcome.arguments = resolved(ready.server_info)
        record["changed_arguments"] = changed(task.launch.argv, ready.server_info)
        measuring = _Measuring(task, server, outcome, save, say, in_time)
        with sampler:
            measuring.all(on_ready)
        _telemetry(outcome, sampler, measuring, server.pids)
        record["resident_bytes"] = processes.activity([one.pid for one in server.members]).resident_bytes
    except Unusable as error:
        outcome.fatal = error
        said = str(error.problems[0].found or error.problems[0].what).splitlines()[0]
        died = isinstance(error, ServerDied) and not said.startswith(error.kind)
        causes.append(f"{error.kind}: {said}" if died else said)
        if isinstance(error, ServerFault):
            record["diagnosis"] = error.diagnosis.as_dict()
    except BaseException:
        server.stop()
        raise
    try:
        say("stopping")
        report = server.stop()
    except Terminated as stop:
        outcome.interrupted = stop
        report = server.stop(0)
    record["stop"] = report.as_dict()
    outcome.remains = server.remains
    record["t_end"] = round(time.perf_counter() - task.origin, 3)
    record["validity"]["ok"] = not causes
    return outcome


def _telemetry(outcome: Outcome, sampler: telemetry.Sampler, measuring: _Measuring, own: Sequence[int]) -> None:
    outcome.samples = list(sampler.samples)
    summary = telemetry.summarise(outcome.samples, measuring.spans, tokens=measuring.tokens, own=own)
    summary["warnings"] = telemetry.warnings(summary)
    summary["trace"] = telemetry.trace(outcome.samples)
    outcome.record["telemetry"] = summary
    outcome.record["validity"]["causes"] += telemetry.causes(summary)


class _Measuring:
    """The part of a block in which the server is up."""

    def __init__(self, task: Task, server: Server, outcome: Outcome, save: Save, say: Say,
                 in_time: Callable[[], None]) -> None:
        self.task = task
        self.in_time = in_time
        self.server = server
        self.outcome = outcome
        self.record = outcome.record
        self.causes: list[str] = outcome.record["validity"]["causes"]
        self.save = save
        self.say = say
        self.host, self.port = "127.0.0.1", task.launch.port
        self.spans: list[tuple[float, float]] = []
        self.tokens = 0
        self.version = str(outcome.server_info.get("version") or task.plan["image"]["packages"].get("sglang", ""))

    def watch(self) -> None:
        """Called about four times a second while anything is waited for: is the server alive, and is there time?"""
        self.server.check()
        self.in_time()

    def all(self, on_ready: Callable[[Outcome], None]) -> None:
        plan, task = self.task.plan, self.task
        rendered = self._render((*task.pack.measured, *task.pack.warmup))
        self.outcome.rendered_sha256 = prompts.rendered_digest(rendered)
        on_ready(self.outcome)
        shared = prompts.shared_prefix({one.id: rendered[one.id] for one in task.pack.measured})
        self._warm_up(rendered)
        compiled = self._compiled()
        order = prompts.order(task.pack, (plan["order_seed"], task.pair))
        jobs = [client.Job(one.id, one.stratum, rendered[one.id], plan["max_tokens"]) for one in order]
        for number in range(plan["passes"]):
            for point in plan["load_points"]:
                self.watch()
                self._pass(number, point, jobs, shared)
        grown = self._compiled() - compiled
        self.record["warmup"]["jit_files_while_measuring"] = len(grown)
        if grown:
            self.causes.append(f"{len(grown)} kernels were compiled while measuring, first {min(grown)}")
        summary = None
        self.record.update(server_info_after={}, ties=[])
        try:
            self.record["server_info_after"] = self._thresholds()
            self.record["ties"] = asyncio.run(self._ties(rendered))
            summary = self._trace()
            if self.task.problems:
                self.record["task"] = self._problems()
        except Deadline as late:  # the passes are whole: the block is kept before the deadline is obeyed
            self.outcome.interrupted = late
        self.record["evidence"] = self._evidence(len(grown), summary)

    def _render(self, wanted: Sequence[prompts.Prompt]) -> dict[str, tuple[int, ...]]:
        """By the server; when it cannot render chats, by its tokenizer, unless its template is not the model's own."""
        try:
            return asyncio.run(prompts.render(self.host, self.port, wanted, api_key=self.task.api_key,
                                              watch=self.watch))
        except Unusable:
            self.server.check()
            if self.outcome.server_info.get("chat_template"):
                raise
            self.say("the server renders no chats (/v1/tokenize); its tokenizer does it")
            return self.task.render(wanted)

    def _generate(self, jobs: Sequence[client.Job], concurrency: int, *, rate: float | None = None,
                  done: list[tuple[client.Job, client.Raw]] | None = None) -> client.Load:
        try:
            return asyncio.run(client.generate(self.host, self.port, jobs, concurrency=concurrency,
                                               stall=self.task.stall, api_key=self.task.api_key,
                                               watch=self.watch, done=done, rate=rate,
                                               seed=self.task.plan["order_seed"] + self.task.pair))
        except client.StalledError as error:
            self.server.check()  # a dead server explains the silence better
            spin = telemetry.spinning_now()
            raise NotReady(self.server.diagnose(
                f"the server hangs: {error}" + (f"; {spin}: waiting in a loop" if spin else ""),
                "on several PCIe GPUs: NCCL_P2P_DISABLE=1, then IOMMU/ACS; else see the end of its log; a shorter "
                "--stall-seconds notices sooner", "hang")) from error

    def _warm_up(self, rendered: Mapping[str, Sequence[int]]) -> None:
        """The same prompts again and again until the rate is steady and nothing is compiled any more."""
        plan, began = self.task.plan["warmup"], time.perf_counter()
        windows: list[dict[str, Any]] = []
        before = first = self._compiled()
        stable = True
        for point in self.task.plan["load_points"]:
            size = max(plan["window"], 2 * point)
            names = [self.task.pack.warmup[place % len(self.task.pack.warmup)] for place in range(size)]
            jobs = [client.Job(one.id, one.stratum, rendered[one.id], plan["max_tokens"]) for one in names]
            rates: list[float] = []
            new_files: list[int] = []
            for number in range(plan["max_windows"]):
                load = self._generate(jobs, point)
                rows = [client.record(job, raw, self.task.origin) for job, raw in load.raws]
                good = [row for row in rows if analyse.measurable(row)]
                if not good and any(row["error"] for row in rows):
                    self._check_requests(rows)
                    why = next(row["error"] for row in rows if row["error"])
                    raise NotReady(Diagnosis(cause=f"the warm-up brought nothing to time: {why}",
                                             remedy="see the server's log", log=str(self.task.launch.log)))
                if not good:  # one token each, or all in one read: nothing to time in this window
                    windows.append({"concurrency": point, "tok_s": None, "new_files": 0})
                    continue
                now = self._compiled()
                rates.append(_window_rate(good))
                new_files.append(len(now - before))
                before = now
                windows.append({"concurrency": point, "tok_s": round(rates[-1], 3), "new_files": new_files[-1]})
                self.say(f"warm-up {number + 1}: {rates[-1]:.1f} tok/s")
                if _steady(rates, new_files, plan):
                    break
            else:
                stable = False
                (self.causes if plan["required"] else []).append(
                    f"not steady after {len(rates)} warm-up windows at concurrency {point}: "
                    f"last {', '.join(f'{one:.1f}' for one in rates[-plan['agree']:])} tok/s")
        self.record["warmup"] = {"windows": windows, "stable": stable,
                                 "seconds": round(time.perf_counter() - began, 3),
                                 "jit_files_new": len(before - first), "jit_files_while_measuring": 0}

    def _pass(self, number: int, point: int, jobs: Sequence[client.Job], shared: Mapping[str, int]) -> None:
        flush = asyncio.run(_flush(self.host, self.port, self.task.api_key, self.watch))
        self.record["flush"].append(flush)
        self.say(f"pass {number + 1}, concurrency {point}, {len(jobs)} requests")
        done: list[tuple[client.Job, client.Raw]] = []
        rows: list[dict[str, Any]] = []
        begin = time.perf_counter() - self.task.origin
        try:
            load = self._generate(jobs, point, rate=self.task.plan["rate"], done=done)
        finally:  # what was answered before a death or a stop is kept
            for job, raw in done:
                rows.append(client.record(job, raw, self.task.origin))
                self.save({"block": self.task.index, "pair": self.task.pair, "arm": self.task.arm.name,
                           "pass": number, "concurrency": point, **rows[-1]})
        self.spans.append((begin, time.perf_counter() - self.task.origin))
        self.tokens += sum(row["n_tokens_server"] or 0 for row in rows)
        self._check_requests(rows)
        hits = [row for row in rows if (row["cached_tokens"] or 0) > shared[row["prompt_id"]]]
        if hits:
            self.causes.append(f"{len(hits)} requests of pass {number} hit the prefix cache, first "
                               f"{hits[0]['prompt_id']} with {hits[0]['cached_tokens']} cached tokens")
        elif not flush["ok"] and any(row["cached_tokens"] is None for row in rows):
            self.causes.append(f"cache not flushed before pass {number} (HTTP {flush['status']}), and the server does "
                               "not say how many tokens were cached")
        gap = _median_gap(rows)
        lag = load.lag_p99_ms()
        share = self.task.plan["client"]["lag_share"]
        if gap is not None and lag is not None and share is not None and lag > max(1.0, share * gap):
            self.causes.append(f"the client itself was late: lag of its loop p99 {lag:.1f} ms, "
                               f"a chunk every {gap:.1f} ms")
        self.record["passes"].append({
            "pass": number, "load_point": point, "duration_s": round(load.seconds, 3),
            "errors": sum(bool(row["error"]) for row in rows), "cache_hits": len(hits),
            "cached_tokens_max": max((row["cached_tokens"] or 0 for row in rows), default=0),
            "client": {"loop_lag_p99_ms": lag, "cpu_seconds": round(load.cpu_seconds, 3),
                       "queue_ms_p99": analyse.quantiles([1e3 * (row["t_send"] - row["t_queue"]) for row in rows
                                                          if row["t_send"] is not None], (99,), 3)["p99"]}})

    def _check_requests(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A failed request is often the first sign of a death: give it a moment to show."""
        if any(row["error"] for row in rows):
            self.server.wait(1.0)

    def _compiled(self) -> frozenset[str]:
        return frozenset(found for name in JIT_CACHES
                         for found in _files(Path(self.task.launch.env.get(name, "/nonexistent"))))

    def _trace(self) -> trace.Summary | None:
        """A short trace, now that nothing is measured any more; None when none is wanted or to be had."""
        if self.task.trace is None:
            return None
        try:
            return trace.take(self.port, self.task.trace, version=self.version,
                              gpu=self.task.plan["image"]["cuda"] is not None,
                              api_key=self.task.api_key, while_waiting=self.watch)
        except (NoAnswer, ServerFault) as error:  # the measurement is over, its numbers stand
            self.say(f"no trace: {error}")
            return None

    def _evidence(self, jit_files: int, summary: trace.Summary | None) -> list[dict[str, Any]]:
        """What this start shows for each claim."""
        return evidence.observe(evidence.Observation(
            arm=self.task.arm.name, version=self.version, server_info=self.outcome.server_info,
            environment=self.task.launch.env, log=self.server.log.everything(), patches=self.task.patches,
            jit_files=jit_files, trace=summary), required=self.task.plan["required_evidence"])

    async def _ties(self, rendered: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """Teacher-force the common prefix and ask for the best next tokens; what fails is left out."""
        judged = []
        for fork in self.task.forks:
            body = {"input_ids": [*rendered[fork["prompt_id"]], *fork["prefix"]], "return_logprob": True,
                    "top_logprobs_num": equivalence.TOP, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}}
            try:
                response = await client.call(self.host, self.port, "POST", "/generate", body, stall=self.task.stall,
                                             api_key=self.task.api_key, watch=self.watch)
                top = json.loads(response.text)["meta_info"]["output_top_logprobs"][0]
                judged.append(equivalence.judge(fork, [(float(one[0]), int(one[1])) for one in top]))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                self.say(f"split of {fork['prompt_id']} not looked at: {error}")
            except client.StalledError as error:  # the next question would only wait as long again
                self.say(f"split of {fork['prompt_id']} and the rest not looked at: {error}")
                break
        return judged

    def _problems(self) -> dict[str, Any]:
        """The task check: (problem, right answer, given answer, right) each; unanswered requests are only counted."""
        began, problems = time.perf_counter(), self.task.problems
        answers: list[list[Any]] = []
        failed = 0
        for part in (problems[:task.PROBE], problems[task.PROBE:]):
            if not part or task.hopeless([right for _, _, _, right in answers]):
                break
            self.say(f"task check, {len(part)} problems")
            rendered = self._render([prompts.Prompt(one.id, "task", one.messages) for one in part])
            jobs = [client.Job(one.id, "task", rendered[one.id], self.task.plan["max_tokens"]) for one in part]
            load = self._generate(jobs, self.task.plan["task_check"]["concurrency"])
            said = {job.prompt_id: raw for job, raw in load.raws}
            for one in part:
                try:
                    given = task.extract(client.answer(said[one.id]))
                except (ValueError, KeyError):
                    failed += 1
                    continue
                answers.append([one.id, one.answer, given, given == one.answer])
        return {"asked": len(problems), "answers": answers, "failed": failed,
                "seconds": round(time.perf_counter() - began, 3)}

    def _thresholds(self) -> dict[str, Any]:
        """Acceptance thresholds after the measurement: they can be changed while a server runs."""
        try:
            response = asyncio.run(client.call(self.host, self.port, "GET", "/server_info", stall=self.task.stall,
                                               api_key=self.task.api_key, watch=self.watch))
            table = json.loads(response.text)
        except (ValueError, client.StalledError):
            return {}
        state = (table.get("internal_states") or [{}])[0]
        names = [name for name in state if name.startswith("speculative_accept_threshold")]
        return {name: state[name] for name in names}


def _files(folder: Path) -> list[str]:
    """All files below a folder; one that vanishes while we look is no concern."""
    return [f"{root}/{name}" for root, _, names in os.walk(folder) for name in names]


def _window_rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens after the first chunks over the time after the first chunks, all requests of a window together."""
    tokens = sum(row["n_tokens_server"] - row["n_first_chunk"] for row in rows)
    return float(tokens / sum(row["t_last"] - row["t_first"] for row in rows))


def _steady(rates: Sequence[float], new_files: Sequence[int], plan: Mapping[str, Any]) -> bool:
    last = rates[-plan["agree"]:]
    return (len(rates) >= plan["min_windows"] and max(last) / min(last) <= 1 + plan["tolerance"]
            and not any(new_files[-2:]))


def _median_gap(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Median time between chunks in ms."""
    gaps = [1e3 * float(np.median(np.diff([moment for moment, _ in row["chunks"]])))
            for row in rows if len(row["chunks"]) > 1]
    return float(np.median(gaps)) if gaps else None


async def _flush(host: str, port: int, api_key: str, watch: Callable[[], None]) -> dict[str, Any]:
    """Empty the prefix cache and check that it was done: the server answers 400 while a request is pending.

    `watch` is called all the while; it raises when the server is dead.
    """
    status: int | None = None
    message = ""
    for attempt in range(1, FLUSH_TRIES + 1):
        try:
            response = await client.call(host, port, "POST", "/flush_cache", api_key=api_key, watch=watch)
            status, message = response.status, response.text.splitlines()[0] if response.text else ""
        except ValueError as error:
            status, message = None, str(error)
        except client.StalledError as error:  # it hangs: the pass that follows will say so
            status, message = None, str(error)
            break
        if status == 200:
            break
        if status in {401, 403, 404, 405}:  # waiting does not help
            break
        watch()
        await asyncio.sleep(FLUSH_PAUSE * attempt)
    return {"status": status, "ok": status == 200, "attempts": attempt, "message": message}

