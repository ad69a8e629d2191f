"""Cleaning up: only what buildctl made for this project's stacks and what no stack makes now."""

from __future__ import annotations

from buildctl import pruning
from buildctl.engine import Engine, LocalImage


def image(name: str, key: str = "old", stack: str = "small", *tags: str) -> LocalImage:
    labels = {"buildctl.key": key, "buildctl.stack": stack} if key else {}
    return LocalImage(name, "", labels, 10, tags or (f"{name}:1",))


def test_only_stale_images_of_ours_go() -> None:
    images = [image("stale"), image("current", "now"), image("foreign", "old", "another"), image("plain", ""),
              image("pushed", "old", "small", "registry.example/team/pushed:1", "pushed:1")]
    found = pruning.stale(images, ["now"], ["small"])
    assert [one.image.id for one in found] == ["stale"]
    assert found[0].as_dict() == {"id": "stale", "tags": ["stale:1"], "bytes": 10}


def test_all_tags_are_taken_away() -> None:
    class Names(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.gone: list[str] = []

        def untag(self, reference: str) -> None:
            self.gone.append(reference)

    engine = Names()
    pruning.remove(engine, [pruning.Stale(image("a", "old", "small", "a:1", "a:key-1"))])
    assert engine.gone == ["a:1", "a:key-1"]
