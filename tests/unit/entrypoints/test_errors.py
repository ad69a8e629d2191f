"""Errors: three parts, one code per kind."""

from __future__ import annotations

import signal

import pytest

from entrypoints import errors
from entrypoints.errors import VERDICT_CODES, Diagnosis, EntrypointError, NotReady, Problem, ServerDied, Terminated


def test_codes_are_those_of_the_table() -> None:
    expected = {"Usage": 64, "InputMissing": 66, "Unusable": 69, "Bug": 70, "CannotWrite": 73, "Busy": 75,
                "BadConfig": 78, "Deadline": 124, "Invalid": 13, "ServerDied": 69, "NotReady": 69}
    assert {name: getattr(errors, name).exit_code for name in expected} == expected
    assert VERDICT_CODES == {"win": 0, "loss": 10, "equivalent": 11, "inconclusive": 12, "invalid": 13}


def test_a_problem_says_what_was_found_and_what_to_do() -> None:
    problem = Problem(what="no model", where="--model", found="nothing", expected="a folder", todo="name one")
    assert str(problem) == ("--model: no model\n  found:    nothing\n  expected: a folder\n  do:       name one")
    assert str(Problem("x")) == "x"
    assert problem.as_dict() == {"what": "no model", "where": "--model", "found": "nothing", "expected": "a folder",
                                 "todo": "name one"}
    error = EntrypointError([problem, Problem("y")])
    assert error.as_dict() == {"kind": "error", "exit_code": 70, "problems": [problem.as_dict(), {"what": "y"}]}


def test_a_dead_server_carries_its_diagnosis() -> None:
    diagnosis = Diagnosis(cause="killed", remedy="more memory", evidence="line", exit_code=-9, tail=("a", "b"),
                          log="x.log")
    error = ServerDied(diagnosis)
    assert "x.log: server died" in str(error)
    assert "    | b" in str(error)
    shown = error.as_dict()["diagnosis"]
    assert isinstance(shown, dict)
    assert shown["signal"] == "SIGKILL"
    assert issubclass(NotReady, errors.Unusable)


@pytest.mark.parametrize(("code", "kills", "missing", "state"), [
    (None, 0, ("sglang::schedul (pid 7)",),
     "its first process lives; out-of-memory kills in this container: 0; gone: sglang::schedul (pid 7)"),
    (-9, 2, (), "ended by signal SIGKILL; out-of-memory kills in this container: 2"),
    (137, 0, (), "exit status 137 (SIGKILL); out-of-memory kills in this container: 0"),
    (1, 0, (), "exit status 1; out-of-memory kills in this container: 0"),
    (-64, 0, (), "ended by signal SIGRTMAX; out-of-memory kills in this container: 0"),
    (-99, 0, (), "ended by signal 99; out-of-memory kills in this container: 0"),
])
def test_a_message_has_the_state_whatever_the_cause(code: int | None, kills: int, missing: tuple[str, ...],
                                                    state: str) -> None:
    diagnosis = Diagnosis(cause="a row of the table", evidence="its line", exit_code=code, oom_kills=kills,
                          missing=missing, tail=("a", "b"))
    assert f"found:    a row of the table | its line\n    {state}\n    | a\n    | b" in str(ServerDied(diagnosis))


@pytest.mark.parametrize(("code", "name"), [
    (None, ""), (0, ""), (1, ""), (-15, "SIGTERM"), (139, "SIGSEGV"), (-7, "SIGBUS")])
def test_signals_by_name(code: int | None, name: str) -> None:
    assert Diagnosis("x", exit_code=code).signal == name


def test_an_interruption_is_128_and_the_signal() -> None:
    assert Terminated(signal.SIGTERM).exit_code == 143
    assert Terminated(signal.SIGINT).exit_code == 130
    assert str(Terminated(signal.SIGHUP)) == "stopped by SIGHUP"
    assert not issubclass(Terminated, Exception)
