"""pid1-exit: how the process ends when it kills itself and the kernel does not let it, from any thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patched import loading
from tests.patched.loading import SGLANG_0523, SGLANG_059

ROOT = Path(__file__).parents[2]
SERIES = pytest.mark.parametrize("series", [SGLANG_059, SGLANG_0523])

#: stands for the kernel, which drops a SIGKILL that PID 1 sends itself; everything else is the real function
CODE = """
import logging, os, sys, threading, types
from tests.patched import loading
logging.basicConfig(level="INFO")
psutil = types.SimpleNamespace(NoSuchProcess=ProcessLookupError, Process=lambda pid: types.SimpleNamespace(
    children=lambda recursive: [], kill=lambda: None, send_signal=lambda number: None))
module = loading.load(sys.argv[1], "sglang.srt.utils.common", {"torch": loading.torch("12.0"), "psutil": psutil},
                      patched=sys.argv[3] == "patched")
end = lambda: module.kill_process_tree(os.getpid())
if sys.argv[2] == "thread":
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    print("still there", flush=True)
else:
    end()
"""


def run(series: str, thread: str, patched: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", CODE, series, thread, patched]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@SERIES
@pytest.mark.parametrize("thread", ["main", "thread"])
def test_it_ends_with_137_and_says_so(series: str, thread: str) -> None:
    done = run(series, thread, "patched")

    assert done.returncode == 137
    assert "buildctl patch pid1-exit: PID 1 leaves with 137" in done.stderr
    assert "still there" not in done.stdout


@SERIES
def test_upstream_reports_success_and_survives_in_a_thread(series: str) -> None:
    assert run(series, "main", "upstream").returncode == 0
    assert "still there" in run(series, "thread", "upstream").stdout


def test_a_child_is_still_killed_without_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loading.common(SGLANG_059, "12.0")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    psutil = loading.StandIn(name="psutil", NoSuchProcess=ProcessLookupError)
    psutil.Process.return_value.children.return_value = [child]
    monkeypatch.setitem(vars(module), "psutil", psutil)

    module.kill_process_tree(1, include_parent=False)

    with child:
        assert child.wait() == -9
