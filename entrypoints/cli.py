"""The words after `docker run IMAGE`: which mode, its settings, its exit code.

stdout carries what was asked for, stderr the progress. A word that is no mode is a command and is executed as given.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from entrypoints import __version__, settings, signals
from entrypoints.errors import Bug, EntrypointError, Problem, Terminated, Usage
from entrypoints.image import Image, load

HELP = f"""entrypoint {__version__}: usage of this image

  docker run IMAGE [serve] [FLAGS]     start the SGLang server (default); FLAGS go to it and win over the profile
  docker run IMAGE benchmark [OPTIONS] compare the arms of the profile: baseline against EAGLE-3
  docker run IMAGE plan [OPTIONS]      what benchmark would do, every setting with its source; starts nothing
  docker run IMAGE check [OPTIONS]     machine, models and image, before anything starts
  docker run IMAGE analyze DIR         verdict of a finished run, from its raw files
  docker run IMAGE compare DIR DIR...  decode rates of runs of different images
  docker run IMAGE health              one line and 0 or 1, for HEALTHCHECK
  docker run IMAGE version             what is in this image
  docker run IMAGE COMMAND ...         any other first word is executed as given

A first argument with a dash means serve. `MODE --help` lists the options; each is also a variable ENTRYPOINT_NAME.
"""


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run one mode; the exit code (see `errors`). Does not return when the first word is a command."""
    mode, rest = _mode(argv)
    if mode == "help":
        print(HELP, end="")
        return 0
    if mode not in MODES:
        _execute(argv)
    as_json = "--json" in rest or environ.get("ENTRYPOINT_JSON", "").lower() in {"1", "true", "yes", "on"}
    try:
        with signals.as_exceptions():
            return MODES[mode](rest, environ)
    except EntrypointError as error:
        return _report(error, as_json)
    except Terminated as stop:
        print(f"entrypoint: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our stdout went away: `entrypoint plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return _report(Bug(Problem(what="the entrypoint itself failed", todo="report the traceback above")), as_json)


def _mode(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    if not argv:
        return "serve", ()
    if argv[0] in {"--help", "-h", "help"}:
        return "help", ()
    if argv[0] == "--version":
        return "version", argv[1:]
    if argv[0].startswith("-"):
        return "serve", argv
    return argv[0], argv[1:]


def _execute(argv: Sequence[str]) -> NoReturn:
    """Replace this process; 127 and 126 as a shell says it."""
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's own command, as given
    except FileNotFoundError:
        close = settings.suggestion(argv[0], MODES)
        hint = f"; {close}" if close.startswith("did you mean") else ""
        print(f"entrypoint: {argv[0]}: no mode of this image and no command in it{hint}", file=sys.stderr)
        sys.exit(127)
    except OSError as error:
        print(f"entrypoint: {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(126)


def _report(error: EntrypointError, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_dict(), indent=2))
    print(f"error: {error.kind}\n{error}", file=sys.stderr)
    return error.exit_code


def _serve(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from entrypoints import serve
    chosen, image = settings.resolve(words, environ, only=settings.SERVE_OPTIONS, mode="serve"), load()
    if not {"--help", "-h"} & set(chosen.extra):
        serve.require_model(chosen, image)
        _check_first(serve.completed(chosen), image, environ, measuring=False)
    return serve.run(chosen, image, environ)


def _benchmark(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from entrypoints import run
    chosen, image = settings.resolve(words, environ, mode="benchmark"), load()
    _check_first(chosen, image, environ, measuring=True)
    _validate_flags(chosen, image, environ)
    return run.benchmark(chosen, image)


def _plan(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from entrypoints import run
    chosen, image = settings.resolve(words, environ, mode="plan"), load()
    document = run.describe(chosen, image)
    _validate_flags(chosen, image, environ)
    if chosen.json:
        print(json.dumps({"settings": [{"name": name, "value": value, "source": source}
                                       for name, value, source in chosen.shown()], "plan": document}, indent=2))
        return 0
    print("settings")
    for name, value, source in chosen.shown():
        print(f"  {name:<20} {value or '-':<24} {source}")
    print()
    print(run.render_plan(document))
    return 0


def _validate_flags(chosen: settings.Settings, image: Image, environ: Mapping[str, str]) -> None:
    """Flags of the user go through the installed server's parser; the profile's did when the image was built."""
    if not chosen.extra and not any("=" in arm for arm in chosen.arm):
        return
    from entrypoints import command, flags, plan
    commands = {arm.name: arm.command(chosen.port) for arm in plan.arms(image, chosen)}
    root = Path(chosen.cache)
    why = flags.validate(image, commands, command.server_environment(image, environ, cache_root=root),
                         root / image.short_key)
    if why:
        print(f"entrypoint: flags not checked before the start: {why}", file=sys.stderr)


def _check_first(chosen: settings.Settings, image: Image, environ: Mapping[str, str], *, measuring: bool) -> None:
    """What can be known in a second is not learnt from a server start."""
    if not chosen.check:
        return
    from entrypoints import check, command, host
    environment = command.server_environment(image, environ, cache_root=Path(chosen.cache))
    if chosen.resume:  # models and flags are those of the run; GPU memory may still be held by what ended it
        findings = list(check.gpus(host.read(), image, 0))
    else:
        findings = check.run(host.read(), image, chosen, environment, whole=False)
    for one in check.before_start(findings, measuring=measuring):
        print(f"entrypoint: {one.name}: {one.found}; {one.remedy}", file=sys.stderr)


def _analyze(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from entrypoints import run
    folders = [word for word in words if not word.startswith("-")]
    if len(folders) != 1:
        raise Usage(Problem(what="analyze takes one run folder", found=" ".join(words) or "nothing",
                            todo="entrypoint analyze /results/RUN"))
    chosen = settings.resolve([word for word in words if word != folders[0]], environ, mode="analyze")
    return run.analyze(Path(folders[0]), chosen)


def _compare(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    from entrypoints import compare
    return compare.main(words)


def _check(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from entrypoints import check, command, host
    chosen = settings.resolve(words, environ, mode="check")
    image = load()
    environment = command.server_environment(image, environ, cache_root=Path(chosen.cache))
    findings = check.run(host.read(), image, chosen, environment)
    print(json.dumps([one.as_dict() for one in findings], indent=2) if chosen.json else check.render(findings))
    return check.exit_code(findings)


def _health(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    from entrypoints import health
    if words:
        raise Usage(Problem(what="health takes no options", found=" ".join(words)))
    healthy, why = health.check()
    print(why)
    return 0 if healthy else 1


def _version(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    from entrypoints import version
    info = version.describe()
    print(json.dumps(info, indent=2) if "--json" in words else version.render(info))
    return 0


MODES: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "serve": _serve, "benchmark": _benchmark, "plan": _plan, "check": _check, "analyze": _analyze, "compare": _compare,
    "health": _health, "version": _version}
