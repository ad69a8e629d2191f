from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoints import plan, resolve
from entrypoints.errors import Invalid
from tests.unit.entrypoints.test_plan import made, settings


def python(folder: Path, baseline: dict[str, Any], eagle3: dict[str, Any], *, noise: str = "") -> Path:
    """An interpreter that answers as the script would."""
    (folder / "answer.py").write_text(
        f"import json, sys\nfor words in json.loads(sys.argv[3]):\n    {noise or 'print(1)'}\n"
        f"    spec = '--speculative-algorithm' in words\n"
        f"    print('RESOLVED', json.dumps({eagle3!r} if spec else {baseline!r}))\n")
    file = folder / "python"
    file.write_text(f"#!/bin/sh\nexec {sys.executable} {folder}/answer.py \"$@\"\n")
    file.chmod(0o755)
    return file


def test_arms_that_would_differ_are_refused_before_a_start(tmp_path: Path) -> None:
    arms = plan.arms(made(), settings())
    sizes = {"cuda_graph_config": {"decode": {"bs": [1, 2, 4, 8]}}, "port": 1}
    finer = {"cuda_graph_config": {"decode": {"bs": [1, 2, 3, 4]}}, "port": 1, "speculative_algorithm": "EAGLE3"}
    with pytest.raises(Invalid, match="cuda_graph_config"):
        resolve.refuse_unequal(python(tmp_path, sizes, finer), arms, {})
    assert resolve.refuse_unequal(python(tmp_path, sizes, {**sizes, "speculative_algorithm": "EAGLE3"}), arms, {})


@pytest.mark.parametrize("noise", ["sys.exit(1)", "print('RESOLVED {')", "raise ImportError('libcuda')"])
def test_no_answer_is_no_judgement(tmp_path: Path, noise: str) -> None:
    arms = plan.arms(made(), settings())
    assert not resolve.refuse_unequal(python(tmp_path, {}, {}, noise=noise), arms, {})
    assert not resolve.refuse_unequal(tmp_path / "none", arms, {})


def test_the_script_is_valid_and_speaks_json_only() -> None:
    compile(resolve._SCRIPT, "script", "exec")
    assert json.loads(json.dumps(resolve._SCRIPT)) == resolve._SCRIPT
