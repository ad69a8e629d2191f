"""`entrypoint serve`: the server with the profile's flags, watched: a death is explained and never ends with 0."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints import health, probe, version
from entrypoints.command import given_flags, mask, secrets, server_argv, server_environment
from entrypoints.errors import BadConfig, CannotWrite, Problem, Usage
from entrypoints.image import Image
from entrypoints.logfile import PassThrough
from entrypoints.probe import Address, NoAnswer
from entrypoints.readiness import (
    RESOLVED,
    Expect,
    asked,
    changed,
    identity,
    key_of,
    listening,
    wait_listening,
    wait_ready,
)
from entrypoints.settings import Settings, suggestion
from entrypoints.supervise import Launch, Server

#: seconds that memory of a dead server is waited for; a neighbour's on the same GPU must not delay a restart
RELEASE = 15.0
#: flags of servers that speak no HTTP that we know, and what they speak
_OTHER_TONGUES = {"grpc_mode": "gRPC", "smg_grpc_mode": "gRPC", "encoder_only": "the encoder's own protocol"}


def run(settings: Settings, image: Image, environ: Mapping[str, str]) -> int:
    """Serve until stopped or dead; does not return normally. Raises `ServerDied`, `NotReady`, `Terminated` and more.

    With `--help` among the server's words, the server's own help is printed instead.
    """
    argv = command(settings, image)
    environment = server_environment(image, environ, cache_root=Path(settings.cache))
    if {"--help", "-h"} & set(settings.extra):
        os.execve(argv[0], argv, environment)  # noqa: S606
    said = asked(argv)
    prepare_cache(Path(settings.cache) / image.short_key)
    address = Address.of(str(said.get("host", "")), int(said["port"]), tls="ssl_certfile" in said)
    launch = Launch(argv=argv, env=environment, cwd=Path(tempfile.gettempdir()), log=Path("stdout"), port=address.port)
    _say(" ".join(mask(argv)))
    server = Server(launch, grace=settings.grace_seconds, version=version.of(image), log=PassThrough(secrets(argv)),
                    patience=RELEASE)
    server.start()
    try:
        phase = _wait(server, settings, said, address)
        _beat(server, phase, address)
        while True:
            server.wait(1.0)
            if phase != "serving":
                _beat(server, phase, address)
    finally:
        # all of the grace time, also when we are being stopped: requests in flight are somebody's
        for left in server.stop(settings.grace_seconds).problems():
            _say(str(left))
        health.forget()


def _say(line: str) -> None:
    print(f"entrypoint: {line}", file=sys.stderr, flush=True)


def _wait(server: Server, settings: Settings, said: Mapping[str, Any], address: Address) -> str:
    """Wait as far as this kind of server can be asked; the phase in which it is from then on."""
    bounds: dict[str, Any] = {"stall": settings.stall_seconds, "deadline": settings.ready_seconds or None}
    if str(said.get("node_rank", "0")) != "0":
        _say("another node of a cluster: the first one answers, this one is only watched")
        return "supervising"
    if tongue := next((name for flag, name in _OTHER_TONGUES.items() if flag in said), ""):
        wait_listening(server, on_progress=_say, **bounds)
        _say(f"listening; it speaks {tongue}, so nothing more is proved")
        return "listening"
    must = {name: value for name, value in identity(server.launch.argv).items() if name not in RESOLVED}
    expect = Expect(str(said.get("model_path") or said.get("model") or ""), must, key_of(server.launch.argv), address)
    ready = wait_ready(server, expect, mode="serve", on_progress=_say, **bounds)
    for difference in changed(server.launch.argv, ready.server_info):
        _say(f"note: {difference}")
    _say(f"ready after {ready.seconds:.1f} s")
    server.doubt = functools.partial(_answers, address)
    return "serving"


def _beat(server: Server, phase: str, address: Address) -> None:
    """For HEALTHCHECK: it asks a server that serves itself; of others it learns here whether they still listen."""
    if phase == "listening" and not listening(server):
        phase = "deaf"
    health.beat(phase, "serve", port=address.port, host=address.host, tls=address.tls)


def _answers(address: Address, line: str) -> bool:
    """Whether the server lives in spite of a fatal line: with --log-requests anybody may write one into the log."""
    try:
        healthy = probe.ask(address, "/health").status == 200
    except NoAnswer:
        return False
    if healthy:
        _say(f"/health says 200, so this line is no death: {line[:200]}")
    return healthy


def completed(settings: Settings) -> Settings:
    """The settings with model and draft as the server's own flags name them, for the check."""
    said = asked(settings.extra)
    model = str(said.get("model_path") or said.get("model") or settings.model)
    draft = str(said.get("speculative_draft_model_path") or settings.draft)
    return dataclasses.replace(settings, model=model, draft=draft)


def require_model(settings: Settings, image: Image) -> None:
    """Raise `Usage` where nobody names a model: SGLang says so only after half a minute of imports.

    The words for the server count too, and its own --config may hold it.
    """
    given = given_flags(command(settings, image))
    if "config" not in given and not any(name.startswith("model") and "model-path".startswith(name) for name in given):
        raise Usage(Problem(what="no model named", where="serve", expected="--model FOLDER, or a name on the hub",
                            todo="docker run -v /models/NAME:/models/NAME:ro IMAGE serve --model /models/NAME; "
                                 "`docker run IMAGE help` lists the modes"))


def command(settings: Settings, image: Image) -> tuple[str, ...]:
    """The server's command line for the chosen arm. Raises `BadConfig` for an unknown arm or a missing draft."""
    arms = image.profile.arms
    if settings.serve_arm not in arms and settings.serve_arm != "baseline":
        raise BadConfig(Problem(what=f"unknown arm {settings.serve_arm}", where="--serve-arm",
                                expected=" or ".join(arms) or "baseline", todo=suggestion(settings.serve_arm, arms)))
    extra = settings.extra
    if settings.api_key and not key_of(extra):  # SGLang takes it as a flag only
        extra = ("--api-key", settings.api_key, *extra)
    argv = server_argv(image, arms.get(settings.serve_arm, {}), model=settings.model, draft=settings.draft,
                       host=settings.host, port=settings.port, extra=extra)
    flags = given_flags(argv)
    if (str(asked(argv).get("speculative_algorithm", "")).upper().startswith("EAGLE")
            and not {"speculative-draft-model-path", "speculative-draft-model"} & flags):
        raise BadConfig(Problem(what="EAGLE needs a draft model", where=f"arm {settings.serve_arm}",
                                expected="--draft FOLDER", todo="without one SGLang loads the target twice and fails"))
    return argv


def prepare_cache(folder: Path) -> None:
    """Make the keyed cache folder. Raises `CannotWrite`: without it each start compiles all kernels again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CannotWrite(Problem(what="the cache folder cannot be written", where=str(folder),
                                  found=f"{error.strerror} (user {os.getuid()})", expected="a writable volume",
                                  todo="-v NAME:/cache with an owner of that uid, or --cache FOLDER")) from error
