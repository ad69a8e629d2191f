"""The file system that the layers of an image make together, whiteouts and links applied: in memory, content apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from buildctl.errors import AuditError, Problem
from buildctl.layers import Entry, Layer, clean

#: links that a path may lead over, as in the kernel
_MOST_LINKS = 40
_FOLDER = Entry("folder", 0o755)


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, where it really lies, and the number of the layer that it comes from (the lowest is 0)."""

    path: str
    entry: Entry
    layer: int


@dataclass(slots=True)
class _Node:
    entry: Entry
    layer: int
    children: dict[str, _Node] = field(default_factory=dict)


class FileSystem:
    """Files by path without leading slash; links in a path are followed as the kernel would."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        """Put the layers on each other, the lowest first. Raises `AuditError` where they cannot be."""
        self._root = _Node(_FOLDER, 0)
        for number, layer in enumerate(layers):
            self._apply(layer, number)

    def find(self, path: str) -> Found | None:
        """The file or folder that a path leads to; None where it leads nowhere, or round and round."""
        walked = self._walk(path, follow=True)
        return Found(walked[0], walked[1].entry, walked[1].layer) if walked else None

    def own(self, path: str) -> Found | None:
        """What lies at a path itself, be it a link."""
        walked = self._walk(path, follow=False)
        return Found(walked[0], walked[1].entry, walked[1].layer) if walked else None

    def content(self, path: str) -> bytes | None:
        """The content of a file, where it was kept."""
        found = self.find(path)
        return found.entry.content if found else None

    def under(self, folder: str = "") -> Iterator[Found]:
        """Everything below a folder, sorted, links as links."""
        walked = self._walk(folder, follow=True)
        if walked is None:
            return
        path, node = walked
        stack = [(f"{path}/{name}" if path else name, child) for name, child in sorted(node.children.items(),
                                                                                     reverse=True)]
        while stack:
            path, node = stack.pop()
            yield Found(path, node.entry, node.layer)
            stack += [(f"{path}/{name}", child) for name, child in sorted(node.children.items(), reverse=True)]

    # ------------------------------------------------------------------ making

    def _apply(self, layer: Layer, number: int) -> None:
        # whiteouts are about the layers below, wherever in the tar they stand
        for path in layer.removed:
            folder, _, name = path.rpartition("/")
            if (above := self._walk(folder, follow=True)) is not None:
                above[1].children.pop(name, None)
        for path in layer.emptied:
            if (found := self._walk(path, follow=True)) is not None:
                found[1].children.clear()
        known: dict[str, _Node] = {}
        for path, entry in layer.entries:
            self._put(path, entry, number, known)

    def _put(self, path: str, entry: Entry, number: int, known: dict[str, _Node]) -> None:
        """:param known: folders that were found already; forgotten when one of them may have gone."""
        folder, _, name = path.rpartition("/")
        above = known.get(folder)
        if above is None:
            above = known[folder] = self._make(folder, number)
        if entry.kind == "hardlink":
            target = self._walk(clean(entry.target, path), follow=False)
            if target is None or target[1].entry.kind == "folder":
                raise AuditError(Problem("a layer links to a file that is not there", path, entry.target,
                                         "a file of this layer or one below", "push the image again"))
            entry = target[1].entry
        before = above.children.get(name)
        if before is not None and before.entry.kind == entry.kind == "folder":
            before.entry, before.layer = entry, number
        else:
            above.children[name] = _Node(entry, number)
            if before is not None:
                known.clear()

    def _make(self, folder: str, number: int) -> _Node:
        """The folder that entries go to; parents that no layer names come into being."""
        node = self._root
        done = ""
        for name in folder.split("/") if folder else ():
            done = f"{done}/{name}" if done else name
            walked = self._walk(done, follow=True)
            if walked is None or walked[1].entry.kind != "folder":
                own = self._walk(done, follow=False)
                if own is not None and own[1].entry.kind == "symlink":
                    raise AuditError(Problem("a layer writes through a link that leads nowhere", done,
                                             own[1].entry.target, "a folder", "push the image again"))
                node.children[name] = _Node(_FOLDER, number)
                node = node.children[name]
            else:
                node = walked[1]
        return node

    def _walk(self, path: str, *, follow: bool) -> tuple[str, _Node] | None:
        """Where a path leads, as the real path and its node."""
        todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        trail: list[tuple[str, _Node]] = [("", self._root)]
        links = 0
        while todo:
            name = todo.pop()
            if name == "..":
                if len(trail) > 1:
                    trail.pop()
                continue
            node = trail[-1][1].children.get(name)
            if node is None:
                return None
            if node.entry.kind == "symlink" and (todo or follow):
                links += 1
                if links > _MOST_LINKS:
                    return None
                target = node.entry.target
                if target.startswith("/"):
                    del trail[1:]
                todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            else:
                trail.append((name, node))
        return "/".join(name for name, _ in trail[1:]), trail[-1][1]
