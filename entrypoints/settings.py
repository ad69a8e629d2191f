"""Every option once: its name, type, default and help; each value comes with its source.

Precedence: command line > environment (`ENTRYPOINT_NAME`) > TOML file (`--config`) > default. A variable or a key of
the file that we do not know is an error: a misspelt option that silently does nothing is worse than no option.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from entrypoints.command import HIDDEN, mask, mask_text
from entrypoints.errors import BadConfig, InputMissing, Problem, Usage

PREFIX = "ENTRYPOINT_"
#: variables with our prefix that are not options
RESERVED = frozenset({"ENTRYPOINT_IMAGE_FILE", "ENTRYPOINT_CONFIG"})
EFFORTS = ("quick", "standard", "thorough")
NOISE_FLOORS = ("auto", "measure", "off")


def _option(default: Any, text: str, *, at_least: float | None = None, choices: tuple[str, ...] = (),
            below: float | None = None, secret: bool = False, many: bool = False) -> Any:
    metadata = {"help": text, "at_least": at_least, "below": below, "choices": choices, "secret": secret, "many": many}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved options. `sources` names for each one where its value comes from.

    Seconds are float seconds; `margin` is a ratio (0.02 is two percent); 0 switches an optional limit off.
    """

    model: str = _option("", "target model: a folder, or a name on the hub")
    draft: str = _option("", "EAGLE-3 draft model: a folder, or a name on the hub")
    host: str = _option("0.0.0.0", "serve: address to listen on (benchmark always uses the loopback)")  # noqa: S104
    port: int = _option(30000, "serve: port to listen on (benchmark takes free ones)", at_least=1)
    serve_arm: str = _option("baseline", "serve: which arm of the profile to run")
    arm: tuple[str, ...] = _option((), "arm to compare, NAME or NAME=FLAGS; the first is the baseline", many=True)
    sweep: tuple[str, ...] = _option((), "EAGLE-3 setting to try, STEPS,TOPK,DRAFT_TOKENS; the best one is then "
                                     "confirmed on other prompts and fresh starts", many=True)
    pairs: int = _option(0, "pairs of server starts; 0: what the effort says", at_least=0)
    passes: int = _option(2, "measured passes over the prompts in each server start", at_least=1)
    prompts: str = _option("", "JSONL file of chat prompts; empty: the shipped pack")
    prompts_per_stratum: int = _option(0, "prompts taken from each stratum of the pack; 0: all", at_least=0)
    long_context: int = _option(0, "add a stratum of generated prompts of about so many tokens; 0: none", at_least=0)
    max_tokens: int = _option(512, "output tokens at most for each request", at_least=1)
    concurrency: tuple[int, ...] = _option((1,), "requests in flight; the first is the primary one", many=True,
                                           at_least=1)
    rate: float = _option(0.0, "requests per second, arriving at random (Poisson), at most --concurrency in flight; 0: "
                          "closed loop", at_least=0)
    seed: int = _option(20261201, "seed of the order of arms and prompts", at_least=0)
    margin: float = _option(0.02, "ratio within which two arms count as equivalent; 0.02: two percent", at_least=0,
                            below=1)
    effort: str = _option("standard", "how much to measure", choices=EFFORTS)
    task_check: int = _option(200, "word problems with known answers asked in both arms: a drop makes the run invalid; "
                              "0: none", at_least=0)
    noise_floor: str = _option("auto", "control arm (the baseline again): measure, off, or auto: where the effort is "
                               "standard or thorough and none of the last 30 days is kept", choices=NOISE_FLOORS)
    results: str = _option("/results", "folder for the runs")
    cache: str = _option("/cache", "folder for compiled kernels, keyed by the image")
    resume: str = _option("", "folder of a run to continue")
    exit_zero_on_valid: bool = _option(False, "exit with 0 for every verdict but invalid")
    require: tuple[str, ...] = _option((), "claim of the evidence that must be active, else the run is invalid",
                                       many=True)
    trace: bool = _option(False, "profile a few steps of each arm after its measured passes")
    check: bool = _option(True, "refuse to start where `entrypoint check` fails")
    stall_seconds: float = _option(300.0, "give up when nothing moves for so long: log, load, tokens", at_least=1)
    ready_seconds: float = _option(0.0, "give up on a start after so long even if it moves; 0: never", at_least=0)
    deadline_seconds: float = _option(0.0, "end the whole run after so long; 0: never", at_least=0)
    grace_seconds: float = _option(30.0, "time between TERM and KILL", at_least=0)
    api_key: str = _option("", "key that the server asks for (serve passes it on as --api-key)", secret=True)
    json: bool = _option(False, "write JSON to stdout")
    sources: Mapping[str, str] = field(default_factory=dict, metadata={"hidden": True})
    #: the words after `--`: flags for the server, in every arm
    extra: tuple[str, ...] = field(default=(), metadata={"hidden": True})

    def masked(self) -> Settings:
        """The same for people and files: secrets, also those among flags for the server, are ***."""
        hidden: dict[str, Any] = {one.name: HIDDEN for one in OPTIONS if one.secret and getattr(self, one.name)}
        arms = []
        for text in self.arm:
            name, given, flags = text.partition("=")
            arms.append(name + given + mask_text(flags))
        return dataclasses.replace(self, **hidden, arm=tuple(arms), extra=tuple(mask(self.extra)))

    def shown(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of every option for people and files; secrets are masked."""
        rows, safe = [], self.masked()
        for one in OPTIONS:
            value = getattr(safe, one.name)
            text = " ".join(str(part) for part in value) if one.many else str(value)
            rows.append((one.name, text, self.sources.get(one.name, "default")))
        rows.append(("extra", " ".join(safe.extra), "command line" if self.extra else "default"))
        return rows


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: everything that the parsers and the help need."""

    name: str
    kind: type
    default: Any
    help: str
    many: bool
    secret: bool
    choices: tuple[str, ...]
    at_least: float | None
    below: float | None

    @property
    def flag(self) -> str:
        """`--max-tokens`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`ENTRYPOINT_MAX_TOKENS`."""
        return PREFIX + self.name.upper()


def _table() -> tuple[Option, ...]:
    hints = typing.get_type_hints(Settings)
    rows = []
    for one in dataclasses.fields(Settings):
        if one.metadata.get("hidden"):
            continue
        kind = typing.get_args(hints[one.name])[0] if one.metadata["many"] else hints[one.name]
        rows.append(Option(name=one.name, kind=kind, default=one.default, help=one.metadata["help"],
                           many=one.metadata["many"], secret=one.metadata["secret"],
                           choices=one.metadata["choices"], at_least=one.metadata["at_least"],
                           below=one.metadata["below"]))
    return tuple(rows)


OPTIONS = _table()
#: what `serve` understands itself; every other word goes to the server
SERVE_OPTIONS = ("model", "draft", "host", "port", "serve_arm", "cache")


def resolve(argv: Sequence[str], environ: Mapping[str, str], file: Path | None = None, *,
            only: Iterable[str] | None = None, mode: str = "benchmark") -> Settings:
    """The settings from the words after the mode, the environment and a TOML file.

    `file` is what `--config` or ENTRYPOINT_CONFIG name; `only` limits the command line to those options and passes the
    other words to the server (`serve`). Raises `Usage` for the command line and `BadConfig` for the rest, all problems
    at once.
    """
    ours, extra = _split(argv)
    parser = _parser(mode, OPTIONS if only is None else [one for one in OPTIONS if one.name in set(only)])
    known, unknown = parser.parse_known_args(ours)
    if unknown and only is None:
        raise Usage([_unknown_word(word) for word in unknown if word.startswith("-")] or
                    [Problem(what=f"stray words: {' '.join(unknown)}", where=mode,
                             todo="options begin with --; words for the server go after a lone --")])
    extra = (*unknown, *extra) if only is not None else extra

    problems: list[Problem] = []
    named = known.config or environ.get("ENTRYPOINT_CONFIG") or (str(file) if file else "")
    from_file = _read_file(Path(named)) if named else {}
    problems += _unknown_names(from_file, {one.name for one in OPTIONS}, named, "key")
    mine = {name: text for name, text in environ.items() if name.startswith(PREFIX) and name not in RESERVED}
    problems += _unknown_names(mine, {one.variable for one in OPTIONS}, "environment", "variable")

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for one in OPTIONS:
        given: Any
        if (given := getattr(known, one.name, None)) is not None:
            source = "command line"
        elif (given := environ.get(one.variable)) is not None:
            source = f"environment {one.variable}"
            if one.many:  # several arms in one variable: a semicolon between them
                given = [part.strip() for part in given.split(";") if part.strip()]
        elif (given := from_file.get(one.name)) is not None:
            source = f"file {named}"
        else:
            continue
        try:
            values[one.name] = _convert(one, given)
            sources[one.name] = source
        except ValueError as error:
            shown = "***" if one.secret else repr(given)
            problems.append(Problem(what=f"bad value for {one.name}", where=source, found=shown, expected=str(error)))
    if problems:
        raise BadConfig(problems)
    return Settings(**values, sources=MappingProxyType(sources), extra=tuple(extra))


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our words and those after a lone `--`."""
    words = list(argv)
    if "--" not in words:
        return words, ()
    cut = words.index("--")
    return words[:cut], tuple(words[cut + 1:])


class Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of leaving with 2."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise `Usage`."""
        raise Usage(Problem(what=message, where=self.prog, todo=f"{self.prog} --help lists the options"))


def _parser(mode: str, options: Iterable[Option]) -> argparse.ArgumentParser:
    parser = Parser(prog=f"entrypoint {mode}", allow_abbrev=False,
                     description="Words after a lone -- are flags for the server.")
    parser.add_argument("--config", default=None, metavar="FILE", help="TOML file with these options")
    for one in options:
        text = f"{one.help} (default: {one.default if one.default not in ('', ()) else 'none'}; {one.variable})"
        text = text.replace("%", "%%")
        if one.kind is bool:
            parser.add_argument(one.flag, dest=one.name, default=None, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(one.flag, dest=one.name, default=None, help=text,
                                action="append" if one.many else "store",
                                metavar="|".join(one.choices) or one.name.rpartition("_")[2].upper())
    return parser


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _convert(one: Option, given: Any) -> Any:
    """The typed value. Raises `ValueError` with what was expected."""
    if one.many:
        parts = given if isinstance(given, list | tuple) else [given]
        if one.kind is not str:
            parts = [piece for part in parts for piece in str(part).replace(",", " ").split()]
        if not parts:
            raise ValueError("at least one value")
        return tuple(_single(one, part) for part in parts)
    return _single(one, given)


def _single(one: Option, given: Any) -> Any:
    readers: dict[type, Callable[[Any], Any]] = {bool: _boolean, int: _integer, float: _number, str: _text}
    value = readers[one.kind](given)
    if one.choices and value not in one.choices:
        raise ValueError(" or ".join(one.choices))
    if one.at_least is not None and value < one.at_least:
        raise ValueError(f"at least {one.at_least:g}")
    if one.below is not None and value >= one.below:
        raise ValueError(f"below {one.below:g}")
    return value


def _boolean(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    word = str(given).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("true or false")


def _integer(given: Any) -> int:
    try:
        return int(str(given)) if not isinstance(given, bool) else int("")
    except ValueError:
        raise ValueError("a whole number") from None


def _number(given: Any) -> float:
    try:
        value = float(str(given)) if not isinstance(given, bool) else float("")
    except ValueError:
        raise ValueError("a number") from None
    if not -1e18 < value < 1e18:
        raise ValueError("a finite number")
    return value


def _text(given: Any) -> str:
    if isinstance(given, str):
        return given
    raise ValueError("a text")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputMissing(Problem(what="cannot read the configuration file", where=str(path),
                                   found=error.strerror or str(error), expected="a TOML file")) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(Problem(what="the configuration file is not TOML", where=str(path),
                                found=str(error))) from error


def _unknown_names(given: Iterable[str], known: set[str], where: str, noun: str) -> list[Problem]:
    return [Problem(what=f"unknown {noun} {name}", where=where, todo=suggestion(name, known))
            for name in given if name not in known]


def _unknown_word(word: str) -> Problem:
    name = word.partition("=")[0]
    return Problem(what=f"unknown option {name}",
                   todo=f"{suggestion(name, {one.flag for one in OPTIONS})}; flags for the server go after a lone --")


def suggestion(name: str, known: Iterable[str]) -> str:
    """«did you mean X?» or where to find the list."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else "`entrypoint benchmark --help` lists what there is"
