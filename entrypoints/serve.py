"""`entrypoint serve`: the server with the profile's flags, watched: a death is explained and never ends with 0."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from entrypoints import health, probe, version
from entrypoints.command import given_flags, mask, secrets, server_argv, server_environment
from entrypoints.errors import BadConfig, CannotWrite, Problem
from entrypoints.image import Image
from entrypoints.logfile import PassThrough
from entrypoints.probe import NoAnswer
from entrypoints.readiness import Expect, asked, wait_ready
from entrypoints.settings import Settings, suggestion
from entrypoints.supervise import Launch, Server

#: seconds that memory of a dead server is waited for; a neighbour's on the same GPU must not delay a restart
RELEASE = 15.0
_EVERYWHERE = frozenset({"0.0.0.0", "127.0.0.1", "localhost", "::", ""})  # noqa: S104 - compared, not bound


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
    port = int(said["port"])
    launch = Launch(argv=argv, env=environment, cwd=Path(tempfile.gettempdir()), log=Path("stdout"), port=port)
    print(f"entrypoint: {' '.join(mask(argv))}", file=sys.stderr, flush=True)
    server = Server(launch, grace=settings.grace_seconds, version=version.of(image), log=PassThrough(secrets(argv)),
                    patience=RELEASE)
    server.start()
    try:
        if _can_be_asked(said):
            expect = Expect(str(said.get("model_path") or said.get("model") or ""),
                            api_key=str(said.get("api_key") or ""))
            ready = wait_ready(server, expect, stall=settings.stall_seconds, deadline=settings.ready_seconds or None,
                               mode="serve", on_progress=lambda step: print(f"entrypoint: {step}", file=sys.stderr))
            print(f"entrypoint: ready after {ready.seconds:.1f} s", file=sys.stderr, flush=True)
            server.doubt = functools.partial(_answers, port)
        health.beat("serving" if _can_be_asked(said) else "supervising", "serve", port=port)
        while True:
            server.wait(1.0)
            if not _can_be_asked(said):
                health.beat("supervising", "serve", port=port)
    finally:
        # all of the grace time, also when we are being stopped: requests in flight are somebody's
        for left in server.stop(settings.grace_seconds).problems():
            print(f"entrypoint: {left}", file=sys.stderr, flush=True)
        health.forget()


def _answers(port: int, line: str) -> bool:
    """Whether the server lives in spite of a fatal line: with --log-requests anybody may write one into the log."""
    try:
        healthy = probe.ask(port, "/health").status == 200
    except NoAnswer:
        return False
    if healthy:
        print(f"entrypoint: /health says 200, so this line is no death: {line[:200]}", file=sys.stderr, flush=True)
    return healthy


def completed(settings: Settings) -> Settings:
    """The settings with model and draft as the server's own flags name them, for the check."""
    said = asked(settings.extra)
    model = str(said.get("model_path") or said.get("model") or settings.model)
    draft = str(said.get("speculative_draft_model_path") or settings.draft)
    return dataclasses.replace(settings, model=model, draft=draft)


def command(settings: Settings, image: Image) -> tuple[str, ...]:
    """The server's command line for the chosen arm. Raises `BadConfig` for an unknown arm or a missing draft."""
    arms = image.profile.arms
    if settings.serve_arm not in arms and settings.serve_arm != "baseline":
        raise BadConfig(Problem(what=f"unknown arm {settings.serve_arm}", where="--serve-arm",
                                expected=" or ".join(arms) or "baseline", todo=suggestion(settings.serve_arm, arms)))
    argv = server_argv(image, arms.get(settings.serve_arm, {}), model=settings.model, draft=settings.draft,
                       host=settings.host, port=settings.port, extra=settings.extra)
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


def _can_be_asked(said: Mapping[str, object]) -> bool:
    """Whether this process speaks plain HTTP on an address that we can reach; other nodes of a cluster do not."""
    return (str(said.get("host", "")) in _EVERYWHERE and "ssl_certfile" not in said
            and str(said.get("node_rank", "0")) == "0" and "skip_tokenizer_init" not in said)
