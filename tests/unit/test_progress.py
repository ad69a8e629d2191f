"""BuildKit's progress: recorded streams of a real engine (buildx 0.13.1, BuildKit of Docker 26.1.5), and made-up ones
for what an engine does not do on demand."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildctl.progress import BuildRecord, Cause, Mode, Progress
from buildctl.progress.model import Kind, State, _cause, brief, clean, parse_name
from buildctl.progress.rawjson import Decoder, Event, Log, Text, Transfer, Vertex, Warned
from buildctl.progress.render import choose

RECORDED = Path(__file__).parents[1] / "fixtures" / "rawjson"
NAMES = sorted(path.stem for path in RECORDED.glob("*.txt"))
SUCCEEDED = {"success", "cached", "push", "pull", "progress", "link"}


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.txt").read_bytes()


def follow(data: bytes, exit_code: int, mode: Mode = "plain", log: Path | None = None) -> tuple[BuildRecord, str]:
    stream = io.StringIO()
    with Progress(log=log, mode=mode, stream=stream, environ={}) as progress:
        progress.feed(data)
        return progress.finish(exit_code), stream.getvalue()


def replay(name: str, mode: Mode = "plain", log: Path | None = None) -> tuple[BuildRecord, str]:
    return follow(recorded(name), 0 if name in SUCCEEDED else 1, mode, log)


def decode(data: bytes, cuts: list[int] | None = None) -> list[Event]:
    decoder = Decoder()
    events: list[Event] = []
    start = 0
    for cut in [*sorted(cuts or []), len(data)]:
        events += decoder.feed(data[start:cut])
        start = cut
    return events + decoder.close()


def status(**lists: list[dict[str, Any]]) -> bytes:
    return json.dumps(lists).encode() + b"\n"


def vertex(name: str, started: int | None = None, completed: int | None = None, digest: str = "", **more: Any) -> bytes:
    item: dict[str, Any] = {"digest": digest or name, "name": name, **more}
    for key, second in (("started", started), ("completed", completed)):
        if second is not None:
            item[key] = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.123456789Z"
    return status(vertexes=[item])


def output(digest: str, data: bytes, stream: int = 1) -> bytes:
    return status(logs=[{"vertex": digest, "stream": stream, "data": base64.b64encode(data).decode()}])


# decoding


def test_printed_objects_json_lines_and_text() -> None:
    printed = json.dumps({"vertexes": [{"digest": "d", "name": "[a 1/2] RUN {x}\n\"}"}]}, indent=2)
    data = f'{printed}\n{{"logs":[{{"vertex":"d","stream":2,"data":"aGk="}}]}}\nDockerfile:4\n\n ERROR: {{ }}\n'
    assert decode(data.encode()) == [
        Vertex("d", '[a 1/2] RUN {x}\n"}'), Log("d", 2, b"hi"), Text("Dockerfile:4"), Text(""), Text(" ERROR: { }")]


@pytest.mark.parametrize("text", [
    "{ not json", "{", "{}x", '{"error": "not a status"}', '{"a": 1', '{"open string', '{"a\\', "[1]", "{\n\n",
    '{"vertexes": [}'])
def test_what_only_looks_like_an_object_is_text_and_hides_nothing(text: str) -> None:
    after = vertex("[a 1/1] RUN x").decode()
    events = decode(f"{text}\n{after}".encode())
    assert [event for event in events if isinstance(event, Vertex)]
    lines = [event.line for event in events if isinstance(event, Text)]
    assert "".join(lines).replace("\n", "") in (text.replace("\n", ""), text.removeprefix("{}"))


def test_an_object_cut_off_by_the_end_is_text() -> None:
    assert decode(b'{\n  "vertexes": [\n') == [Text("{"), Text('  "vertexes": [')]


def test_malformed_parts_of_a_status_are_passed_over() -> None:
    data = status(vertexes=[{"digest": "d", "name": "n", "started": "yesterday", "completed": 5}],
                  logs=[{"data": "abc"}], statuses=[{"vertex": "d", "id": "x"}], warnings=[{"short": 3}])
    data += b'{"vertexes": null, "logs": [1, {"vertex": "d", "data": 7}]}\n'
    assert decode(data) == [Vertex("d", "n"), Transfer("d", "x", 0), Log("", 1, b""), Warned(""), Log("d", 1, b"")]


def test_parts_of_one_instruction_are_named_by_their_group() -> None:
    group = {"id": "g", "name": "[a 2/2] COPY --link x /"}
    assert decode(vertex("[a 2/2] LINK COPY --link x /", digest="d", progressGroup=group)) == [
        Vertex("d", "[a 2/2] COPY --link x /", relink=True)]
    assert decode(vertex("[a 2/2] COPY --link x /", digest="d", progressGroup=group)) == [
        Vertex("d", "[a 2/2] COPY --link x /")]


@pytest.mark.parametrize("name", NAMES)
def test_compact_objects_give_the_same_events(name: str) -> None:
    text = recorded(name).decode()
    compact = re.sub(r"^\{\n.*?^\}$", lambda found: json.dumps(json.loads(found.group())), text, flags=re.M | re.S)
    assert compact.count("\n") < text.count("\n") / 4
    assert decode(compact.encode()) == decode(text.encode())


@given(name=st.sampled_from(NAMES), data=st.data())
def test_where_the_bytes_are_cut_does_not_matter(name: str, data: st.DataObject) -> None:
    whole = recorded(name)[-6000:]
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=40))
    assert decode(whole, cuts) == decode(whole)


_LINE = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1, max_size=30)
_NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(parts=st.lists(st.tuples(st.sampled_from(["printed", "compact", "text"]), _LINE, _NAME), max_size=12),
       data=st.data())
def test_any_mixture_comes_out_as_it_went_in(parts: list[tuple[str, str, str]], data: st.DataObject) -> None:
    expected: list[Event] = []
    stream = b""
    for form, line, name in parts:
        if form == "text":
            expected.append(Text(f"> {line}"))
            stream += f"> {line}\n".encode()
        else:
            expected.append(Vertex("d", f"[{name}"))
            # compact as Go prints it: non-ASCII characters as they are
            stream += json.dumps({"vertexes": [{"digest": "d", "name": f"[{name}"}]}, ensure_ascii=form == "printed",
                                 indent=2 if form == "printed" else None).encode() + b"\n"
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    assert decode(stream, cuts) == expected


# names


@pytest.mark.parametrize(("text", "kind", "label", "instruction"), [
    ("[torch 2/5] RUN x", Kind.INSTRUCTION, "torch 2/5", "RUN x"),
    ("[sglang torch 2/5] RUN x [y] z", Kind.INSTRUCTION, "torch 2/5", "RUN x [y] z"),
    ("[sglang torch 1/5] FROM base", Kind.BASE, "torch 1/5", "FROM base"),
    ("[2/2] COPY a /", Kind.INSTRUCTION, "2/2", "COPY a /"),
    ("[linux/arm64 torch 2/5] RUN x", Kind.INSTRUCTION, "torch linux/arm64 2/5", "RUN x"),
    ("[linux/arm64 2/5] RUN x", Kind.INSTRUCTION, "linux/arm64 2/5", "RUN x"),
    ("[internal] load .dockerignore", Kind.INTERNAL, "internal", "load .dockerignore"),
    ("[torch internal] load build context", Kind.INTERNAL, "torch internal", "load build context"),
    ("[auth] library/x:pull token", Kind.INTERNAL, "internal", "library/x:pull token"),
    ("[torch] exporting to image", Kind.EXPORT, "torch export", "exporting to image"),
    ("exporting to image", Kind.EXPORT, "export", "exporting to image"),
    ("[torch] pushing r/t:1 with docker", Kind.EXPORT, "torch push", "pushing r/t:1 with docker"),
    ("resolve image config for x", Kind.INTERNAL, "internal", "resolve image config for x"),
    ("[broken", Kind.INTERNAL, "internal", "[broken"),
])
def test_names_in_the_users_terms(text: str, kind: Kind, label: str, instruction: str) -> None:
    name = parse_name(text)
    assert (name.kind, name.label, name.instruction) == (kind, label, instruction)


# what a build did


def states(record: BuildRecord) -> dict[str, str]:
    return {step.label: step.state.value for step in record.steps}


def test_a_build_of_two_targets_shows_each_instruction_once() -> None:
    record, shown = replay("success")
    assert states(record) == {"cuda 1/2": "cached", "cuda 2/2": "ran", "torch 1/2": "ran", "torch 2/2": "ran",
                              "sglang 1/1": "ran", "sglang-image 1/1": "ran", "torch export": "ran",
                              "sglang export": "ran"}
    assert (record.ran, record.cached) == (5, 1)
    assert record.error is None
    assert not record.canceled
    assert record.slowest(1)[0].label == "cuda 2/2"
    # two targets report this step, each with its own clock; it is counted once
    assert record.slowest(1)[0].seconds == pytest.approx(1.37, abs=0.02)
    lines = shown.splitlines()
    assert lines.count("[torch 2/2] | torch line 2") == 1
    assert "[sglang 1/1] | no newline at end" in lines
    assert lines.index("[torch 2/2] | torch line 3") < lines.index("[torch 2/2] done in 0.1 s")
    assert "5 steps ran, 1 cached" in lines[-2]
    assert lines[-1].startswith("slowest: cuda 2/2 1.4 s")


def test_a_build_without_changes_runs_nothing() -> None:
    record, shown = replay("cached")
    assert (record.ran, record.cached) == (0, 6)
    assert not [line for line in shown.splitlines() if "2/2] RUN" in line]
    assert shown.count("cached: RUN echo cuda") == 1


def test_a_cached_copy_that_is_linked_to_a_new_base_did_not_run() -> None:
    record, shown = replay("link")
    assert states(record) == {"cuda 2/2": "ran", "entrypoint 1/2": "cached", "entrypoint 2/2": "cached",
                              "cuda-image 1/3": "cached", "cuda-image 2/3": "cached", "cuda-image 3/3": "ran",
                              "cuda export": "ran", "cuda-image export": "ran"}
    assert "LINK" not in shown
    assert shown.count("COPY --link word /word") == 1


def test_the_first_true_error_among_canceled_steps() -> None:
    record, shown = replay("failed")
    assert states(record) == {"cuda 1/2": "cached", "cuda 2/2": "ran", "torch 1/1": "failed",
                              "flashinfer 1/1": "canceled", "sglang 1/2": "waiting", "sglang 2/2": "waiting"}
    error = record.error
    assert error is not None
    assert (error.stage, error.label, error.message, error.exit_code) == ("torch", "torch 1/1", "exit code: 3", 3)
    assert error.log == ("collecting torch", "torch: wrong version")
    assert error.cause is Cause.STEP
    assert error.where == "Dockerfile:4"
    assert any(line.startswith("   4 | >>> RUN echo collecting") for line in error.excerpt)
    assert record.plain_text.splitlines()[-1].startswith("ERROR: failed to solve")
    # the caller shows the error; the raw text is only in the log
    assert "ERROR:" not in shown
    assert "[flashinfer 1/1] canceled" in shown
    assert "steps ran" not in shown


def test_other_text_before_the_excerpt() -> None:
    record, _ = follow(b"time=x level=warning\nDockerfile:7\n--------------------\n 7 | >>> X\nERROR: bad\n", 1)
    assert record.error is not None
    assert (record.error.where, record.error.excerpt) == ("Dockerfile:7", (" 7 | >>> X", "ERROR: bad"))


def test_the_error_says_what_was_found_and_what_to_do() -> None:
    record, _ = replay("failed")
    assert record.error is not None
    text = str(record.error.problem("build.log"))
    assert text.startswith("Dockerfile:4: step [torch 1/1] failed: RUN echo collecting torch")
    assert "| torch: wrong version" in text
    assert "whole log: build.log" in text


@pytest.mark.parametrize(("name", "label", "cause", "message"), [
    ("secret", "one 2/2", Cause.DEFINITION, "secret ca: not found"),
    ("missing", "internal", Cause.NETWORK, "connection refused"),
    ("copy", "copy 2/2", Cause.DEFINITION, '"/nothere.txt": not found'),
    ("nostage", "", Cause.DEFINITION, 'target stage "nostage" could not be found'),
])
def test_errors_that_no_command_made(name: str, label: str, cause: Cause, message: str) -> None:
    record, _ = replay(name)
    assert record.error is not None
    assert record.error.label == label
    assert message in record.error.message
    assert record.error.cause is cause
    assert message in str(record.error.problem())


def test_a_clipped_log_is_said_to_be_clipped() -> None:
    record, _ = replay("clipped")
    assert record.error is not None
    assert record.error.clipped
    assert record.error.log[-1].endswith("the end")
    assert "clipped" in str(record.error.problem())


def test_an_interrupted_build_has_no_error() -> None:
    record, shown = replay("interrupt")
    assert record.canceled
    assert record.error is None
    assert states(record)["slow 2/2"] == "canceled"
    assert "canceled in 2.9 s" in shown


def test_a_pulled_base_counts_with_its_bytes() -> None:
    record, shown = replay("pull")
    assert record.steps[1].state is State.RAN
    assert record.steps[1].bytes == 6002044
    assert "[1/2] done in 0.1 s, 6.0 MB" in shown


def test_pushes_are_steps() -> None:
    record, _ = replay("push")
    assert [step.label for step in record.steps if step.kind is Kind.EXPORT] == [
        "cuda export", "torch export", "cuda push", "torch push"]


def test_an_export_says_what_it_is_at() -> None:
    _, shown = replay("push")
    assert "[cuda export] | exporting layers\n" in shown
    assert "[cuda export] | pushing layers\n" in shown
    assert "| exporting manifest sha256:" not in shown


def test_progress_bars_and_colours_are_taken_out() -> None:
    _, shown = replay("progress")
    assert "[progress 2/2] | 4%\n[progress 2/2] | red done\n" in shown


@pytest.mark.parametrize(("raw", "text"), [
    (b"a\r\n"[:-1], "a"), (b"1%\r2%", "2%"), (b"\x1b[1;31mred\x1b[0m", "red"), (b"\x1b]0;title\x07x", "x"),
    (b"\xff", "\ufffd"), (b"a\x08\x00b\tc  ", "ab\tc"), (b"\x1b(x", "(x")])
def test_lines_cannot_reach_the_terminal(raw: bytes, text: str) -> None:
    assert clean(raw) == text


def test_a_character_cut_between_two_reports_and_an_endless_line() -> None:
    word = "größer".encode()
    data = vertex("[a 1/1] RUN x", 1) + output("[a 1/1] RUN x", word[:3]) + output("[a 1/1] RUN x", word[3:] + b"\n")
    data += output("[a 1/1] RUN x", b"." * 150_000)
    _, shown = follow(data + vertex("[a 1/1] RUN x", 1, 2), 0)
    assert "[a 1/1] | größer\n" in shown
    assert max(map(len, shown.splitlines())) < 70_000
    assert shown.count(".") >= 150_000


def test_output_of_a_step_that_never_ends_is_not_lost() -> None:
    record, shown = follow(vertex("[a 1/1] RUN x", 1) + output("[a 1/1] RUN x", b"last words"), 137)
    assert "[a 1/1] | last words" in shown
    assert states(record) == {"a 1/1": "canceled"}
    assert record.error is not None
    assert record.error.message == "buildx ended without saying why"


def test_a_cache_that_cannot_be_read_ends_no_build() -> None:
    cache = vertex("importing cache manifest from r/x", 1, 2, error="r/x: not found")
    record, _ = follow(cache, 0)
    assert record.error is None
    error = 'process "x" did not complete successfully: exit code: 9'
    run = vertex("[a 1/1] RUN x", 3, 4, error=error)
    record, _ = follow(cache + run + f"ERROR: failed to solve: {error}".encode(), 1)
    assert record.error is not None
    assert record.error.label == "a 1/1"


def test_a_true_error_replaces_a_canceled_one_of_the_same_step() -> None:
    name = "[a 1/1] RUN x"
    data = (vertex(name, 1, 2, digest="1", error="context canceled") + vertex(name, 1, 2, digest="2", error="real")
            + vertex(name, 1, 3, digest="1", error="other"))
    record, _ = follow(data, 1)
    assert record.error is not None
    assert record.error.message == "real"


@pytest.mark.parametrize(("code", "log", "cause"), [
    (1, b"OSError: [Errno 28] No space left on device", Cause.DISK),
    (137, b"", Cause.MEMORY),
    (1, b"Temporary failure in name resolution", Cause.NETWORK),
    (1, b"HTTP 403 from a test", Cause.STEP),
])
def test_the_cause_of_a_failed_command(code: int, log: bytes, cause: Cause) -> None:
    name, error = "[a 1/1] RUN x", f'process "x" did not complete successfully: exit code: {code}'
    record, _ = follow(vertex(name, 1) + output(name, log + b"\n") + vertex(name, 1, 2, error=error), 1)
    assert record.error is not None
    assert record.error.cause is cause


@pytest.mark.parametrize(("text", "cause"), [
    ("failed to authorize: 401 Unauthorized", Cause.AUTH),
    ("unexpected status: 503 Service Unavailable", Cause.NETWORK),
    ("write /x: no space left on device", Cause.DISK),
    ("Cannot connect to the Docker daemon at tcp://127.0.0.1:1. Is the docker daemon running?", Cause.ENGINE),
    ('no builder "nope" found', Cause.ENGINE),
    # an engine with more to do than it can
    ("DeadlineExceeded: context deadline exceeded", Cause.ENGINE),
    ("open bake.json: no such file or directory", Cause.DEFINITION),
])
def test_the_cause_of_a_failure_without_a_step(text: str, cause: Cause) -> None:
    record, _ = follow(f"ERROR: {text}\n".encode(), 1)
    assert record.error is not None
    assert (record.error.message, record.error.cause) == (text, cause)


def test_text_before_an_unknown_vertex_and_warnings() -> None:
    data = (output("nobody", b"x\n") + status(statuses=[{"vertex": "nobody", "id": "x", "current": 4}])
            + 2 * status(warnings=[{"vertex": "v", "short": base64.b64encode(b"FromAsCasing").decode()}]))
    record, shown = follow(data, 0)
    assert record.warnings == ("FromAsCasing",)
    assert shown.count("WARNING: FromAsCasing") == 1
    assert record.steps == ()


def test_a_step_that_runs_on_is_said_again() -> None:
    name = "[a 1/2] FROM r/base"
    data = vertex(name, 0, 1) + vertex(name, 1) + status(statuses=[{"vertex": name, "id": "l", "current": 5_000_000}])
    data += vertex(name, 1, 3) + vertex(name, 3) + vertex(name, 3, 63) + vertex(name, 63, 63)
    _, shown = follow(data, 0)
    assert [line for line in shown.splitlines() if line.startswith("[a 1/2]")] == [
        "[a 1/2] FROM r/base", "[a 1/2] done in 3.0 s, 5.0 MB", "[a 1/2] done in 1 min 03 s, 5.0 MB"]


def test_the_record_as_json() -> None:
    record, _ = replay("failed")
    value = json.loads(json.dumps(record.as_dict()))
    assert value["error"]["cause"] == "step"
    assert value["error"]["log"][-1] == "torch: wrong version"
    assert value["slowest"][0]["step"] == "flashinfer 1/1"
    assert value["steps"][0].keys() == {"stage", "position", "instruction", "kind", "state", "seconds", "bytes"}
    assert json.loads(json.dumps(replay("success")[0].as_dict()))["error"] is None


# shows


@pytest.mark.parametrize("name", NAMES)
def test_the_log_file_has_everything_as_it_comes(name: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "build.log"
    progress = Progress(log=log, mode="quiet", stream=io.StringIO(), environ={})
    data = recorded(name)
    progress.feed(data[:-1])
    before = log.read_text()
    progress.feed(data[-1:])
    progress.finish(1)
    text = log.read_text()
    assert text.startswith(before)
    for event in decode(data):
        if isinstance(event, Text):
            assert f"{event.line}\n" in text
        elif isinstance(event, Log) and b"\r" not in event.data:
            assert all(line in text for line in event.data.decode().splitlines()[1:-1])


def test_quiet_shows_nothing() -> None:
    assert replay("success", "quiet")[1] == ""
    assert replay("failed", "quiet")[1] == ""


def test_folds_keep_the_output_of_steps_together() -> None:
    _, shown = replay("success", "github")
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("::group::[torch 2/2] done in"))
    assert lines[start + 1:start + 5] == ["[torch 2/2] | torch line 1", "[torch 2/2] | torch line 2",
                                          "[torch 2/2] | torch line 3", "::endgroup::"]
    assert "[torch 1/2] done in 0.0 s" in lines


def test_a_failed_step_is_not_folded_away() -> None:
    _, shown = replay("failed", "github")
    assert "\n[torch 1/1] | torch: wrong version\n[torch 1/1] failed in 1.2 s: exit code: 3\n" in shown
    assert shown.count("::group::") == 1
    assert "ERROR" not in shown


def test_a_step_cannot_give_commands_to_the_runner_and_a_fold_is_bounded() -> None:
    name = "[a 1/1] RUN x"
    data = vertex(name, 1) + output(name, b"::set-env name=X::1\n" + b"line\n" * 3000)
    _, shown = follow(data, 137, "github")
    assert not re.search(r"^\s*::set-env", shown, re.M)
    assert "(1001 lines left out; the log file has them)" in shown
    assert shown.count("| line") == 2000


@pytest.mark.parametrize(("environ", "tty", "mode"), [
    ({}, True, "terminal"), ({}, False, "plain"), ({"CI": "true"}, True, "plain"), ({"TERM": "dumb"}, True, "plain"),
    ({"GITHUB_ACTIONS": "true", "CI": "true"}, False, "github")])
def test_the_show_fits_the_place(environ: dict[str, str], tty: bool, mode: str) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    assert choose("auto", Stream(), environ) == mode
    assert choose("quiet", Stream(), environ) == "quiet"


class Screen:
    """A real terminal (a pty) and all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._written = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            with self._changed:
                self._written += data
                self._changed.notify_all()

    def wait(self, condition: Callable[[str], object]) -> str:
        with self._changed:
            seen = self._changed.wait_for(lambda: condition(self._written.decode("utf-8", "ignore")), timeout=20)
            assert seen, self._written
            return self._written.decode("utf-8", "ignore")

    def close(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return self._written.decode()


def test_a_terminal_shows_running_steps_live_and_ends_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen()
    with Progress(mode="terminal", stream=screen.stream) as progress:
        progress.feed(vertex("[internal] load build context", 1) + vertex("[a 1/2] RUN [red]one[/red]", 1, 3)
                      + vertex("[a 2/2] RUN two", 3) + output("[a 2/2] RUN two", b"Collecting torch\n"))
        progress.feed(status(warnings=[{"short": base64.b64encode(b"odd").decode()}]))
        live = screen.wait(lambda text: "Collecting torch" in text and "context" not in text)
        assert "1/2 steps, 0 cached" in live
        # what a build says is never taken for markup
        assert "RUN [red]one[/red]" in live
        assert "WARNING: odd" in live
        progress.feed(vertex("[a 2/2] RUN two", 3, 63))
        record = progress.finish(0)
    shown = screen.close()
    assert record.ran == 2
    assert "2 steps ran" in shown
    assert "1 min 00 s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_terminal_shows_slow_internal_work_and_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    now = [0.0]
    with Progress(mode="terminal", stream=screen.stream, clock=lambda: now[0]) as progress:
        progress.feed(vertex("[internal] load build context", 1))
        now[0] = 5.0
        screen.wait(lambda text: "load build context" in text)
        progress.feed(vertex("[a 1/1] RUN x", 1, 2, error='process "x" did not complete successfully: exit code: 3'))
        assert progress.finish(1).error is not None
    shown = screen.close()
    assert "✗ a 1/1: exit code: 3" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "steps ran" not in shown


def test_an_exception_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    progress = Progress(mode="terminal", stream=screen.stream)
    with pytest.raises(TypeError), progress:
        progress.feed("not bytes")  # type: ignore[arg-type]
    shown = screen.close()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_an_instruction_on_one_line() -> None:
    assert brief("RUN --mount=type=bind,source=a,target=/a     --network=none sh  -c 'x --y'") == "RUN sh -c 'x --y'"
    assert brief("COPY --link a b") == "COPY --link a b"
    assert brief("RUN " + "x" * 200, 20) == "RUN xxxxxxxxxxxxxxx…"


@pytest.mark.parametrize(("answer", "cause"), [
    ("413 Request Entity Too Large", Cause.REFUSED), ("400 Bad Request", Cause.REFUSED), ("403 Forbidden", Cause.AUTH),
    ("401 Unauthorized", Cause.AUTH), ("500 Internal Server Error", Cause.NETWORK),
    ("429 Too Many Requests", Cause.NETWORK)])
def test_the_cause_of_a_builders_failed_push(answer: str, cause: Cause) -> None:
    """The words of BuildKit 0.12 in engine 26.1.5."""
    message = (f'failed to push r.example/team/cuda: failed commit on ref "config-sha256:dc4c": unexpected status '
               f"from PUT request to http://r.example/v2/team/cuda/blobs/uploads/261a: {answer}")
    assert _cause(Kind.EXPORT, message, ()) is cause
    assert _cause(Kind.EXPORT, "failed to push r.example/a: something new", ()) is Cause.DEFINITION


def test_a_builder_that_cannot_be_reached_is_the_engines_fault() -> None:
    assert _cause(Kind.INTERNAL, "context deadline exceeded", ()) is Cause.ENGINE
    assert _cause(Kind.EXPORT, 'image "docker.io/library/cuda:1": already exists', ()) is Cause.COLLISION
