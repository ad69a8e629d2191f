"""Limits of known registries."""

import pytest

from buildctl.budget import GB, MIB, Layer, check, limit_of, within


def test_a_layer_over_the_limit_is_refused_with_the_step_that_made_it() -> None:
    errors, warnings = check([Layer(3 * GB), Layer(11 * GB, "RUN uv pip install torch")], "ghcr.io")
    assert len(errors) == 1
    assert not warnings
    text = str(errors[0])
    assert "layer 2 of 2 (RUN uv pip install torch)" in text
    assert "11.00 GB" in text
    assert "10.00 GB" in text


def test_near_the_limit_is_a_warning() -> None:
    errors, warnings = check([Layer(int(9.6 * GB), "x" * 200)], "ghcr.io")
    assert not errors
    assert "near the registry's limit" in str(warnings[0])
    assert "..." in str(warnings[0])


def test_many_middling_layers_pass() -> None:
    assert check([Layer(3 * GB)] * 14, "ghcr.io") == ([], [])


def test_a_registry_without_a_known_limit_takes_anything() -> None:
    assert check([Layer(40 * GB)], "registry.example:5000") == ([], [])
    assert within([Layer(40 * GB)], "registry.example:5000")


def test_an_unpacked_size_is_never_an_error() -> None:
    errors, warnings = check([Layer(12 * GB, exact=False)], "ghcr.io")
    assert not errors
    assert "12.00 GB unpacked" in str(warnings[0])


def test_a_slow_line_is_warned_of() -> None:
    errors, warnings = check([Layer(7 * GB)], "ghcr.io", rate=10e6)
    assert not errors
    assert "700 s at 10.0 MB/s" in str(warnings[0])
    assert check([Layer(5 * GB)], "ghcr.io", rate=10e6) == ([], [])


def test_too_many_layers_are_refused_anywhere() -> None:
    assert "too many layers" in str(check([Layer(1)] * 128, "registry.example")[0][0])
    assert check([Layer(1)] * 127, "registry.example") == ([], [])


@pytest.mark.parametrize(("host", "size"), [
    ("ghcr.io", 10 * GB), ("123456789012.dkr.ecr.eu-west-1.amazonaws.com", 52_000 * MIB),
    ("public.ecr.aws", 10_000 * MIB)])
def test_the_known_limits(host: str, size: int) -> None:
    limit = limit_of(host)
    assert limit is not None
    assert limit.layer_bytes == size
    assert within([Layer(size // 2)], host)
    assert not within([Layer(size)], host)
