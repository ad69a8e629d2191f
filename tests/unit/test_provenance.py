"""Provenance: what went in, by hash, and nothing of the host; a statement held against image and lock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import lock as locks
from buildctl import provenance
from buildctl.lock import Lock, LockedBase, LockedSeries
from buildctl.provenance import Build, Origin
from tests.unit.projects import lock_of, make, wheel

DIGEST = "sha256:" + "d" * 64
COMMIT = "c" * 40
IMAGE = {"image": "sglang", "stack": "small", "version": "0.5", "key": "k" * 64}


@pytest.fixture
def part(tmp_path: Path) -> Lock:
    from buildctl import stack

    project = make(tmp_path)
    return lock_of(project, stack.load(project, "small"))


CHECKOUT = Origin(COMMIT, "https://git.example/team/images")
UNKNOWN = Build()


def statement(part: Lock, origin: Origin = CHECKOUT, build: Build = UNKNOWN) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(provenance.statement("r.example/sglang", DIGEST, IMAGE, part, origin, build, {}))
    return made


def test_a_statement_names_the_image_and_everything_that_went_in(part: Lock) -> None:
    made = statement(part, build=Build("26.1.5", "remote", 1_700_000_000.7, 1_700_000_100.0))
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    assert made["subject"] == [{"name": "r.example/sglang", "digest": {"sha256": "d" * 64}}]
    definition, run = made["predicate"]["buildDefinition"], made["predicate"]["runDetails"]
    assert definition["externalParameters"] == {"stack": "small", "image": "sglang", "platform": "linux/amd64"}
    assert definition["internalParameters"]["lock"] == locks.text_digest(part)
    assert definition["internalParameters"]["builder"] == "remote"
    materials = {one["name"]: one for one in definition["resolvedDependencies"]}
    assert materials["checkout"] == {"name": "checkout", "uri": f"git+https://git.example/team/images@{COMMIT}",
                                     "digest": {"gitCommit": COMMIT}}
    assert materials["base"]["uri"] == "pkg:generic/bookworm?tool=mmdebstrap"
    torch = materials["torch-2.0+cpu-py3-none-any.whl"]
    assert (torch["uri"], torch["digest"]) == ("pkg:pypi/torch@2.0%2Bcpu", {"sha256": "ab" * 32})
    assert materials["patches/sglang/0.5/0001-change.patch"]["digest"] == {"sha256": "ef" * 32}
    assert "images/sglang/packages/ours" in materials
    assert run["metadata"] == {"startedOn": "2023-11-14T22:13:20Z", "finishedOn": "2023-11-14T22:15:00Z"}
    assert run["builder"]["id"] == "urn:sgl-buildctl:local"
    assert run["builder"]["version"]["docker"] == "26.1.5"


def test_what_is_not_known_is_left_out(part: Lock) -> None:
    made = statement(replace(part, base=LockedBase("registry", image="a/b:1", digest="sha256:" + "e" * 64)),
                     origin=Origin())
    definition = made["predicate"]["buildDefinition"]
    assert "revision" not in definition["internalParameters"]
    assert definition["resolvedDependencies"][0] == {"uri": "docker://a/b:1", "name": "base",
                                                     "digest": {"sha256": "e" * 64}}
    assert made["predicate"]["runDetails"]["metadata"] == {}
    assert "docker" not in made["predicate"]["runDetails"]["builder"]["version"]
    unlocked = replace(part, base=LockedBase("registry", image="a/b:1"))
    assert "digest" not in next(iter(provenance.materials(unlocked)))


@pytest.mark.parametrize(("started", "run"), [(1_700_000_000.0, "https://ci.example/job/7"), (0.0, None)])
def test_a_run_is_named_by_what_it_built_only(part: Lock, started: float, run: str | None) -> None:
    environment = {"GITLAB_CI": "true", "CI_PROJECT_URL": "https://ci.example/p", "CI_JOB_URL": "https://ci.example/job/7"}
    made = json.loads(provenance.statement("r.example/sglang", DIGEST, IMAGE, part, CHECKOUT,
                                           Build(started=started), environment))
    assert made["predicate"]["runDetails"]["metadata"].get("invocationId") == run


def test_a_dirty_checkout_says_so(part: Lock) -> None:
    definition = statement(part, Origin(f"{COMMIT}-dirty", "https://g.example/x"))["predicate"]["buildDefinition"]
    assert definition["internalParameters"]["revision"] == f"{COMMIT}-dirty"
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": COMMIT}


def test_ci_names_the_builder() -> None:
    assert provenance.runner({"GITHUB_ACTIONS": "true", "GITHUB_SERVER_URL": "https://github.com",
                              "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "2",
                              "GITHUB_WORKFLOW_REF": "a/b/.github/workflows/x.yml@refs/heads/main"}) == (
        "https://github.com/a/b/.github/workflows/x.yml@refs/heads/main",
        "https://github.com/a/b/actions/runs/7/attempts/2")
    assert provenance.runner({"GITLAB_CI": "true", "CI_PROJECT_URL": "https://gitlab.com/a/b", "CI_RUNNER_ID": "3",
                              "CI_JOB_URL": "https://gitlab.com/a/b/-/jobs/9"}) == (
        "https://gitlab.com/a/b/-/runners/3", "https://gitlab.com/a/b/-/jobs/9")
    assert provenance.runner({}) == ("urn:sgl-buildctl:local", "")


@pytest.mark.parametrize(("remote", "shown"), [
    ("https://user:hunter2@git.example:8443/a/b.git?token=x", "https://git.example:8443/a/b.git"),
    ("https://token@github.com/a/b", "https://github.com/a/b"), ("git@github.com:a/b.git", "ssh://github.com/a/b.git"),
    ("ssh://git@host.example/a", "ssh://host.example/a"), ("/srv/git/x", ""), ("../x", ""), ("file:///srv/x", ""),
    ("", ""), ("C:/x", "")])
def test_a_remote_is_shown_without_credentials_and_never_as_a_path(remote: str, shown: str) -> None:
    assert provenance.public(remote) == shown


def test_a_statement_held_against_image_and_lock(part: Lock) -> None:
    data = provenance.statement("x", DIGEST, IMAGE, part, Origin(COMMIT, "https://g.example/x"), Build(), {})
    assert provenance.differences(data, DIGEST, part) == []
    other = "sha256:" + "0" * 64
    assert provenance.differences(data, other, part) == [("the provenance is of another image", DIGEST, other)]
    newer = replace(part, wheels=(*part.wheels[:-1], wheel("helper", "4", "sglang", sha256="99" * 32)),
                    patches={"sglang": LockedSeries("sglang/0.5", "cd" * 32, (), "12" * 32)})
    said = provenance.differences(data, DIGEST, newer)
    assert [what for what, _, _ in said] == [
        "the provenance names another lock", "a material that the lock does not have",
        "a material that the lock does not have", "a material of the lock is missing"]
    assert ("a material of the lock is missing", "none", f"helper-4-py3-none-any.whl sha256:{'99' * 32}") in said
    for broken in (b"{", b"[]", b'{"subject": []}', b'{"subject": [{"digest": 1}]}'):
        (fault,) = provenance.differences(broken, DIGEST, part)
        assert fault[0] == "the provenance cannot be read"
