"""The engine's subprocess half against a docker client of known answers, with streams recorded from the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from buildctl.engine import Engine
from buildctl.errors import BuildError, EngineError, Interrupted

RECORDED = Path(__file__).parent.parent / "fixtures" / "rawjson"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the head of PATH for a made-up docker client."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


def write(folder: Path, text: str) -> None:
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\n[ "$2" = version ] && exit 0\n{text}\n')
    path.chmod(0o755)


def bake(tmp_path: Path, **rest: object) -> object:
    return Engine().bake(tmp_path, ["a-image"], tmp_path / "log", show="quiet", **rest)  # type: ignore[arg-type]


def test_a_build_gives_its_record_and_digests(tmp_path: Path, client: Path) -> None:
    metadata = json.dumps({"a-image": {"containerimage.digest": "sha256:1"}, "buildx.build.warnings": []})
    write(client, f"""echo "$@" > {tmp_path}/words; env > {tmp_path}/env; cat {RECORDED}/success.txt >&2
while [ "$1" != --metadata-file ]; do shift; done; echo '{metadata}' > "$2" """)
    baked = Engine().bake(tmp_path, ["a-image"], tmp_path / "log", show="quiet", builder="b", no_cache=True,
                          settings=["*.output=type=docker"], environment={"SECRET_X": "1"})
    assert baked.digests == {"a-image": "sha256:1"}
    assert baked.record.error is None
    words = (tmp_path / "words").read_text()
    assert "--builder b --no-cache --set *.output=type=docker a-image" in words
    env = (tmp_path / "env").read_text()
    assert "BUILDX_BAKE_ENTITLEMENTS_FS=0" in env
    assert "SECRET_X=1" in env
    assert (tmp_path / "log").read_text()


def test_a_failure_carries_the_first_true_error(tmp_path: Path, client: Path) -> None:
    write(client, f"cat {RECORDED}/failed.txt >&2; exit 1")
    with pytest.raises(BuildError) as error:
        bake(tmp_path)
    assert "failed" in str(error.value)
    assert str(tmp_path / "log") in str(error.value)
    assert "context canceled" not in error.value.problems[0].what


def test_a_silent_failure_still_fails(tmp_path: Path, client: Path) -> None:
    write(client, "exit 7")
    with pytest.raises(BuildError, match="without saying why"):
        bake(tmp_path)


def test_a_success_without_metadata_has_no_digests(tmp_path: Path, client: Path) -> None:
    write(client, 'while [ "$1" != --metadata-file ]; do shift; done; echo "{" > "$2"')
    assert Engine().bake(tmp_path, ["a"], tmp_path / "log", show="quiet").digests == {}


@pytest.mark.parametrize("obedient", [True, False])
def test_an_interrupt_ends_buildx(tmp_path: Path, client: Path, monkeypatch: pytest.MonkeyPatch,
                                  obedient: bool) -> None:
    monkeypatch.setattr("buildctl.engine._GRACE", 0.5)
    trap = f'trap "echo told > {tmp_path}/told; exit 130" INT' if obedient else 'trap "" INT'
    write(client, f"{trap}\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid\n"
                  "n=0; while [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done")

    def interrupt() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted):
        bake(tmp_path)
    assert (tmp_path / "told").exists() is obedient
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupt_while_buildx_is_being_started_leaves_no_process(tmp_path: Path, client: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    write(client, "n=0; while [ $n -lt 600 ]; do sleep 0.05; n=$((n + 1)); done")
    made: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def interrupted(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        made.append(real(*words, **more))
        if "bake" in words[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return made[-1]

    monkeypatch.setattr("buildctl.engine.subprocess.Popen", interrupted)
    with pytest.raises(Interrupted):
        bake(tmp_path)
    assert all(one.poll() is not None for one in made)


def test_a_client_without_buildx_is_passed_over(tmp_path: Path, client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (client / "docker").write_text("#!/bin/sh\nexit 1\n")
    (client / "docker").chmod(0o755)
    other = tmp_path / "other"
    other.mkdir()
    write(other, "exit 0")
    monkeypatch.setenv("PATH", f"{client}{os.pathsep}{other}")
    assert Engine().program() == str(other / "docker")
    monkeypatch.setenv("PATH", str(client))
    with pytest.raises(EngineError, match="no docker client with buildx") as error:
        Engine().program()
    assert str(client / "docker") in str(error.value)


def test_the_driver_of_a_builder(client: Path) -> None:
    write(client, 'case $3 in good) printf "Driver: kubernetes\\n\\nNodes:\\nEndpoint: k8s:///b?x=1\\n" ;;\n'
                  'dead) printf "Driver: remote\\n\\nNodes:\\nEndpoint: tcp://b:1\\nStatus: inactive\\n" ;;\n'
                  'far) printf "Name: far\\nDriver: docker\\n\\nNodes:\\nName: far\\nEndpoint: far\\n" ;;\n'
                  'default) printf "Name: default\\nDriver: docker\\n\\nNodes:\\nEndpoint: default\\n" ;;\n'
                  '*) echo "ERROR: no builder \\"$3\\" found" >&2; exit 1 ;; esac')
    found = Engine().builder("good")
    assert (found.driver, found.endpoints, found.keeps_images) == ("kubernetes", ("k8s:///b?x=1",), False)
    assert Engine().builder("default").keeps_images
    with pytest.raises(EngineError, match="no builder"):
        Engine().builder("bad")
    with pytest.raises(EngineError, match="no node of the builder 'dead' answers"):
        Engine().builder("dead")
    with pytest.raises(EngineError, match="in another engine") as error:
        Engine().builder("far")
    assert "DOCKER_CONTEXT=far" in str(error.value)


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(EngineError, match="does not answer"):
        Engine().facts()
