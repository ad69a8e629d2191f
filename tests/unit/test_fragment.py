"""Fragments: stages, the stages and paths they use, renaming; everything else passes through untouched."""

from __future__ import annotations

import pytest

from buildctl.fragment import instructions, parse, split, variables
from buildctl.manifest import Problems

TEXT = """\
# a comment
FROM base AS system
RUN apt-get install x

FROM system AS layer
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/uv \\
    # a comment between the lines
    --mount=type=bind,source=layers/x,target=/layer \\
    --mount=type=cache,target=/cache \\
    --mount=type=secret,id=ca \\
    install
COPY --link --from=system /a /b
COPY --chown=1:1 files other/file /dest/
ADD base.tar /
RUN <<END
FROM nothing here AS it
COPY this that
END
RUN echo "from=tools"
"""


def parsed(text: str) -> tuple[list[str], list[str]]:
    problems = Problems()
    stages = parse(text, "Dockerfile", problems)
    return [stage.name for stage in stages], [f"{problem.where}: {problem.what}" for problem in problems.found]


def test_stages_and_what_they_use() -> None:
    problems = Problems()
    system, layer = parse(TEXT, "Dockerfile", problems)
    assert not problems.found
    assert (system.name, system.base) == ("system", "base")
    assert system.paths_used() == ()
    assert layer.stages_used() == ("system", "tools")
    assert layer.paths_used() == ("layers/x", "files", "other/file", "base.tar")
    assert len(list(instructions(layer.body))) == 6


@pytest.mark.parametrize(("line", "paths"), [
    ("RUN --mount=type=bind,src=a/b,target=/x true", ("a/b",)), ("RUN --mount=target=/x true", (".",)),
    ("RUN --mount=type=bind,from=x,target=/x true", ()), ("RUN --mount=type=cache,target=/x true", ()),
    ('COPY --link ["a b", "c", "/x"]', ("a b", "c")), ("COPY ./a/ b/../c /x", ("a", "c")), ("COPY . /x", (".",)),
    ("COPY [a]/b /x", ("[a]/b",)), ("COPY <<EOF /x", ()), ("ADD https://x.example/y /x", ())])
def test_paths_of_the_context_in_every_form(line: str, paths: tuple[str, ...]) -> None:
    (stage,) = parse(f"FROM a AS layer\n{line}\n", "Dockerfile", Problems())
    assert stage.paths_used() == paths


def test_renaming_touches_names_of_stages_only() -> None:
    _, layer = parse(TEXT, "Dockerfile", Problems())
    text = layer.renamed({"system": "cuda-system", "layer": "cuda", "tools": "kit"}).text()
    assert text.startswith("FROM cuda-system AS cuda\n")
    assert "from=kit,source=/opt/uv" in text
    assert "--from=cuda-system /a /b" in text
    assert 'echo "from=tools"' in text
    assert "FROM nothing here AS it" in text


def test_an_instruction_cut_off_by_the_end_still_counts() -> None:
    assert list(instructions("RUN a \\\n  b \\\n")) == ["RUN a b"]


@pytest.mark.parametrize(("text", "problem"), [
    ("RUN x\nFROM a AS layer\n", "Dockerfile:1: an instruction before the first FROM"),
    ("FROM a\n", "Dockerfile:1: a stage without a name"),
    ("FROM --platform=linux/amd64 a AS layer\n", "Dockerfile:1: a FROM line that cannot be joined"),
    ("FROM a AS layer\nFROM $X AS y z\n", "Dockerfile:2: a FROM line that cannot be joined"),
    ("FROM a AS layer\nFROM b AS layer\n", "Dockerfile:2: two stages are called 'layer'"),
    ("# nothing\n", "Dockerfile: a Dockerfile without FROM"),
    ("# x\nFROM a AS b\nENV A=1 \\\n  B=2\n\nFROM b AS layer\nRUN x\nENV A=1 \\\n  C\n",
     "Dockerfile:8: an ENV line that nobody can read"),
    ("FROM a AS layer\nENV A='\n", "Dockerfile:2: an ENV line that nobody can read"),
    ("FROM a AS layer\nENV A\n", "Dockerfile:2: an ENV line that nobody can read"),
    ("FROM a AS layer\nENV\n", "Dockerfile:2: an ENV line that nobody can read"),
    ("FROM a AS layer\nENV =1\n", "Dockerfile:2: an ENV line that nobody can read"),
])
def test_what_cannot_be_joined(text: str, problem: str) -> None:
    assert problem in parsed(text)[1]


@pytest.mark.parametrize(("rest", "found"), [
    ("A=1 B='two words' C=", {"A": "1", "B": "two words", "C": ""}),
    ("A=b=c D=e\\ f", {"A": "b=c", "D": "e f"}),
    # the older form, which Docker still takes: the value goes to the end of the line
    ("A 1", {"A": "1"}), ("CUDA_HOME   /usr/local/cuda", {"CUDA_HOME": "/usr/local/cuda"}),
    ("A  two  words # no comment", {"A": "two  words # no comment"}), ('A "quoted  words"', {"A": "quoted  words"}),
    ("ONE TWO= THREE=x", {"ONE": "TWO= THREE=x"}), ('A ""', {"A": ""})])
def test_variables_as_docker_reads_them(rest: str, found: dict[str, str]) -> None:
    assert variables(rest) == found


def test_an_instruction_begins_with_a_word() -> None:
    assert (split("env\tA=b  c"), split("RUN")) == (("ENV", "A=b  c"), ("RUN", ""))
