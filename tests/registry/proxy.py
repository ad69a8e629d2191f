"""A fault proxy in front of a real registry.

Every request goes through to the registry unless a scripted fault takes it; all requests are recorded, with the body
bytes that arrived, so that a test can say what was sent twice. With `token_ttl` set the proxy also plays the token
server: it answers 401 with a Bearer challenge and hands out tokens at `/token` to the one user it knows.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from tests.registry.server import HOSTS

CHUNK = 64 * 1024
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}

Action = Literal["status", "reset", "lose_answer", "cut_answer", "swap", "hang", "rewrite", "expire_tokens", "slow"]


@dataclass
class Fault:
    """One scripted fault: for requests of `method` whose path matches `path`, calls number `skip + 1` to
    `skip + times`.

    - `status`: answer `code` with `headers` and `body` without asking the registry (the request body is not read when
      `read_body` is off, as a front end does that refuses by size)
    - `reset`: pass `after` body bytes on, then reset the connection
    - `lose_answer`: the registry gets the whole request, the client a reset instead of the answer
    - `cut_answer`: the client gets `after` bytes of the answer's body, then a reset
    - `swap`: the registry gets the whole request, the client `code` with `headers` and `body` instead of its answer
    - `hang`: no answer until the proxy stops
    - `slow`: the answer comes after `delay` seconds
    - `rewrite`: the registry's answer with `headers` put over it
    - `expire_tokens`: all tokens handed out so far stop being valid, then as usual
    """

    method: str
    path: str
    action: Action = "status"
    code: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: int = 0
    delay: float = 0.0
    read_body: bool = True
    skip: int = 0
    times: int = 1_000_000
    seen: int = 0
    fired: int = 0

    def takes(self, method: str, path: str) -> bool:
        """Whether this request is one of those that the fault is for; counts it."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        if self.skip < self.seen <= self.skip + self.times:
            self.fired += 1
            return True
        return False


@dataclass
class Request:
    """One request as the proxy saw it, from its first byte on.

    `status` is what the client got (0: no answer), `stored` what the registry itself answered (0: was not asked),
    `peer` the client's address.
    """

    method: str
    path: str
    status: int
    body_bytes: int
    at: float
    authorization: str
    stored: int = 0
    stored_at: float = 0.0
    peer: str = ""


class FaultProxy:
    """An HTTP proxy on a free port of an address of this machine; a context manager."""

    def __init__(self, upstream: str, *, token_ttl: float | None = None, user: str = "ci", password: str = "",
                 address: str = "127.0.0.1") -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.token_ttl = token_ttl
        self.user, self.password = user, password
        self.token_expires_in = True
        self._tokens: dict[str, float] = {}
        self._lock = threading.Lock()
        self._waiting = 0
        self._connections: set[socket.socket] = set()
        self.stopping = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server((address, 0), Handler)
        self._server.owner = self
        self.host = f"{address}:{self._server.server_address[1]}"
        HOSTS.add(self.host)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.join_handlers()

    def add(self, *faults: Fault) -> None:
        """Put faults in front of those already there."""
        self.faults[:0] = faults

    def clear(self) -> None:
        """Forget faults and recorded requests."""
        self.faults.clear()
        self.requests.clear()

    def count(self, method: str, path: str = "") -> int:
        """How many recorded requests have this method and a matching path."""
        return sum(1 for request in self.requests if re.fullmatch(method, request.method)
                   and re.search(path, request.path))

    def upload_bytes(self) -> int:
        """Body bytes of all blob upload requests, those that failed included."""
        return sum(request.body_bytes for request in self.requests if "/blobs/uploads/" in request.path)

    def sent_twice(self) -> int:
        """Body bytes of blobs that the registry had already stored when the client asked for them, and that were sent
        again. An upload that was cut off and that the registry completes a moment after the next attempt has asked is
        nobody's mistake.
        """
        twice = 0
        stored: dict[str, float] = {}
        asked: dict[str, float] = {}
        for request in self.requests:
            repository, _, digest = request.path.replace("%3A", ":").partition("/blobs/")
            blob = f"{repository}@{digest.rpartition('digest=')[2]}"
            if request.method == "HEAD":
                asked[blob] = request.at
            elif request.method == "PUT" and "digest=" in digest:
                if stored.get(blob, request.at) < asked.get(blob, request.at):
                    twice += request.body_bytes
                if request.stored == 201:
                    stored[blob] = min(request.stored_at, stored.get(blob, request.stored_at))
        return twice

    def clients_waiting(self) -> int:
        """How many clients wait in a `hang`."""
        with self._lock:
            return self._waiting

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.takes(method, path)), None)

    def record(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def track(self, connection: socket.socket, *, on: bool) -> None:
        with self._lock:
            (self._connections.add if on else self._connections.discard)(connection)

    def new_token(self) -> str:
        token = secrets.token_hex(12)
        with self._lock:
            self._tokens[token] = time.monotonic() + (self.token_ttl or 0)
        return token

    def valid_token(self, authorization: str) -> bool:
        with self._lock:
            return self._tokens.get(authorization.removeprefix("Bearer "), 0) > time.monotonic()

    def expire_tokens(self) -> None:
        """All tokens handed out so far stop being valid."""
        with self._lock:
            self._tokens.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = False
    request_queue_size = 64
    owner: FaultProxy

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address))
        self._handlers: list[threading.Thread] = [t for t in getattr(self, "_handlers", []) if t.is_alive()]
        self._handlers.append(thread)
        thread.start()

    def join_handlers(self) -> None:
        for thread in getattr(self, "_handlers", []):
            thread.join(timeout=5)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are the daily business of this proxy."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy
    raw_requestline: bytes
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.owner.track(self.connection, on=True)

    def finish(self) -> None:
        self.owner.track(self.connection, on=False)
        with contextlib.suppress(OSError):
            super().finish()

    def parse_request(self) -> bool:
        """Answer a TLS hello as Go's HTTP servers do: the engine tries https first and falls back on that answer."""
        if self.raw_requestline[:1] == b"\x16":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTPS request to an HTTP server.\n")
            return False
        return super().parse_request()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        self.entry = Request(self.command, self.path, 0, 0, time.monotonic(), self.headers.get("Authorization", ""),
                             peer=self.client_address[0])
        self.owner.record(self.entry)
        try:
            self._answer()
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    # ------------------------------------------------------------------ answers

    def _answer(self) -> None:
        url = urlsplit(self.path)
        if self.owner.token_ttl is not None and url.path == "/token":
            return self._token()
        fault = self.owner.fault_for(self.command, self.path)
        action = fault.action if fault else None
        if action == "expire_tokens":
            self.owner.expire_tokens()
        if self.owner.token_ttl is not None and not self.owner.valid_token(self.headers.get("Authorization", "")):
            return self._challenge(url.path)
        if fault is None or action == "expire_tokens":
            return self._forward()
        if action == "status":
            if fault.read_body:
                for _ in self._body():
                    pass
            else:
                self.close_connection = True
            return self._reply(fault.code, fault.headers, fault.body)
        if action == "hang":
            return self._hang()
        if action == "slow":
            self.owner.stopping.wait(fault.delay)
            return self._forward()
        if action == "swap":
            return self._forward(swap=fault)
        if action == "cut_answer":
            return self._forward(cut_after=fault.after)
        return self._forward(reset_after=fault.after if action == "reset" else None, lose=action == "lose_answer",
                             over=fault.headers)

    def _reply(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.entry.status = code
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Close with RST, as a broken middle box does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        with contextlib.suppress(OSError):
            self.connection.close()

    def _hang(self) -> None:
        """Swallow the request and answer nothing until the proxy stops or the client goes away."""
        with self.owner.waiting():
            for _ in self._body():
                pass
            self.connection.settimeout(0.05)
            while not self.owner.stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    if not self.connection.recv(1):
                        break
        return self._reset()

    def _challenge(self, path: str) -> None:
        for _ in self._body():
            pass
        match = re.match(r"/v2/(.+?)/(?:manifests|blobs|tags|referrers)/", path)
        scope = f',scope="repository:{match[1]}:pull,push"' if match else ""
        body = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}).encode()
        return self._reply(401, {
            "Www-Authenticate": f'Bearer realm="http://{self.owner.host}/token",service="proxy"{scope}',
            "Content-Type": "application/json"}, body)

    def _token(self) -> None:
        """Docker token API: GET with Basic, or POST as an OAuth form."""
        form = b"".join(self._body()).decode()
        basic = base64.b64encode(f"{self.owner.user}:{self.owner.password}".encode()).decode()
        good = self.headers.get("Authorization") == f"Basic {basic}" or (
            f"username={self.owner.user}" in form and f"password={self.owner.password}" in form)
        if not good:
            return self._reply(401, {"Content-Type": "application/json"}, b'{"details":"incorrect password"}')
        token = self.owner.new_token()
        answer: dict[str, object] = {"token": token, "access_token": token}
        if self.owner.token_expires_in:
            answer["expires_in"] = max(1, int(self.owner.token_ttl or 0))
        return self._reply(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    # ------------------------------------------------------------------ forwarding

    def _body(self) -> Iterator[bytes]:
        """The request's body in pieces, counted."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                data = self.rfile.read(size)
                self.rfile.readline()
                self.entry.body_bytes += len(data)
                yield data
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            data = self.rfile.read1(min(CHUNK, left))
            if not data:
                raise ConnectionResetError("client went away")
            left -= len(data)
            self.entry.body_bytes += len(data)
            yield data

    def _forward(self, *, reset_after: int | None = None, lose: bool = False, swap: Fault | None = None,
                 cut_after: int | None = None, over: dict[str, str] | None = None) -> None:
        host, port = self.owner.upstream.rsplit(":", 1)
        upstream = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
            for name, value in self.headers.items():
                if name.lower() not in HOP_HEADERS | {"expect", "authorization"}:
                    upstream.putheader(name, value)
            if chunked:
                upstream.putheader("Transfer-Encoding", "chunked")
            upstream.endheaders()
            if reset_after == 0:
                return self._reset()
            for data in self._body():
                upstream.send(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
                if reset_after is not None and self.entry.body_bytes >= reset_after:
                    return self._reset()
            if chunked:
                upstream.send(b"0\r\n\r\n")
            response = upstream.getresponse()
            self.entry.stored, self.entry.stored_at = response.status, time.monotonic()
            if lose or reset_after is not None:
                response.read()
                return self._reset()
            if swap is not None:
                response.read()
                return self._reply(swap.code, swap.headers, swap.body)
            return self._pass_on(response, over or {}, cut_after)
        except ConnectionRefusedError:
            return self._reset()
        finally:
            upstream.close()

    def _pass_on(self, response: http.client.HTTPResponse, over: dict[str, str], cut_after: int | None) -> None:
        self.entry.status = response.status
        self.send_response_only(response.status)
        replaced = {name.lower() for name in over}
        for name, value in response.getheaders():
            if name.lower() not in HOP_HEADERS | replaced:
                self.send_header(name, value)
        for name, value in over.items():
            self.send_header(name, value)
        bodiless = self.command == "HEAD" or response.status in {204, 304}
        chunked = not bodiless and response.length is None
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if cut_after is not None:
            self.wfile.write(response.read(cut_after))
            self.wfile.flush()
            self._reset()
            return
        if not bodiless:
            while data := response.read(CHUNK):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
