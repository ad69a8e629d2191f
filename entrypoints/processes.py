"""Processes as /proc shows them: who descends from whom, who listens, who was killed for memory. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHM = Path("/dev/shm")  # noqa: S108 - nothing is created there
_LISTEN = "0A"
_SUBREAPER = 36  # prctl(2): PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `start` (clock ticks since boot) with `pid` names it for good: pids are used again."""

    pid: int
    start: int
    parent: int
    session: int
    state: str
    threads: int
    name: str

    @property
    def alive(self) -> bool:
        """A zombie is not alive: it only waits for its parent to read its status.

        A zombie with more threads than one is: its first thread ended, the others still run.
        """
        return self.state not in "ZXx" or self.threads > 1


@dataclass(frozen=True, slots=True)
class Activity:
    """What a tree did so far: bytes read and written by its processes, resident bytes, processes ever seen."""

    io_bytes: int
    resident_bytes: int
    processes: int


def read(pid: int) -> Process | None:
    """The process, or None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1:text.rindex(")")]
    fields = text[text.rindex(")") + 2:].split()
    return Process(pid=pid, start=int(fields[19]), parent=int(fields[1]), session=int(fields[3]), state=fields[0],
                   threads=int(fields[17]), name=name)


def everyone() -> dict[int, Process]:
    """All processes that we may see."""
    with os.scandir(PROC) as entries:
        found = [read(int(entry.name)) for entry in entries if entry.name.isdigit()]
    return {one.pid: one for one in found if one}


def is_same(one: Process) -> bool:
    """Whether that very process still lives (a zombie does not)."""
    now = read(one.pid)
    return now is not None and now.start == one.start and now.alive


def family(root: Process, seen: Iterable[Process], table: Mapping[int, Process],
           others: Collection[int] = ()) -> dict[int, Process]:
    """The process and its descendants: by parents, by its session, those seen before that still are, and orphans.

    Orphans keep their session. One that also left the session is known from an earlier look; or it has become our child
    (`adopt_orphans`) with a session that is neither ours nor one of `others`. Zombies are included.
    """
    members = {one.pid for one in (root, *seen) if (now := table.get(one.pid)) and now.start == one.start}
    if root.pid in members or root.pid not in table:  # else the number belongs to somebody else by now
        members |= {pid for pid, one in table.items() if one.session == root.pid}
    mine = os.getpid()
    known = {os.getsid(0), *others}
    members |= {pid for pid, one in table.items()
                if one.parent == mine and one.start >= root.start and one.session not in known}
    grown = True
    while grown:
        more = {pid for pid, one in table.items() if one.parent in members and pid not in members}
        members |= more
        grown = bool(more)
    return {pid: table[pid] for pid in members}


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants, so that none can hide from us and all can be reaped."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) == 0)
    return False


def reap(pids: Iterable[int]) -> None:
    """Read the status of those of our children that have ended; others are left alone."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def reap_orphans(session: int, others: Collection[int] = ()) -> None:
    """Read the status of ended orphans that became our children: those of a session, and of sessions of their own.

    By the rule of `family`: what is neither in our session nor in one of `others` was orphaned by a server. A session's
    leader is left to its owner.
    """
    mine, known = os.getpid(), {os.getsid(0), *others} - {session}

    def adopted(one: Process) -> bool:
        return one.parent == mine and one.pid != session and one.session not in known and not one.alive

    with contextlib.suppress(OSError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            one = read(ended.si_pid)
            if one is None or not adopted(one):
                # a child that somebody else will ask for is reported first, again and again: look past it
                reap(pid for pid, other in everyone().items() if adopted(other))
                return
            os.waitpid(one.pid, os.WNOHANG)


def listeners() -> dict[int, set[int]]:
    """Ports in state LISTEN with the inodes of their sockets (IPv4 and IPv6)."""
    ports: dict[int, set[int]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    ports.setdefault(int(fields[1].rpartition(":")[2], 16), set()).add(int(fields[9]))
    return ports


def socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds; empty when we may not look."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(PROC / str(pid) / "fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)  # noqa: PTH115 - many of them, and often
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def holder(port: int) -> str:
    """«name (pid N)» of who listens on a port, as far as we may know; "" when nobody listens."""
    inodes = listeners().get(port)
    if not inodes:
        return ""
    for pid, one in everyone().items():
        if inodes & socket_inodes(pid):
            return f"{one.name} (pid {pid})"
    return "another process"


def listening_ports(pids: Collection[int]) -> set[int]:
    """Ports on which one of these processes listens."""
    inodes = set().union(*(socket_inodes(pid) for pid in pids)) if pids else set()
    return {port for port, theirs in listeners().items() if theirs & inodes}


def shared_memory(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped.

    Inodes, because a semaphore is mapped under the temporary name that it had while it was created.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHM}/"):
                    found.add(int(fields[4]))
    return found


def segments() -> dict[int, str]:
    """Files in /dev/shm: inode to name."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found[entry.inode()] = entry.name
    return found


def remove_segments(inodes: Collection[int]) -> list[str]:
    """Delete the files in /dev/shm with these inodes; the names of those that could not be deleted.

    SGLang leaves some behind when it is killed. One that a living process still maps is in use: with `--ipc=host`
    others may share it.
    """
    there = {inode: name for inode, name in segments().items() if inode in inodes} if inodes else {}
    used = shared_memory(everyone()) if there else set()
    stay = []
    for name in (name for inode, name in there.items() if inode not in used):
        try:
            (SHM / name).unlink(missing_ok=True)
        except OSError:
            stay.append(name)
    return sorted(stay)


def activity(pids: Collection[int]) -> Activity:
    """Work done by these processes; one that we may not read counts as idle."""
    io_bytes = resident = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (PROC / str(pid) / "io").read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(":")
                if name in ("rchar", "wchar", "read_bytes"):
                    io_bytes += int(value)
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident += int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * page
    return Activity(io_bytes=io_bytes, resident_bytes=resident, processes=len(pids))


def oom_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel has killed in our memory cgroup, v2 or v1; 0 when it does not say."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (root / name).read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
