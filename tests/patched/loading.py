"""Loads single modules of the real, patched source on a machine without GPU, torch or SGLang.

The code of the module under test is the real one, taken from the wheel with the series applied. What it imports from
elsewhere is a stand-in, given by name or made up on the spot; the interpreter's own modules are real. Capability checks
are the real ones of `sglang.srt.utils.common`, so a test says which card there is and nothing else.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import MagicMock

from buildctl import patches, source

PATCHES = Path(__file__).parents[2] / "patches"
SGLANG_059, SGLANG_0523, FLASHINFER_063 = "sglang/0.5.9", "sglang/0.5.23", "flashinfer/0.6.3"
#: cards that the tests ask about, by compute capability
CARDS = {"8.9": (8, 9), "9.0": (9, 0), "10.0": (10, 0), "10.3": (10, 3), "12.0": (12, 0), "12.1": (12, 1)}
SM12X = ("12.0", "12.1")


class StandIn(MagicMock):
    """A module that has every name; names that start and end with two underscores only where Python sets them."""


@functools.cache
def _wheel(series: str) -> source.Wheel:
    package, version = series.split("/")
    return source.wheel(package, version)


@functools.cache
def _patched(series: str) -> Mapping[str, bytes]:
    return patches.apply_series(patches.read_series(PATCHES / series), _wheel(series).read).files


def text(series: str, path: str, *, patched: bool = True) -> str:
    """A file of the release, with the series applied or as upstream has it."""
    content = _patched(series).get(path) if patched else None
    content = content if content is not None else _wheel(series).read(path)
    assert content is not None, path
    return content.decode()


@functools.cache
def _code(series: str, path: str, patched: bool) -> CodeType:
    return compile(text(series, path, patched=patched), path, "exec", dont_inherit=True)


def load(series: str, module: str, given: Mapping[str, Any] | None = None, *, patched: bool = True) -> ModuleType:
    """The module `module` of the release, executed with stand-ins for what it imports.

    `given` maps `package.module` or `package.module.name` to what an import of it yields.
    """
    path = module.replace(".", "/") + ".py"
    known = dict(given or {})
    loaded = ModuleType(module)
    loaded.__package__ = module.rpartition(".")[0]
    loaded.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(loaded.__package__, known)}
    sys.modules[module] = loaded  # dataclasses look their module up
    try:
        exec(_code(series, path, patched), loaded.__dict__)
    finally:
        del sys.modules[module]
    return loaded


def _importer(package: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def stand_in(name: str) -> Any:
        if name not in made:
            made[name] = known.get(name) or StandIn(name=name)
            for full, value in known.items():
                if full.rpartition(".")[0] == name:
                    setattr(made[name], full.rpartition(".")[2], value)
        return made[name]

    def find(name: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0) -> Any:
        if level:
            base = package.split(".")
            name = ".".join([*base[: len(base) - level + 1], *([name] if name else [])])
        elif name.split(".")[0] in {*sys.stdlib_module_names, "packaging"}:
            return importlib.__import__(name, globals_, locals_, names or (), 0)
        if names:
            module = stand_in(name)
            for wanted in names:
                full = f"{name}.{wanted}"
                if full not in known and any(other.startswith(f"{full}.") for other in known):
                    setattr(module, wanted, stand_in(full))
            return module
        top = stand_in(name.split(".")[0])
        at, here = top, name.split(".")[0]
        for part in name.split(".")[1:]:
            here = f"{here}.{part}"
            below = stand_in(here)
            setattr(at, part, below)
            at = below
        return top

    return find


def torch(card: str, cuda: str = "13.0") -> MagicMock:
    """torch as the source asks it: which card there is, and which CUDA it was built for."""
    stand_in = StandIn(name="torch")
    stand_in.cuda.is_available.return_value = True
    stand_in.cuda.get_device_capability.side_effect = lambda *_: CARDS[card]
    stand_in.version.cuda = cuda
    stand_in.version.hip = None
    stand_in.__version__ = "2.9.1+cu130"
    stand_in.compiler.is_compiling.return_value = False
    del stand_in.npu, stand_in.hpu, stand_in.xpu, stand_in.musa
    return stand_in


@functools.cache
def common(series: str, card: str, *, patched: bool = True) -> ModuleType:
    """The real `sglang.srt.utils.common` on a machine with that card."""
    return load(series, "sglang.srt.utils.common", {"torch": torch(card)}, patched=patched)


def checks(series: str, card: str, **other: Any) -> dict[str, Any]:
    """The real capability checks of the release, as `sglang.srt.utils` gives them out, and `other` things there."""
    module = common(series, card)
    found = {name: value for name, value in vars(module).items() if name.startswith(("is_", "get_device_"))}
    return {f"{place}.{name}": value for name, value in {**found, "get_cuda_version": lambda: (13, 0), **other}.items()
            for place in ("sglang.srt.utils", "sglang.srt.utils.common")}
