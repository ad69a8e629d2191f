"""Stacks and images: what is read, and everything that is refused, at once and with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import project as projects
from buildctl import stack
from buildctl.errors import ManifestError, UsageError
from buildctl.project import Project
from tests.unit.projects import IMAGES, STACK, make


def problems_of(project: Project, name: str = "small") -> list[str]:
    with pytest.raises(ManifestError) as error:
        stack.load(project, name)
    assert error.value.exit_code == 3
    return [str(problem) for problem in error.value.problems]


def test_a_stack_is_read_into_typed_fields(tmp_path: Path) -> None:
    loaded = stack.load(make(tmp_path), "small")
    assert [layer.name for layer in loaded.layers] == ["cuda", "torch", "sglang"]
    assert loaded.python == "3.11"
    assert loaded.platform == "linux/amd64"
    assert loaded.base.bootstrap is not None
    assert loaded.base.bootstrap.suite == "bookworm"
    assert loaded.cuda is None
    assert loaded.requirements["torch"] == ("torch==2.0",)
    assert loaded.indexes[0].packages == ("torch",)
    assert set(loaded.profile.arms) == {"baseline", "eagle3"}
    assert loaded.profile.arms["eagle3"]["speculative-num-steps"] == 3
    assert loaded.profile.as_dict()["server"] == {"mem-fraction-static": 0.5, "max-running-requests": 4,
                                                  "enable-metrics": True}
    assert loaded.layer("torch").version_of == "torch"


def test_a_skipped_layer_leaves_the_chain_whole(tmp_path: Path) -> None:
    """`extra` lies between torch and sglang; the stack does without it."""
    names = [layer.name for layer in stack.load(make(tmp_path), "small").layers]
    assert "extra" not in names


def test_the_order_of_layers_comes_from_their_parents(tmp_path: Path) -> None:
    project = make(tmp_path, STACK.replace("[cuda, torch, sglang]", "[sglang, cuda, torch]"))
    assert [layer.name for layer in stack.load(project, "small").layers] == ["cuda", "torch", "sglang"]


def test_an_unknown_stack_or_image_gets_a_suggestion(tmp_path: Path) -> None:
    project = make(tmp_path)
    assert "did you mean 'small'?" in problems_of(project, "smal")[0]
    with pytest.raises(ManifestError, match="did you mean 'torch'"):
        stack.load(project, "small").layer("torhc")


@pytest.mark.parametrize(("old", "new", "line", "expected"), [
    ("[cuda, torch, sglang]", "[cuda, torch, sglnag]", 9, "did you mean 'sglang'?"),
    ("[cuda, torch, sglang]", "[cuda, torch, torch, sglang]", 9, "stands twice"),
    ("[cuda, torch, sglang]", "[cuda, torch, sglang, runtime]", 9, "part of every image"),
    ("[cuda, torch, sglang]", "[]", 9, "a stack needs layers"),
    ("{suite: bookworm}", "{suite: bookworm, snapshot: yesterday}", 7, "20261201T000000Z"),
    ("targets: [cpu]", "apt: {torch: [gdb]}\ntargets: [cpu]", 8, "image 'torch' has no step that installs Debian"),
    ("targets: [cpu]", "targets: [sm12]", 8, "unknown GPU target 'sm12'"),
    ('python: "3.11"', "python: 3.11", 3, "write it in quotes"),
    ('python: "3.11"', 'python: "3"', 3, "a minor version of Python"),
    ("tag: small", "tag: Small!", 2, "form that is not allowed"),
    ("[torch==2.0]", "[torch=2.0]", 13, "is not a requirement"),
    ("[torch==2.0]", "['torch @ https://example.org/torch.whl']", 13, "names a URL"),
    ("  torch: [torch==2.0]", "  touch: [torch==2.0]", 13, "a layer that the stack does not have"),
    ("[sglang/packages/ours]", "[sglang/packages/none]", 16, "with a pyproject.toml"),
    ("[sglang/packages/ours]", "[../elsewhere]", 16, "lies outside images/"),
    ("sglang: sglang/0.5\n", "sglang: sglang/0.6\n", 18, "there is no series at patches/sglang/0.6"),
    ("  sglang: sglang/0.5\n", "  torch: sglang/0.5\n", 18, "no layer of the stack applies patches to 'torch'"),
    ("    baseline: {}\n", "", 23, "no arm 'baseline'"),
    ("mem-fraction-static", "--mem-fraction", 20, "cannot be a server flag"),
    ('{A: "1"}', '{"A-B": "1"}', 21, "cannot be the name of an environment variable"),
    ('{A: "1"}', '{A: "1\\n2"}', 21, "cannot be the value of an environment variable"),
    ("https://index.example", "https://user:secret@index.example", 11, "without credentials"),
    ("packages: [torch]}", "packages: [torch]}\n  - {name: two, url: 'https://b.example', packages: [torch]}", 12,
     "comes from two indexes"),
    ("image: debian:bookworm-slim\n  bootstrap: {suite: bookworm}", "{}", 6, "neither an image nor a bootstrap"),
    ("image: debian:bookworm-slim", "image: Debian:12", 6, "no image reference"),
    ("image: debian:bookworm-slim", "image: debian:12@sha256:12", 6, "the digest is not one"),
    ("image: debian:bookworm-slim", f"image: debian@sha512:{'ab' * 64}", 6, "cannot take a base by such a digest"),
    ("description: a small stack", "descriptoin: a small stack", 1, "did you mean 'description'?"),
    ("profile:", "overrides:\n  - {requirement: torch==2.0}\nprofile:", 20, "has no 'reason'"),
    ("profile:", "excludes:\n  - {package: 'a b', reason: r}\nprofile:", 20, "is not a requirement"),
    ("profile:", "apt:\n  torch: ['g++ ; rm']\nprofile:", 20, "is not the name of a Debian package"),
    ("profile:", "cuda: {version: 13, from: wheel}\nprofile:", 19, "did you mean 'wheels'?"),
])
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, expected: str) -> None:
    assert old in STACK
    found = "\n".join(problems_of(make(tmp_path, STACK.replace(old, new))))
    assert expected in found
    assert f"images/stacks/small.yaml:{line}" in found


def test_all_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    project = make(tmp_path, STACK.replace("tag: small", "tga: small").replace('"3.11"', "3.11"))
    (tmp_path / "images" / "torch" / "image.yaml").write_text("description: torch\nparent: cude\nversoin_of: torch\n")
    found = problems_of(project)
    assert any("images/torch/image.yaml:3: unknown key 'versoin_of'" in text for text in found)
    assert any("a parent that does not exist" in text and "did you mean 'cuda'?" in text for text in found)
    assert any("small.yaml:2: unknown key 'tga'" in text for text in found)
    assert any("small.yaml:3" in text and "wrong type" in text for text in found)


def test_a_cycle_of_images_is_shown_as_a_path(tmp_path: Path) -> None:
    project = make(tmp_path)
    (tmp_path / "images" / "cuda" / "image.yaml").write_text("description: base\nparent: sglang\n")
    found = "\n".join(problems_of(project))
    assert "are their own ancestors" in found
    assert " -> " in found


def test_layers_that_form_no_chain(tmp_path: Path) -> None:
    text = STACK.replace("[cuda, torch, sglang]", "[cuda, torch, extra]").replace("sglang:", "extra:")
    project = make(tmp_path, text)
    (tmp_path / "images" / "extra" / "image.yaml").write_text("description: e\nparent: cuda\nversion_of: extra\n")
    assert any("does not stand on" in text for text in problems_of(project))


@pytest.mark.parametrize("broken", ["missing", "binary"])
def test_an_image_without_a_readable_dockerfile(tmp_path: Path, broken: str) -> None:
    project = make(tmp_path)
    path = tmp_path / "images" / "torch" / "Dockerfile"
    path.unlink() if broken == "missing" else path.write_bytes(b"\xff\xfe")
    assert any("needs a Dockerfile" in text for text in problems_of(project))


@pytest.mark.parametrize("image", ["runtime", "tools"])
def test_the_images_that_every_build_needs(tmp_path: Path, image: str) -> None:
    project = make(tmp_path)
    (tmp_path / "images" / image / "image.yaml").unlink()
    assert any(f"the project has no image '{image}'" in text for text in problems_of(project))


def test_broken_yaml_in_an_image(tmp_path: Path) -> None:
    project = make(tmp_path)
    (tmp_path / "images" / "torch" / "image.yaml").write_text("description: [\n")
    assert any("images/torch/image.yaml:" in text and "not valid YAML" in text for text in problems_of(project))


def test_missing_profile_and_base(tmp_path: Path) -> None:
    base = "base:\n  image: debian:bookworm-slim\n  bootstrap: {suite: bookworm}\n"
    text = STACK.split("profile:")[0].replace(base, "")
    found = "\n".join(problems_of(make(tmp_path, text)))
    assert "has no 'profile'" in found
    assert "has no 'base'" in found


def test_an_empty_stack(tmp_path: Path) -> None:
    assert "is empty" in problems_of(make(tmp_path, ""))[0]


def test_a_project_is_found_from_below_and_nowhere_else(tmp_path: Path) -> None:
    project = make(tmp_path / "here")
    assert projects.find(project.images / "cuda").root == project.root
    assert project.shown(Path("/elsewhere/x")) == "/elsewhere/x"
    with pytest.raises(UsageError, match="no project here"):
        projects.find(tmp_path)


def test_the_fixture_is_a_good_project() -> None:
    assert set(IMAGES) == {"tools", "cuda", "torch", "extra", "sglang", "runtime"}
