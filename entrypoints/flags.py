"""The installed server's own parser judges flags before anything starts; no list of ours can know them all."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.command import given_flags
from entrypoints.errors import BadConfig, Problem
from entrypoints.faults import load, match
from entrypoints.image import Image

#: importing SGLang takes 5 to 30 s
TIMEOUT = 180.0
#: runs in the server's interpreter: one line of JSON for each command line, null or what argparse said
_SCRIPT = """
import argparse, contextlib, io, json, sys
try:
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser(prog="launch_server.py")
    ServerArgs.add_cli_args(parser)
except BaseException as error:
    print("UNAVAILABLE", type(error).__name__, error)
    sys.exit(0)
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words)
        print("VERDICT", json.dumps(None))
    except SystemExit as leaving:
        text = said.getvalue().strip().splitlines()
        print("VERDICT", json.dumps(text[-1] if leaving.code else None))
"""


def validate(image: Image, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str],
             memory: Path | None = None) -> str:
    """Raise `BadConfig` with every command line that the server would refuse; `commands` maps a name to its argv.

    Returns "" when all were judged and found good, else why they could not be judged (a missing GPU, for instance: then
    the server itself will judge). A good verdict is remembered in the folder `memory`.
    """
    words = {name: list(argv[3:]) for name, argv in commands.items()}  # without python -m sglang.launch_server
    key = hashlib.sha256(json.dumps([image.key, sorted(words.values())]).encode()).hexdigest()[:16]
    known = memory / f"flags-{key}" if memory else None
    if known and known.exists():
        return ""
    try:
        done = subprocess.run([str(image.python), "-c", _SCRIPT, json.dumps(list(words.values()))], timeout=TIMEOUT,
                              capture_output=True, text=True, env=dict(environment), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    verdicts = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("VERDICT ")]
    if len(verdicts) != len(words):
        why = [line for line in done.stdout.splitlines() if line.startswith("UNAVAILABLE ")]
        return why[-1][12:] if why else (done.stderr.strip().splitlines() or ["no answer"])[-1]
    problems = [_problem(name, verdict, words[name], image) for name, verdict in zip(words, verdicts, strict=True)
                if verdict]
    if problems:
        raise BadConfig(problems)
    if known and known.parent.is_dir():
        known.touch()
    return ""


def _problem(name: str, verdict: str, words: Sequence[str], image: Image) -> Problem:
    known = match(verdict, load(), image.profile.sglang)
    return Problem(what="the server does not take these flags", where=f"arm {name}",
                   found=verdict.partition("error: ")[2] or verdict,
                   expected=f"flags of SGLang {image.packages.get('sglang', image.profile.sglang)}",
                   todo=known.remedy if known else f"given: {' '.join(sorted(given_flags(words)))}")
