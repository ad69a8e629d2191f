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


def test_names_of_stages_go_when_their_run_is_dead() -> None:
    """Whatever key they have: a build that lives needs them, nobody else does."""
    tags = [f"cuda:chain-{'a' * 16}-{machine}-12-18a" for machine in ("00000001", "00000002")]
    images = [image("both", "now", "small", *tags), image("living", "old", "small", tags[1]),
              image("by hand", "now", "small", f"cuda:chain-{'a' * 16}"),
              image("by hand, of before", "old", "small", f"cuda:chain-{'b' * 16}"),
              image("another's", "old", "other", tags[0])]
    found = pruning.stale(images, ["now"], ["small"], dead=lambda tag: tag == tags[0])
    assert [(one.image.id, one.image.tags) for one in found] == [
        ("both", (tags[0],)), ("by hand, of before", (f"cuda:chain-{'b' * 16}",))]


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
