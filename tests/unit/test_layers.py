"""Reading layers: every packing, every whiteout, hostile tars, blobs that are not what they should be."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from buildctl.errors import AuditError
from buildctl.layers import LARGEST_KEPT, Entry, Layer, Pieces, WrongDigest, clean, read
from tests.unit import tars
from tests.unit.tars import item, pack, tar


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_bytes(data: bytes, keep: bool = False, expected: str = "", size: int | None = None) -> Layer:
    return read(io.BytesIO(data), lambda _: keep, where="layer 1", digest=expected, size=size)


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
def test_a_layer_is_hashed_in_every_packing(how: str) -> None:
    plain = tars.of({"usr": None, "usr/a": b"hello", "opt/b": b"world", "usr/l": "a"})
    packed = pack(plain, how)
    layer = read_bytes(packed, keep=True, expected=digest(packed), size=len(packed))
    assert (layer.digest, layer.diff_id, layer.size) == (digest(packed), digest(plain), len(packed))
    found = dict(layer.entries)
    assert [path for path, _ in layer.entries] == ["usr", "usr/a", "opt/b", "usr/l"]
    assert found["usr/a"] == Entry("file", 0o644, 0, 5, hashlib.sha256(b"hello").hexdigest(),
                                   hashlib.md5(b"hello").hexdigest(), content=b"hello")
    assert found["opt/b"].md5 == ""  # nothing of Debian's lies in /opt
    assert (found["usr"].kind, found["usr/l"].kind, found["usr/l"].target) == ("folder", "symlink", "a")


def test_content_is_kept_where_asked_only() -> None:
    layer = read(io.BytesIO(tars.of({"a": b"1", "b": b"2"})), lambda path: path == "b", where="x")
    assert {path: entry.content for path, entry in layer.entries} == {"a": None, "b": b"2"}


def test_several_frames_and_members_are_one_layer() -> None:
    plain = tars.of({"a": b"x" * 5000})
    for how in ("gzip", "zstd"):
        packed = pack(plain[:3000], how) + pack(plain[3000:], how)
        assert read_bytes(packed).diff_id == digest(plain)


def test_a_source_that_gives_a_byte_at_a_time_is_read_all_the_same() -> None:
    packed = pack(tars.of({"a": b"hello"}), "zstd")
    layer = read(Pieces(packed[at:at + 1] for at in range(len(packed))), lambda _: False, where="x")
    assert layer.digest == digest(packed)

    class Stingy(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(1)

    assert read(Stingy(packed), lambda _: False, where="x").digest == digest(packed)


@pytest.mark.parametrize("data", [b"", pack(b"", "gzip"), pack(b"", "zstd"), b"\0" * 1024])
def test_a_layer_without_anything(data: bytes) -> None:
    assert read_bytes(data).entries == ()


def test_whiteouts() -> None:
    layer = tars.layer(tar([item("a/.wh.gone", b""), item("a/kept", b"1"), item(".wh.root", b""),
                            item("b/.wh..wh..opq", b""), item(".wh..wh.plnk", b""), item("./b/new", b"2")]))
    assert layer.removed == {"a/gone", "root"}
    assert layer.emptied == {"b"}
    assert [path for path, _ in layer.entries] == ["a/kept", "b/new"]


@pytest.mark.parametrize("name", ["../etc/passwd", "a/../../b", "/../x", "..", ".wh...", "a/.wh..."])
def test_a_path_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(AuditError, match="leads out of the image"):
        tars.layer(tar([item(name, b"x")]))


def test_absolute_and_dotted_paths_are_paths_below_the_root() -> None:
    assert clean("/etc//./passwd", "x") == "etc/passwd"
    assert clean("./", "x") == ""
    assert [path for path, _ in tars.layer(tar([item("/etc/x", b"1"), item("./")])).entries] == ["etc/x"]


def test_devices_and_pipes_are_seen_and_not_read() -> None:
    layer = tars.layer(tar([item("dev/null", kind=tarfile.CHRTYPE), item("p", kind=tarfile.FIFOTYPE)]))
    assert [entry.kind for _, entry in layer.entries] == ["other", "other"]


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
@pytest.mark.parametrize("cut", [10, 700, 2500])
def test_a_cut_blob_is_the_wrong_blob(how: str, cut: int) -> None:
    import random

    packed = pack(tars.of({"a": random.Random(1).randbytes(4000)}), how)
    with pytest.raises(WrongDigest):
        read_bytes(packed[:cut], expected=digest(packed))


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
def test_a_blob_that_is_cut_and_named_so_is_damaged(how: str) -> None:
    packed = pack(tars.of({"a": bytes(range(256)) * 16}), how)
    cut = packed[: len(packed) * 2 // 5]
    with pytest.raises(AuditError, match="a layer is damaged"):
        read_bytes(cut, expected=digest(cut))


def test_a_damaged_header_in_the_middle_is_no_end() -> None:
    plain = bytearray(tars.of({"a": b"1", "evil": b"2"}))
    plain[1024 + 148] ^= 0xFF  # the checksum of the second header
    with pytest.raises(AuditError, match="damaged header"):
        read_bytes(bytes(plain))


def test_more_bytes_than_the_manifest_says_end_the_reading() -> None:
    with pytest.raises(WrongDigest, match="more than 10 bytes"):
        read_bytes(tars.of({"a": b"1"}), size=10)


def test_the_wrong_digest_counts_before_what_is_wrong_inside() -> None:
    evil = tar([item("../x", b"1")])
    with pytest.raises(WrongDigest):
        read_bytes(evil, expected=digest(b"other"))


def test_absurd_headers_are_refused_before_they_are_read() -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 100 << 20
    with pytest.raises(AuditError, match="a header of 104857600 bytes"):
        read_bytes(header.tobuf() + b"\0" * 2048)


def test_a_file_that_is_too_big_to_keep_is_refused_before_it_is_read() -> None:
    header = tarfile.TarInfo("etc/buildctl/lock.json")
    header.size = LARGEST_KEPT + 1
    with pytest.raises(AuditError, match="too big"):
        read_bytes(header.tobuf(), keep=True)


def test_long_names_and_sparse_attributes_pass() -> None:
    long = "a/" * 200 + "file"
    assert [path for path, _ in tars.layer(tar([item(long, b"1")])).entries] == [long]
