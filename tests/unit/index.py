"""A package index on this machine, with made-up wheels of about 1 KB: what uv and buildctl ask, it answers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from buildctl.host import Host

UPLOADED = "2026-01-02T03:04:05Z"


def metadata(name: str, version: str, requires: Iterable[str] = ()) -> str:
    """A METADATA file."""
    return "".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                    *(f"Requires-Dist: {text}\n" for text in requires)])


def wheel(name: str, version: str, requires: Iterable[str] = (), files: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a wheel; the same input gives the same bytes."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    members = {**(files or {f"{name.replace('-', '_')}/__init__.py": f"# {name} {version}\n"}),
               f"{info}/METADATA": metadata(name, version, requires),
               f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    members[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*members, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in members.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()


@dataclass
class Index:
    """A simple index (PEP 503, 691, 658) on 127.0.0.1; what it offers can change while it runs."""

    #: where to listen; the engine's gateway lets build steps in
    address: str = "127.0.0.1"
    pep658: bool = True
    ranges: bool = True
    hashes: bool = True
    #: user:password that every request must carry
    login: str = ""
    #: path -> status to answer with
    faults: dict[str, int] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __enter__(self) -> Index:
        outer = self

        class Handler(_Handler):
            index = outer

        self._server = ThreadingHTTPServer((self.address, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.down()

    def down(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where the index is."""
        login = f"{self.login}@" if self.login else ""
        return f"http://{login}{self.address}:{self._server.server_address[1]}/simple"

    def add(self, name: str, version: str, requires: Iterable[str] = (), *, tag: str = "py3-none-any",
            files: Mapping[str, str] | None = None, uploaded: str = UPLOADED) -> str:
        """Offer a wheel; its sha256."""
        file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
        self.files[file] = wheel(name, version, requires, files)
        self.uploaded[file] = uploaded
        return hashlib.sha256(self.files[file]).hexdigest()

    def write(self, folder: Path, file: str) -> Path:
        """Put one of the wheels into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file
        path.write_bytes(self.files[file])
        return path

    def host(self, *wheelhouses: Path) -> Host:
        """A host whose default index is this one."""
        return Host(ca=None, index=self.url, netrc=None, wheelhouses=wheelhouses)


class _Handler(BaseHTTPRequestHandler):
    index: Index
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.index
        index.log.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        if index.login and self.headers.get("Authorization") != \
                f"Basic {base64.b64encode(index.login.encode()).decode()}":
            self._answer(401, b"", {"WWW-Authenticate": "Basic"})
        elif self.path in index.faults:
            self._answer(index.faults[self.path], b"")
        elif match := re.fullmatch(r"/simple/([a-z0-9.-]+)/", self.path):
            self._page(match[1])
        elif self.path.endswith(".metadata"):
            content = index.files.get(self.path.rsplit("/", 1)[-1].removesuffix(".metadata"))
            self._answer(200, _metadata_of(content)) if content and index.pep658 else self._answer(404, b"")
        elif (content := index.files.get(self.path.rsplit("/", 1)[-1])) is not None:
            self._file(content)
        else:
            self._answer(404, b"")

    def _page(self, package: str) -> None:
        index = self.index
        files = []
        for file, content in sorted(index.files.items()):
            if file.split("-")[0].replace("_", "-").lower() != package:
                continue
            sha = hashlib.sha256(content).hexdigest()
            files.append({"filename": file, "url": f"/files/{file}", "size": len(content),
                          "hashes": {"sha256": sha} if index.hashes else {}, "upload-time": index.uploaded[file],
                          "core-metadata": index.pep658})
        if not files:
            self._answer(404, b"")
            return
        body = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": files}).encode()
        self._answer(200, body, {"Content-Type": "application/vnd.pypi.simple.v1+json"})

    def _file(self, content: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if match is None or not self.index.ranges:
            self._answer(200, content)
            return
        size = len(content)
        start = int(match[1]) if match[1] else max(0, size - int(match[2]))
        end = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
        self._answer(206, content[start:end + 1], {"Content-Range": f"bytes {start}-{end}/{size}"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _metadata_of(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))
