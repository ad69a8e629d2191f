"""Options: precedence, sources, and nothing misspelt goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoints.errors import BadConfig, InputMissing, Usage
from entrypoints.settings import OPTIONS, SERVE_OPTIONS, Settings, resolve


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('pairs = 2\npasses = 3\nseed = 4\nconcurrency = [1, 4]\n', encoding="utf-8")
    found = resolve(["--pairs", "6", "--config", str(file)], {"ENTRYPOINT_PAIRS": "5", "ENTRYPOINT_PASSES": "7"})
    assert (found.pairs, found.passes, found.seed, found.concurrency, found.margin) == (6, 7, 4, (1, 4), 0.02)
    shown = {name: (value, source) for name, value, source in found.shown()}
    assert shown["pairs"] == ("6", "command line")
    assert shown["passes"] == ("7", "environment ENTRYPOINT_PASSES")
    assert shown["seed"] == ("4", f"file {file}")
    assert shown["margin"] == ("0.02", "default")
    assert shown["concurrency"][0] == "1 4"


def test_the_file_may_be_named_by_a_variable_or_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("pairs = 2", encoding="utf-8")
    assert resolve([], {"ENTRYPOINT_CONFIG": str(file)}).pairs == 2
    assert resolve([], {}, file).pairs == 2


@pytest.mark.parametrize(("text", "error", "message"), [
    (None, InputMissing, "cannot read"), ("pairs = ", BadConfig, "not TOML"),
    ("paris = 2", BadConfig, "did you mean pairs"), ("pairs = true", BadConfig, "a whole number"),
    ("model = 3", BadConfig, "a text"), ("margin = true", BadConfig, "a number"),
    ("margin = inf", BadConfig, "a finite number"),
])
def test_a_bad_file(tmp_path: Path, text: str | None, error: type[Exception], message: str) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        resolve(["--config", str(file)], {})


def test_all_problems_at_once() -> None:
    environ = {"ENTRYPOINT_PARIS": "1", "ENTRYPOINT_PASSES": "none", "ENTRYPOINT_MARGIN": "-1",
               "ENTRYPOINT_JSON": "maybe", "ENTRYPOINT_EFFORT": "much", "ENTRYPOINT_CONCURRENCY": "",
               "ENTRYPOINT_IMAGE_FILE": "fine", "OTHER": "1"}
    with pytest.raises(BadConfig) as caught:
        resolve([], environ)
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for part in ("did you mean ENTRYPOINT_PAIRS?", "a whole number", "at least 0", "true or false",
                 "quick or standard or thorough", "at least one value"):
        assert part in text


def test_a_margin_in_percent_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BadConfig, match="below 1"):
        resolve(["--margin", "2"], {})


def test_unknown_options_get_a_hint() -> None:
    with pytest.raises(Usage, match="did you mean --pairs") as caught:
        resolve(["--pears", "3", "--tp", "2"], {})
    assert len(caught.value.problems) == 2
    assert "flags for the server go after a lone --" in str(caught.value)
    with pytest.raises(Usage, match="stray words: here"):
        resolve(["here"], {})
    with pytest.raises(Usage, match="expected one argument"):
        resolve(["--pairs"], {})


def test_words_for_the_server() -> None:
    found = resolve(["--pairs", "2", "--", "--tp", "2", "--pairs", "9"], {})
    assert (found.pairs, found.extra) == (2, ("--tp", "2", "--pairs", "9"))
    serve = resolve(["--tp", "2", "--port", "8000", "--json-model-override-args", "{}", "--", "--x"], {},
                    only=SERVE_OPTIONS)
    assert (serve.port, serve.extra) == (8000, ("--tp", "2", "--json-model-override-args", "{}", "--x"))


def test_repeated_and_separated_values() -> None:
    assert resolve(["--arm", "a", "--arm", "b=--x 1, 2"], {}).arm == ("a", "b=--x 1, 2")
    assert resolve([], {"ENTRYPOINT_ARM": "a; b=--x 1"}).arm == ("a", "b=--x 1")
    assert resolve(["--concurrency", "1,4", "--concurrency", "16"], {}).concurrency == (1, 4, 16)


def test_switches() -> None:
    assert resolve(["--json"], {}).json
    assert not resolve(["--no-json"], {"ENTRYPOINT_JSON": "1"}).json
    assert resolve([], {"ENTRYPOINT_EXIT_ZERO_ON_VALID": "yes"}).exit_zero_on_valid


def test_secrets_are_masked_everywhere() -> None:
    found = resolve(["--api-key", "sesame"], {})
    assert found.api_key == "sesame"
    assert "sesame" not in str(found.shown())
    words = ["--arm", "a", "--arm", "b=--api-key 'open sesame' --tp 2", "--", "--admin-api", "sesame", "--dp", "2"]
    found = resolve(words, {})
    shown = {name: value for name, value, _ in found.shown()}
    assert shown["arm"] == "a b=--api-key *** --tp 2"
    assert shown["extra"] == "--admin-api *** --dp 2"
    assert "sesame" in str(found), "the server gets it"
    assert found.masked().masked() == found.masked()


def test_every_option_has_help_and_a_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve(["--help"], {})
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert option.flag in text
        assert option.variable in " ".join(text.split())
    assert {option.name for option in OPTIONS} == {
        name for name in Settings.__dataclass_fields__ if name not in {"sources", "extra"}}
