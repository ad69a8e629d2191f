"""Differences between locks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import lock as locks
from buildctl import lockdiff
from buildctl.errors import UsageError
from buildctl.lock import LockedBase, Unlocked
from buildctl.lockdiff import Side, compare, sides
from tests.unit.projects import ready, wheel


def test_packages_as_a_person_wants_them(tmp_path: Path) -> None:
    _, _, before = ready(tmp_path)
    after = replace(before, wheels=(
        wheel("torch", "2.1+cpu", "torch", index="special", size=3000), wheel("needed", layer="sglang"),
        wheel("sglang", "0.5", "sglang", sha256="99" * 32), wheel("fresh", "7", "sglang", size=None)),
        entrypoint=(wheel("h11", "0.17", ""),))
    found = compare(before, after)
    rows = {row.package: (row.what, row.old, row.new, row.layer) for row in found.rows}
    assert rows == {"fresh": ("added", "", "7", "sglang"), "helper": ("removed", "3", "", "sglang"),
                    "needed": ("moved", "1.0", "1.0", "torch -> sglang"),
                    "sglang": ("other file", "0.5", "0.5", "sglang"),
                    "torch": ("changed", "2.0+cpu", "2.1+cpu", "torch"),
                    "h11": ("changed", "0.16", "0.17", "(entrypoint)")}
    lines = list(found.lines())
    assert any("torch" in line and "2.0+cpu -> 2.1+cpu" in line and "3.0 kB" in line for line in lines)
    assert lines[-1] == "6 packages, +1.0 kB"
    assert next(iter(compare(after, before).lines())).startswith("fresh")
    assert found.as_dict()["packages"][0]["to"] == "7"


def test_what_differs_beside_packages(tmp_path: Path) -> None:
    _, _, before = ready(tmp_path)
    series = {"sglang": replace(before.patches["sglang"], tree="ff" * 32)}
    after = replace(before, python="3.12", patches=series, local={}, unlocked=(Unlocked("x", "x==1", "torch", "i"),),
                    base=LockedBase("registry", image="debian", digest="sha256:" + "ab" * 32))
    others = {what: (old, new) for what, old, new in compare(before, after).others}
    assert others["python"] == ("3.11", "3.12")
    assert others["base"] == ("bootstrap bookworm", "debian@sha256:abababababab")
    assert others["patches of sglang"][1].endswith("tree ffffffffffff")
    assert others["local sglang/packages/ours"][1] == ""
    assert others["unlocked"] == ("", "x==1 of index 'i'")
    open_base = replace(after, base=LockedBase("registry", image="debian"))
    assert {what: new for what, _, new in compare(after, open_base).others}["base"] == "debian (unlocked)"
    without = replace(before, patches={})
    assert "patches of sglang: -> -" not in "\n".join(compare(before, without).lines())
    assert any(line.endswith("-> -") for line in compare(before, without).lines())
    assert list(compare(before, before).lines()) == ["no difference"]


def test_debian_packages(tmp_path: Path) -> None:
    _, _, before = ready(tmp_path)
    after = replace(before, debian={"base": {"apt": "2.6.2 sha256:00", "libc6": f"2.36-9 sha256:{'ff' * 32}"},
                                    "cuda": {"python3": before.debian["cuda"]["python3"], "git": "2 sha256:11"}})
    found = compare(before, after)
    assert {(row.layer, row.package): row.what for row in found.debian} == {
        ("base", "apt"): "changed", ("base", "libc6"): "other file", ("cuda", "git"): "added",
        ("tools", "tini"): "removed"}
    assert "Debian, base: apt  2.6.1 -> 2.6.2  changed" in list(found.lines())
    assert found.as_dict()["debian"][0] == {"package": "apt", "what": "changed", "from": "2.6.1", "to": "2.6.2",
                                            "place": "base"}
    pinned = replace(before, base=replace(before.base, snapshot="20261201T000000Z"))
    assert ("base", "bootstrap bookworm", "bootstrap bookworm snapshot 20261201T000000Z") in compare(before,
                                                                                                     pinned).others


def test_the_words_of_the_command(tmp_path: Path) -> None:
    stacks = ["one", "two"]
    file = tmp_path / "x"
    file.write_text("")
    assert sides([], stacks, "one") == (Side("one", "HEAD"), Side("one"))
    assert sides(["two"], stacks, "one") == (Side("two", "HEAD"), Side("two"))
    assert sides(["v1"], stacks, "one") == (Side("one", "v1"), Side("one"))
    assert sides(["one", "two"], stacks, "one") == (Side("one"), Side("two"))
    assert sides(["v1", "two"], stacks, "one") == (Side("two", "v1"), Side("two"))
    assert sides([str(file), "old.lock"], stacks, "one") == (Side("one", file=str(file)), Side("one", file="old.lock"))
    with pytest.raises(UsageError, match="two sides"):
        sides(["a", "b", "c"], stacks, "one")
    assert [side.shown for side in sides(["v1", "old.lock"], stacks, "one")] == ["one at v1", "old.lock"]


def test_a_lock_at_a_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, loaded, _ = ready(tmp_path / "sub")
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=t", "-c", "user.email=t@example", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    path = locks.path_of(loaded)
    path.write_text("changed")
    text = lockdiff.at_revision(project.root, "HEAD", path)
    assert locks.parse(text, "HEAD", "small").wheels
    for revision in ("no-such-revision", "--output=/tmp/x"):
        with pytest.raises(UsageError, match="git has no"):
            lockdiff.at_revision(project.root, revision, path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="cannot ask git"):
        lockdiff.at_revision(project.root, "HEAD", path)
