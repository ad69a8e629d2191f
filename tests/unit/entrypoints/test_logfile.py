"""Logs while they grow."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from entrypoints import logfile
from entrypoints.logfile import LogFile, PassThrough, first_exception, tail


def test_only_whole_lines_and_each_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "server.log")
    assert log.new_lines() == []
    with log.writer() as file:
        file.write(b"one\ntwo\rthree\n\n\x1b[32mfour\x1b[0m  \nfi")
        file.flush()
        assert log.new_lines() == ["one", "two", "three", "four"]
        assert log.everything()[-1] == "fi"
        file.write(b"ve\n\xff\n" + b"x" * 5000)
        file.flush()
        assert log.new_lines() == ["five", "�"]
        assert len(log.everything()[-1]) == logfile.LINE_LIMIT
    assert log.total == 6
    assert log.since(4) == ["five", "�"]
    log.close()


def test_the_first_exception_is_the_cause() -> None:
    lines = ["fine", "[12:00] hit an exception: Traceback (most recent call last):", "  File x", "    f()",
             "torch.OutOfMemoryError: CUDA out of memory", "", "During handling of the above exception:",
             "Traceback (most recent call last):", "RuntimeError: later"]
    assert first_exception(lines) == "torch.OutOfMemoryError: CUDA out of memory"
    assert first_exception(["RuntimeError: no traceback before it"]) == ""
    assert first_exception(["Traceback (most recent call last):", "  File x"]) == ""


def test_the_tail() -> None:
    assert tail([str(n) for n in range(40)], 3) == ("37", "38", "39")


def test_a_passed_through_log_is_copied_and_its_middle_dropped() -> None:
    reading, writing = os.pipe()
    log = PassThrough(target=writing)
    with log.writer() as pipe:
        for number in range(2 * logfile.KEPT_LINES + 500):
            pipe.write(b"line %d\n" % number)
            if number % 500 == 0:
                pipe.flush()
                os.read(reading, 65536)
        pipe.flush()
        os.set_blocking(reading, False)
    while log.total < 2 * logfile.KEPT_LINES + 500:
        with contextlib.suppress(BlockingIOError):
            os.read(reading, 65536)
        log.new_lines()
    log.close()
    os.close(reading)
    os.close(writing)
    assert len(log.lines) <= 2 * logfile.KEPT_LINES
    assert log.lines[0] == "line 0"
    assert log.lines[-1] == f"line {2 * logfile.KEPT_LINES + 499}"
    assert log.since(log.total - 1) == log.lines[-1:]


def test_nobody_reads_our_stdout_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log = PassThrough(target=writing)
    with log.writer() as pipe:
        pipe.write(b"kept\n")
    while not log.total:
        log.new_lines()
    log.close()
    os.close(writing)
    assert log.lines == ["kept"]


def test_secrets_are_blanked_in_the_file_and_in_memory(tmp_path: Path) -> None:
    """SGLang writes `server_args={..., 'api_key': ...}` into its log."""
    log = LogFile(tmp_path / "server.log", ["sesame"])
    with log.writer() as file:
        file.write(b"args api_key='ses")
        file.flush()
        assert log.new_lines() == []
        file.write(b"ame', x\nmore\n")
        file.flush()
        assert log.new_lines() == ["args api_key='******', x", "more"]
        file.write(b"again sesame")
        file.flush()
        log.close()
    assert (tmp_path / "server.log").read_bytes() == b"args api_key='******', x\nmore\nagain ******"
    assert log.everything() == ["args api_key='******', x", "more", "again ******"]


def test_secrets_are_blanked_before_they_are_passed_through() -> None:
    reading, writing = os.pipe()
    log = PassThrough(["sesame"], writing)
    with log.writer() as pipe:
        for part in (b"first\napi_key='ses", b"ame'\nprogress\r", b"end sesame"):
            pipe.write(part)
            pipe.flush()
    log.close()
    os.close(writing)
    with os.fdopen(reading, "rb") as passed:
        assert passed.read() == b"first\napi_key='******'\nprogress\rend ******"
    assert log.everything() == ["first", "api_key='******'", "progress", "end ******"]
