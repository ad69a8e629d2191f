"""A server that fails on demand: SGLang's command line, processes, log lines and endpoints, scripted.

Run as `python fault_server.py --port N --model-path M`, with the script as JSON in FAULT_SCRIPT. Log lines and answers
are those of SGLang 0.5.23 (and 0.5.9 where the script says so); nothing here needs more than the standard library.

Script, all optional:
  log          lines before the port opens, each "text" or [delay seconds before it, "text"]; "|text" has no timestamp
  open         seconds until the port opens; null: never
  starting     seconds for which /health and /ready say 503 after the port opened; null: for ever
  ready_path   false: no /ready, as before SGLang 0.5.20
  stream       whole (default) | new: each event has only what is new | mixed: new ids, whole text, as 0.5.9 does it
  embeds       what /encode answers: a list of numbers; the model then generates nothing
  generate     ok | unavailable | empty | html | repeat | short | cut | error | silent | late (compiles for 2 s first)
  model        what /server_info says instead of --model-path
  info         more keys for /server_info; info_without: keys that it lacks
  info_fails   so many times /server_info says 503 first
  health_generate  status of that endpoint
  paths        what /openapi.json lists; []: no such endpoint
  port         listen on this port instead
  workers      sglang:: processes (default 2: scheduler and detokenizer)
  grandchildren  processes of the scheduler that end at once
  adrift       processes that lose their parent, every second one also the session, and then end
  orphan       true: one process of its own session that survives its parent
  ignore_term  true
  then         steps after the port is due, in order: ["after", s] | ["log", text] | ["exit", status] |
               ["signal", name] | ["kill", worker index] | ["requests", n]: wait for n generations | ["hang"] |
               ["exists", path]: wait for it | ["sick"]: /health says 503 from now on |
               ["escape"]: a process that leaves its session and its parent, listens on a port and ignores TERM
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("a", "server", "answers", "with", "words", "that", "differ", "from", "each", "other", "so", "it", "reads",
         "like", "text", "and", "not", "one", "thing")
PATHS = ("/ready", "/health", "/health_generate", "/server_info", "/get_server_info", "/model_info", "/generate",
         "/encode", "/flush_cache", "/start_profile", "/stop_profile")


def log(text: str) -> None:
    """A line as SGLang's logger writes it; one that begins with `|` is written bare, as tracebacks are."""
    bare = text.startswith("|")
    print(text[1:] if bare else time.strftime("[%Y-%m-%d %H:%M:%S] ") + text, file=sys.stderr, flush=True)


def name_process(name: str) -> None:
    """What setproctitle does to the name that the kernel shows."""
    ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)


class State:
    """What the handlers share."""

    def __init__(self, script: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.script = script
        self.arguments = arguments
        self.opened = time.monotonic()
        self.generations = self.info_asked = 0
        self.sick = False
        self.counted = threading.Condition()

    @property
    def up(self) -> bool:
        """Whether the warm-up is over."""
        starting = self.script.get("starting", 0)
        return not self.sick and starting is not None and time.monotonic() - self.opened >= starting


class Handler(BaseHTTPRequestHandler):
    """The endpoints."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:
        """As uvicorn writes it."""
        status = "200 OK" if str(args[1]) == "200" else f"{args[1]} Unavailable"
        log(f'INFO:     127.0.0.1:{self.client_address[1]} - "{self.requestline}" {status}')

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        """Whether the request lacks the key, answered as SGLang does; health needs none."""
        key = self.state.arguments.api_key
        free = self.path.startswith(("/health", "/ready", "/metrics"))
        if not key or free or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.answer(401, b'{"error": "Unauthorized"}')
        return True

    def do_GET(self) -> None:
        """Health and descriptions."""
        script = self.state.script
        if self.refused():
            pass
        elif self.path == "/ready" and not script.get("ready_path", True):
            self.answer(404)
        elif self.path == "/health_generate" and "health_generate" in script:
            self.answer(script["health_generate"])
        elif self.path in {"/server_info", "/get_server_info"} and self.state.info_asked < script.get("info_fails", 0):
            self.state.info_asked += 1
            self.answer(503, b"{}")
        elif self.path in {"/health", "/ready", "/health_generate"}:
            self.answer(200 if self.state.up else 503)
        elif self.path in {"/server_info", "/get_server_info"}:
            model = script.get("model", self.state.arguments.model_path)
            info = {"model_path": model, "served_model_name": model, "version": "0.5.23", "internal_states": [{}],
                    "port": self.state.arguments.port, "tp_size": 1, "attention_backend": "flashinfer",
                    "speculative_algorithm": None, "disable_cuda_graph": False, "disable_custom_all_reduce": False,
                    "enable_torch_symm_mem": False, "enable_flashinfer_allreduce_fusion": False,
                    **script.get("info", {})}
            for name in script.get("info_without", []):
                del info[name]
            self.answer(200, json.dumps(info).encode())
        elif self.path == "/openapi.json" and script.get("paths") != []:
            self.answer(200, json.dumps({"paths": dict.fromkeys(script.get("paths", PATHS))}).encode())
        elif self.path == "/metrics" and script.get("info", {}).get("enable_metrics"):
            self.answer(200, b"# HELP sglang:generation_tokens_total x\n"
                             b'sglang:generation_tokens_total{model_name="m"} 7.0\n', "text/plain")
        elif self.path in {"/model_info", "/v1/models"}:
            self.answer(200, json.dumps({"model_path": self.state.arguments.model_path,
                                         "is_generation": "embeds" not in script}).encode())
        else:
            self.answer(404)

    def do_POST(self) -> None:
        """Generation."""
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        embeds = self.state.script.get("embeds")
        if self.refused():
            return
        if self.path == "/encode" and embeds is not None:
            self.answer(200, json.dumps({"embedding": embeds}).encode())
            return
        if self.path != "/generate" or embeds is not None:
            self.answer(400 if embeds is not None else 404)
            return
        how = self.state.script.get("generate", "ok")
        if self.state.arguments.skip_tokenizer_init and "input_ids" not in asked:
            how = "error"
        with self.state.counted:
            self.state.generations += 1
            self.state.counted.notify_all()
        if how == "unavailable":
            self.answer(503, b"")
        elif how == "empty":
            self.answer(200, b"", "text/event-stream")
        elif how == "html":
            self.answer(200, b"<html><body>gateway</body></html>", "text/html")
        else:
            self.stream(how)

    def stream(self, how: str) -> None:
        """Events with cumulative text, as /generate sends them."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if how == "silent":
            time.sleep(3600)
        for step in range(20 if how == "late" else 0):
            time.sleep(0.1)
            log(f"[jit] compiling kernel {step}")
        if how == "error":
            self.event(json.dumps({"error": {"message": "The request was aborted", "code": 500}}))
            self.event("[DONE]", last=True)
            return
        count = 3 if how in {"short", "cut"} else 32
        ids: list[int] = []
        form = self.state.script.get("stream", "whole")
        for index in range(0, count, 2):
            ids += [7, 7] if how == "repeat" else [index, index + 1]
            words = ["!" if how == "repeat" else WORDS[one % len(WORDS)] for one in ids]
            body: dict[str, Any] = {
                "text": " ".join(words) if form != "new" else " ".join(words[-2:]) + " ",
                "output_ids": ids if form == "whole" else ids[-2:], "meta_info": {
                    "id": "fake", "finish_reason": None, "prompt_tokens": 6, "completion_tokens": len(ids),
                    "cached_tokens": 0}}
            if self.state.arguments.skip_tokenizer_init:
                del body["text"]
            self.event(json.dumps(body))
            if how == "cut":
                self.connection.close()
                return
        self.event("[DONE]", last=True)

    def event(self, data: str, last: bool = False) -> None:
        """One event, chunked."""
        body = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n" + (b"0\r\n\r\n" if last else b""))
        self.wfile.flush()


def worker(name: str, script: dict[str, Any]) -> int:
    """Fork a process with SGLang's name; it dies with its parent, as theirs do."""
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    name_process(name)
    for _ in range(script.get("grandchildren", 0) if "sched" in name else 0):
        if os.fork() == 0:
            os._exit(0)
    if script.get("orphan") and "sched" in name and os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    for number in range(script.get("adrift", 0) if "sched" in name else 0):
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                if number % 2:
                    os.setsid()
                time.sleep(0.2)
            os._exit(0)
        os.waitpid(middle, 0)
    while True:
        time.sleep(3600)


def escape() -> None:
    """A daemon: no parent, no session in common with the server."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with socket.create_server(("127.0.0.1", 0)):
            while True:
                time.sleep(3600)
    os.waitpid(middle, 0)


def play(state: State, workers: list[int]) -> None:
    """The steps of `then`."""
    for what, *rest in state.script.get("then", []):
        if what == "after":
            time.sleep(rest[0])
        elif what == "log":
            log(rest[0])
        elif what == "requests":
            with state.counted:
                state.counted.wait_for(lambda count=rest[0]: state.generations >= count)  # type: ignore[misc]
        elif what == "exists":
            while not os.path.exists(rest[0]):  # noqa: PTH110 - the fake stays with the plain standard library
                time.sleep(0.02)
        elif what == "kill":
            os.kill(workers[rest[0]], signal.SIGKILL)
        elif what == "signal":
            os.kill(os.getpid(), getattr(signal, rest[0]))
        elif what == "exit":
            os._exit(rest[0])
        elif what == "sick":
            state.sick = True
        elif what == "escape":
            escape()
        elif what == "hang":
            time.sleep(3600)


def main() -> None:
    """Play the script."""
    parser = argparse.ArgumentParser(prog="launch_server.py")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", default="/models/target")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--ssl-certfile", default="")
    parser.add_argument("--ssl-keyfile", default=None)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    arguments = parser.parse_known_args()[0]
    script = json.loads(os.environ.get("FAULT_SCRIPT", "{}"))
    if script.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names = ("sglang::scheduler", "sglang::detokenizer", "sglang::scheduler_TP1", "sglang::scheduler_TP2")
    workers = [worker(name, script) for name in names[:script.get("workers", 2)]]
    for entry in script.get("log", []):
        delay, text = entry if isinstance(entry, list) else (0, entry)
        time.sleep(delay)
        log(text)
    state = State(script, arguments)
    threading.Thread(target=play, args=(state, workers), daemon=True).start()
    if script.get("open", 0) is None:
        signal.pause() if not script.get("ignore_term") else time.sleep(3600)
    time.sleep(script.get("open", 0))
    Handler.state = state
    kind = type("Server", (ThreadingHTTPServer,), {"address_family": socket.AF_INET6 if ":" in arguments.host
                                                   else socket.AF_INET, "daemon_threads": True})
    server = kind((arguments.host, script.get("port", arguments.port)), Handler)
    if arguments.ssl_certfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    state.opened = time.monotonic()
    log("INFO:     Application startup complete.")
    log(f"INFO:     Uvicorn running on http://127.0.0.1:{server.server_port} (Press CTRL+C to quit)")
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
