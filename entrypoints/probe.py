"""Small HTTP client for questions to our own server: bounded, and it looks at the server while it waits."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h11

_SLICE = 0.1
_CHUNK = 65536


class NoAnswer(Exception):
    """Refused, reset, silent or no HTTP: the text says which."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises `NoAnswer` when it is something else, an error page for instance."""
        try:
            return json.loads(self.body)
        except ValueError:
            shown = self.body[:60].decode("utf-8", "replace")
            raise NoAnswer(f"status {self.status} with something that is not JSON: {shown!r}") from None


def ask(port: int, path: str, payload: Any = None, *, silence: float = 25.0, api_key: str = "",
        while_waiting: Callable[[], None] = lambda: None) -> Answer:
    """GET, or POST of JSON. `silence` bounds the seconds without a byte; `while_waiting` is called about every 0.1 s.

    Raises `NoAnswer`, and whatever `while_waiting` raises.
    """
    status, parts = 0, []
    for event in _exchange(port, path, payload, silence, api_key, while_waiting):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
    return Answer(status, b"".join(parts))


def stream(port: int, path: str, payload: Any, *, silence: float | None = 25.0, api_key: str = "",
           while_waiting: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The `data:` lines of a server-sent event stream, as they come. Raises `NoAnswer` for a status other than 200.

    With `silence` None only `while_waiting` ends the wait.
    """
    rest = b""
    for event in _exchange(port, path, payload, silence, api_key, while_waiting):
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise NoAnswer(f"status {event.status_code}")
        if isinstance(event, h11.Data):
            *lines, rest = (rest + bytes(event.data)).split(b"\n")
            yield from (line[5:].strip().decode("utf-8", "replace") for line in lines if line.startswith(b"data:"))


def _exchange(port: int, path: str, payload: Any, silence: float | None, api_key: str,
              while_waiting: Callable[[], None]) -> Iterator[h11.Event]:
    body = b"" if payload is None else json.dumps(payload).encode()
    headers = [("Host", f"127.0.0.1:{port}"), ("Connection", "close"), ("Content-Length", str(len(body)))]
    headers += [("Content-Type", "application/json")] if body else []
    headers += [("Authorization", f"Bearer {api_key}")] if api_key else []
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="POST" if body else "GET", target=path, headers=headers)
    out = (connection.send(request) or b"") + (connection.send(h11.Data(data=body)) or b"")
    out += connection.send(h11.EndOfMessage()) or b""
    try:
        with _connect(port, silence) as link:
            link.sendall(out)
            yield from _events(connection, link, silence, while_waiting)
    except (OSError, h11.ProtocolError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error


def _connect(port: int, silence: float | None) -> socket.socket:
    """To this machine; a server told to listen on `::` takes IPv6 only."""
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=silence)
    except ConnectionRefusedError as refused:
        try:
            return socket.create_connection(("::1", port), timeout=silence)
        except OSError:
            raise refused from None


def _events(connection: h11.Connection, link: socket.socket, silence: float | None,
            while_waiting: Callable[[], None]) -> Iterator[h11.Event]:
    last = time.monotonic()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            while not select.select([link], [], [], _SLICE)[0]:
                while_waiting()
                if silence is not None and time.monotonic() - last > silence:
                    raise NoAnswer(f"no byte for {silence:g} s")
            last = time.monotonic()
            connection.receive_data(link.recv(_CHUNK))
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return
        elif isinstance(event, h11.Response | h11.Data):
            yield event
