"""Ready means that it serves; everything else is told apart, soon."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from entrypoints import probe, processes, telemetry
from entrypoints.errors import NotReady, ServerDied, ServerFault
from entrypoints.readiness import (
    Expect,
    Ready,
    asked,
    changed,
    differences,
    identity,
    is_sane,
    key_of,
    wait_ready,
)
from entrypoints.supervise import Server
from tests.unit.entrypoints.serving import MODEL, server


def wait(one: Server, **more: Any) -> Ready:
    return wait_ready(one, Expect(MODEL), **{"stall": 10, **more})


def fault(tmp_path: Path, *, stall: float = 10, patience: float = 1.0, deadline: float | None = None,
          expect: Expect | None = None, **script: Any) -> ServerFault:
    """What waiting for this server ends with."""
    with server(tmp_path, grace=0.5, **script) as one, pytest.raises(ServerFault) as caught:
        wait_ready(one, expect or Expect(MODEL), stall=stall, patience=patience, deadline=deadline)
    assert one.stop().clean
    return caught.value


def test_ready_with_evidence_and_steps(tmp_path: Path) -> None:
    steps: list[str] = []
    with server(tmp_path, starting=0.5, info={"max_running_requests": 8}) as one:
        expect = Expect(MODEL, {"max_running_requests": "8", "tp": "1"})
        found = wait_ready(one, expect, stall=10, on_progress=steps.append)
        assert found.evidence["listener_pid"] == one.pid
        assert found.evidence["health"] == "/ready"
        assert found.evidence["completion"]["tokens"] == 32
        assert found.evidence["unchecked"] == ["tp"]
        assert found.evidence["contract"] == {"version": "0.5.23", "missing": []}
        assert found.server_info["model_path"] == MODEL
        assert 0.5 < found.seconds < 5
    assert steps[1:] == ["/ready says 200", "completed a prompt: 32 tokens"]


def test_what_the_contract_misses_is_named_and_does_not_stop_the_start(tmp_path: Path) -> None:
    steps: list[str] = []
    with server(tmp_path, info={"speculative_algorithm": "EAGLE3"}, info_without=["attention_backend"]) as one:
        found = wait(one, on_progress=steps.append)
    names = [entry["name"] for entry in found.evidence["contract"]["missing"]]
    assert names == ["server_info.attention_backend", "meta_info.spec_verify_ct", "meta_info.spec_accept_length",
                     "meta_info.spec_correct_drafts_histogram"]
    assert "server_info.attention_backend (unavailable: claim attention-backend)" in steps[-1]


def test_endpoints_and_metrics_are_judged_where_the_server_lists_them(tmp_path: Path) -> None:
    def missing(folder: Path, **script: Any) -> list[str]:
        folder.mkdir()
        with server(folder, **script) as one:
            return [entry["name"] for entry in wait(one).evidence["contract"]["missing"]]

    assert missing(tmp_path / "a") == []
    assert missing(tmp_path / "b", paths=[]) == []  # no list: not judged
    assert missing(tmp_path / "c", paths=["/health", "/ready", "/server_info", "/generate", "/start_profile",
                                          "/model_info", "/encode"]) == ["/health_generate", "/flush_cache"]
    assert missing(tmp_path / "d", info={"enable_metrics": True}) == ["sglang:cuda_graph_passes_total"]


def test_an_older_server_has_no_ready_endpoint(tmp_path: Path) -> None:
    with server(tmp_path, ready_path=False) as one:
        assert wait(one).evidence["health"] == "/health"


def test_not_before_health_although_the_models_are_listed(tmp_path: Path) -> None:
    """K6-3 (a)."""
    with server(tmp_path, starting=1.0) as one:
        found = wait(one)
    assert found.seconds >= 1.0


@pytest.mark.parametrize(("generate", "trouble"), [
    ("unavailable", "status 503"),
    ("empty", "ended after 0 tokens"),
    ("html", "ended after 0 tokens"),
    ("repeat", "no text but"),
    ("short", "ended after 4 tokens"),
    ("cut", "closed|peer|incomplete|reset"),
    ("error", "The request was aborted"),
])
def test_healthy_and_not_able_to_generate(tmp_path: Path, generate: str, trouble: str) -> None:
    """K6-3 (b) and (e)."""
    error = fault(tmp_path, generate=generate)
    assert isinstance(error, NotReady)
    assert error.diagnosis.fault == "wrong-answers"
    assert "it completes a prompt with sane text did not happen" in error.diagnosis.cause
    assert re.search(trouble, error.diagnosis.cause), error.diagnosis.cause


@pytest.mark.parametrize("form", ["new", "mixed"])
def test_a_server_that_streams_only_what_is_new_is_ready(tmp_path: Path, form: str) -> None:
    """--incremental-streaming-output, and --stream-output of 0.5.9: the last event holds two tokens of 32."""
    with server(tmp_path, stream=form) as one:
        found = wait(one, patience=0.5).evidence["completion"]
    assert (found["tokens"], len(found["text"].split())) == (32, 32)


def test_a_server_that_streams_only_what_is_new_and_repeats_itself_is_not(tmp_path: Path) -> None:
    assert fault(tmp_path, stream="new", generate="repeat").diagnosis.fault == "wrong-answers"


def test_an_embedding_model_is_asked_for_an_embedding(tmp_path: Path) -> None:
    steps: list[str] = []
    with server(tmp_path, embeds=[0.25, -0.5, 1]) as one:
        found = wait(one, on_progress=steps.append, patience=0.5)
    assert found.evidence["completion"] == {"endpoint": "/encode", "dimensions": 3}
    assert steps[-1] == "embedded a text: 3 numbers"


def test_an_embedding_of_no_numbers_is_none(tmp_path: Path) -> None:
    error = fault(tmp_path, embeds=[0.25, None], info={"is_embedding": True})
    assert error.diagnosis.fault == "wrong-answers"
    assert "it embeds a text did not happen: /encode says 200 with no embedding but" in error.diagnosis.cause


def test_a_model_with_an_endpoint_of_its_own_is_not_proved_and_that_is_said(tmp_path: Path) -> None:
    steps: list[str] = []
    with server(tmp_path, info={"is_embedding": True}) as one:  # this one has no /encode: 404
        found = wait(one, on_progress=steps.append, patience=0.5)
    assert found.evidence["completion"]["status"] == 404
    assert steps[-1] == "/encode says 404; not proved: an answer, for which this kind of model has another endpoint"


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_half_of_a_disaggregated_pair_completes_no_prompt_alone(tmp_path: Path, half: str) -> None:
    steps: list[str] = []
    with server(tmp_path, info={"disaggregation_mode": half}, generate="unavailable") as one:
        found = wait(one, on_progress=steps.append, patience=0.5)
    assert found.evidence["completion"]["endpoint"] == "/health_generate"
    assert steps[-1] == "/health_generate says 200; not proved: text, which prefill and decode only bring together"


def test_half_of_a_pair_whose_health_request_gets_no_token_is_not_ready(tmp_path: Path) -> None:
    error = fault(tmp_path, info={"disaggregation_mode": "decode"}, health_generate=503)
    assert "it generates a token for its own health request did not happen: /health_generate says 503" in (
        error.diagnosis.cause)


def test_a_server_without_a_tokenizer_is_asked_with_ids(tmp_path: Path) -> None:
    steps: list[str] = []
    one = server(tmp_path, info={"skip_tokenizer_init": True}, generate="repeat")
    argv = (*one.launch.argv, "--skip-tokenizer-init")
    with Server(dataclasses.replace(one.launch, argv=argv), grace=5) as other:
        wait(other, on_progress=steps.append, patience=0.5)
    assert steps[-1] == "completed a prompt: 32 tokens; not proved: sane text, as the server has no tokenizer"


def test_a_wrong_answer_that_was_followed_by_a_right_one_counts_no_more(tmp_path: Path) -> None:
    """/server_info says 503 once; the first completion may then take longer than the patience."""
    with server(tmp_path, info_fails=1, generate="late") as one:
        assert wait(one, patience=0.5).evidence["completion"]["tokens"] == 32


def test_a_first_answer_may_take_long_while_kernels_are_compiled(tmp_path: Path) -> None:
    """With --skip-server-warmup our question is the first: it is bounded by progress."""
    with server(tmp_path, generate="late") as one:
        assert wait(one, stall=1.5, patience=0.5).seconds > 2.0


def test_a_silent_generation_ends_at_the_stall_limit(tmp_path: Path) -> None:
    begin = time.monotonic()
    error = fault(tmp_path, generate="silent", stall=1.0, patience=30)
    assert time.monotonic() - begin < 6
    assert error.diagnosis.fault in {"stalled", "wrong-answers"}


def test_another_model_answers(tmp_path: Path) -> None:
    """K6-4."""
    error = fault(tmp_path, model="/models/other")
    assert error.diagnosis.fault == "other-server"
    assert f"model: asked {MODEL}, server says /models/other" in error.diagnosis.cause


def test_arguments_that_the_server_changed_are_all_listed(tmp_path: Path) -> None:
    expect = Expect(MODEL, {"max_running_requests": 4096, "page_size": 1, "tp_size": 1})
    error = fault(tmp_path, expect=expect, info={"max_running_requests": 48, "page_size": 64, "tp_size": 1})
    assert "max_running_requests: asked 4096, server says 48" in error.diagnosis.cause
    assert "page_size: asked 1, server says 64" in error.diagnosis.cause
    assert "tp_size" not in error.diagnosis.cause


def test_a_dead_server_whose_port_somebody_else_answers(tmp_path: Path) -> None:
    """K6-4: the left-over server answers 200, the new one is dead."""
    dying = [["after", 0.3], ["exit", 0]]
    with (server(tmp_path, open=None, then=dying) as one, foreign(one.launch.port),
          pytest.raises(ServerFault) as caught):
        wait(one)
    assert caught.value.diagnosis.fault in {"foreign-listener", "exit-0"}


def test_a_foreign_listener_is_not_taken_for_ours(tmp_path: Path) -> None:
    """K6-4."""
    with server(tmp_path, open=None) as one, foreign(one.launch.port), pytest.raises(NotReady) as caught:
        wait(one)
    assert caught.value.diagnosis.fault == "foreign-listener"


class foreign:
    """A server of this test process that answers 200 to everything."""

    def __init__(self, port: int) -> None:
        class Yes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

        self.server = HTTPServer(("127.0.0.1", port), Yes)

    def __enter__(self) -> None:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_server_that_moved_to_another_port(tmp_path: Path) -> None:
    """K6-4."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        other = probe.getsockname()[1]
    error = fault(tmp_path, port=other)
    assert error.diagnosis.cause.startswith(f"it listens on port {other} instead of")


def test_a_stall_names_the_last_line_and_the_usual_place(tmp_path: Path) -> None:
    """K4-5: both ranks say that NCCL is complete, then nothing, for ever."""
    line = "ncclCommInitRank comm 0x5581 rank 1 nranks 2 cudaDev 1 - Init COMPLETE"
    begin = time.monotonic()
    error = fault(tmp_path, log=[line], open=None, stall=1.0)
    assert 1.0 <= time.monotonic() - begin < 5
    assert error.diagnosis.fault == "stalled"
    assert line in error.diagnosis.cause
    assert "NCCL_P2P_DISABLE=1" in error.diagnosis.remedy
    assert error.diagnosis.tail[-1].endswith(line)


def test_a_stall_at_full_load_and_low_power_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K4-5: GPUs at 100 %, for ever."""
    monkeypatch.setattr(telemetry, "spinning_now", lambda: "GPU 0 is 100 % busy at 90 of 600 W")
    error = fault(tmp_path, open=None, stall=1.0)
    assert "no memory growth; GPU 0 is 100 % busy at 90 of 600 W; the log is empty" in error.diagnosis.cause


def test_a_hub_that_never_answers_ends_at_the_stall_limit_and_is_named(tmp_path: Path) -> None:
    """K6-5: the server waits for a download; nothing of ours may wait with it for ever."""
    quiet = server(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        fetch = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{hub.getsockname()[1]}/org/model')"
        argv = (sys.executable, "-c", fetch, "--model-path", "org/model", "--speculative-draft-model-path", "/drafts/d")
        with (Server(dataclasses.replace(quiet.launch, argv=argv), grace=1) as one,
              pytest.raises(NotReady) as caught):
            wait(one, stall=1.5)
    assert caught.value.diagnosis.fault == "stalled"
    assert caught.value.diagnosis.remedy.startswith("org/model may be waiting for the hub: give a folder")


def test_spinning_is_no_progress(tmp_path: Path) -> None:
    """A hung all-reduce keeps the processor busy."""
    quiet = server(tmp_path)
    spin = dataclasses.replace(quiet.launch, argv=(sys.executable, "-c", "while True: pass"))
    with Server(spin, grace=1) as one, pytest.raises(NotReady) as caught:
        wait(one, stall=1.0)
    assert caught.value.diagnosis.fault == "stalled"


def test_a_slow_but_talking_start_is_not_killed(tmp_path: Path) -> None:
    """K4-5: the other side of it."""
    lines = [[0.4, f"Loading safetensors checkpoint shards: {n}/6"] for n in range(6)]
    with server(tmp_path, log=lines) as one:
        assert wait(one, stall=1.5).seconds > 2.0


def test_loading_without_a_word_is_progress(tmp_path: Path) -> None:
    """Reading the weights, or memory growth, counts though the log is silent."""
    script = ("import time, os\nfor _ in range(12):\n  with open('/dev/zero', 'rb', buffering=0) as f:\n"
              "    for _ in range(16): f.read(1 << 20)\n  time.sleep(0.2)\n")
    quiet = server(tmp_path)
    start = dataclasses.replace(quiet.launch, argv=(sys.executable, "-c", script))
    begin = time.monotonic()
    with Server(start, grace=1) as one, pytest.raises(ServerDied):
        wait(one, stall=1.2)
    assert time.monotonic() - begin > 2.2


def test_our_own_questions_in_its_log_are_no_progress(tmp_path: Path) -> None:
    """Each probe of ours makes the server write a line; 503 for ever must still end."""
    begin = time.monotonic()
    error = fault(tmp_path, starting=None, stall=1.5)
    assert error.diagnosis.fault == "stalled"
    assert time.monotonic() - begin < 6


def test_the_time_limit_holds_though_it_moves(tmp_path: Path) -> None:
    lines = [[0.2, f"line {n}"] for n in range(100)]
    error = fault(tmp_path, log=lines, deadline=1.0)
    assert error.diagnosis.fault == "start-deadline"
    assert "still waiting until its port opens" in error.diagnosis.cause


def test_a_dead_child_ends_the_wait(tmp_path: Path) -> None:
    """K6-2."""
    error = fault(tmp_path, starting=None, then=[["after", 0.5], ["kill", 0]])
    assert isinstance(error, ServerDied)
    assert error.diagnosis.missing


def test_a_server_without_server_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(tmp_path) as one:
        real = probe.ask

        def hide(port: int, path: str, *args: Any, **more: Any) -> Any:
            return real(port, "/no" if "server_info" in path else path, *args, **more)

        monkeypatch.setattr(probe, "ask", hide)
        with pytest.raises(NotReady, match="/server_info is not there"):
            wait(one, patience=0.5)


@pytest.mark.parametrize(("tokens", "sane"), [
    (range(32), True), ([1, 2] * 16, False), ([5] * 32, False), (range(15), False), (list("abcd") * 4, True),
])
def test_sanity_of_text(tokens: Any, sane: bool) -> None:
    assert is_sane(list(tokens)) is sane


def test_a_command_line_as_server_info_says_it() -> None:
    argv = ("python", "-m", "sglang.launch_server", "--model-path", "/m", "--enable-metrics", "--tp=2", "--port", "1",
            "--disable-radix-cache")
    assert asked(argv) == {"model_path": "/m", "enable_metrics": True, "tp": "2", "port": "1",
                           "disable_radix_cache": True}


@pytest.mark.parametrize(("words", "key"), [
    ((), ""), (("--api-key", "k"), "k"), (("--api-key=k",), "k"), (("--api", "k"), "k"),
    (("--admin-api-key", "k"), ""), (("--api-key", "a", "--port", "1"), "a")])
def test_the_key_that_a_server_asks_for(words: tuple[str, ...], key: str) -> None:
    assert key_of(words) == key


def test_what_identifies_a_server_and_what_it_made_of_its_flags() -> None:
    argv = ("--model-path", "/m", "--port", "1", "--page-size", "1", "--api-key", "k", "--lora-paths", "a", "b",
            "--tp=2", "--speculative-algorithm", "EAGLE3")
    assert identity(argv) == {"port": "1", "speculative_algorithm": "EAGLE3"}
    info = {"page_size": 64, "api_key": "other", "lora_paths": [], "tp": 4, "speculative_algorithm": None}
    assert changed(argv, info) == ["page_size: asked 1, server says 64", "tp: asked 2, server says 4",
                                   "speculative_algorithm: asked EAGLE3, server says None"]


def test_differences_compare_meaning() -> None:
    info = {"mem_fraction_static": 0.2, "tp_size": 2, "enable_metrics": True, "draft": None, "dtype": "float32"}
    assert differences({"mem_fraction_static": "0.20", "tp_size": "2", "enable_metrics": True, "dtype": "float32",
                        "not_there": 1}, info) == []
    assert differences({"enable_metrics": "1"}, info) == ["enable_metrics: asked 1, server says True"]
    assert differences({"draft": "/d"}, info) == ["draft: asked /d, server says None"]


def test_activity_counts_what_a_process_reads() -> None:
    before = processes.activity([os.getpid()])
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        zeros.read(1 << 20)
    after = processes.activity([os.getpid(), 2**22 - 1])
    assert after.io_bytes - before.io_bytes >= 1 << 20
    assert after.resident_bytes > 0
