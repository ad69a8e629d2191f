"""The small HTTP client."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints import probe
from entrypoints.probe import Address, NoAnswer
from entrypoints.supervise import free_port


class Canned:
    """Answers one connection with fixed bytes and keeps what was asked."""

    def __init__(self, *parts: bytes, close: bool = True, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family)
        self.port: int = self.listener.getsockname()[1]
        self.asked = b""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve, args=(parts, close), daemon=True)
        self.thread.start()

    def serve(self, parts: tuple[bytes, ...], close: bool) -> None:
        link, _ = self.listener.accept()
        with link:
            self.asked = link.recv(65536)
            for part in parts:
                link.sendall(part)
            if not close:
                self.over.wait(10)

    def end(self) -> None:
        self.over.set()
        self.thread.join()
        self.listener.close()


@pytest.fixture
def canned() -> Iterator[type[Canned]]:
    made: list[Canned] = []

    class Kept(Canned):
        def __init__(self, *parts: bytes, close: bool = True, host: str = "127.0.0.1") -> None:
            super().__init__(*parts, close=close, host=host)
            made.append(self)

    yield Kept
    for one in made:
        one.end()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def test_get_and_post(canned: type[Canned]) -> None:
    one = canned(HEAD + b"Content-Length: 8\r\n\r\n", b'{"a": 1}')
    assert probe.ask(one.port, "/x", api_key="sesame").json() == {"a": 1}
    assert one.asked.startswith(b"GET /x HTTP/1.1\r\n")
    assert b"Bearer sesame" in one.asked
    two = canned(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
    assert probe.ask(two.port, "/x", {"b": 2}).status == 503
    assert two.asked.endswith(b'{"b": 2}')


def test_no_json_is_no_answer(canned: type[Canned]) -> None:
    one = canned(HEAD + b"Content-Length: 6\r\n\r\n<html>")
    with pytest.raises(NoAnswer, match="not JSON: '<html>'"):
        probe.ask(one.port, "/x").json()


@pytest.mark.parametrize("parts", [(b"",), (b"nonsense\r\n\r\n",), (HEAD + b"Content-Length: 9\r\n\r\ncut",)])
def test_what_is_no_http(canned: type[Canned], parts: tuple[bytes, ...]) -> None:
    with pytest.raises(NoAnswer):
        probe.ask(canned(*parts).port, "/x")


def test_nobody_there() -> None:
    with pytest.raises(NoAnswer, match="refused"):
        probe.ask(free_port(), "/x")


def test_a_server_on_ipv6_only(canned: type[Canned]) -> None:
    """`--host ::`: asyncio takes no IPv4 there."""
    one = canned(HEAD + b"Content-Length: 2\r\n\r\n{}", host="::1")
    assert probe.ask(one.port, "/health").status == 200


def test_silence_is_bounded_and_watched(canned: type[Canned]) -> None:
    looks = []
    with pytest.raises(NoAnswer, match=r"no byte for 0\.3 s"):
        probe.ask(canned(HEAD, close=False).port, "/x", silence=0.3, while_waiting=lambda: looks.append(1))
    assert looks

    def dead() -> None:
        raise RuntimeError("dead")
    with pytest.raises(RuntimeError, match="dead"):
        probe.ask(canned(HEAD, close=False).port, "/x", while_waiting=dead)


def test_a_stream_gives_its_data_lines_as_they_come(canned: type[Canned]) -> None:
    body = b"data: {\"text\": \"a\"}\n\n: comment\n\ndata: [DO", b"NE]\n\n"
    one = canned(HEAD + b"\r\n", *body)
    assert list(probe.stream(one.port, "/g", {})) == ['{"text": "a"}', "[DONE]"]
    with pytest.raises(NoAnswer, match="status 503"):
        list(probe.stream(canned(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n").port, "/g", {}))


@pytest.mark.parametrize(("host", "authority", "shown"), [
    ("", "127.0.0.1:7", "port 7"), ("0.0.0.0", "127.0.0.1:7", "port 7"),
    ("::", "127.0.0.1:7", "port 7"), ("::1", "[::1]:7", "port 7 of ::1, TLS"),
    ("box", "box:7", "port 7 of box, TLS")])
def test_where_a_server_is_asked(host: str, authority: str, shown: str) -> None:
    address = Address.of(host, 7, tls="TLS" in shown)
    assert (address.authority, str(address)) == (authority, shown)


def test_tls_is_spoken_and_not_verified() -> None:
    """The certificate is signed by nobody and names another host: it is our own child's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).parents[2] / "fixtures" / "tls" / "server.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve() -> None:
            link, _ = listener.accept()
            with context.wrap_socket(link, server_side=True) as secure:
                secure.recv(65536)
                secure.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        answer = probe.ask(Address(listener.getsockname()[1], "127.0.0.1", tls=True), "/health")
        thread.join()
    assert (answer.status, answer.json()) == (200, {})


def test_tls_asked_of_a_server_that_speaks_none(canned: type[Canned]) -> None:
    with pytest.raises(NoAnswer):
        probe.ask(Address(canned(HEAD).port, tls=True), "/health")
