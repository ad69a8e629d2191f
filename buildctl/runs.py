"""Names that one run gives to chain stages in an engine. Other runs leave them alone, except what dead ones left.

A name says whose it is: the machine (with its process namespace: containers may share an engine), process and time.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from pathlib import Path

_NAME = re.compile(r".+:chain-[0-9a-f]{16}-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-(?P<time>[0-9a-f]+)")
#: no run takes this long, in seconds; of a process on another machine nothing else can be known
LONGEST = 24 * 3600.0


def name(tag: str) -> str:
    """A name for what is published as `tag`, of this run alone."""
    return f"{tag}-{_machine()}-{os.getpid()}-{time.time_ns():x}"


def owned(tag: str) -> bool:
    """Whether a tag is such a name."""
    return _NAME.fullmatch(tag) is not None


def dead(tag: str) -> bool:
    """Whether a tag is a name of a run that has ended: its process is gone, or nobody works that long."""
    match = _NAME.fullmatch(tag)
    if match is None:
        return False
    if time.time() - int(match["time"], 16) / 1e9 > LONGEST:
        return True
    return match["machine"] == _machine() and not _alive(int(match["process"]))


def _machine() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
