"""The server's flags, read from the source of its argument parser without running it.

SGLang declares flags in two ways: `parser.add_argument("--name", ...)`, and from 0.5.10 on also as annotated fields,
`name: A[type, Arg(...)] = default`. Both are read from the syntax tree of `server_args.py` and of the `arg_groups`
modules that it imports. Choices that are computed when the server starts are not known here and any word passes for
them; what the server checks after parsing (for a model, or a GPU) is the business of the compatibility rules.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from buildctl.errors import Problem
from buildctl.manifest import Scalar, suggest
from buildctl.stack import Profile

_ROOT = "sglang.srt.server_args"
_GROUPS = "sglang.srt.arg_groups"
_NUMBERS = {"int": int, "float": float}
#: fewer flags than any server has: its form is not understood
_FEWEST = 100


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `type` is int, float, str or the name of a parser of the server's own; choices None: any word."""

    name: str
    switch: bool = False
    type: str = "str"
    choices: tuple[str, ...] | None = None


def of_source(read: Callable[[str], bytes | None]) -> dict[str, Flag]:
    """Every flag by name, without its dashes; aliases too.

    :param read: gives a file by its path in site-packages.
    """
    trees = _trees(read)
    constants: dict[str, ast.expr] = {}
    for tree in trees:
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                constants[statement.targets[0].id] = statement.value
    found: dict[str, Flag] = {}
    for tree in trees:
        for node in ast.walk(tree):
            flags = _of_call(node, constants) if isinstance(node, ast.Call) else \
                _of_field(node, constants) if isinstance(node, ast.AnnAssign) else ()
            found.update((flag.name, flag) for flag in flags)
    return found


def check(profile: Profile, flags: Mapping[str, Flag], where: str, version: str) -> list[Problem]:
    """What the parser of the locked server would refuse in a profile."""
    if len(flags) < _FEWEST:
        return [Problem(f"cannot read the flags of SGLang {version}", where, found=f"{len(flags)} flags",
                        todo="report it: this buildctl does not know how that release declares its flags")]
    groups = {"profile.server": profile.server,
              **{f"profile.arms.{arm}": given for arm, given in profile.arms.items()}}
    return [problem for group, given in groups.items() for name, value in given.items()
            if (problem := _problem(name, value, flags, f"{where}, {group}", version))]


def _problem(name: str, value: Scalar, flags: Mapping[str, Flag], where: str, version: str) -> Problem | None:
    # argparse takes any beginning of a flag that no other flag has
    longer = [name] if name in flags else [word for word in flags if word.startswith(name)]
    if len(longer) != 1:
        return Problem(f"SGLang {version} has no flag --{name}", where,
                       found=f"the beginning of {', '.join(f'--{word}' for word in longer)}" if longer else "",
                       todo=suggest(name, flags))
    flag = flags[longer[0]]
    if value is False:
        return None
    if flag.switch:
        return None if value is True else Problem(f"--{name} takes no value", where, found=str(value),
                                                  expected="true or false")
    if value is True:
        return Problem(f"--{name} needs a value", where, found="true")
    number = _NUMBERS.get(flag.type)
    if number is not None:
        try:
            number(str(value))
        except ValueError:
            return Problem(f"--{name} takes a number", where, found=str(value), expected=flag.type)
    if flag.choices is not None and str(value) not in flag.choices:
        return Problem(f"SGLang {version} does not know this value of --{name}", where, found=str(value),
                       expected=" | ".join(flag.choices))
    return None


def _trees(read: Callable[[str], bytes | None]) -> list[ast.Module]:
    trees, seen, queue = [], {_ROOT}, [_ROOT]
    while queue:
        path = queue.pop(0).replace(".", "/")
        content = read(f"{path}.py") or read(f"{path}/__init__.py")
        if content is None:
            continue
        tree = ast.parse(content)
        trees.append(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_GROUPS) and \
                    node.module not in seen and node.module:
                seen.add(node.module)
                queue.append(node.module)
    return trees


def _of_call(call: ast.Call, constants: Mapping[str, ast.expr]) -> Iterator[Flag]:
    """`ANYTHING.add_argument("--name", ...)`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return
    names = [text[2:] for argument in call.args if (text := _text(argument)).startswith("--")]
    words = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    switch = _switch(words.get("action"), words.get("nargs"))
    for name in names:
        yield Flag(name, switch, _type(words.get("type")), _choices(words.get("choices"), constants))
        if _name(words.get("action")) == "BooleanOptionalAction":
            yield Flag(f"no-{name}", True)


def _of_field(field: ast.AnnAssign, constants: Mapping[str, ast.expr]) -> Iterator[Flag]:
    """`name: A[type, "help"]` or `name: A[type, Arg(...)]`."""
    note = field.annotation
    if not isinstance(field.target, ast.Name) or not isinstance(note, ast.Subscript) or \
            _name(note.value) not in ("A", "Annotated") or not isinstance(note.slice, ast.Tuple):
        return
    kind, *marks = note.slice.elts
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and _name(mark.func) == "Arg"]
    if not calls and not any(isinstance(mark, ast.Constant | ast.JoinedStr) for mark in marks):
        return
    words = {keyword.arg: keyword.value for call in calls for keyword in call.keywords if keyword.arg}
    if _constant(words.get("no_cli")) is True:
        return
    kind = _required(kind)
    choices = _choices(words.get("choices"), constants)
    if choices is None and isinstance(kind, ast.Subscript) and _name(kind.value) == "Literal":
        choices = _choices(kind.slice if isinstance(kind.slice, ast.Tuple) else
                           ast.Tuple(elts=[kind.slice], ctx=ast.Load()), constants)
    if isinstance(kind, ast.Subscript) and _name(kind.value) in ("List", "list"):
        kind = kind.slice
    own = words.get("type_parser")
    action = words.get("action")
    switch = _switch(action, words.get("nargs")) if action is not None else _name(kind) == "bool" and own is None
    first = _text(words.get("cli_name")) or "--" + field.target.id.replace("_", "-")
    aliases = words.get("aliases")
    others = [_text(item) for item in aliases.elts] if isinstance(aliases, ast.List | ast.Tuple) else []
    for text in (first, *others):
        yield Flag(text.removeprefix("--"), switch, _type(own) if own is not None else _type(kind), choices)
        if _name(action) == "BooleanOptionalAction":
            yield Flag(f"no-{text.removeprefix('--')}", True)


def _switch(action: ast.expr | None, nargs: ast.expr | None) -> bool:
    """Whether a flag takes no value."""
    if action is None:
        return False
    word = _text(action) or _name(action)
    if word in ("store_true", "store_false", "store_const", "BooleanOptionalAction"):
        return True
    # SGLang's own: without a value unless the declaration says otherwise
    return word in ("DeprecatedAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction") and nargs is None


def _required(kind: ast.expr) -> ast.expr:
    """T of `Optional[T]` and of `T | None`."""
    if isinstance(kind, ast.Subscript) and _name(kind.value) == "Optional":
        return kind.slice
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        return kind.right if isinstance(kind.left, ast.Constant) else kind.left
    return kind


def _choices(node: ast.expr | None, constants: Mapping[str, ast.expr]) -> tuple[str, ...] | None:
    """A list of constants as words, through names of other lists; None when it is computed."""
    if isinstance(node, ast.Name) and node.id in constants:
        return _choices(constants[node.id], {name: value for name, value in constants.items() if name != node.id})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _choices(node.left, constants), _choices(node.right, constants)
        return None if left is None or right is None else (*left, *right)
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None
    found: list[str] = []
    for item in node.elts:
        if isinstance(item, ast.Starred):
            inner = _choices(item.value, constants)
            if inner is None:
                return None
            found += inner
        elif isinstance(item, ast.Constant):
            found.append(str(item.value))
        else:
            return None
    return tuple(dict.fromkeys(found))


def _type(node: ast.expr | None) -> str:
    return _name(node) or "str"


def _name(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _text(node: ast.expr | None) -> str:
    value = _constant(node)
    return value if isinstance(value, str) else ""
