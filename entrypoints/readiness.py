"""When a server really serves: live child, own listener, health, the right model and arguments, one real completion.

No single sign is enough: the port opens before the weights answer, `/model_info` is 200 while the warm-up runs, a
left-over server answers in place of a new one, and `/health` does not look at the text.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from entrypoints import contract, health, models, probe, processes, telemetry
from entrypoints.command import is_secret
from entrypoints.errors import NotReady
from entrypoints.generation import Generation
from entrypoints.probe import Address, NoAnswer
from entrypoints.supervise import Server

#: tokens of the completion that proves readiness, and how many of them must come
PROBE_TOKENS, MINIMUM_TOKENS = 32, 16
#: share of different neighbouring pairs below which text counts as one thing repeated
MINIMUM_VARIETY = 0.2
PROBE_TEXT = "The capital city of France is"
#: for a server without a tokenizer; SGLang's own warm-up asks with ids like these
PROBE_IDS = (10, 11, 12, 13)
#: how long a healthy server may give wrong answers before we stop asking, seconds from the first one on
PATIENCE = 60.0
#: less reading than this, or less growth, is waiting and not loading
LOAD_BYTES, GROWTH_BYTES = 4 * 2**20, 32 * 2**20
_PAUSE = 0.1
#: our own questions show in the server's log: no progress of its own
_OUR_QUESTIONS = re.compile(r'"(GET|POST) /(health|ready|model_info|server_info|get_server_info|generate)\S* HTTP')
#: what must be as asked, beside everything that begins with `speculative_`
IDENTITY = frozenset({"port", "device", "random_seed", "quantization"})
#: what SGLang may resolve to something else by itself (NEXTN becomes EAGLE, one draft path sets the draft tokens)
RESOLVED = frozenset({"speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
                      "speculative_num_draft_tokens", "quantization"})
#: flags that name model files
MODELS = ("model_path", "model", "speculative_draft_model_path", "speculative_draft_model", "tokenizer_path")
T = TypeVar("T")
_ELSEWHERE = re.compile(r"Uvicorn running on https?://\S+:(\d+)")


@dataclass(frozen=True)
class Expect:
    """What the server must say about itself: its model path, and `/server_info` keys with their values."""

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = ""
    #: where to ask it; None: on the port of its launch, over the loopback
    address: Address | None = None


@dataclass(frozen=True)
class Ready:
    """A server that serves: seconds since its start, what was seen, and its `/server_info` whole."""

    seconds: float
    evidence: Mapping[str, Any]
    server_info: Mapping[str, Any]


def wait_ready(server: Server, expect: Expect, *, stall: float, deadline: float | None = None,
               on_progress: Callable[[str], None] = lambda _line: None, patience: float = PATIENCE,
               mode: str = "benchmark", in_time: Callable[[], None] = lambda: None) -> Ready:
    """Wait until the server serves; bounded by progress (`stall` seconds without any) and not by one wall clock.

    Raises `ServerDied`, or `NotReady` for a stall, a deadline or wrong answers, each with a diagnosis. `on_progress`
    gets one short line for each step forward; the heartbeat is kept up, for `mode`. `in_time` is called all the while
    and may raise.
    """
    watch = _Watch(server, expect, stall, deadline, on_progress, mode, in_time)
    listener = _opened(watch)
    endpoint = _until(watch, "it reports health", lambda: _healthy(watch))
    watch.say(f"/{endpoint} says 200")

    watch.patience = min(stall, patience)
    info = _until(watch, "it describes itself", lambda: _server_info(watch))
    _require_match(server, expect, info)
    what, question = _question(watch, info)
    completion = _until(watch, what, question)
    watch.say(_answered(completion))
    meta_info = completion.pop("meta_info", None)
    missing = _contract(watch, info, meta_info)
    if missing:
        watch.say("this SGLang lacks what we use: " + "; ".join(
            f"{one['name']} (unavailable: {', '.join(one['consumers'])})" for one in missing))
    server.settle()
    server.check()
    evidence = {"pid": server.pid, "port": watch.address.port, "listener_pid": listener, "health": f"/{endpoint}",
                "completion": completion, "steps": watch.steps,
                "contract": {"version": server.version, "missing": missing},
                "unchecked": sorted(set(expect.arguments) - set(info))}
    return Ready(seconds=time.monotonic() - server.started, evidence=evidence, server_info=info)


def wait_listening(server: Server, *, stall: float, deadline: float | None = None,
                   on_progress: Callable[[str], None] = lambda _line: None, mode: str = "serve") -> None:
    """Wait until the server's own listener is open, and no further: for servers that speak no HTTP that we know.

    Raises as `wait_ready`.
    """
    _opened(_Watch(server, Expect(""), stall, deadline, on_progress, mode, lambda: None))
    server.settle()
    server.check()


def listening(server: Server) -> bool:
    """Whether a process of the server's own still listens on its port."""
    inodes = processes.listeners().get(server.launch.port) or set()
    return any(inodes & processes.socket_inodes(one.pid) for one in server.look()) if inodes else False


def asked(argv: Sequence[str]) -> dict[str, Any]:
    """Flags of a server command line as `/server_info` names them: `--max-running-requests 8` -> the value "8".

    A flag without value is True. Only for comparing: abbreviations and lists stay as they are written.
    """
    found: dict[str, Any] = {}
    words = list(argv)
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            found[name.replace("-", "_")] = value if equals else True if following.startswith("--") else following
    return found


def key_of(argv: Sequence[str]) -> str:
    """The key that a server started so asks for, "" for none; SGLang takes every beginning of the flag's name."""
    return next((str(value) for name, value in asked(argv).items() if name and "api_key".startswith(name)), "")


def differences(wanted: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """«key: asked X, server says Y» for every key that the server reports with another value."""
    return [f"{key}: asked {value}, server says {info[key]}" for key, value in wanted.items()
            if key in info and not _same(value, info[key])]


def identity(argv: Sequence[str]) -> dict[str, Any]:
    """What a server must say about itself to be the one that was started.

    Other arguments may be resolved to something else; they are compared between the arms, and changes are noted.
    """
    return {name: value for name, value in asked(argv).items() if name.startswith("speculative_") or name in IDENTITY}


def changed(argv: Sequence[str], info: Mapping[str, Any]) -> list[str]:
    """`differences` of a whole command line: what the server made of its flags. Lists and secrets are left out."""
    words, single = list(argv), {}
    for name, value in asked(argv).items():
        spelt = [index for index, word in enumerate(words) if word == "--" + name.replace("_", "-")]
        many = any(not word.startswith("--") for index in spelt for word in words[index + 2:index + 3])
        if not many and not is_secret(name):
            single[name] = value
    return differences(single, info)


def is_sane(tokens: Sequence[object]) -> bool:
    """Whether tokens (or words) look like text: enough of them, and not one thing over and over."""
    if len(tokens) < MINIMUM_TOKENS:
        return False
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs) >= MINIMUM_VARIETY


class _Watch:
    """Looks at the server while something is awaited, and knows when it last moved."""

    def __init__(self, server: Server, expect: Expect, stall: float, deadline: float | None,
                 on_progress: Callable[[str], None], mode: str, in_time: Callable[[], None]) -> None:
        self.server = server
        self.address = expect.address or Address(server.launch.port)
        self.api_key = expect.api_key
        self.in_time = in_time
        self.mode = mode
        self.stall = stall
        self.end = server.started + deadline if deadline else None
        #: seconds from the first wrong answer on; one that has not come yet may be a kernel that is being compiled
        self.patience: float | None = None
        self.limit: float | None = None
        self.on_progress = on_progress
        self.awaited = self.last_trouble = ""
        self.steps: dict[str, float] = {}
        self._read = 0
        self._moved = time.monotonic()
        self._next = 0.0
        self._activity = processes.Activity(0, 0, 0)
        self._seen = 0

    def say(self, step: str) -> None:
        """A step was reached."""
        self._moved = time.monotonic()
        self.steps[step] = round(self._moved - self.server.started, 3)
        self.on_progress(step)

    def ask(self, path: str, payload: Any = None) -> probe.Answer:
        """A question to the server, which is looked at meanwhile. Raises `NoAnswer`, and as `tick` does."""
        return probe.ask(self.address, path, payload, api_key=self.api_key, while_waiting=self.tick)

    def tick(self) -> None:
        """Raise when the server is dead, or stalled, or out of time."""
        self.server.check()
        self.in_time()
        health.beat("starting", self.mode)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.5
            if self._moving():
                self._moved = now
        if now - self._moved >= self.stall:
            self.fail(f"no progress for {self.stall:g} s while waiting until {self.awaited}: no log line, nothing "
                      f"read, no memory growth{_spin()}{self._last_line()}", self._stall_remedy(), "stalled")
        if self.end and now >= self.end:
            self.fail(f"not ready before the time limit, still waiting until {self.awaited}{self._trouble()}",
                      "a longer --ready-seconds, or 0 for no limit as long as it moves", "start-deadline")
        if self.limit and now >= self.limit:
            self.fail(f"healthy by its own word, but {self.awaited} did not happen{self._trouble()}",
                      "see the log; the model files or a kernel are probably wrong", "wrong-answers")

    def fail(self, cause: str, remedy: str, fault: str) -> NoReturn:
        raise NotReady(self.server.diagnose(cause, remedy, fault))

    def _moving(self) -> bool:
        """Log lines of its own, bytes loaded, memory grown, or new processes (compilers)."""
        lines, self._read = self.server.log.since(self._read), self.server.log.total
        for line in lines:
            if (found := _ELSEWHERE.search(line)) and int(found[1]) != self.server.launch.port:
                self.fail(f"it listens on port {found[1]} instead of {self.server.launch.port}",
                          "another process took the port first: start again", "other-port")
        moved = any(not _OUR_QUESTIONS.search(line) for line in lines)
        now = processes.activity([one.pid for one in self.server.members])
        before = self._activity
        if (moved or self.server.processes_seen != self._seen or now.io_bytes - before.io_bytes >= LOAD_BYTES
                or now.resident_bytes - before.resident_bytes >= GROWTH_BYTES):
            self._activity, self._seen = now, self.server.processes_seen
            return True
        return False

    def _stall_remedy(self) -> str:
        """A hub that accepts and never answers and a hung all-reduce look alike from here."""
        said = asked(self.server.launch.argv)
        remote = [str(said[name]) for name in MODELS if name in said and not models.is_local(str(said[name]))]
        hub = (f"{' and '.join(remote)} may be waiting for the hub: give a folder, or HF_HUB_OFFLINE=1 with the files "
               "in the cache; else " if remote else "")
        return (f"{hub}all-reduce over PCIe is the usual place: try NCCL_P2P_DISABLE=1, then look at IOMMU/ACS; a "
                "longer --stall-seconds if the machine is just slow")

    def _last_line(self) -> str:
        lines = [line for line in self.server.log.lines if not _OUR_QUESTIONS.search(line)]
        return f"; last line: {lines[-1]}" if lines else "; the log is empty"

    def _trouble(self) -> str:
        return f": {self.last_trouble}" if self.last_trouble else ""


def _spin() -> str:
    spin = telemetry.spinning_now()
    return f"; {spin}" if spin else ""


def _until(watch: _Watch, awaited: str, question: Callable[[], T | None]) -> T:
    """Ask until there is an answer; a wrong one is remembered as the last trouble."""
    watch.awaited = awaited
    while True:
        watch.tick()
        try:
            if (answer := question()) is not None:
                watch.limit, watch.last_trouble = None, ""
                return answer
        except NoAnswer as trouble:
            watch.last_trouble = str(trouble)
            if watch.patience is not None and watch.limit is None:
                watch.limit = time.monotonic() + watch.patience
        time.sleep(_PAUSE)


def _opened(watch: _Watch) -> int:
    """Wait for the port; the pid that listens."""
    listener = _until(watch, "its port opens", lambda: _own_listener(watch.server))
    watch.say(f"port {watch.server.launch.port} open, held by pid {listener}")
    return listener


def _own_listener(server: Server) -> int | None:
    """Pid of our process that listens on the port; None while nobody does. Raises `NotReady` when it is a foreigner."""
    port = server.launch.port
    inodes = processes.listeners().get(port)
    if not inodes:
        return None
    for one in server.look():
        if inodes & processes.socket_inodes(one.pid):
            return one.pid
    raise NotReady(server.diagnose(f"port {port} is held by {processes.holder(port)}, not by the server just started",
                                   "end that process, or use another port", "foreign-listener"))


def _healthy(watch: _Watch) -> str | None:
    """Name of the endpoint that says so: `/ready` (SGLang 0.5.20 and later) answers at once, `/health` takes 1 s."""
    for endpoint in ("ready", "health"):
        answer = watch.ask(f"/{endpoint}")
        if answer.status == 200:
            return endpoint
        watch.last_trouble = f"/{endpoint} says {answer.status}"
        if answer.status != 404:
            return None
    return None


def _server_info(watch: _Watch) -> Mapping[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        answer = watch.ask(path)
        if answer.status == 404:
            continue
        if answer.status in {401, 403}:
            raise NoAnswer(f"{path} says {answer.status}: the server wants another key than the one it was given")
        info = answer.json()
        if answer.status == 200 and isinstance(info, dict):
            return info
        raise NoAnswer(f"{path} says {answer.status} with {type(info).__name__}")
    raise NoAnswer("/server_info is not there")


def _require_match(server: Server, expect: Expect, info: Mapping[str, Any]) -> None:
    """Raise `NotReady` with every difference between what was asked for and what answers."""
    wrong = differences(expect.arguments, info)
    names = (info.get("model_path"), info.get("served_model_name"))
    if expect.model and expect.model not in names:
        wrong.insert(0, f"model: asked {expect.model}, server says {names[0]}")
    if wrong:
        raise NotReady(server.diagnose(f"the server that answers is not the one asked for: {'; '.join(wrong)}",
                                       "the server changed these arguments itself, or another server answers",
                                       "other-server"))


def _question(watch: _Watch, info: Mapping[str, Any]) -> tuple[str, Callable[[], dict[str, Any] | None]]:
    """What this kind of server must do to prove that it works, in words and as a question."""
    if str(info.get("disaggregation_mode") or "null") != "null":
        return "it generates a token for its own health request", lambda: _generates(watch)
    if info.get("is_embedding") or not _until(watch, "it describes its model", lambda: _generation(watch)):
        return "it embeds a text", lambda: _embedding(watch)
    prompt: dict[str, Any] = {"text": PROBE_TEXT}
    if info.get("skip_tokenizer_init"):
        prompt = {"input_ids": list(PROBE_IDS)}
    return "it completes a prompt with sane text", lambda: _complete(watch, prompt)


def _answered(found: Mapping[str, Any]) -> str:
    """One line of progress: what was proved, and what was not."""
    unproved = f"; not proved: {found['unproved']}" if "unproved" in found else ""
    if "dimensions" in found:
        return f"embedded a text: {found['dimensions']} numbers"
    if "tokens" in found:
        return f"completed a prompt: {found['tokens']} tokens{unproved}"
    return f"{found['endpoint']} says {found['status']}{unproved}"


def _generation(watch: _Watch) -> bool:
    """Whether the model generates; one that makes embeddings or scores can say so where no flag does."""
    answer = watch.ask("/model_info")
    table = answer.json() if answer.status == 200 else {}
    return not isinstance(table, dict) or table.get("is_generation") is not False


def _generates(watch: _Watch) -> dict[str, Any] | None:
    """Half of a disaggregated pair completes no prompt alone; its health request passes through its scheduler."""
    answer = watch.ask("/health_generate")
    if answer.status != 200:
        raise NoAnswer(f"/health_generate says {answer.status}")
    return {"endpoint": "/health_generate", "status": 200,
            "unproved": "text, which prefill and decode only bring together"}


def _embedding(watch: _Watch) -> dict[str, Any]:
    """One embedding (or score) of finite numbers; a model with an endpoint of its own refuses the question."""
    answer = watch.ask("/encode", {"text": PROBE_TEXT})
    if 400 <= answer.status < 500 and answer.status not in {401, 403}:
        return {"endpoint": "/encode", "status": answer.status,
                "unproved": "an answer, for which this kind of model has another endpoint"}
    found = answer.json()
    vector = found.get("embedding") if isinstance(found, dict) else None
    numbers = vector if isinstance(vector, list) else [vector]
    if answer.status != 200 or not numbers or not all(isinstance(one, int | float) and math.isfinite(one)
                                                      for one in numbers):
        raise NoAnswer(f"/encode says {answer.status} with no embedding but {answer.body[:60]!r}")
    return {"endpoint": "/encode", "dimensions": len(numbers)}


def _complete(watch: _Watch, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """One streamed greedy completion. Raises `NoAnswer` when it is cut short, an error, or no text.

    Its first token may take as long as the server moves: kernels are compiled for it. What follows ids that mean
    nothing may well repeat itself, so only text is judged.
    """
    payload = {**prompt, "stream": True,
               "sampling_params": {"temperature": 0.0, "max_new_tokens": PROBE_TOKENS, "ignore_eos": True}}
    begin = time.monotonic()
    made, events, done = Generation(), 0, False
    for data in probe.stream(watch.address, "/generate", payload, silence=None, api_key=watch.api_key,
                             while_waiting=watch.tick):
        if data == "[DONE]":
            done = True
            break
        try:
            message = json.loads(data)
        except ValueError:
            raise NoAnswer(f"/generate streams something that is not JSON: {data[:60]!r}") from None
        try:
            made.add(message)
        except ValueError as error:
            raise NoAnswer(f"/generate: {error}") from None
        events += 1
    text = made.text
    tokens: Sequence[object] = made.ids or text.split()
    count = len(tokens) if made.total is None else made.total
    if not done or count < MINIMUM_TOKENS:
        raise NoAnswer(f"/generate ended after {count} tokens, {'complete' if done else 'cut off'}")
    found = {"endpoint": "/generate", "tokens": count, "events": events,
             "seconds": round(time.monotonic() - begin, 3), "text": text[:200], "meta_info": made.meta}
    if "text" not in prompt:
        return {**found, "unproved": "sane text, as the server has no tokenizer"}
    if not is_sane(tokens):
        raise NoAnswer(f"/generate gives no text but {text[:60]!r}")
    return found


def _contract(watch: _Watch, info: Mapping[str, Any], meta_info: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What contract.toml names and this server does not have. A list of endpoints is judged when it gives one."""
    conditions = {"speculative"} if info.get("speculative_algorithm") else set()
    paths = metrics = None
    try:
        answer = watch.ask("/openapi.json")
        paths = set(answer.json()["paths"]) if answer.status == 200 else None
        if info.get("enable_metrics"):
            answer = watch.ask("/metrics")
            if answer.status == 200:
                conditions.add("metrics")
                metrics = {line.partition("{")[0].partition(" ")[0] for line in answer.body.decode().splitlines()}
                paths = paths and paths | {"/metrics"}  # mounted, so not among the documented ones
    except (NoAnswer, KeyError, TypeError) as trouble:
        watch.last_trouble = str(trouble)
    version = str(info.get("version") or watch.server.version)
    return [one.as_dict() for one in contract.missing_live(version, server_info=info, meta_info=meta_info, paths=paths,
                                                           metrics=metrics, conditions=conditions)]


def _same(asked_value: Any, reported: Any) -> bool:
    """Whether a flag's text and a JSON value mean the same."""
    if isinstance(asked_value, bool) or isinstance(reported, bool) or reported is None:
        return bool(asked_value == reported)
    try:
        return float(asked_value) == float(reported)
    except (TypeError, ValueError):
        return str(asked_value) == str(reported)
