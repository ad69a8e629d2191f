"""Unified diffs, parsed strictly and applied exactly.

The same file runs on the host and, copied beside the applier, in the image build: standard library only, and nothing of
buildctl is imported. Nothing here touches a file; the caller reads and writes.

Stricter than `git apply` and GNU patch on purpose: no fuzz, an offset only where the match is unique and in the
function that the hunk names, and no guess about a damaged patch.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

#: reads a file of the unpatched tree, `None` when there is none
Reader = Callable[[str], "bytes | None"]

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: ?(.*))?")
_CRLF = re.compile(rb"^(?:@@ -\d|diff --git )[^\n]*\r$", re.MULTILINE)
_HARMLESS = re.compile(rb"index [0-9a-f]+\.\.[0-9a-f]+(?: 100(?:644|755))?\n|new file mode 100644\n")
_DEFINITION = re.compile(rb"\s*(?:async\s+def|def|class)\s")
_NO_END = b"\\ No newline at end of file\n"
_AGAIN = "take it from version control again, or write it with `buildctl patch refresh`"
_SECTION_START = re.compile(rb"[A-Za-z_$]")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a patch: the parts of an error message, in the order of `buildctl.errors.Problem`."""

    what: str
    where: str = ""
    found: str = ""
    expected: str = ""
    todo: str = ""

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        for label, text in (("found:", self.found), ("expected:", self.expected), ("do:", self.todo)):
            if text:
                parts.append(f"  {label:<9} {text}")
        return "\n".join(parts)


class DiffError(Exception):
    """A patch is damaged or does not apply; carries every fault found."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


@dataclass(frozen=True)
class Hunk:
    """One hunk; `lines` keep their first character and their line end, `at` is its line in the patch file."""

    number: int
    old_start: int
    new_start: int
    section: str
    lines: tuple[bytes, ...]
    at: int = 0

    @property
    def old(self) -> list[bytes]:
        """The lines before the change."""
        return [line[1:] for line in self.lines if line[:1] in b" -"]

    @property
    def new(self) -> list[bytes]:
        """The lines after the change."""
        return [line[1:] for line in self.lines if line[:1] in b" +"]


@dataclass(frozen=True)
class FileDiff:
    """The hunks for one file, its path without the `a/` or `b/`."""

    path: str
    hunks: tuple[Hunk, ...]
    created: bool = False


@dataclass(frozen=True)
class Diff:
    """A whole patch file: the text above the diff, and the files."""

    preamble: str
    files: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Place:
    """Where a hunk went: `line` counts from 1 in the file before the patch, `offset` from the hunk's own number."""

    patch: str
    path: str
    hunk: int
    line: int
    offset: int


@dataclass(frozen=True)
class Result:
    """A series after application: contents of the touched files, where each hunk went, which patch builds on which."""

    files: Mapping[str, bytes]
    places: tuple[Place, ...]
    builds_on: tuple[tuple[str, str, str], ...]

    @property
    def offsets(self) -> tuple[Place, ...]:
        """The places that are not where the hunk said."""
        return tuple(place for place in self.places if place.offset)


# --- reading -------------------------------------------------------------------------------------------------------


def split_lines(data: bytes) -> list[bytes]:
    r"""Lines with their ends; only `\n` ends a line, as in git."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def parse(data: bytes, name: str) -> Diff:
    """The patch file `name` with the bytes `data`.

    Raises DiffError when it is empty, cut off, binary, CRLF-damaged, hand-edited out of step, leaves the tree, names a
    file twice, or deletes, renames or changes modes.
    """
    _refuse_damage(data, name)
    lines = split_lines(data)
    start = next((at for at in range(len(lines)) if _file_starts(lines, at)), None)
    if start is None:
        raise _stop(
            "there is no diff in the patch",
            name,
            found=f"{len(lines)} lines of text",
            expected="a unified diff",
            todo="run `buildctl patch refresh` on it",
        )
    faults = [
        Fault(
            "a hunk stands before any file",
            f"{name}:{number}",
            _show(line),
            "`--- a/FILE` and `+++ b/FILE` above it",
            _AGAIN,
        )
        for number, line in enumerate(lines[:start], 1)
        if line.startswith((b"@@ -", b"+++ "))
    ]
    files: list[FileDiff] = []
    at = start
    while at < len(lines):
        if lines[at] == b"-- \n" and len(lines) - at <= 3:  # the signature that git format-patch leaves
            break
        try:
            file, at = _parse_file(lines, at, name)
        except DiffError as error:
            faults += error.faults
            at = next(
                (later for later in range(at + 1, len(lines)) if lines[later].startswith(b"diff --git ")), len(lines)
            )
            continue
        if any(file.path == other.path for other in files):
            faults.append(
                Fault(
                    f"{file.path} stands in the patch twice",
                    name,
                    expected="one part for each file",
                    todo="run `buildctl patch refresh` on it",
                )
            )
        files.append(file)
    if faults:
        raise DiffError(faults)
    return Diff(b"".join(lines[:start]).decode(), tuple(files))


def _refuse_damage(data: bytes, name: str) -> None:
    if not data.strip():
        raise _stop(
            "the patch is empty",
            name,
            found=f"{len(data)} bytes",
            expected="a unified diff",
            todo="delete it and its line in the series, or take it from version control again",
        )
    if b"\0" in data:
        raise _stop("the patch is binary", name, found="NUL bytes", expected="a text diff", todo=_AGAIN)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise _stop(
            "the patch is binary",
            name,
            found=f"byte {error.start} is no UTF-8",
            expected="a text diff",
            todo=_AGAIN,
        ) from None
    if _CRLF.search(data):
        raise _stop(
            "the patch has CRLF line ends",
            name,
            found="\\r\\n after a hunk or file line",
            expected="\\n",
            todo="take it again with `git -c core.autocrlf=false`, and keep `*.patch -text` in .gitattributes",
        )
    if not data.endswith(b"\n"):
        raise _stop(
            "the patch is cut off", name, found="its last line has no end", expected="a whole line", todo=_AGAIN
        )


def _file_starts(lines: Sequence[bytes], at: int) -> bool:
    if lines[at].startswith(b"diff --git "):
        return True
    return lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")


def _parse_file(lines: Sequence[bytes], at: int, name: str) -> tuple[FileDiff, int]:
    start = at
    if lines[at].startswith(b"diff --git "):
        at += 1
        while at < len(lines) and not lines[at].startswith((b"--- ", b"diff --git ")):
            if not _HARMLESS.fullmatch(lines[at]):
                what = "binary change" if b"inary" in lines[at] else "kind of change that is not supported"
                raise _stop(
                    f"the patch holds a {what}",
                    f"{name}:{at + 1}",
                    found=_show(lines[at]),
                    expected="changed or new text files (no deletion, rename or mode)",
                    todo="leave the file in place and change what uses it",
                )
            at += 1
    if at + 1 >= len(lines) or not lines[at].startswith(b"--- ") or not lines[at + 1].startswith(b"+++ "):
        raise _stop(
            "the patch is cut off or has text between its parts",
            f"{name}:{at + 1}",
            found=_show(lines[at]) if at < len(lines) else "its end",
            expected="`--- a/FILE` and `+++ b/FILE`",
            todo=_AGAIN,
        )
    path, created = _paths(lines[at], lines[at + 1], f"{name}:{at + 1}")
    if lines[start] not in (f"diff --git a/{path} b/{path}\n".encode(), lines[at]):
        raise _stop("the patch names two files for one part", f"{name}:{start + 1}", _show(lines[start]), path, _AGAIN)
    at += 2
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith(b"@@"):
        hunk, at = _parse_hunk(lines, at, f"{name}:{at + 1}", path, len(hunks) + 1)
        _check_order(hunk, hunks, created, f"{name}:{hunk.at}", path)
        hunks.append(hunk)
    if not hunks:
        raise _stop(
            f"there is no hunk for {path}",
            f"{name}:{at}",
            expected="`@@ -LINE,COUNT +LINE,COUNT @@`",
            todo="take the patch from version control again; it may be cut off",
        )
    if at < len(lines) and not _file_starts(lines, at) and lines[at] != b"-- \n":
        raise DiffError(
            [_miscounted(f"{name}:{at + 1}", path, len(hunks), f"more lines than it counts: {_show(lines[at])}")]
        )
    return FileDiff(path, tuple(hunks), created), at


def _paths(old_line: bytes, new_line: bytes, where: str) -> tuple[str, bool]:
    old, new = (line[4:].decode().rstrip("\n").split("\t")[0] for line in (old_line, new_line))
    if new == "/dev/null":
        raise _stop(
            "the patch deletes a file",
            where,
            found=old,
            expected="changed or new files",
            todo="leave the file in place and change what uses it",
        )
    created = old == "/dev/null"
    for text, prefix in ((new, "b/"),) if created else ((old, "a/"), (new, "b/")):
        parts = text.removeprefix(prefix).split("/")
        bad = {"", ".", ".."}.intersection(parts) or re.search(r"[\\\x00-\x1f\x7f\":]", text)
        if not text.startswith(prefix) or bad:
            raise _stop(
                "the path leaves the tree or is no plain path",
                where,
                found=text,
                expected=f"{prefix}PACKAGE/...; relative to site-packages, without . or ..",
                todo="write the patch with `buildctl patch refresh`",
            )
    if not created and old[2:] != new[2:]:
        raise _stop(
            "the patch renames a file",
            where,
            found=f"{old} -> {new}",
            expected="the same path twice",
            todo="change the file in place",
        )
    return new[2:], created


def _parse_hunk(lines: Sequence[bytes], at: int, where: str, path: str, number: int) -> tuple[Hunk, int]:
    match = _HUNK.fullmatch(lines[at].rstrip(b"\n"))
    if match is None:
        raise _stop(
            f"hunk #{number} for {path} has no proper head",
            where,
            found=_show(lines[at]),
            expected="`@@ -LINE,COUNT +LINE,COUNT @@`",
            todo="write it with `buildctl patch refresh`",
        )
    old_start, new_start = int(match[1]), int(match[3])
    old_left, new_left = (1 if count is None else int(count) for count in (match[2], match[4]))
    body: list[bytes] = []
    head = at + 1
    at = head
    while old_left or new_left or (at < len(lines) and lines[at].startswith(b"\\")):
        sign = lines[at][:1] if at < len(lines) else b""
        if sign == b"\\" and body and body[-1].endswith(b"\n") and lines[at] == _NO_END:
            body[-1] = body[-1][:-1]
            at += 1
            continue
        old_left -= sign in (b" ", b"-")
        new_left -= sign in (b" ", b"+")
        if sign not in (b" ", b"-", b"+") or old_left < 0 or new_left < 0:
            found = f"the patch ends or goes on with {_show(lines[at])}" if at < len(lines) else "the patch ends"
            raise DiffError([_miscounted(where, path, number, found)])
        body.append(lines[at])
        at += 1
    return Hunk(number, old_start, new_start, (match[5] or b"").decode().strip(), tuple(body), head), at


def _miscounted(where: str, path: str, number: int, found: str) -> Fault:
    return Fault(
        f"hunk #{number} for {path} is cut off, or its counts are wrong",
        where,
        found=found,
        expected="as many lines as its head counts",
        todo="edit the files, not the patch: `buildctl patch edit`, then `buildctl patch refresh`",
    )


def _check_order(hunk: Hunk, before: Sequence[Hunk], created: bool, where: str, path: str) -> None:
    kinds = {line[:1] for line in hunk.lines}
    todo = "write it with `buildctl patch refresh`"
    if created:
        if kinds != {b"+"} or before or (hunk.old_start, hunk.new_start) != (0, 1):
            raise _stop(
                f"{path} is new, but hunk #{hunk.number} is no plain addition",
                where,
                expected="one hunk `@@ -0,0 +1,COUNT @@`",
                todo=todo,
            )
        return
    if not kinds & {b"+", b"-"} or hunk.old == hunk.new:
        raise _stop(f"hunk #{hunk.number} for {path} changes nothing", where, todo=todo)
    if b" " not in kinds and hunk.old_start != 1:  # from line 1 on, it must be the whole file
        raise _stop(
            f"hunk #{hunk.number} for {path} has no context",
            where,
            found="no unchanged line",
            expected="three unchanged lines around the change",
            todo=todo,
        )
    if not all(line.endswith(b"\n") for line in (*hunk.old[:-1], *hunk.new[:-1])):
        raise _stop(f"hunk #{hunk.number} for {path} ends a line of the file before its end", where, todo=todo)
    end = max((other.old_start + len(other.old) for other in before), default=1)
    shift = sum(len(other.new) - len(other.old) for other in before)
    if hunk.old_start < end or hunk.new_start != hunk.old_start + shift:
        raise _stop(
            f"the line numbers of hunk #{hunk.number} for {path} do not add up",
            where,
            found=f"-{hunk.old_start} +{hunk.new_start}",
            expected=f"from -{end} on, and +{hunk.old_start + shift} after the hunks above it",
            todo="a hunk was removed or edited by hand; " + todo,
        )


def _stop(what: str, where: str, found: str = "", expected: str = "", todo: str = "") -> DiffError:
    return DiffError([Fault(what, where, found, expected, todo)])


# --- applying ------------------------------------------------------------------------------------------------------


def apply_file(source: bytes | None, file: FileDiff, patch: str) -> tuple[bytes, list[Place]]:
    """The file after `file`'s hunks, and where they went; raises DiffError with every hunk that does not fit."""
    where = f"{patch}: {file.path}"
    if file.created:
        if source is not None:
            raise _stop(
                "the patch creates a file that is there already",
                where,
                expected="no such file",
                todo="upstream may have it now: `buildctl patch matrix`",
            )
        return b"".join(file.hunks[0].new), [Place(patch, file.path, 1, 1, 0)]
    if source is None:
        raise _stop(
            "the file to patch is not there",
            where,
            expected="the release that the series is for",
            todo="see where it went: `buildctl patch matrix`, `buildctl patch rebase --onto`",
        )
    lines = split_lines(source)
    out: list[bytes] = []
    places: list[Place] = []
    faults: list[Fault] = []
    cursor = drift = 0
    for hunk in file.hunks:
        old = hunk.old
        at = _find(lines, hunk, cursor, drift, where)
        if isinstance(at, Fault):
            faults.append(at)
            continue
        drift = at + 1 - hunk.old_start
        out += lines[cursor:at] + hunk.new
        cursor = at + len(old)
        places.append(Place(patch, file.path, hunk.number, at + 1, drift))
    if faults:
        raise DiffError(faults)
    return b"".join(out + lines[cursor:]), places


def _find(lines: Sequence[bytes], hunk: Hunk, cursor: int, drift: int, where: str) -> int | Fault:
    """Index of the hunk's first line. An unshifted match wins; a shifted one must be the only one."""
    old = hunk.old
    where = f"{where}: hunk #{hunk.number}"
    matches = [at for at in range(cursor, len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
    if hunk.old_start == 1:  # at the head of the file, and without trailing context at its end: as git does
        matches = [at for at in matches if at == 0]
    if hunk.lines[-1][:1] != b" ":
        matches = [at for at in matches if at + len(old) == len(lines)]
    if hunk.old_start - 1 in matches and not drift:
        return hunk.old_start - 1
    if not matches:
        return _mismatch(lines, hunk, drift, where)
    if len(matches) > 1:
        return Fault(
            "the hunk fits in several places",
            where,
            found="lines " + ", ".join(str(at + 1) for at in matches),
            expected=f"line {hunk.old_start}, or one place only",
            todo="refresh the patch with more context",
        )
    at = matches[0]
    if at + 1 != hunk.old_start and not _same_section(lines, at, hunk):
        return Fault(
            "the hunk's text is found in another function",
            where,
            found=f"line {at + 1}: {_section(lines, at)}",
            expected=f"line {hunk.old_start}: {hunk.section}",
            todo="look at the source, then refresh the patch",
        )
    return at


def _mismatch(lines: Sequence[bytes], hunk: Hunk, drift: int, where: str) -> Fault:
    start = max(hunk.old_start - 1 + drift, 0)
    number, found, expected = start + 1, "the end of the file", b""
    for step, line in enumerate(hunk.old):
        expected = line
        number = start + step + 1
        found = _show(lines[number - 1]) if number <= len(lines) else "the end of the file"
        if number > len(lines) or lines[number - 1] != line:
            break
    crlf = any(line.endswith(b"\r\n") for line in lines) and not any(line.endswith(b"\r\n") for line in hunk.old)
    fits_after = any(list(lines[at : at + len(hunk.new)]) == hunk.new for at in range(len(lines) - len(hunk.new) + 1))
    if crlf:
        todo = "the source has CRLF line ends, the patch has not: refresh the patch from the real source"
    elif fits_after:
        todo = (
            "the source reads as after the patch: it is reversed, or the change is upstream already;"
            " see `buildctl patch matrix`"
        )
    else:
        todo = "compare with the locked release; `buildctl patch rebase --onto VERSION` carries a series to another one"
    return Fault("the hunk does not fit, and there is no fuzz", where, f"line {number}: {found}", _show(expected), todo)


def _section(lines: Sequence[bytes], at: int) -> str:
    """The nearest `def` or `class` line above line index `at`, as it stands in a hunk's head."""
    line = next((lines[up] for up in range(at - 1, -1, -1) if _DEFINITION.match(lines[up])), b"")
    return line.decode(errors="replace").strip()


def _same_section(lines: Sequence[bytes], at: int, hunk: Hunk) -> bool:
    """Whether the hunk's heading still stands above; git cuts headings short, and without a Python driver it takes
    the last line that begins in the first column."""
    if not hunk.section:
        return True
    outer = next((lines[up] for up in range(at - 1, -1, -1) if _SECTION_START.match(lines[up])), b"")
    return any(text.startswith(hunk.section) for text in (_section(lines, at), outer.decode(errors="replace").strip()))


def apply_patches(patches: Sequence[tuple[str, Diff]], read: Reader) -> Result:
    """The series applied in memory: all of it, or DiffError with every fault that is not a consequence of another."""
    files: dict[str, bytes] = {}
    owners: dict[str, list[str]] = {}
    spoilt: set[str] = set()
    places: list[Place] = []
    faults: list[Fault] = []
    builds_on: dict[tuple[str, str, str], None] = {}
    for name, diff in patches:
        for file in diff.files:
            if file.path in spoilt:
                continue
            source = files[file.path] if file.path in files else read(file.path)
            try:
                content, where = apply_file(source, file, name)
                check_python(content, file.path, name)
            except DiffError as error:
                faults += error.faults
                spoilt.add(file.path)
                continue
            owners.setdefault(file.path, [""] * len(split_lines(source or b"")))
            for earlier in _take_over(owners, file, where, name):
                builds_on[name, earlier, file.path] = None
            files[file.path] = content
            places += where
    if faults:
        raise DiffError(faults)
    return Result(files, tuple(places), tuple(builds_on))


def _take_over(owners: dict[str, list[str]], file: FileDiff, where: Sequence[Place], name: str) -> set[str]:
    """Notes which patch wrote each line; returns the earlier patches whose lines this one touches or leans on."""
    before = owners[file.path]
    after: list[str] = []
    touched: set[str] = set()
    cursor = 0
    for hunk, place in zip(file.hunks, where, strict=True):
        after += before[cursor : place.line - 1]
        cursor = place.line - 1
        for line in hunk.lines:
            if line[:1] == b"+":
                after.append(name)
                continue
            touched.add(before[cursor])
            if line[:1] == b" ":
                after.append(before[cursor])
            cursor += 1
    owners[file.path] = after + before[cursor:]
    return touched - {""}


def check_python(content: bytes, path: str, patch: str) -> None:
    """Raises DiffError when a patched Python file does not compile."""
    if not path.endswith(".py"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's own
        try:
            compile(content, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise _stop(
                "the patched file does not compile",
                f"{patch}: {path}:{line or 1}",
                found=str(error),
                expected="valid Python",
                todo=f"`buildctl patch edit {patch}`, then refresh it",
            ) from None


def effective_tree(files: Mapping[str, bytes]) -> str:
    """sha256 over the lines `SHA256  PATH`, sorted by path, of the touched files after the series."""
    lines = (f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_series_file(text: str, where: str) -> list[str]:
    """The patch names of a `series` file in order; raises DiffError on a URL, a path, an option or a repeated name."""
    names: list[str] = []
    faults: list[Fault] = []
    for number, line in enumerate(text.split("\n"), 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        at = f"{where}:{number}"
        if "://" in name:
            faults.append(
                Fault(
                    "a patch by URL",
                    at,
                    name,
                    "a file in this folder",
                    "what the URL serves can change: save it here and review it",
                )
            )
        elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch", name):
            faults.append(
                Fault(
                    "no plain name of a patch",
                    at,
                    line,
                    "NAME.patch, without path or options",
                    "the strip level is always 1",
                )
            )
        elif name in names:
            faults.append(Fault("the patch stands in the series twice", at, name, "each patch once", "remove one line"))
        else:
            names.append(name)
    if faults:
        raise DiffError(faults)
    return names


def _show(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\n")
    return repr(text if len(text) <= 100 else text[:97] + "...")
