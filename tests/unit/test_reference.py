"""Image references."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildctl.errors import UsageError
from buildctl.reference import Reference, Target, base, check_tag, parse, parse_target

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(("text", "expected"), [
    ("sglang:0.5.23-cpu", Reference("", "sglang", "0.5.23-cpu")),
    ("team/sglang", Reference("", "team/sglang")),
    ("ghcr.io/team/sglang:1", Reference("ghcr.io", "team/sglang", "1")),
    ("127.0.0.1:5000/a:b", Reference("127.0.0.1:5000", "a", "b")),
    ("localhost/a:b", Reference("localhost", "a", "b")),
    ("[::1]:5000/a:b", Reference("[::1]:5000", "a", "b")),
    (f"ghcr.io/a@{DIGEST}", Reference("ghcr.io", "a", "", DIGEST)),
    (f"ghcr.io/a:1@{DIGEST}", Reference("ghcr.io", "a", "1", DIGEST)),
])
def test_a_reference_is_taken_apart_and_written_back(text: str, expected: Reference) -> None:
    assert parse(text) == expected
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", [
    "", ":tag", "UPPER/name:1x:2", "ghcr.io/Team/sglang:1", "ghcr.io//a:1", "a:", "a:.x", "a:" + "t" * 129,
    "a@sha256:12", "a@", "-x.io/a:1", "a b:1", "x/" * 130 + "y", "https://ghcr.io/a:1",
])
def test_what_no_registry_takes_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert text in str(caught.value)
    assert "do:" in str(caught.value)


def test_a_target_keeps_the_last_name_and_the_tag() -> None:
    assert str(parse_target("ghcr.io/team/").place(parse("other.io/x/sglang:1"))) == "ghcr.io/team/sglang:1"
    assert str(parse_target("127.0.0.1:5000").place(parse("sglang:1"))) == "127.0.0.1:5000/sglang:1"
    assert str(Target("ghcr.io", "a/b")) == "ghcr.io/a/b"


@pytest.mark.parametrize("text", ["team", "https://ghcr.io/team", "ghcr.io/Team", "gh_cr.io/x", ""])
def test_a_target_without_a_registry_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


def test_tags_are_checked() -> None:
    assert check_tag("latest") == "latest"
    with pytest.raises(UsageError):
        check_tag("no/slash")


def test_a_reference_by_digest_has_no_tag() -> None:
    reference = parse("ghcr.io/a:1")
    assert str(reference.at(DIGEST)) == f"ghcr.io/a@{DIGEST}"
    assert str(reference.at(DIGEST).tagged("2")) == "ghcr.io/a:2"


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_and_never_changed(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert str(reference) == text


@pytest.mark.parametrize(("text", "expected"), [
    ("debian:bookworm-slim", Reference("docker.io", "library/debian", "bookworm-slim")),
    ("docker.io/debian", Reference("docker.io", "library/debian")),
    ("nvidia/cuda:13.0.1-devel-ubuntu24.04", Reference("docker.io", "nvidia/cuda", "13.0.1-devel-ubuntu24.04")),
    ("ghcr.io/debian:12", Reference("ghcr.io", "debian", "12")),
    ("localhost:5000/debian", Reference("localhost:5000", "debian")),
    (f"debian:12@{DIGEST}", Reference("docker.io", "library/debian", "12", DIGEST))])
def test_a_base_is_read_as_from_reads_it(text: str, expected: Reference) -> None:
    assert base(text) == expected
