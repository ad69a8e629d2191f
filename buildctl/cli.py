"""The command line: a group that imports a command when it is used, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from buildctl import __version__
from buildctl.errors import BuildctlError, Interrupted, Problem, UsageError

#: command -> (module under buildctl.commands, one line of help); a table, so that --help imports nothing
COMMANDS = {
    "list": ("listing", "Show the stacks and their images."),
    "lock": ("lock", "Resolve a stack once, with hashes, into its lock."),
    "check": ("check", "Check stacks: manifest, lock, compatibility rules."),
    "plan": ("plan", "Show what a build would do, and why."),
    "render": ("render", "Write the Dockerfile, its context and the bake file."),
    "build": ("build", "Build and tag the images of a stack."),
    "fetch": ("fetch", "Download everything that a lock names, for builds without network."),
    "push": ("push", "Push images to registries and prove that they arrived."),
    "promote": ("promote", "Give a tested digest other tags, here or elsewhere."),
    "verify": ("verify", "Compare an image, here or in a registry, with a lock."),
    "bench": ("bench", "Benchmark images in their containers; bind the results to them."),
    "compare": ("compare", "Compare benchmark runs of different images."),
    "results": ("results", "List the benchmark results attached to an image."),
    "prune": ("prune", "Remove images of this project that no stack makes any more."),
    "patch": ("patch", "Check, list, edit and carry over patch series."),
}
#: words of BuildKit's client of the same name
_BUILDKIT = {"du", "debug", "prune-histories", "dial-stdio", "--addr", "--frontend", "--tlscacert"}


class LazyGroup(click.Group):
    """Knows its commands by table."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All commands, in the order of a day's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"buildctl.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The command list, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context,
                        args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command, or a hint to those who meant BuildKit's client."""
        if args[0] in _BUILDKIT:
            raise _not_buildkit(args[0])
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words after `buildctl`, or a hint to those who meant BuildKit's client."""
        for word in args[:1]:
            if word.split("=")[0] in _BUILDKIT:
                raise _not_buildkit(word)
        return super().parse_args(ctx, args)


def _not_buildkit(word: str) -> UsageError:
    return UsageError(Problem("this is not BuildKit's buildctl", "command line", found=word,
                              expected="a command of the image builder for SGLang",
                              todo="call BuildKit's client by its path; this tool is also installed as sgl-buildctl"))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path(),
              help="A folder in the checkout with images/, patches/ and entrypoints/.  [default: here]")
@click.version_option(__version__, message="buildctl %(version)s, builder of SGLang images (not BuildKit's client)")
@click.pass_context
def group(ctx: click.Context, project: Path) -> None:
    """Compose, build, prove and push layered SGLang images for CUDA 13 and SM120.

    Exit codes: 0 done, 2 usage, 3 manifest or lock, 4 versions, 5 patch, 6 build step, 7 audit, 8 disk or memory,
    9 engine, 10 authentication, 11 registry or network (retry helps), 12 tag exists, 130 interrupted. `bench` and
    `compare` have those of the benchmark: 0 win, 10 loss, 11 equivalent, 12 inconclusive, 13 invalid, 64 and more.
    """
    ctx.obj = project.resolve()


def main() -> None:
    """Run the command line and exit with the code of the outcome."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. Errors go to stderr, with `--json` also to stdout as one object."""
    try:
        result = group.main(arguments, prog_name="buildctl", standalone_mode=False)
    except BuildctlError as error:
        return _fail(error, arguments)
    except click.exceptions.Abort:
        return _fail(Interrupted(Problem("interrupted")), arguments)
    except KeyboardInterrupt:
        return _fail(Interrupted(Problem("interrupted")), arguments)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _fail(error: BuildctlError, arguments: list[str]) -> int:
    click.echo("\n".join(f"buildctl: {problem}" for problem in error.problems), err=True)
    if "--json" in arguments:
        emit({"error": error.as_dict()})
    return error.exit_code


def emit(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def _terminated(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signature of a handler
    raise KeyboardInterrupt
