"""What a push makes of each fault, as a table: `python -m tests.registry.outcomes`.

Real engine, real registry, three layers of 200 kB, four attempts with hardly any waiting.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

from buildctl.engine import connect
from tests.registry.conftest import fast_push, pushing
from tests.registry.images import Images
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

UPLOAD, MANIFEST, JSON = "/blobs/uploads/", "/manifests/", {"Content-Type": "application/json"}


def body(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


FAULTS: dict[str, list[Fault]] = {
    "none": [],
    "connection reset in the middle of a layer": [Fault("PUT", UPLOAD, "reset", after=50_000, skip=1, times=1)],
    "500 on an upload": [Fault("PUT", UPLOAD, times=1)],
    "502 on two uploads": [Fault("PUT", UPLOAD, code=502, times=2)],
    "504 on the manifest": [Fault("PUT", MANIFEST, code=504, times=1)],
    "504 on a layer that arrived": [Fault("PUT", UPLOAD, "swap", code=504, times=1)],
    "429 with Retry-After: 1": [Fault("POST", UPLOAD, code=429, headers={"Retry-After": "1"}, times=1)],
    "429 with the wait in its body": [Fault("POST", UPLOAD, code=429, times=1, headers=JSON,
                                            body=body("TOOMANYREQUESTS", "retry-after: 1s"))],
    "answer to a layer lost": [Fault("PUT", UPLOAD, "lose_answer", times=1)],
    "answer to the manifest lost": [Fault("PUT", MANIFEST, "lose_answer", times=1)],
    "BLOB_UPLOAD_UNKNOWN, layer is there": [Fault("PUT", UPLOAD, "swap", code=404, times=1, headers=JSON,
                                                  body=body("BLOB_UPLOAD_UNKNOWN", "blob upload unknown"))],
    "token ends before the manifest": [Fault("PUT", MANIFEST, "expire_tokens", times=1)],
    "upload stands still once (--timeout 1)": [Fault("PUT", UPLOAD, "hang", times=1)],
    "every upload answered 0.5 s late": [Fault("PUT", UPLOAD, "slow", delay=0.5)],
    "500 for ever": [Fault("PUT", UPLOAD)],
    "413": [Fault("PUT", UPLOAD, code=413, read_body=False)],
    "403 to the first upload call": [Fault("POST", UPLOAD, code=403, headers=JSON,
                                           body=body("DENIED", "permission_denied: write_package"))],
    "wrong digest when read back": [Fault("HEAD", MANIFEST, "rewrite", skip=2,
                                          headers={"Docker-Content-Digest": "sha256:" + "0" * 64})],
    "login rejected for ever": [Fault("PUT", MANIFEST, "expire_tokens")],
}


def main() -> None:
    """Print the table."""
    print("| fault | exit code | seconds | requests | bytes sent | of stored layers again |")
    print("|---|--:|--:|--:|--:|--:|")
    with closing(connect(60)) as engine, tempfile.TemporaryDirectory() as folder:
        images = Images(engine)
        os.environ["DOCKER_CONFIG"] = folder
        try:
            for number, (name, faults) in enumerate(FAULTS.items()):
                one(name, faults, images, Path(folder) / str(number))
            for case in (full, killed, one_image_twice, one_fixed_tag, one_moving_tag):
                case(images, Path(folder) / case.__name__)
        finally:
            images.clean()


def row(name: str, codes: str, started: float, proxy: FaultProxy) -> None:
    """Print what came of it."""
    print(f"| {name} | {codes} | {time.monotonic() - started:.1f} | {len(proxy.requests)} | {proxy.upload_bytes():,} | "
          f"{proxy.sent_twice():,} |", flush=True)


def full(images: Images, folder: Path) -> None:
    """A registry whose disk ends before the image does."""
    with RegistryServer(folder, disk="400k") as server, FaultProxy(server.host) as proxy:
        image, started = images.make("t:1", layers=3, size=200_000), time.monotonic()
        row("no space left on the registry's disk", str(fast_push(image, "--to", proxy.host).code), started, proxy)
    images.clean()


def killed(images: Images, folder: Path) -> None:
    """`kill -9` when the layers are there and the manifest is not; then the same command again."""
    with RegistryServer(folder) as server, FaultProxy(server.host) as proxy:
        image, started = images.make("t:1", layers=3, size=200_000), time.monotonic()
        proxy.add(hang := Fault("PUT", MANIFEST, "hang"))
        with pushing(image, "--to", proxy.host) as process:
            while not hang.fired:
                time.sleep(0.01)
            process.kill()
        proxy.faults.clear()
        again = fast_push(image, "--to", proxy.host)
        row("process killed before the manifest; run again", f"{process.wait()}; {again.code}", started, proxy)
        images.engine.remove_image(f"{proxy.host}/regtest-t:1")
    images.clean()


def one_image_twice(images: Images, folder: Path) -> None:
    """Two jobs push the same image at once."""
    both("two jobs at once, the same image", images, folder, same=True)


def one_fixed_tag(images: Images, folder: Path) -> None:
    """Two jobs push other content under one fixed tag at once."""
    both("two jobs at once, other content, one fixed tag", images, folder, "--alias", "1.0")


def one_moving_tag(images: Images, folder: Path) -> None:
    """Two jobs push other content and move one tag at once."""
    both("two jobs at once, other content, one moving tag", images, folder, "--moving", "latest")


def both(name: str, images: Images, folder: Path, *words: str, same: bool = False) -> None:
    """Two pushes in processes of their own, every answer late."""
    with RegistryServer(folder) as server, FaultProxy(server.host) as proxy:
        proxy.add(Fault("PUT", "", "slow", delay=0.2))
        first = images.make("t:1", layers=3, size=200_000)
        second = first if same else images.make("t:2", layers=3, size=200_000)
        started = time.monotonic()
        with pushing(first, "--to", proxy.host, *words) as one, pushing(second, "--to", proxy.host, *words) as two:
            for process in (one, two):
                process.communicate()
        row(name, ", ".join(sorted(f"{process.returncode}" for process in (one, two))), started, proxy)
    images.clean()


def one(name: str, faults: list[Fault], images: Images, folder: Path) -> None:
    """Push once under these faults and print what came of it."""
    logins = any(fault.action == "expire_tokens" for fault in faults)
    with RegistryServer(folder) as server, FaultProxy(server.host, token_ttl=60 if logins else None,
                                                      password="pass") as proxy:
        auth = {proxy.host: {"auth": base64.b64encode(b"ci:pass").decode()}}
        (folder.parent / "config.json").write_text(json.dumps({"auths": auth if logins else {}}))
        proxy.add(*faults)
        image = images.make("t:1", layers=3, size=200_000)
        started = time.monotonic()
        done = fast_push(image, "--to", proxy.host, "--timeout", "1" if "hang" in {f.action for f in faults} else "60")
        row(name, str(done.code), started, proxy)
    images.clean()


if __name__ == "__main__":
    main()
