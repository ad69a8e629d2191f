"""The applier of the image build, run as there: by the interpreter of a real environment with an installed package."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from buildctl import patches, udiff
from tests.patched import lab

ROOT = Path(__file__).parents[2]
GATE = "demo/gate.py"
OLD = "import os\n\n\ndef gate(card):\n    return card == 90\n\n\ndef other():\n    return 1\n"
NEW = OLD.replace("return card == 90", "return card in (90, 120)  # MARK")
FREE = lab.patch(lab.diff("demo/new.py", None, "VALUE = 2  # MARK\n"), files="demo/new.py")
FILES = {"demo/__init__.py": "", GATE: OLD, "demo/sub/__init__.py": ""}


class Environment:
    """A virtual environment with the package installed, and the applier with its one helper beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        venv.create(root / "venv", symlinks=True)
        self.python = root / "venv/bin/python"
        self.site = next((root / "venv/lib").glob("python*/site-packages"))
        with zipfile.ZipFile(lab.wheel(root / "w", FILES)) as archive:
            archive.extractall(self.site)
        compiled = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(self.site / "demo")]
        subprocess.run([str(self.python), *compiled], check=True)
        (root / "tool").mkdir()
        shutil.copy(ROOT / "images/tools/bin/patches/apply_series.py", root / "tool")
        shutil.copy(ROOT / "buildctl/udiff.py", root / "tool")
        self.series = root / "patches/demo/1.0"
        gate = lab.patch(lab.diff(GATE, OLD, NEW), files=GATE)
        lab.series(self.series, {"0001-gate.patch": gate, "0002-new.patch": FREE})

    @property
    def tree(self) -> str:
        """The effective tree as `buildctl lock` would write it."""
        return patches.apply_series(patches.read_series(self.series),
                                    {name: text.encode() for name, text in FILES.items()}.get).tree_sha256

    def apply(self, *words: str, tree: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, self.root / "tool/apply_series.py", "--package", "demo", "--series", self.series,
             "--expect-tree", self.tree if tree is None else tree, "--from", cwd or self.root, *words],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})

    def everything(self) -> dict[str, bytes]:
        """Every file of the environment's packages."""
        return {str(path.relative_to(self.site)): path.read_bytes() for path in self.site.rglob("*") if path.is_file()}

    def installed_files_are_right(self) -> bool:
        """What an installed-files check does: hash and size of each file against the RECORD."""
        with next(self.site.glob("demo-*.dist-info/RECORD")).open() as file:
            rows = [row for row in csv.reader(file) if row and row[1]]
        return all(
            row[1] == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            and row[2] == str(len(data))
            for row in rows for data in [(self.site / row[0]).read_bytes()]
        )

    def ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], cwd=self.root, capture_output=True, text=True,
                              check=True).stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_the_imported_package_is_patched_recorded_and_compiled(environment: Environment) -> None:
    pyc = next(environment.site.glob("demo/__pycache__/gate.*.pyc"))
    before = pyc.read_bytes()

    done = environment.apply("--import")

    assert done.returncode == 0, done.stderr
    assert "0001-gate.patch: 1 file(s)" in done.stdout
    assert f"2 patches, 2 files, tree {environment.tree}" in done.stdout
    assert (environment.site / GATE).read_text() == NEW
    assert environment.installed_files_are_right()
    assert "demo/new.py," in next(environment.site.glob("demo-*.dist-info/RECORD")).read_text()
    assert pyc.read_bytes() != before
    assert pyc.read_bytes()[4:8] == before[4:8]  # compiled in the same way: unchecked hashes
    assert list(environment.site.glob("demo/__pycache__/new.*.pyc"))
    assert environment.ask("from demo import gate, new; print(gate.gate(120), new.VALUE)") == "True 2"


def test_the_tree_that_comes_out_is_that_of_the_lock(environment: Environment) -> None:
    environment.apply()

    found = {name: (environment.site / name).read_bytes() for name in (GATE, "demo/new.py")}
    assert udiff.effective_tree(found) == environment.tree


@pytest.mark.parametrize("case", ["tree", "hunk", "compile", "twice", "import", "missing", "outside"])
def test_on_any_failure_nothing_is_changed(environment: Environment, case: str) -> None:
    words: tuple[str, ...] = ()
    tree: str | None = environment.tree
    if case == "tree":
        tree = "0" * 64
    elif case == "hunk":
        (environment.site / GATE).write_text(OLD.replace("90", "91"))
    elif case == "compile":
        lab.series(environment.series, {"0002-new.patch": FREE.replace("VALUE = 2", "VALUE = (2")},
                   names="0001-gate.patch\n0002-new.patch\n")
    elif case == "twice":
        assert environment.apply().returncode == 0
    elif case == "import":
        lab.series(environment.series, {"0002-new.patch": FREE.replace("VALUE = 2", "import nowhere_at_all")},
                   names="0001-gate.patch\n0002-new.patch\n")
        words, tree = ("--import",), environment.tree
    elif case == "missing":
        lab.series(environment.series, {}, names="0001-gate.patch\n0009-none.patch\n")
    elif case == "outside":
        lab.series(environment.series, {"0002-new.patch": FREE.replace("demo/new", "other/new")},
                   names="0001-gate.patch\n0002-new.patch\n")
    before = environment.everything()

    done = environment.apply(*words, tree=tree)

    assert done.returncode == 5
    assert "nothing was changed" in done.stderr
    after = environment.everything()
    assert {name: data for name, data in after.items() if "__pycache__" not in name} == {
        name: data for name, data in before.items() if "__pycache__" not in name}
    assert after.keys() == before.keys()


def test_a_copy_that_shadows_the_package_is_refused(environment: Environment) -> None:
    """The server's working folder comes first on its path: a stray checkout there is what it would import."""
    stray = environment.root / "work"
    shutil.copytree(environment.site / "demo", stray / "demo")

    done = environment.apply(cwd=stray)

    assert done.returncode == 5
    assert "a copy of demo that no installed distribution owns" in done.stderr
    assert str(stray) in done.stderr
    assert (environment.site / GATE).read_text() == OLD


def test_a_package_that_is_not_installed_is_said(environment: Environment) -> None:
    shutil.rmtree(environment.site / "demo")

    done = environment.apply(tree="0" * 64)

    assert done.returncode == 5
    assert "demo cannot be found" in done.stderr


def test_a_file_that_is_a_link_out_of_the_package_is_refused(environment: Environment, tmp_path: Path) -> None:
    (environment.site / GATE).unlink()
    (tmp_path / "elsewhere.py").write_text(OLD)
    (environment.site / GATE).symlink_to(tmp_path / "elsewhere.py")

    done = environment.apply()

    assert done.returncode == 5
    assert "lies elsewhere" in done.stderr
    assert (tmp_path / "elsewhere.py").read_text() == OLD


def test_a_file_shared_with_an_installers_cache_is_not_changed_there(environment: Environment, tmp_path: Path) -> None:
    os.link(environment.site / GATE, tmp_path / "cached.py")

    assert environment.apply().returncode == 0

    assert (tmp_path / "cached.py").read_text() == OLD
    assert (environment.site / GATE).read_text() == NEW


def test_without_bytecode_none_is_made(environment: Environment) -> None:
    shutil.rmtree(environment.site / "demo/__pycache__")

    assert environment.apply().returncode == 0

    assert not (environment.site / "demo/__pycache__").exists()


def test_modes_stay_and_times_follow_the_source_date(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment.site / GATE).chmod(0o755)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")

    assert environment.apply().returncode == 0

    state = (environment.site / GATE).stat()
    assert (state.st_mode & 0o777, state.st_mtime) == (0o755, 1_700_000_000)


def test_the_applier_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    shutil.copy(ROOT / "images/tools/bin/patches/apply_series.py", tmp_path)
    shutil.copy(ROOT / "buildctl/udiff.py", tmp_path)

    code = "import sys; sys.path.insert(0, sys.argv[1]); import apply_series"
    words = [sys.executable, "-I", "-S", "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
