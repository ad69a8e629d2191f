"""Credentials of this host reach the steps that need them and stay nowhere: planted for real, looked for all over."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import secrets
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ran, buildctl
from tests.registry.server import RegistryServer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.engine

#: of the registry alone; bcrypt needs no secret of ours
PASSWORD = "registry-pw-5f2c"
LOGIN = "ci:$2b$04$.89.x5.0tFuDb9pTS63TIuN/L3aC.DctEy/oaRyWqQDtbVb74rNgq"


class Planted:
    """Credentials as a CI job has them, each found again by its own text."""

    def __init__(self, folder: Path) -> None:
        self.words = {name: f"{name}-{secrets.token_hex(8)}" for name in ("index", "netrc", "hub", "proxy")}
        self.words["registry"] = PASSWORD
        netrc = folder / "netrc"
        netrc.write_text(f"machine files.example login ci password {self.words['netrc']}\n")
        netrc.chmod(0o600)
        self.index = f"https://ci:{self.words['index']}@127.0.0.1:9/simple"
        self.environment = {
            "UV_DEFAULT_INDEX": self.index, "NETRC": str(netrc), "HF_TOKEN": self.words["hub"],
            # nothing listens there: whatever goes through it fails and says so
            "HTTPS_PROXY": f"http://ci:{self.words['proxy']}@127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost",
            "SGL_BUILDCTL_REGISTRY_USER": "ci", "SGL_BUILDCTL_REGISTRY_PASSWORD": PASSWORD}
        self._needles = {word.encode(): name for name, word in self.words.items()}
        self._needles |= {base64.b64encode(f"ci:{word}".encode()): f"{name} in base64"
                          for name, word in self.words.items()}

    def found(self, data: bytes | str) -> set[str]:
        """Which of them are in there."""
        raw = data.encode() if isinstance(data, str) else data
        return {name for needle, name in self._needles.items() if needle in raw}


class Processes(threading.Thread):
    """Looks at the command lines of all processes of this machine, again and again."""

    def __init__(self, planted: Planted) -> None:
        super().__init__(daemon=True)
        self._planted, self._over = planted, threading.Event()
        self.seen: set[str] = set()
        self.leaks: set[str] = set()

    def __enter__(self) -> Processes:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.05):
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit():
                    continue
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue  # it has ended
                program = line.partition(b"\0")[0].rpartition(b"/")[2].decode(errors="replace")
                self.seen.add(program)
                self.leaks |= {f"{name} in the command line of {program}" for name in self._planted.found(line)}


def unpacked(data: bytes) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return zstd.decompress(data)
    return data


def leaks_under(folder: Path, planted: Planted) -> set[str]:
    """What is found in the files of a folder, packed ones unpacked."""
    found = set()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "htpasswd":
            data = path.read_bytes()
            found |= {f"{name} in {path.relative_to(folder)}" for name in
                      planted.found(data) | planted.found(unpacked(data)) | planted.found(str(path))}
    return found


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry", login=LOGIN) as running:
        yield running


@pytest.fixture
def planted(tmp_path: Path, registry: RegistryServer) -> Planted:
    made = Planted(tmp_path)
    made.environment["SGL_BUILDCTL_REGISTRY_HOST"] = registry.host
    return made


def with_step(project: Path, step: str) -> None:
    """A step in the last stage that gets the secrets as the steps that install do."""
    path = project / "images" / "runtime" / "Dockerfile"
    marker = "COPY --link --from=guard"
    mounts = "".join(f"--mount=type=secret,id={name} " for name in ("index", "netrc", "ca"))
    tools = "--mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools "
    path.write_text(path.read_text().replace(marker, f"RUN {tools}{mounts}{step}\n{marker}", 1))


def everything(planted: Planted, project: Path, *runs: Ran) -> set[str]:
    """What is found in what the commands said and in what they left in the checkout."""
    found = set()
    for ran in runs:
        found |= {f"{name} on stdout" for name in planted.found(ran.out)}
        found |= {f"{name} on stderr" for name in planted.found(ran.err)}
    return found | leaks_under(project / ".buildctl", planted)


def test_credentials_are_used_and_left_nowhere(tiny: Path, registry: RegistryServer, planted: Planted) -> None:
    config = f"[[index]]\nurl = {json.dumps(planted.index)}\ndefault = true\n"
    checks = [f"echo '{hashlib.sha256(config.encode()).hexdigest()}  /run/secrets/index' | sha256sum --check --quiet",
              "grep -q 'machine files.example' /run/secrets/netrc", 'test -n "$HTTPS_PROXY"',
              # what the step's environment holds, into a layer; the proxy has to be there, by BuildKit's own rule
              "env | grep -vi _proxy > /etc/environment-of-the-step"]
    with_step(tiny, " && ".join(checks))
    place = f"{registry.host}/team"
    with Processes(planted) as processes:
        build = buildctl("build", "--stack", "tiny", "--progress", "plain", "--json", "--push", place, cwd=tiny,
                         **planted.environment)
        assert build.code == 0, build.err
        tag = next(tag for tag in json.loads(build.out)["images"][0]["tags"] if ":key-" in tag)
        check = buildctl("verify", f"{place}/{tag}", "--json", cwd=tiny, **planted.environment)
        again = buildctl("promote", f"{place}/{tag}", "--to", f"{registry.host}/prod/cuda:1", "--json", cwd=tiny,
                         **planted.environment)
    assert again.code == 0, again.err
    assert {"docker"} <= processes.seen | {name.partition("-")[0] for name in processes.seen}
    assert processes.leaks == set()
    assert everything(planted, tiny, build, check, again) == set()
    # manifests, configs with history and labels, layers, provenance, bill of materials: everything that was pushed
    assert sum(path.name == "data" for path in registry.blobs.rglob("data")) > 10
    assert leaks_under(registry.folder, planted) == set()
    report = json.loads(check.out)
    # verify finds what this test has put in, and nothing else
    assert [one["name"] for one in report["differences"]] == ["/etc/environment-of-the-step"], check.err
    assert [one["kind"] for one in report["attached"]] == ["provenance", "sbom"]
    # the same search finds what is there
    (tiny / ".buildctl" / "planted").write_bytes(gzip.compress(planted.index.encode()))
    assert leaks_under(tiny / ".buildctl", planted) == {"index in planted"}


def test_a_failing_step_and_a_refused_login_do_not_tell_them(tiny: Path, registry: RegistryServer,
                                                             planted: Planted) -> None:
    with_step(tiny, "UV_CONFIG_FILE=/run/secrets/index UV_HTTP_RETRIES=0 "
                    "/opt/tools/bin/uv pip install --python /opt/venv/bin/python no-such-package")
    with Processes(planted) as processes:
        build = buildctl("build", "--stack", "tiny", "--progress", "plain", "--json", cwd=tiny, **planted.environment)
        wrong = {**planted.environment, "SGL_BUILDCTL_REGISTRY_PASSWORD": f"{PASSWORD}-is-wrong"}
        refused = buildctl("promote", f"{registry.host}/team/x:1", "--to", "2", "--json", cwd=tiny, **wrong)
    assert build.code == 11, build.err
    assert "127.0.0.1:9" in build.err  # the address is told, its password is not
    assert refused.code == 10, refused.err
    assert processes.leaks == set()
    assert everything(planted, tiny, build, refused) == set()


def test_buildkits_own_provenance_does_not_publish_the_login_of_a_proxy(tiny: Path, registry: RegistryServer,
                                                                        planted: Planted) -> None:
    def build(spec: str) -> Ran:
        return buildctl("build", "cuda", "--stack", "tiny", "--progress", "plain", "--push", f"{registry.host}/team",
                        "--buildkit-attest", spec, cwd=tiny, **planted.environment)

    for spec in ("type=provenance,mode=max", "type=provenance"):
        refused = build(spec)
        assert (refused.code, "would publish the login of a proxy" in refused.err) == (2, True), refused.err
    made = build("type=provenance,mode=min")
    assert made.code == 0, made.err
    manifests = [json.loads(data) for path in registry.blobs.rglob("data") if (data := path.read_bytes())[:1] == b"{"]
    assert any("slsa.dev/provenance" in str(one.get("predicateType")) for one in manifests)
    assert everything(planted, tiny, refused, made) == set()
    assert leaks_under(registry.folder, planted) == set()
