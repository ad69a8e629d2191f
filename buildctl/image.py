"""Layer images: `images/NAME/image.yaml` with the Dockerfile fragment beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildctl import manifest
from buildctl.manifest import Problems
from buildctl.project import NAME, NAME_HELP, Project

#: the last stage of every image; not a layer of a chain
RUNTIME = "runtime"
#: builds uv and the entrypoint's environment; its stages are copied from, never built on
TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class LayerImage:
    """One folder under `images/`."""

    name: str
    folder: Path
    description: str
    parent: str | None
    #: the package whose version is the image's version, or None: the stack's CUDA version (or `cpu`)
    version_of: str | None
    apt: tuple[str, ...]
    #: packages whose patch series is applied in this layer
    patches: tuple[str, ...]
    #: what the runtime image installs for the entrypoint, the tools image for the build
    requirements: tuple[str, ...]
    dockerfile: str
    place: str


def load_all(project: Project, problems: Problems) -> dict[str, LayerImage]:
    """Every image of the project by name; what is wrong goes to `problems`."""
    images = {}
    for path in sorted(project.images.glob("*/image.yaml")):
        image = _load(project, path, problems)
        if image is not None:
            images[image.name] = image
    for image in images.values():
        if image.parent is not None and image.parent not in images:
            problems.add(f"image '{image.name}' has a parent that does not exist", image.place, found=image.parent,
                         todo=manifest.suggest(image.parent, images.keys() - {RUNTIME, TOOLS}))
    for cycle in _cycles({name: image.parent for name, image in images.items()}):
        problems.add("images are their own ancestors", images[cycle[0]].place, found=" -> ".join((*cycle, cycle[0])),
                     todo="give one of them another parent")
    return images


def ancestors(images: Mapping[str, LayerImage], name: str) -> list[str]:
    """The parents of an image, nearest first; safe in a cycle."""
    found: list[str] = []
    image = images.get(name)
    while image is not None and image.parent is not None and image.parent not in (*found, name):
        found.append(image.parent)
        image = images.get(image.parent)
    return found


def _cycles(parents: Mapping[str, str | None]) -> list[Sequence[str]]:
    cycles: list[Sequence[str]] = []
    done: set[str] = set()
    for start in sorted(parents):
        path: list[str] = []
        word: str | None = start
        while word is not None and word in parents and word not in done:
            if word in path:
                cycles.append(path[path.index(word):])
                break
            path.append(word)
            word = parents[word]
        done.update(path)
    return cycles


def _load(project: Project, path: Path, problems: Problems) -> LayerImage | None:
    shown = project.shown(path)
    name = path.parent.name
    table = manifest.load(path, shown, problems, f"image '{name}'")
    if table is None:
        return None
    image = LayerImage(
        name=name,
        folder=path.parent,
        description=table.string("description"),
        parent=table.string("parent", "", pattern=NAME, expected=NAME_HELP) or None,
        version_of=table.string("version_of", "", pattern=NAME, expected=NAME_HELP) or None,
        apt=table.strings("apt", pattern=r"[a-z0-9][a-z0-9+.-]+", expected="the name of a Debian package"),
        patches=table.strings("patches", pattern=NAME, expected=NAME_HELP),
        requirements=table.strings("requirements"),
        dockerfile=_dockerfile(path.parent / "Dockerfile", project, problems),
        place=f"{shown}:1",
    )
    table.close()
    return image


def _dockerfile(path: Path, project: Project, problems: Problems) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.add("an image needs a Dockerfile beside its image.yaml", project.shown(path), found=str(error))
        return ""
