"""The measuring tools measure what they say."""

from __future__ import annotations

import asyncio

import pytest

from tests.perf import bench, clients
from tests.perf.compare import Comparison, Timing, compare


def test_alternatives_take_turns_and_swap_their_order() -> None:
    calls: list[str] = []
    now = [0.0]

    def take(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    found = compare({"a": lambda: take("a", 2), "b": lambda: take("b", 3)}, 3, warmups=1, clock=lambda: now[0])
    assert "".join(calls) == "ab" "ab" "ba" "ab"
    assert [timing.median for timing in found.timings] == [2, 3]
    assert found.ratio(found.timings[1]) == 1.5


def test_the_ratio_is_taken_within_rounds() -> None:
    # the machine got twice as slow after the first round; the ratio did not change
    found = Comparison((Timing("a", (1, 2, 2)), Timing("b", (2, 4, 4))))
    assert found.ratio(found.timings[1]) == 2
    assert found.lines()[1] == "b     4.000 s  [2.000 .. 4.000]  x2.00  n=3"
    assert found.as_dict()["b"] == {"median": 4, "ratio": 2, "seconds": [2, 4, 4]}


def test_a_command_that_fails_shows_its_output() -> None:
    with pytest.raises(bench.Failed, match=r"(?s)exit status 3.*out.*because"):
        bench.call("sh", "-c", "echo out; echo because >&2; exit 3")


def test_both_clients_see_every_chunk_of_the_null_server_in_time() -> None:
    with bench.null_server(0.002) as port:
        for run in (bench.ours, bench.readline):
            added, cpu = asyncio.run(run(port, 3, 20))
            assert len(added) == 60
            assert all(0 < seconds < 5 for seconds in added)
            assert cpu > 0


def test_one_line_is_edited_again_and_again() -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,1 +1,4 @@\n y = 1\n+# why\n+\n+x = \"a\"\n+z = 2\n"
    once = bench.edited(patch, "measured 1")
    assert once == patch.replace("z = 2", "z = 2  # measured 1")
    assert bench.edited(once, "measured 2") == patch.replace("z = 2", "z = 2  # measured 2")
    with pytest.raises(bench.Failed, match="no added line"):
        bench.edited(patch.replace("+z", " z"), "measured 1")


def test_a_ratio_of_rounds_has_an_interval() -> None:
    # the machine got twice as slow between the rounds
    assert clients.ratio([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]).startswith("2.000 (95 % interval 2.000 to 2.000, 3 rounds")
    assert clients.ratio([1.0, 2.0], [2.0, 1.0]).startswith("1.000 (95 % interval 0.000 to 6682.651, 2 rounds")


def test_the_same_requests_by_our_definitions_and_by_theirs() -> None:
    row = {"t_queue": 0.0, "t_send": 0.01, "t_first": 0.11, "t_last": 0.31, "n_tokens_server": 11, "n_first_chunk": 1,
           "chunks": [[0.1, 1], [0.2, 3], [0.3, 11]], "error": None}
    ours = clients._own_way([row], [0.32], 0.5)
    assert ours["ttft_ms"] == pytest.approx(100)
    assert ours["itl_ms"] == pytest.approx(20)
    assert ours["tok_s"] == pytest.approx(11 / 0.3)
    theirs = clients._their_way([row], [0.32], 0.5)
    assert theirs["ttft_ms"] == pytest.approx(110)
    assert theirs["itl_ms"] == pytest.approx(21)
    assert theirs["itl_p99_ms"] == pytest.approx(50)
    assert theirs["tok_s"] == pytest.approx(22)
