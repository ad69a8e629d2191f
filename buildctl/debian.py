"""Debian packages: what apt would install in the base and in each layer, as the mirror has it now.

apt itself decides, on this host, with folders of its own and as any user: nothing is installed or downloaded but the
mirror's lists, and the mirror's signature is checked. Pins of a lock are preferences: a mirror that no longer has a
version gives another one, and the guard says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from buildctl.errors import ManifestError, NetworkError, Problem

#: what a layer installs: name -> `version sha256:HEX` of its archive
Packages = Mapping[str, str]
#: Debian's keys where a host does not trust them for itself, as Ubuntu
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PROGRAMS = ("apt-get", "apt-cache")
#: what mmdebstrap's variant minbase installs
_MINBASE = ("?essential", "?priority(required)", "apt")
_INSTALLED = re.compile(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", re.MULTILINE)


def available() -> bool:
    """Whether this host has apt."""
    return all(shutil.which(program) for program in _PROGRAMS)


def resolve(sources: Iterable[str], architecture: str, include: Iterable[str], layers: Mapping[str, Sequence[str]],
            beside: Mapping[str, Sequence[str]], ca: Path | None = None) -> dict[str, dict[str, str]]:
    """What apt would install: `base`, then each layer on top of the ones before it.

    :param sources: lines of a sources.list.
    :param include: packages of the base beyond the minimum.
    :param layers: layer -> packages that it asks for, in build order.
    :param beside: the same for stages that stand on the base alone.
    :raises NetworkError: the mirror does not answer, or its signature is not good.
    :raises ManifestError: the mirror has no such packages.
    """
    with tempfile.TemporaryDirectory(prefix="buildctl-apt-") as name:
        apt = _Apt(Path(name), architecture, ca)
        (Path(name) / "sources.list").write_text("".join(f"{line}\n" for line in sources))
        apt.update()
        found = {"base": apt.install((*_MINBASE, *include), "base")}
        bottom = apt.status.read_text()
        for layer, wanted in layers.items():
            found[layer] = apt.install(wanted, layer)
        for stage, wanted in beside.items():
            apt.status.write_text(bottom)
            found[stage] = apt.install(wanted, stage)
    return found


def preferences(packages: Packages) -> str:
    """apt preferences that take the locked versions where the mirror has them."""
    return "\n".join(f"Package: {name}\nPin: version {text.split()[0]}\nPin-Priority: 990\n"
                     for name, text in sorted(packages.items()))


class _Apt:
    """apt with folders of its own."""

    def __init__(self, folder: Path, architecture: str, ca: Path | None) -> None:
        self.status = folder / "status"
        self.status.touch()
        for path in ("lists/partial", "cache/archives/partial", "none"):
            (folder / path).mkdir(parents=True)
        settings = {
            "Dir::State": folder, "Dir::State::Lists": folder / "lists", "Dir::State::status": self.status,
            "Dir::Cache": folder / "cache", "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": folder / "none", "Dir::Etc::Preferences": folder / "none" / "preferences",
            "Dir::Etc::PreferencesParts": folder / "none", "APT::Architecture": architecture,
            "APT::Architectures": architecture, "APT::Install-Recommends": "false", "APT::Sandbox::User": "",
            "APT::Default-Release": "", "APT::Update::Error-Mode": "any", "Acquire::Languages": "none",
            "Acquire::Retries": "3", "APT::Get::Show-User-Simulation-Note": "false",
            **({"Dir::Etc::trusted": KEYRING} if KEYRING.is_file() else {}),
            **({"Acquire::https::CaInfo": ca} if ca is not None else {}),
        }
        self._options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def update(self) -> None:
        """Fetch the mirror's lists."""
        done = self._run("apt-get", "-q", "update")
        if done.returncode:
            raise NetworkError(Problem("the Debian mirror does not give its lists", "apt", found=_last(done.stderr),
                                       todo="check the machine's apt sources and network, then run the same command "
                                            "again"))

    def install(self, wanted: Sequence[str], where: str) -> dict[str, str]:
        """What installing these would add; from now on it counts as installed."""
        done = self._run("apt-get", "-q", "--simulate", "install", *wanted)
        if done.returncode:
            raise ManifestError(Problem("the Debian mirror does not have what the stack asks for", f"apt of {where}",
                                        found=_last(done.stderr) or _last(done.stdout),
                                        expected=", ".join(wanted), todo="mend 'apt' of the image or stack"))
        added = dict(_INSTALLED.findall(done.stdout))
        if not added:
            return {}
        shown = self._run("apt-cache", "show", *(f"{name}={version}" for name, version in added.items())).stdout
        found: dict[str, str] = {}
        with self.status.open("a") as status:
            for text, fields in _stanzas(shown):
                name = fields["Package"]
                if name in added and fields["Version"] == added[name] and name not in found:
                    found[name] = f"{fields['Version']} sha256:{fields['SHA256']}"
                    status.write(text.replace("\n", "\nStatus: install ok installed\n", 1) + "\n\n")
        lacking = added.keys() - found.keys()
        if lacking:
            raise NetworkError(Problem("the Debian mirror's lists do not tell all that apt chose", f"apt of {where}",
                                       found=f"nothing about {', '.join(sorted(lacking))}",
                                       todo="run the same command again"))
        return dict(sorted(found.items()))

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *self._options, *words], capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C.UTF-8"})


def _stanzas(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    for stanza in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[\w-]+: ", line))
        if {"Package", "Version"} <= fields.keys():
            yield stanza.strip(), fields


def _last(text: str) -> str:
    """The telling lines of apt, without credentials of a mirror."""
    lines = [line for line in text.strip().splitlines() if line.startswith(("E:", "W:"))] or text.strip().splitlines()
    return re.sub(r"://[^/@\s]+@", "://***@", "\n            ".join(lines[-6:]))
