"""Where an image comes from: an in-toto statement with SLSA provenance, made from stack, lock and build.

Formats: in-toto.io/Statement/v1 and slsa.dev/provenance/v1. Not signed: who may write to the registry may write this
too. It holds names, versions and hashes; no address of an index, no setting of the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from buildctl import __version__
from buildctl import lock as locks
from buildctl.lock import Lock, Wheel

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:sgl-buildctl:stack:v1"
_LOCAL = "urn:sgl-buildctl:local"


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkout that was built: its commit (`-dirty` at the end when files differ), and where it is fetched from."""

    revision: str = ""
    remote: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """How it was built. Times in seconds since 1970, 0 where this run did not build it; no run is named then."""

    engine: str = ""
    builder: str = ""
    started: float = 0.0
    finished: float = 0.0


def statement(name: str, digest: str, image: Mapping[str, str], part: Lock, origin: Origin, build: Build,
              environment: Mapping[str, str]) -> bytes:
    """The statement about one image.

    :param name: its repository, `digest`: of its manifest.
    :param image: what identifies it: `image`, `stack`, `version`, `key`.
    :param part: the lock's share of it.
    :param environment: of this process; CI's own variables name the builder.
    """
    algorithm, _, value = digest.partition(":")
    identity, invocation = runner(environment)
    metadata = {"invocationId": invocation if build.started else "",
                "startedOn": _time(build.started), "finishedOn": _time(build.finished)}
    body = {
        "_type": STATEMENT, "subject": [{"name": name, "digest": {algorithm: value}}], "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"stack": image["stack"], "image": image["image"], "platform": part.platform},
                "internalParameters": {"key": image["key"], "version": image["version"],
                                       "lock": locks.text_digest(part), "builder": build.builder or "default",
                                       **({"revision": origin.revision} if origin.revision else {})},
                "resolvedDependencies": list(materials(part, origin))},
            "runDetails": {
                "builder": {"id": identity, "version": {"sgl-buildctl": __version__,
                                                        **({"docker": build.engine} if build.engine else {})}},
                "metadata": {key: text for key, text in metadata.items() if text}}}}
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"


def materials(part: Lock, origin: Origin = Origin()) -> Iterable[dict[str, Any]]:
    """Everything that went in, as resource descriptors: checkout, base, wheels, patches, packages of ours."""
    commit = origin.revision.removesuffix("-dirty")
    if commit and origin.remote:
        yield {"uri": f"git+{origin.remote}@{commit}", "name": "checkout", "digest": {"gitCommit": commit}}
    base = part.base
    if base.source == "registry":
        algorithm, _, value = base.digest.partition(":")
        yield {"uri": f"docker://{base.image}", "name": "base", **({"digest": {algorithm: value}} if value else {})}
    else:
        yield {"uri": f"pkg:generic/{quote(base.suite)}?tool=mmdebstrap", "name": "base"}
    for environment, wheels in (("server", part.wheels), ("entrypoint", part.entrypoint), ("tools", part.tools)):
        yield from (_wheel(wheel, environment) for wheel in wheels)
    for package, series in sorted(part.patches.items()):
        for name, sha256 in series.patches:
            yield {"name": f"patches/{series.folder}/{name}", "digest": {"sha256": sha256},
                   "annotations": {"package": package}}
    for path, sha256 in sorted(part.local.items()):
        yield {"name": f"images/{path}", "digest": {"sha256": sha256},
               "annotations": {"digest": "of names and contents"}}


def _wheel(wheel: Wheel, environment: str) -> dict[str, Any]:
    return {"uri": f"pkg:pypi/{quote(wheel.name)}@{quote(wheel.version)}", "name": wheel.file,
            "digest": {"sha256": wheel.sha256}, "annotations": {"environment": environment}}


def differences(data: bytes, digest: str, part: Lock) -> list[tuple[str, str, str]]:
    """What a statement says otherwise than image and lock, as (what, found, expected); the checkout is its own word."""
    try:
        body = json.loads(data)
        subjects = {f"{algorithm}:{value}" for one in body["subject"] for algorithm, value in one["digest"].items()}
        definition = body["predicate"]["buildDefinition"]
        stated = {_identity(one) for one in definition["resolvedDependencies"] if one.get("name") != "checkout"}
        lock = str(definition["internalParameters"].get("lock", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [("the provenance cannot be read", repr(error)[:200], f"a statement with {PREDICATE}")]
    found = []
    if digest not in subjects:
        found.append(("the provenance is of another image", ", ".join(sorted(subjects)) or "none", digest))
    if lock != locks.text_digest(part):
        found.append(("the provenance names another lock", lock or "none", locks.text_digest(part)))
    wanted = {_identity(one) for one in materials(part)}
    found += [("a material that the lock does not have", one, "none") for one in sorted(stated - wanted)]
    return found + [("a material of the lock is missing", "none", one) for one in sorted(wanted - stated)]


def _identity(descriptor: Mapping[str, Any]) -> str:
    digest = ",".join(f"{name}:{value}" for name, value in sorted((descriptor.get("digest") or {}).items()))
    return f"{descriptor.get('name', '')} {digest}".strip()


def runner(environment: Mapping[str, str]) -> tuple[str, str]:
    """Who builds and in which run, as addresses, by the variables of GitHub and GitLab."""
    get = environment.get
    if get("GITHUB_ACTIONS") == "true":
        server, repository = get("GITHUB_SERVER_URL", ""), get("GITHUB_REPOSITORY", "")
        run = f"{get('GITHUB_RUN_ID', '')}/attempts/{get('GITHUB_RUN_ATTEMPT', '1')}"
        return f"{server}/{get('GITHUB_WORKFLOW_REF') or repository}", f"{server}/{repository}/actions/runs/{run}"
    if get("GITLAB_CI") == "true":
        return f"{get('CI_PROJECT_URL', '')}/-/runners/{get('CI_RUNNER_ID', '')}", get("CI_JOB_URL", "")
    return _LOCAL, ""


def public(remote: str) -> str:
    """A git remote as anybody may see it: without credentials; empty for a path of this machine."""
    if "://" not in remote:
        host, colon, path = remote.partition(":")  # git@host:path
        name = host.rpartition("@")[2]
        return f"ssh://{name}/{path}" if colon and "/" not in host and "." in name else ""
    parts = urlsplit(remote)
    if parts.scheme not in ("https", "http", "ssh", "git") or not parts.hostname:
        return ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else ""
