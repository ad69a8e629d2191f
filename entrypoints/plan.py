"""What a benchmark will do, fixed before the first measurement: arms, order of server starts, looks, margin.

Pure. The plan is a JSON document whose hash goes into the result, so that nobody can move the goal afterwards.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entrypoints import evidence
from entrypoints.command import HIDDEN, given_flags, is_secret, mask, mask_text, server_argv
from entrypoints.errors import BadConfig, Invalid, Problem, Usage
from entrypoints.image import Flags, Image, Scalar
from entrypoints.noise import CONTROL, CONTROL_PAIRS, FEW_PAIRS
from entrypoints.prompts import Pack
from entrypoints.settings import Settings

SCHEMA = 1
#: numbers of pairs at which the data are looked at, for each effort
LOOKS: Mapping[str, tuple[int, ...]] = {"quick": (2,), "standard": (4, 6, 8), "thorough": (4, 6, 8, 10, 12)}
#: two-sided level per look that keeps 5 percent over 1 to 5 looks (Pocock's constants; checked by simulation in
#: tests/unit/entrypoints/test_analyse_simulation.py)
LOOK_ALPHA = (0.05, 0.0294, 0.0221, 0.0182, 0.0158)
ALPHA = 0.05
#: arguments that speculation sets itself and that no user can keep equal
FORCED = frozenset({"disable_overlap_schedule", "enable_mixed_chunk"})
#: entries of /server_info that are no arguments, or that differ between any two starts
NOT_ARGUMENTS = frozenset({
    "host", "port", "nccl_port", "dist_init_addr", "engine_info_bootstrap_port", "disaggregation_bootstrap_port",
    "encoder_bootstrap_port", "launch_command", "startup_time", "internal_states", "kv_events", "status",
    "server_args_hash", "max_total_num_tokens", "max_req_input_len"})
#: live values that must be equal although no argument names them
LIVE = ("effective_max_running_requests_per_dp",)
#: how to make an argument equal whose name is not that of a flag to give
REMEDIES: Mapping[str, str] = {
    "cuda_graph_config": "--cuda-graph-max-bs-decode N (the captured sizes are then pinned in both arms)",
    "effective_max_running_requests_per_dp": "--max-running-requests N"}
#: requests in flight of the task check; greedy, so that only rounding depends on it
TASK_CONCURRENCY = 16
PORT, INIT_PORT = "{port}", "{init_port}"
#: flags with which the rendezvous of the server's processes is the user's, or one for each replica
_RENDEZVOUS = frozenset({"nccl-port", "dist-init-addr", "nccl-init-addr", "nnodes", "dp", "dp-size",
                         "data-parallel-size"})


@dataclass(frozen=True)
class Arm:
    """One server configuration. `own` are its flags beyond the profile, `argv` has `{port}` and `{init_port}`."""

    name: str
    own: Flags
    argv: tuple[str, ...]

    @property
    def speculative(self) -> bool:
        """Whether the arm speculates."""
        return "speculative-algorithm" in given_flags(self.argv)

    def command(self, port: int, init_port: int | None = None) -> tuple[str, ...]:
        """The command line with real ports; without `init_port`, one to be looked at and not to be run."""
        ports = {PORT: str(port), INIT_PORT: str(init_port or port + 1)}
        return tuple(ports.get(word, word) for word in self.argv)


@dataclass(frozen=True)
class Block:
    """One server start of the plan; `first` says whether its arm opens the pair."""

    index: int
    pair: int
    arm: str


def arms(image: Image, settings: Settings) -> tuple[Arm, ...]:
    """The arms to compare; the first one is the baseline.

    Without `--arm` these are all arms of the image's profile. Raises `Usage` or `BadConfig`, all problems at once.
    """
    problems: list[Problem] = []
    chosen: list[tuple[str, Flags]] = []
    for text in settings.arm or tuple(image.profile.arms):
        name, given, words = text.partition("=")
        if not given and name not in image.profile.arms:
            problems.append(Problem(what=f"unknown arm {name}", where="--arm", found=name,
                                    expected=", ".join(image.profile.arms) or "the profile has no arms",
                                    todo="name an arm of the profile, or give its flags: --arm 'NAME=--flag value'"))
            continue
        chosen.append((name, image.profile.arms[name] if not given else parse_flags(words, f"--arm {name}")))
    fixed = sorted({"host", "port"} & given_flags(settings.extra))
    problems += [Problem(what=f"--{name} is not for the user here", where="after --", expected="no such flag",
                         todo="a benchmark takes a free port on the loopback for each start") for name in fixed]
    names = [name for name, _ in chosen]
    problems += [Problem(what=f"arm {name} twice", where="--arm") for name in dict.fromkeys(names)
                 if names.count(name) > 1]
    if not problems and len(chosen) < 2:
        problems.append(Problem(what="nothing to compare", where="arms", found=", ".join(names) or "no arm",
                                expected="a baseline and at least one more arm",
                                todo="--arm baseline --arm eagle3, or an image whose profile has both"))
    if problems:
        raise Usage(problems)
    pins = {**_pins(image, settings), **_rendezvous(image, settings, chosen)}
    extra = (*_graph_sizes(image, settings), *settings.extra)
    made = []
    for name, own in chosen:
        argv = server_argv(image, {**pins, **own}, model=settings.model, draft=settings.draft, host="127.0.0.1",
                           port=0, extra=extra)
        cut = argv.index("--port") + 1
        made.append(Arm(name, dict(own), (*argv[:cut], PORT, *argv[cut + 1:])))
    needs_draft = [arm.name for arm in made
                   if arm.speculative and "speculative-draft-model-path" not in given_flags(arm.argv)
                   and str(arm.own.get("speculative-algorithm", "")).upper().startswith("EAGLE")]
    if needs_draft:
        raise BadConfig(Problem(what="no draft model", where=f"arm {', '.join(needs_draft)}", expected="--draft FOLDER",
                                todo="name the EAGLE-3 draft of this model with --draft or ENTRYPOINT_DRAFT"))
    check_arms(made)
    _check_required(image, settings, made)
    return tuple(made)


def _check_required(image: Image, settings: Settings, made: Sequence[Arm]) -> None:
    """A claim that nobody makes would be required in vain: its name is misspelt, or its patch is not in the image."""
    known = [name for name in evidence.known(image.patches)
             if name != "speculation" or any(arm.speculative for arm in made)]
    if wrong := [name for name in settings.require if name not in known]:
        raise Usage([Problem(what=f"no claim is called {name}", where="--require", found=name,
                             expected=", ".join(known), todo="require one of these") for name in wrong])


def with_control(made: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms and, when none of them is one yet, a control: the baseline's command line again."""
    if any(_same(arm, made[0]) for arm in made):
        return tuple(made)
    if any(arm.name == CONTROL for arm in made):
        raise Usage(Problem(what=f"an arm called {CONTROL} that is none", where="--arm",
                            expected=f"{CONTROL} has the baseline's flags",
                            todo="give the arm another name, or --noise-floor off"))
    return (*made, Arm(CONTROL, made[0].own, made[0].argv))


def parse_flags(words: str, where: str) -> dict[str, Scalar]:
    """`--a 1 --b` as a mapping. Raises `Usage` for a word that belongs to no flag."""
    flags: dict[str, Scalar] = {}
    name = ""
    try:
        split = shlex.split(words)
    except ValueError as error:
        raise Usage(Problem(what="the arm's flags cannot be split into words", where=where,
                            found=f"{mask_text(words)} ({error})",
                            expected="quotes as for a shell, each one closed")) from None
    for word in split:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            flags[name] = value if given else True
        elif name and flags[name] is True:
            flags[name] = word
        else:
            raise Usage(Problem(what=f"stray word {word}", where=where, found=mask_text(words),
                                expected="--flag value --other-flag"))
    return flags


def _pins(image: Image, settings: Settings) -> dict[str, Scalar]:
    """Flags that must be explicit in every arm because their default depends on what is under test.

    SGLang limits running requests to 48 when it speculates and by cache size when not (sglang PR #34290), and draws a
    random seed for each start.
    """
    pins: dict[str, Scalar] = {"random-seed": settings.seed % 2**31,
                               "max-running-requests": max(48, *settings.concurrency)}
    return {name: value for name, value in pins.items() if name not in image.profile.server}


def _rendezvous(image: Image, settings: Settings, chosen: Sequence[tuple[str, Flags]]) -> dict[str, Scalar]:
    """The port where the processes of one server meet, for every arm or for none.

    SGLang takes a free one long before it binds it; 0.5.9 one that any client of the machine may be given meanwhile.
    With data parallelism each replica needs one of its own, and a given one is an error.
    """
    named = {*image.profile.server, *given_flags(settings.extra), *(flag for _, own in chosen for flag in own)}
    return {} if named & _RENDEZVOUS else {"nccl-port": INIT_PORT}


def _graph_sizes(image: Image, settings: Settings) -> tuple[str, ...]:
    """The batch sizes to capture as CUDA graphs, the same in every arm: SGLang captures finer steps when it speculates.

    Its flag is named after the one for the largest size (`--cuda-graph-max-bs` before per-phase flags came). Without
    such a flag nothing is pinned, and the comparison of resolved arguments decides.
    """
    given = {**{name: str(value) for name, value in image.profile.server.items()}, **flags_of(settings.extra)}
    for suffix in ("-decode", ""):
        largest, sizes = given.get(f"cuda-graph-max-bs{suffix}", ""), f"cuda-graph-bs{suffix}"
        if largest.isdigit() and sizes not in given:
            most = int(largest)
            steps = {*range(1, 9), *range(10, 33, 2), *range(40, most + 1, 8), most}
            return (f"--{sizes}", *(str(size) for size in sorted(steps) if size <= most))
    return ()


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Flags of a command line with their values ("" for none); a repeated flag keeps all its values."""
    flags: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            flags[name] = value if given else ""
        elif name:
            flags[name] = f"{flags[name]} {word}".strip()
    return flags


def check_arms(made: Sequence[Arm]) -> None:
    """Refuse arms that differ from the baseline in more than they may.

    An arm that speculates otherwise than the baseline may differ in `speculative-*` flags only, so that its result is
    about speculation; one that speculates in the same way, or neither does (an ablation), in exactly the flags that it
    names. Raises `Invalid`.
    """
    base, *others = made
    problems = []
    for arm in others:
        differ = difference(flags_of(base.argv), flags_of(arm.argv))
        wrong = {key: pair for key, pair in differ.items() if not _may_differ(key, arm, base)}
        if wrong:
            problems.append(_refusal(base.name, arm.name, wrong, "command line"))
    if problems:
        raise Invalid(problems)


def _may_differ(key: str, arm: Arm, base: Arm) -> bool:
    name = key.replace("_", "-")
    if name.startswith("speculative-"):
        return True
    return _speculation(arm) == _speculation(base) and (name in arm.own or name in base.own)


def _speculation(arm: Arm) -> dict[str, str]:
    """The flags that say whether and how an arm speculates."""
    return {name: value for name, value in flags_of(arm.argv).items() if name.startswith("speculative-")}


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ; an absent key counts as None."""
    return {key: (left.get(key), right.get(key)) for key in sorted({*left, *right})
            if left.get(key) != right.get(key)}


def _refusal(base: str, arm: str, wrong: Mapping[str, tuple[Any, Any]], where: str) -> Problem:
    return Problem(
        what=f"the arms differ in more than speculation: {', '.join(wrong)}", where=where,
        found="; ".join(f"{key}: {base} {_short(key, here)}, {arm} {_short(key, there)}"
                        for key, (here, there) in wrong.items()),
        expected="the same value in both arms",
        todo="give the value explicitly for both, after --: " +
             " ".join(REMEDIES.get(key, f"--{key.replace('_', '-')} VALUE") for key in wrong))


def _short(key: str, value: Any) -> str:
    text = "absent" if value is None else HIDDEN if is_secret(key) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def resolved(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved arguments in a `/server_info` answer, and the live limits, without what differs at each start."""
    table = {key: value for key, value in server_info.items() if key not in NOT_ARGUMENTS}
    states = server_info.get("internal_states") or [{}]
    table.update({key: states[0][key] for key in LIVE if key in states[0]})
    return {key: HIDDEN if value and is_secret(key) else value for key, value in table.items()}


def check_resolved(base: Arm, arm: Arm, here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Compare what two servers resolved their arguments to: `{"allowed": ..., "forbidden": ...}`, key to two values."""
    allowed: dict[str, Any] = {}
    forbidden: dict[str, Any] = {}
    for key, pair in difference(here, there).items():
        flag = key.removeprefix("_")
        fine = flag in FORCED or flag.startswith(("speculative_", "decoupled_spec")) or _may_differ(flag, arm, base)
        (allowed if fine else forbidden)[key] = list(pair)
    return {"allowed": allowed, "forbidden": forbidden}


def refuse(base: Arm, arm: Arm, forbidden: Mapping[str, Sequence[Any]]) -> Invalid:
    """The refusal for arguments that differ at run time."""
    return Invalid(_refusal(base.name, arm.name, {key: (pair[0], pair[1]) for key, pair in forbidden.items()},
                            "resolved arguments (/server_info)"))


def order(names: Sequence[str], pairs: int, seed: int) -> tuple[Block, ...]:
    """Server starts in ABBA order: each two pairs mirror each other, and a coin decides who is first.

    With more than two arms a pair holds all of them: ABC CBA, with the names shuffled.
    """
    coin = np.random.default_rng(seed)
    blocks: list[Block] = []
    round_order: list[str] = []
    for pair in range(pairs):
        if pair % 2 == 0:
            round_order = [names[int(index)] for index in coin.permutation(len(names))]
        else:
            round_order = round_order[::-1]
        blocks += [Block(len(blocks) + step, pair, name) for step, name in enumerate(round_order)]
    return tuple(blocks)


def looks(settings: Settings) -> tuple[tuple[int, ...], float]:
    """Numbers of pairs to look at and the two-sided level of each look. `--pairs N` means one look at N."""
    at = (settings.pairs,) if settings.pairs else LOOKS[settings.effort]
    return at, LOOK_ALPHA[len(at) - 1]


def warm_up(image: Image, settings: Settings) -> dict[str, Any]:
    """How a block warms up: windows of at least 8 requests until the last three agree within the tolerance.

    A shared CPU never comes within 5 percent: there the tolerance is 25 percent, and a start that does not reach it
    after a few windows is measured all the same and noted.
    """
    cpu = image.cuda is None
    return {"window": max(8, 2 * settings.concurrency[0]), "min_windows": 3, "max_windows": 5 if cpu else 10,
            "agree": 3,
            "tolerance": 0.25 if cpu else 0.05, "required": not cpu, "max_tokens": max(16, settings.max_tokens // 4)}


def control_blocks(blocks: Sequence[Block], control: str | None) -> tuple[Block, ...]:
    """The order in which the control arm takes part in the first pairs only: later ones cost time and tell no more."""
    kept = [block for block in blocks if block.arm != control or block.pair < CONTROL_PAIRS]
    return tuple(Block(place, block.pair, block.arm) for place, block in enumerate(kept))


def make(image: Image, settings: Settings, made: Sequence[Arm], pack: Pack, *, run_id: str, created: str,
         floor: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan as a JSON document with its own hash under `sha256`.

    `floor` is the noise floor of an earlier run (`noise.find`), `more` are entries of a sweep.
    """
    at, alpha = looks(settings)
    control = next((arm.name for arm in made if _same(arm, made[0])), None)
    blocks = control_blocks(order([arm.name for arm in made], at[-1], settings.seed), control)
    document: dict[str, Any] = {
        "schema": SCHEMA, "run_id": run_id, "created_at": created,
        "image": {"image": image.image, "version": image.version, "stack": image.stack, "key": image.key,
                  "lock_sha256": image.lock_sha256, "targets": list(image.targets), "cuda": image.cuda,
                  "packages": dict(image.packages), "trees": dict(image.trees)},
        "arms": [{"name": arm.name,
                  "flags": {name: HIDDEN if is_secret(name) else value for name, value in arm.own.items()},
                  "argv": mask(arm.argv), "speculative": arm.speculative,
                  "control": _same(arm, made[0])} for arm in made],
        "primary_endpoint": {"metric": "decode_rate", "concurrency": settings.concurrency[0],
                             "baseline": made[0].name,
                             "candidate": next((arm.name for arm in made[1:] if not _same(arm, made[0])),
                                               made[1].name)},
        "load_points": list(settings.concurrency), "rate": settings.rate or None, "passes": settings.passes,
        "max_tokens": settings.max_tokens,
        "temperature": 0.0, "ignore_eos": False,
        "prompts": {"pack": pack.name, "sha256": pack.sha256, "count": len(pack.measured), "strata": pack.strata(),
                    "ids": [prompt.id for prompt in pack.measured], "warmup": len(pack.warmup)},
        "warmup": warm_up(image, settings),
        "task_check": {"problems": settings.task_check, "seed": settings.seed, "concurrency": TASK_CONCURRENCY},
        # on a CPU the client shares the cores with the server: its lag is reported and spoils no block
        "client": {"lag_share": None if image.cuda is None else 0.1},
        "effort": settings.effort, "looks": list(at), "max_pairs": at[-1], "alpha_total": ALPHA,
        "alpha_per_look": alpha, "interval_from": "noise floor" if at[-1] <= FEW_PAIRS else "pairs",
        "noise_floor": None if floor is None else dict(floor), "margin": settings.margin, "order_seed": settings.seed,
        "order": [[block.index, block.pair, block.arm] for block in blocks],
        "required_evidence": sorted({*settings.require, *(["speculation"] if any(arm.speculative for arm in made)
                                                          else [])}),
    }
    document.update(more or {})
    document["sha256"] = digest(document)
    return document


def _same(arm: Arm, base: Arm) -> bool:
    """An arm with the baseline's flags under another name is a control: it shows the noise floor (A/A)."""
    return arm.name != base.name and flags_of(arm.argv) == flags_of(base.argv)


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document as canonical JSON, its own `sha256` left out."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def estimate(plan: Mapping[str, Any], *, start_seconds: float, rate: float) -> float:
    """Seconds that the whole plan takes, from the seconds of a start and tokens per second of one stream."""
    tokens = plan["prompts"]["count"] * plan["max_tokens"] * plan["passes"]
    measured = sum(tokens / (rate * max(1.0, point ** 0.7)) for point in plan["load_points"])
    warm = plan["warmup"]
    warming = 4 * warm["window"] * warm["max_tokens"] / rate
    task = 2 * plan["task_check"]["problems"] * plan["max_tokens"] / (rate * TASK_CONCURRENCY ** 0.7)
    return float(len(plan["order"]) * (start_seconds + warming + measured) + task)
