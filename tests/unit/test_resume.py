"""What a registry has decides what is asked next, and what a build goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from buildctl import building, resume
from buildctl.building import Request
from buildctl.compose import Composition
from buildctl.oci import Descriptor
from buildctl.reference import Target
from buildctl.registry import Registry
from tests.unit.test_compose import composed

HOME = Target("registry.example", "team")


class Known:
    """A registry with some tags; notes what is asked."""

    def __init__(self, *tags: str) -> None:
        self.tags, self.asked = set(tags), list[str]()

    def head(self, repository: str, tag: str) -> Descriptor | None:
        name = f"{repository.removeprefix('team/')}:{tag}"
        self.asked.append(name)
        return Descriptor(f"sha256:{'0' * 64}", "application/json", 1) if name in self.tags else None


def look(composition: Composition, known: Known) -> resume.Found:
    return resume.look(composition, composition.images, HOME, lambda _: cast(Registry, known))


def tag(composition: Composition, stage: str) -> str:
    return next(one.tag for one in composition.chain if one.stage == stage)


def test_one_question_per_image_when_all_is_there(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    known = Known(*(image.tags[1] for image in composition.images))
    found = look(composition, known)
    assert set(found.images) == {"cuda", "torch", "sglang"}
    assert found.images["torch"] == f"registry.example/team/torch@sha256:{'0' * 64}"
    assert found.stages == {}
    assert len(known.asked) == 3


def test_the_deepest_stage_is_enough(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    found = look(composition, Known(*(composition.image(name).tags[1] for name in ("cuda", "torch")),
                                    tag(composition, "torch"), tag(composition, "cuda"),
                                    tag(composition, "entrypoint-env")))
    assert set(found.stages) == {"torch", "entrypoint-env"}
    resumed = composition.resumed(found.stages)
    needed = resumed.reached(["sglang-image"])
    assert needed == {"sglang-image", "sglang", "torch", "entrypoint", "entrypoint-env"}
    assert f"FROM registry.example/team/torch@sha256:{'0' * 64} AS torch\n" in resumed.dockerfile
    assert "base" not in needed


def test_nothing_is_there(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    known = Known()
    found = look(composition, known)
    assert found == resume.Found({}, {})
    assert len(known.asked) == 3 + len(composition.chain)


def test_chain_stages_are_made_only_for_publishing(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    assert building._unpublished(composition, Request(), composition.images) == ()
    stages = building._unpublished(composition, Request(chain=True), composition.images)
    assert [stage.stage for stage in stages] == ["tools", "entrypoint-env", "cuda-system", "cuda", "torch",
                                                "sglang"]
    assert [stage.tag.split(":")[0] for stage in stages] == ["entrypoint", "entrypoint", "cuda", "cuda", "torch",
                                                                "sglang"]
