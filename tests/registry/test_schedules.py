"""Randomised fault schedules: every push that reports success is byte-correct, every other one reports failure.

`SCHEDULES=1000 pytest tests/registry/test_schedules.py` for the long run; a seed that fails is in the message.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from buildctl.registry import Registry
from buildctl.retry import Policy
from tests.registry.conftest import Ran, fast_push
from tests.registry.images import Images
from tests.registry.proxy import Action, Fault, FaultProxy

pytestmark = pytest.mark.engine

SCHEDULES = int(os.environ.get("SCHEDULES", "24"))
FIRST = int(os.environ.get("FIRST_SEED", "1"))

UPLOADS, BLOBS, MANIFESTS = "/blobs/uploads/", "/blobs/sha256:", "/manifests/"
PLACES = [("POST", UPLOADS), ("PUT", UPLOADS), ("PUT", UPLOADS), ("HEAD", BLOBS), ("HEAD", MANIFESTS),
          ("PUT", MANIFESTS), ("GET", MANIFESTS), ("DELETE", UPLOADS)]
CODES = [408, 425, 429, 499, 500, 500, 502, 503, 504, 522, 524, 401, 403, 404, 413]


def schedule(chance: random.Random) -> list[Fault]:
    """None to four faults."""
    faults = []
    for _ in range(chance.randint(0, 4)):
        method, path = chance.choice(PLACES)
        actions: list[Action] = ["status", "status", "reset", "lose_answer", "slow"]
        fault = Fault(method, path, chance.choice(actions), skip=chance.randint(0, 4),
                      times=chance.choice([1, 1, 1, 2, 3, 50]))
        if fault.action == "status":
            # a registry that denies a blob which it has makes clients send it again, rightly
            fault.code = chance.choice([code for code in CODES if (code, path) != (404, BLOBS)])
            fault.read_body = chance.random() < 0.8
            if fault.code == 429 and chance.random() < 0.5:
                fault.headers = {"Retry-After": "0"}
            if fault.code == 404 and method == "PUT":
                fault.headers = {"Content-Type": "application/json"}
                fault.body = b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN","message":"blob upload unknown"}]}'
        fault.after = chance.choice([0, 1000, 30_000])
        fault.delay = 0.05
        faults.append(fault)
    return faults


def check_stored(proxy: FaultProxy, tag: str, digest: str) -> None:
    """Fetch manifest, config and layers past the proxy and hash every byte, as a pull does."""
    with Registry(proxy.upstream, policy=Policy(1)) as registry:
        manifest = registry.manifest("regtest-s", tag)
        assert manifest is not None
        assert manifest.digest == digest
        for blob in manifest.blobs:
            assert len(registry.blob("regtest-s", blob.digest)) == blob.size


def stored(proxy: FaultProxy, tag: str) -> str:
    with Registry(proxy.upstream, policy=Policy(1)) as registry:
        found = registry.head("regtest-s", tag)
        return found.digest if found else ""


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_success_means_every_byte_and_failure_is_told(seed: int, proxy: FaultProxy, images: Images) -> None:
    chance = random.Random(seed)
    name = images.make("s:1", layers=3, size=chance.choice([500, 20_000, 60_000]), seed=seed * 10)
    digest = images.digest(name)
    faults = schedule(chance)
    proxy.add(*faults)
    done = fast_push(name, "--to", proxy.host, "--moving", "latest")
    told = f"seed {seed}: {faults}\n{done.text}"
    if done.code == 0:
        check_stored(proxy, "1", digest)
        check_stored(proxy, "latest", digest)
    else:
        assert done.code in {10, 11}, told
        assert done.error is not None
        assert done.error.problems[0].todo
        assert stored(proxy, "1") in {"", digest}, told
    fired = sum(fault.fired for fault in faults)
    proxy.faults.clear()
    again = fast_push(name, "--to", proxy.host, "--moving", "latest")
    assert again.code == 0, told + again.text
    check_stored(proxy, "1", digest)
    check_stored(proxy, "latest", digest)
    assert proxy.sent_twice() == 0, told
    _report(seed, done, proxy, fired)


def _report(seed: int, done: Ran, proxy: FaultProxy, fired: int) -> None:
    """One line per schedule for whoever asks with SCHEDULES_LOG."""
    if path := os.environ.get("SCHEDULES_LOG"):
        line = {"seed": seed, "code": done.code, "fired": fired,
                "requests": len(proxy.requests), "upload_bytes": proxy.upload_bytes(), "twice": proxy.sent_twice()}
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
