"""The small HTTP client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from entrypoints import probe
from entrypoints.probe import NoAnswer
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
