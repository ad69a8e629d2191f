"""Process trees and listeners as /proc shows them."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoints import processes
from entrypoints.processes import Process, family


def one(pid: int, parent: int, session: int = 1, start: int = 5, state: str = "S", threads: int = 1) -> Process:
    return Process(pid=pid, start=start, parent=parent, session=session, state=state, threads=threads, name=f"p{pid}")


def table(*members: Process) -> dict[int, Process]:
    return {member.pid: member for member in members}


def test_a_family_by_parents_sessions_and_memory() -> None:
    root = one(10, 1, session=10)
    child, grandchild = one(11, 10, session=10), one(12, 11, session=10)
    orphan = one(13, 1, session=10)  # its parent died, it kept the session
    escaped = one(14, 1, session=14)  # and one that also left the session
    foreign = one(20, 1, session=20)
    everyone = table(root, child, grandchild, orphan, escaped, foreign, one(15, 14, session=14))
    assert set(family(root, [], everyone)) == {10, 11, 12, 13}
    assert set(family(root, [escaped], everyone)) == {10, 11, 12, 13, 14, 15}


def test_a_number_that_was_used_again_is_a_stranger() -> None:
    root = one(10, 1, session=10, start=5)
    again = one(10, 1, session=10, start=99)
    assert family(root, [root], table(again, one(11, 10, session=10))) == {}
    left = one(13, 1, session=13)
    assert set(family(root, [left], table(one(12, 1, session=10), left))) == {12, 13}


def test_zombies_are_not_alive_unless_threads_go_on() -> None:
    assert one(1, 0).alive
    assert not one(1, 0, state="Z").alive
    assert one(1, 0, state="Z", threads=3).alive


def test_reading_real_processes() -> None:
    me = processes.read(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert processes.is_same(me)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    seen = processes.read(child.pid)
    child.wait()
    assert seen is not None
    assert not processes.is_same(seen)
    assert processes.read(2**22 - 1) is None
    processes.reap([2**22 - 1])


def test_who_listens() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("::1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert port in processes.listeners()
        assert port in processes.listening_ports([os.getpid()])
        assert processes.holder(port).endswith(f"(pid {os.getpid()})")
        assert processes.listening_ports([]) == set()
    assert processes.holder(port) == ""


def test_a_holder_that_we_may_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "listeners", lambda: {5: {1}})
    monkeypatch.setattr(processes, "everyone", dict)
    assert processes.holder(5) == "another process"


def test_kills_for_memory_in_both_cgroup_versions(tmp_path: Path) -> None:
    assert processes.oom_kills(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert processes.oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    assert processes.oom_kills(tmp_path) == 3


def test_becoming_the_parent_of_orphans() -> None:
    assert processes.adopt_orphans() is True


def test_files_in_shared_memory_are_removed_unless_somebody_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    path = processes.SHM / f"entrypoint-test-{os.getpid()}"
    try:
        with path.open("w+b") as file:
            file.truncate(4096)
            inode = path.stat().st_ino
            assert processes.segments()[inode] == path.name
            with mmap.mmap(file.fileno(), 4096):
                assert processes.shared_memory([os.getpid()]) >= {inode}
                assert processes.remove_segments([inode]) == []
                assert path.exists()

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            assert processes.remove_segments([inode]) == [path.name]
        assert processes.remove_segments([inode]) == []
        assert not path.exists()
        assert processes.remove_segments([]) == []
    finally:
        path.unlink(missing_ok=True)
