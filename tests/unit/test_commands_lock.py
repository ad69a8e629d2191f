"""`buildctl lock` and `buildctl check` as a user calls them, without a network."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import cli, debian
from buildctl import lock as locks
from buildctl.errors import NetworkError, Problem
from buildctl.lock import LockedBase, Unlocked
from buildctl.registry import Registry
from tests.unit.projects import STACK, ready

#: a stack whose lock needs no source
PLAIN = STACK.replace("patches:\n  sglang: sglang/0.5\n", "")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDCTL_CACHE_DIR", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], root: Path, *words: str) -> tuple[int, str, str]:
    code = cli.run(["--project", str(root), *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_check_of_a_current_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, _, _ = ready(tmp_path)
    code, out, _ = run(capsys, project.root, "lock", "small", "--check")
    assert code == 0
    assert "torch" in out
    assert out.endswith("images/stacks/small.lock is current\n")


def test_check_of_a_stale_and_of_an_edited_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, _ = ready(tmp_path)
    loaded.path.write_text(STACK.replace("sglang==0.5", "sglang==0.6"))
    code, _, err = run(capsys, project.root, "lock", "small", "--check")
    assert (code, "changed since: requirements" in err) == (3, True)
    loaded.path.write_text(STACK)
    path = locks.path_of(loaded)
    path.write_text(path.read_text().replace("2.0+cpu", "2.1+cpu"))
    code, _, err = run(capsys, project.root, "lock", "small", "--check")
    assert (code, "changed by hand" in err) == (3, True)


def test_words_that_do_not_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, _, _ = ready(tmp_path)
    assert run(capsys, project.root, "lock", "small", "other")[0] == 2
    assert run(capsys, project.root, "lock", "small", "--check", "--upgrade", "torch")[0] == 2
    assert run(capsys, project.root, "lock", "small", "--exclude-newer", "long ago")[0] == 2
    code, _, err = run(capsys, project.root, "lock", "small", "--upgrade", "torhc")
    assert (code, "did you mean 'torch'?" in err) == (2, True)


def test_a_lock_is_held_against_the_rules_before_it_is_written(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, _ = ready(tmp_path, PLAIN)
    code, out, err = run(capsys, project.root, "lock", "small")
    before = locks.path_of(loaded).read_bytes()
    assert code == 0
    assert "cuda            0 wheels       0 B, 1 Debian packages" in out
    assert "warning: images/stacks/small.yaml" in err  # what fits with a warning is written, and the warning shown
    loaded.path.write_text(PLAIN + 'environment: {FLASHINFER_DISABLE_VERSION_CHECK: "1"}\n')
    code, _, err = run(capsys, project.root, "lock", "small")
    assert (code, locks.path_of(loaded).read_bytes()) == (4, before)
    assert "FLASHINFER_DISABLE_VERSION_CHECK is set (rule bypass)" in err


def test_what_uv_is_told_elsewhere_is_not_used_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    project, _, _ = ready(tmp_path, PLAIN)
    monkeypatch.setenv("UV_PRERELEASE", "allow")
    code, _, err = run(capsys, project.root, "lock", "small")
    assert (code, "warning: not used, a lock depends on its stack alone: UV_PRERELEASE\n" in err) == (0, True)


def test_a_lock_without_debian_packages_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    project, loaded, lock = ready(tmp_path, PLAIN)
    locks.path_of(loaded).write_text(locks.dump(replace(lock, debian={})))
    monkeypatch.setattr(debian, "available", lambda: False)
    code, out, err = run(capsys, project.root, "lock", "small", "--json")
    assert (code, json.loads(out)["debian"]) == (0, {})
    assert "no versions of Debian packages: this machine has no apt-get" in err
    assert run(capsys, project.root, "lock", "small", "--check", "--upgrade-debian")[0] == 2


def test_a_bootstrap_in_place_of_a_registry_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    project, loaded, lock = ready(tmp_path, PLAIN)
    locks.path_of(loaded).write_text(locks.dump(replace(lock, base=LockedBase("registry", image="debian:12"),
                                                        inputs={**lock.inputs, "base": "other"})))

    def refuse(*_: object, **__: object) -> None:
        raise NetworkError(Problem("no answer", "registry"))

    monkeypatch.setattr(Registry, "head", refuse)
    monkeypatch.setattr(debian, "available", lambda: False)
    code, _, err = run(capsys, project.root, "lock", "small")
    assert code == 0
    assert "the registry gave no digest of debian:bookworm-slim" in err
    assert "no digest" not in run(capsys, project.root, "lock", "small")[2]


def test_a_lock_that_is_not_complete_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, lock = ready(tmp_path)
    lock = replace(lock, unlocked=(Unlocked("kernel", "kernel==1+cu130", "sglang", "special"),),
                   base=LockedBase("registry", image="debian:12"))
    locks.path_of(loaded).write_text(locks.dump(lock))
    code, out, err = run(capsys, project.root, "lock", "small", "--check", "--json")
    assert code == 0
    assert json.loads(out)["unlocked"] == ["base debian:12", "kernel==1+cu130 of index 'special'"]
    assert "unlocked: kernel==1+cu130 of index 'special'" in err
    code, out, _ = run(capsys, project.root, "check", "small")
    assert (code, "  unlocked: base debian:12" in out) == (0, True)
    code, _, err = run(capsys, project.root, "build", "--stack", "small")
    assert code == 3
    assert "the lock of 'small' is not complete" in err
    assert "--allow-unlocked" in err


def test_the_image_records_what_no_hash_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, lock = ready(tmp_path)
    lock = replace(lock, wheels=tuple(wheel for wheel in lock.wheels if wheel.name != "torch"),
                   unlocked=(Unlocked("torch", "torch==2.0+cpu", "torch", "special"),
                             Unlocked("kernel", "kernel>=1", "sglang", "special")),
                   base=LockedBase("registry", image="debian:12"))
    locks.path_of(loaded).write_text(locks.dump(lock))
    target = tmp_path / "out"
    assert run(capsys, project.root, "render", "--stack", "small", "--to", str(target))[0] == 0
    facts = json.loads((target / "image" / "torch" / "image.json").read_text())
    assert facts["unlocked"] == ["base debian:12", "torch==2.0+cpu of index 'special'"]
    assert (facts["version"], facts["driver"]) == ("2.0", None)
    assert "FROM debian:12 AS base" in (target / "Dockerfile").read_text()
    # what the build resolves by itself: from the index that is theirs, held to all that the lock has
    asked = target / "layers" / "torch" / "own" / "unlocked"
    project_file = (asked / "pyproject.toml").read_text()
    assert 'dependencies = ["torch==2.0+cpu"]' in project_file
    assert 'torch = {index = "special"}' in project_file
    assert (asked / "constraints.txt").read_text() == "helper==3\nneeded==1.0\nsglang==0.5\n"
    assert (asked / "locked" / "public.txt").read_text().startswith("helper==3 --hash=sha256:abab")
    assert (asked / "excludes.txt").read_text() + (asked / "options.txt").read_text() == ""
    # a layer above keeps what was resolved below, from the same index
    above = (target / "layers" / "sglang" / "own" / "unlocked" / "pyproject.toml").read_text()
    assert 'dependencies = ["torch==2.0+cpu", "kernel>=1"]' in above


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, lock = ready(tmp_path)
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=t", "-c", "user.email=t@example", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert run(capsys, project.root, "lock", "--diff", "small")[1] == "small at HEAD -> small\nno difference\n"
    newer = replace(lock, wheels=tuple(replace(wheel, version="2.1+cpu") if wheel.name == "torch" else wheel
                                       for wheel in lock.wheels))
    locks.path_of(loaded).write_text(locks.dump(newer))
    code, out, _ = run(capsys, project.root, "lock", "--diff", "HEAD", "small", "--json")
    assert code == 0
    assert json.loads(out)["packages"] == [{"package": "torch", "what": "changed", "from": "2.0+cpu", "to": "2.1+cpu",
                                            "layer": "torch", "bytes_from": 1000, "bytes_to": 1000}]
    copy = tmp_path / "copy.lock"
    copy.write_text(locks.dump(lock))
    code, out, _ = run(capsys, project.root, "lock", "--diff", str(copy), "small")
    assert "1 packages, +0 B" in out
    assert run(capsys, project.root, "lock", "--diff", "nonsense", "small")[0] == 2


def test_check_of_all_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, _ = ready(tmp_path)
    code, out, _ = run(capsys, project.root, "check")
    assert code == 0
    assert out.startswith("small: 4 packages fit, 1 warnings\n  warning: images/stacks/small.yaml")
    (row,) = json.loads(run(capsys, project.root, "check", "--json")[1])["stacks"]
    assert (row["stack"], row["errors"]) == ("small", [])
    loaded.path.write_text(STACK.replace('sglang: "0.5"', 'sglang: "0.4"'))
    code, _, err = run(capsys, project.root, "check")
    assert (code, "changed since: profile" in err) == (3, True)


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    project, _, _ = ready(tmp_path, STACK.replace('  sglang: "0.5"', '  sglang: "0.4"'))
    for words in (("check",), *((word, "--stack", "small") for word in ("plan", "render", "build"))):
        code, _, err = run(capsys, project.root, *words)
        assert (code, "rule profile-version" in err) == (4, True)
    code, out, _ = run(capsys, project.root, "check", "--json")
    assert code == 4
    assert json.loads(out)["error"]["kind"] == "compatibility"


def test_the_rules_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, tmp_path, "check", "--rules")
    assert code == 0
    assert "gpu-cuda (error)" in out
    shown = json.loads(run(capsys, tmp_path, "check", "--rules", "--json")[1])["rules"]
    assert any("cuda: {from: wheels}" in rule["advice"].replace("'", "") for rule in shown)
