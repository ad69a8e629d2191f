"""Push streams, recorded from the real engine (26.1.5) with both image stores, and the export of an image."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any, cast

import docker
import pytest

from buildctl.fault import Kind
from buildctl.retry import Failed
from buildctl.upload import Progress, exact_layers, read_stream
from tests.registry.images import archive, layer

DIGEST = "sha256:163053f1aacd65239f0cc79936966ba98a2a650fa13a2fc12e1224af6832ab92"
REFERS = {"status": "The push refers to repository [127.0.0.1:36609/regtest-rec]"}
CONTAINERD: list[dict[str, Any]] = [
    REFERS,
    {"status": "Waiting", "progressDetail": {}, "id": "71beaec7ab44"},
    {"status": "Pushing", "progressDetail": {"current": 9437184, "total": 60018511}, "id": "71beaec7ab44"},
    {"status": "Pushing", "progressDetail": {"current": 60018511, "total": 60018511}, "id": "71beaec7ab44"},
    {"status": "Pushed", "progressDetail": {}, "id": "71beaec7ab44"},
    {"status": "Layer already exists", "progressDetail": {}, "id": "a58a975abd14"},
    {"status": "Mounted from regtest-rec", "progressDetail": {}, "id": "67e2a114a929"},
    {"status": f"1: digest: {DIGEST} size: 406"},
]


def test_the_containerd_store_names_the_digest_in_its_last_words_only() -> None:
    upload = read_stream(CONTAINERD)
    assert upload.digest == DIGEST
    assert upload.progress == Progress(60018511, 60018511, pushed=1, present=1, mounted=1)


def test_graph_drivers_name_it_in_aux() -> None:
    assert read_stream([REFERS, {"progressDetail": {}, "aux": {"Tag": "1", "Digest": DIGEST, "Size": 406}}]
                       ).digest == DIGEST


def test_an_image_pushed_in_place_of_its_index_names_the_index() -> None:
    """As engines from 28 on write it (moby, api/types/auxprogress)."""
    index = "sha256:" + "1" * 64
    upload = read_stream([REFERS, {"aux": {"manifestPushedInsteadOfIndex": True, "originalIndex": {"digest": index},
                                           "selectedManifest": {"digest": DIGEST}}}, CONTAINERD[-1]])
    assert (upload.digest, upload.index) == (DIGEST, index)
    assert read_stream(CONTAINERD).index == ""


def test_progress_is_reported_as_it_comes() -> None:
    seen: list[Progress] = []
    read_stream(CONTAINERD, seen.append)
    assert [progress.sent for progress in seen] == [0, 9437184, 60018511, 60018511, 60018511, 60018511]


@pytest.mark.parametrize("line", [
    {"errorDetail": {"message": "denied: no"}, "error": "denied: no"}, {"errorDetail": {"message": "denied: no"}}])
def test_an_error_inside_the_stream_is_raised(line: dict[str, Any]) -> None:
    with pytest.raises(Failed) as caught:
        read_stream([REFERS, line])
    assert caught.value.fault.kind is Kind.DENIED


def test_a_stream_without_a_digest_says_so() -> None:
    assert read_stream([REFERS]).digest == ""


def test_repeating_the_same_line_is_standing_still() -> None:
    now = 0.0

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal now
        for _ in range(1000):
            now += 0.1
            yield CONTAINERD[2]

    with pytest.raises(Failed) as caught:
        read_stream(lines(), patience=5, clock=lambda: now)
    assert caught.value.fault.kind is Kind.TRANSIENT
    assert "nothing has moved for 5 s" in caught.value.fault.text
    assert now == pytest.approx(5.2, abs=0.11)


class Exporting:
    """Stands in for an engine that exports an image in small pieces."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def get_image(self, name: str) -> Iterator[bytes]:
        assert name == "a:1"
        for start in range(0, len(self.data), 1000):
            yield self.data[start:start + 1000]


def test_exact_sizes_come_from_the_export() -> None:
    layers = [layer(1, 5000), layer(2, 90_000)]
    found = exact_layers(cast("docker.APIClient", Exporting(archive("a:1", layers, {}))), "a:1")
    assert [one.size for one in found] == [len(data) for data in layers]
    assert all(one.exact for one in found)


def test_an_export_without_compressed_layers_says_nothing() -> None:
    data = archive("a:1", [], {})
    assert exact_layers(cast("docker.APIClient", Exporting(data)), "a:1") == []
    assert gzip.decompress(layer(1)) != layer(1)
