"""Small HTTP client for questions to our own server: bounded, and it looks at the server while it waits."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h11

_SLICE = 0.1
_CHUNK = 65536
#: seconds for a connection and its TLS handshake, where the answer itself may take as long as it likes
_CONNECT = 25.0
#: what a server listens on when it is to be reached from everywhere: asked over the loopback
EVERYWHERE = frozenset({"", "0.0.0.0", "::", "localhost"})  # noqa: S104 - compared, not bound


class NoAnswer(Exception):
    """Refused, reset, silent or no HTTP: the text says which."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where our own server listens: a port of `host` ("" is this machine's loopback, IPv4 or IPv6), with TLS or not."""

    port: int
    host: str = ""
    tls: bool = False

    @classmethod
    def of(cls, host: str, port: int, *, tls: bool = False) -> Address:
        """The address to ask a server that was told to listen on `host`."""
        return cls(port, "" if host in EVERYWHERE else host, tls)

    @property
    def authority(self) -> str:
        """`10.0.0.5:30000`, `[::1]:30000`."""
        host = self.host or "127.0.0.1"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def __str__(self) -> str:
        """For people: `port 30000`, `port 30000 of 10.0.0.5, TLS`."""
        return f"port {self.port}" + (f" of {self.host}" if self.host else "") + (", TLS" if self.tls else "")


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


def ask(at: Address | int, path: str, payload: Any = None, *, silence: float = 25.0, api_key: str = "",
        while_waiting: Callable[[], None] = lambda: None) -> Answer:
    """GET, or POST of JSON, at an address or a port of the loopback.

    `silence` bounds the seconds without a byte; `while_waiting` is called about every 0.1 s.

    Raises `NoAnswer`, and whatever `while_waiting` raises.
    """
    status, parts = 0, []
    for event in _exchange(at, path, payload, silence, api_key, while_waiting):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
    return Answer(status, b"".join(parts))


def stream(at: Address | int, path: str, payload: Any, *, silence: float | None = 25.0, api_key: str = "",
           while_waiting: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The `data:` lines of a server-sent event stream, as they come. Raises `NoAnswer` for a status other than 200.

    With `silence` None only `while_waiting` ends the wait.
    """
    rest = b""
    for event in _exchange(at, path, payload, silence, api_key, while_waiting):
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise NoAnswer(f"status {event.status_code}")
        if isinstance(event, h11.Data):
            *lines, rest = (rest + bytes(event.data)).split(b"\n")
            yield from (line[5:].strip().decode("utf-8", "replace") for line in lines if line.startswith(b"data:"))


def _exchange(at: Address | int, path: str, payload: Any, silence: float | None, api_key: str,
              while_waiting: Callable[[], None]) -> Iterator[h11.Event]:
    address = Address(at) if isinstance(at, int) else at
    body = b"" if payload is None else json.dumps(payload).encode()
    headers = [("Host", address.authority), ("Connection", "close"), ("Content-Length", str(len(body)))]
    headers += [("Content-Type", "application/json")] if body else []
    headers += [("Authorization", f"Bearer {api_key}")] if api_key else []
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="POST" if body else "GET", target=path, headers=headers)
    out = (connection.send(request) or b"") + (connection.send(h11.Data(data=body)) or b"")
    out += connection.send(h11.EndOfMessage()) or b""
    try:
        with _connect(address, _CONNECT if silence is None else silence) as link:
            link.sendall(out)
            link.settimeout(_SLICE)
            yield from _events(connection, link, silence, while_waiting)
    except (OSError, h11.ProtocolError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error


def _connect(address: Address, seconds: float) -> socket.socket:
    """A connection, over TLS where the server speaks it; its certificate is not judged, it is our own child's."""
    link = _reach(address, seconds)
    if not address.tls:
        return link
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(link, server_hostname=address.host or None)
    except BaseException:
        link.close()
        raise


def _reach(address: Address, seconds: float) -> socket.socket:
    """To the host named; on this machine, a server told to listen on `::` takes IPv6 only."""
    if address.host:
        return socket.create_connection((address.host, address.port), timeout=seconds)
    try:
        return socket.create_connection(("127.0.0.1", address.port), timeout=seconds)
    except ConnectionRefusedError as refused:
        try:
            return socket.create_connection(("::1", address.port), timeout=seconds)
        except OSError:
            raise refused from None


def _events(connection: h11.Connection, link: socket.socket, silence: float | None,
            while_waiting: Callable[[], None]) -> Iterator[h11.Event]:
    last = time.monotonic()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(link.recv(_CHUNK))
                last = time.monotonic()
            except TimeoutError:
                while_waiting()
                if silence is not None and time.monotonic() - last > silence:
                    raise NoAnswer(f"no byte for {silence:g} s") from None
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return
        elif isinstance(event, h11.Response | h11.Data):
            yield event
