"""Debian packages that are not those of the lock: what people are told, and what --strict refuses."""

from __future__ import annotations

import json

import pytest

from buildctl import drift
from buildctl.errors import AuditError


class Images:
    """Guard reports by image; other images are not here."""

    def __init__(self, **found: dict[str, list[str]]) -> None:
        self.found = found

    def file(self, reference: str, path: str) -> bytes | None:
        assert path == "/etc/buildctl/guard.json"
        if reference == "old":
            return b"{}"  # made before guards looked at Debian's packages
        found = self.found.get(reference)
        return None if found is None else json.dumps({"debian": {"drift": found}}).encode()


def test_drift_of_several_images_is_told_once() -> None:
    images = Images(cuda={"libc6": ["1", "2"]}, sglang={"libc6": ["1", "2"], "g++": ["", "12"], "gone": ["3", ""]})
    found, unseen = drift.of([(images, "cuda"), (images, "sglang"), (images, "old"), (Images(), "elsewhere")])
    assert found == {"g++": ("", "12"), "gone": ("3", ""), "libc6": ("1", "2")}
    assert unseen == ("elsewhere",)
    said = drift.lines(found, "small")
    assert said[0] == "warning: 3 Debian packages are not those of the lock: the mirror moved on"
    assert said[1:4] == ["  g++: none -> 12", "  gone: 3 -> none", "  libc6: 1 -> 2"]
    assert "buildctl lock small --upgrade-debian" in said[4]
    with pytest.raises(AuditError) as caught:
        drift.refuse(found, (), "small")
    assert caught.value.exit_code == 7
    for words in ("found:    g++ 12, gone none, libc6 2", "expected: g++ none, gone 3, libc6 1", "--strict"):
        assert words in str(caught.value)


def test_no_drift_is_not_mentioned() -> None:
    assert drift.of([(Images(cuda={}), "cuda")]) == ({}, ())
    assert drift.lines({}, "small") == []
    drift.refuse({}, (), "small")


def test_what_cannot_be_asked_is_not_taken_for_good() -> None:
    with pytest.raises(AuditError, match=r"(?s)elsewhere: the image cannot be asked.*leave out --strict"):
        drift.refuse({}, ("elsewhere",), "small")
