"""METADATA and tables of contents, read from an index without downloading wheels."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import metadata
from buildctl.errors import NetworkError
from buildctl.lock import Wheel
from buildctl.metadata import Facts
from tests.unit.index import Index


def wheels_of(index: Index) -> tuple[list[Wheel], dict[str, str]]:
    found = [Wheel(file.split("-")[0], file.split("-")[1], "", "public", file, hashlib.sha256(content).hexdigest(),
                   len(content), ()) for file, content in index.files.items()]
    return found, {file: f"{index.url.replace('/simple', '')}/files/{file}" for file in index.files}


@pytest.mark.parametrize(("pep658", "ranges"), [(True, True), (False, True), (True, False), (False, False)])
def test_facts_by_every_way_an_index_offers(tmp_path: Path, pep658: bool, ranges: bool) -> None:
    with Index(pep658=pep658, ranges=ranges) as index:
        index.add("a", "1.0", ["b>=2", "c ; sys_platform == 'win32'"], files={"a/x.py": "1\n", "a/y.py": "22\n"})
        wheels, urls = wheels_of(index)
        facts = metadata.read(wheels, urls, index.host(), tmp_path)["a"]
    assert facts.requires == ("b>=2", "c ; sys_platform == 'win32'")
    assert {(path, size) for path, _, size in facts.files or ()} >= {("a/x.py", 2), ("a/y.py", 3)}


def test_a_big_wheel_is_never_downloaded(tmp_path: Path) -> None:
    """Only its end, where the table of contents is, and the METADATA inside."""
    noise = random.Random(1).randbytes(400_000).hex()
    with Index(pep658=False) as index:
        index.add("big", "1.0", ["b"], files={"big/data.bin": noise})
        wheels, urls = wheels_of(index)
        assert metadata.read(wheels, urls, index.host(), tmp_path)["big"].requires == ("b",)
        read = [line for line in index.log if line.startswith("/files/big-1.0-py3-none-any.whl bytes=")]
    assert read == ["/files/big-1.0-py3-none-any.whl bytes=-65536"]


def test_a_file_far_from_the_end_is_read_where_it_is(tmp_path: Path) -> None:
    with Index() as index:
        index.add("a", "1.0", files={"a/first.txt": "hello " * 3,
                                         "a/noise": random.Random(2).randbytes(200_000).hex()})
        _, urls = wheels_of(index)
        with metadata._Remote(index.host()) as remote:
            ranges = metadata._Ranges(remote, next(iter(urls.values())))
            assert ranges.readable()
            assert ranges.seekable()
            with zipfile.ZipFile(io.BufferedReader(ranges)) as archive:
                assert archive.read("a/first.txt") == b"hello " * 3
            assert ranges.seek(0, 2) == ranges.tell()
            assert ranges.readinto(bytearray(5)) == 0


def test_big_wheels_without_ranges_stay_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_SMALL", 10)
    with Index(ranges=False, pep658=False) as index:
        index.add("a", "1.0")
        wheels, urls = wheels_of(index)
        assert metadata.read(wheels, urls, index.host(), tmp_path)["a"] == Facts(None, None)
        assert metadata.read(wheels, {}, index.host(), tmp_path)["a"] == Facts(None, None)
    assert not (tmp_path / "metadata").exists()


def test_known_wheels_need_no_network(tmp_path: Path) -> None:
    with Index() as index:
        index.add("a", "1.0", ["b"])
        wheels, urls = wheels_of(index)
        first = metadata.read(wheels, urls, index.host(), tmp_path)
        host = index.host()
    assert metadata.read(wheels, urls, host, tmp_path) == first
    next((tmp_path / "metadata").iterdir()).write_bytes(b"damaged")
    with pytest.raises(NetworkError, match="stopped answering"):
        metadata.read(wheels, urls, replace(host, index=None), tmp_path)


def test_wheels_of_a_wheelhouse_and_file_urls(tmp_path: Path) -> None:
    with Index() as index:
        index.add("a", "1.0", ["b"])
        index.add("c", "1.0", ["d"])
        wheels, _ = wheels_of(index)
        path = index.write(tmp_path / "house", "a-1.0-py3-none-any.whl")
        other = index.write(tmp_path / "else where", "c-1.0-py3-none-any.whl")
        facts = metadata.read(wheels, {other.name: other.as_uri()}, index.host(path.parent), tmp_path / "cache")
    assert (facts["a"].requires, facts["c"].requires) == (("b",), ("d",))


def test_a_wheel_without_metadata_and_one_that_is_no_zip(tmp_path: Path) -> None:
    path = tmp_path / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
    assert metadata.of_file(path).requires is None
    with Index() as index:
        index.files["z-1.0-py3-none-any.whl"] = b"no zip file at all"
        index.uploaded["z-1.0-py3-none-any.whl"] = ""
        index.pep658 = False
        wheels, urls = wheels_of(index)
        assert metadata.read(wheels, urls, index.host(), tmp_path)["z"] == Facts(None, None)


def test_credentials_of_the_index_go_to_its_host_only(tmp_path: Path) -> None:
    with Index(login="me:s3cret") as index:
        index.add("a", "1.0", ["b"])
        wheels, urls = wheels_of(index)
        bare = {file: url.replace("me:s3cret@", "") for file, url in urls.items()}
        assert metadata.read(wheels, bare, index.host(), tmp_path)["a"].requires == ("b",)
        host = replace(index.host(), index="http://me:s3cret@index.example/simple")
        assert metadata.read(wheels, bare, host, tmp_path / "other")["a"] == Facts(None, None)


def facts(*requires: str) -> Facts:
    return Facts(requires, ())


def test_requirements_of_the_target_with_the_extras_asked_for() -> None:
    found = metadata.applicable(
        {"app": facts("lib[fast]>=1", "win ; sys_platform == 'win32'", "old ; python_version < '3.10'", "Not A Line"),
         "lib": facts("base", "quick==2 ; extra == 'fast'", "slow ; extra == 'slow'"),
         "base": Facts(None, None), "quick": facts("deep ; extra == 'x'")},
        ["app", "quick[x]", "elsewhere[y]", "broken ["], "3.11", "x86_64")
    assert found == {"app": ("lib>=1",), "lib": ("base", "quick==2"), "base": None, "quick": ("deep",)}


def test_the_lock_keeps_what_tells_something() -> None:
    wheel = Wheel("a", "1", "", "public", "f", "0", 1, ())
    (one, two) = metadata.annotate([wheel, replace(wheel, name="b")], {"a": ("b", "b>=1", "missing"), "b": None})
    assert one.requires == ("b>=1", "missing")
    assert two.requires is None


def test_two_owners_of_a_file() -> None:
    owns = {"nccl-cu12": Facts((), (("nvidia/nccl/lib/libnccl.so.2", 1, 9), ("nvidia/__init__.py", 0, 0),
                                    ("x-1.dist-info/RECORD", 5, 5))),
            "nccl-cu13": Facts((), (("nvidia/nccl/lib/libnccl.so.2", 2, 9), ("nvidia/__init__.py", 0, 0),
                                    ("x-1.dist-info/RECORD", 6, 5))),
            "unknown": Facts(None, None)}
    (found,) = metadata.overlaps(owns)
    assert (found.first, found.second, found.files) == ("nccl-cu12", "nccl-cu13", 1)
    assert found.paths == ("nvidia/nccl/lib/libnccl.so.2",)
