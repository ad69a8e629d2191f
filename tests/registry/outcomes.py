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
from tests.registry.conftest import fast_push
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
        finally:
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
        seconds = time.monotonic() - started
        print(f"| {name} | {done.code} | {seconds:.1f} | {len(proxy.requests)} | {proxy.upload_bytes():,} | "
              f"{proxy.sent_twice():,} |", flush=True)
    images.clean()


if __name__ == "__main__":
    main()
