"""Bills of materials: valid by the published schema, the same bytes each time, patched packages as such."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from buildctl import sbom
from tests.conftest import ROOT

LOCK: dict[str, Any] = {
    "epoch": 1_700_000_000, "python": "3.11", "base": {"source": "bootstrap", "suite": "bookworm"},
    "wheels": [{"name": "torch", "layer": "torch", "file": "t.whl", "sha256": "ab" * 32, "via": ["."]},
               {"name": "sglang", "layer": "sglang", "file": "s.whl", "sha256": "cd" * 32, "via": ["."]},
               {"name": "dep", "layer": "torch", "file": "d.whl", "sha256": "ef" * 32, "via": ["torch", "absent"]}],
    "entrypoint": [{"name": "h11", "layer": "", "file": "h.whl", "sha256": "12" * 32, "via": ["."]}],
    "patches": {"sglang": {"wheel_sha256": "cd" * 32, "tree": "34" * 32, "patches": [["0001-a.patch", "56" * 32],
                                                                                      ["0002-b.patch", "78" * 32]]}}}
FACTS: dict[str, Any] = {
    "image": "sglang", "version": "0.5", "stack": "small", "lock_sha256": "99" * 32, "key": "aa" * 32,
    "targets": ["sm120"], "cuda": "13.0",
    "patches": [{"package": "sglang", "name": "0001-a.patch", "concern": "all-reduce"}]}
STATUS = ("Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u10\n"
          "Description: text\n more: text\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n")
SYSTEM = 'ID=debian\nVERSION_ID="12"\n# a comment\n'


def metadata(name: str, version: str, *lines: str) -> str:
    return "\n".join([f"Name: {name}", f"Version: {version}", *lines]) + "\n\nLong text\n"


SERVER = [metadata("torch", "2.0+cpu", "License: BSD-3-Clause"),
          metadata("sglang", "0.5", "License-Expression: Apache-2.0"),
          metadata("dep", "1", "Classifier: License :: OSI Approved :: MIT License",
                   "Classifier: License :: OSI Approved", "License: UNKNOWN"),
          metadata("Our_Own", "1.0", "License: " + "x" * 300)]


def make(**changes: Any) -> dict[str, Any]:
    texts = {"server": SERVER, "entrypoint": [metadata("h11", "0.16")]}
    data = sbom.document({**FACTS, **changes}, LOCK, texts, STATUS, SYSTEM)
    made: dict[str, Any] = json.loads(data)
    return made


def component(ref: str) -> dict[str, Any]:
    return next(one for one in make()["components"] if one["bom-ref"] == ref)


def test_the_published_schema_accepts_it() -> None:
    faults = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(make()))
    assert faults is None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str('{"bomFormat": "no"}') is not None


def test_the_same_image_gives_the_same_bytes_whatever_the_order() -> None:
    one = sbom.document(FACTS, LOCK, {"server": SERVER, "entrypoint": []}, STATUS, SYSTEM)
    other = sbom.document(dict(reversed(FACTS.items())), LOCK, {"server": SERVER[::-1], "entrypoint": []}, STATUS,
                          SYSTEM)
    assert one == other
    assert make()["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert make(lock_sha256="11" * 32)["serialNumber"] != make()["serialNumber"]


def test_packages_by_purl_hash_and_licence() -> None:
    torch = component("server/torch")
    assert torch["purl"] == "pkg:pypi/torch@2.0%2Bcpu"
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert torch["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    assert {"name": "buildctl:layer", "value": "torch"} in torch["properties"]
    assert component("server/dep")["licenses"] == [{"license": {"name": "MIT License"}}]
    ours = component("server/our-own")
    assert ours["purl"] == "pkg:generic/our-own@1.0"
    assert "licenses" not in ours
    assert "hashes" not in ours
    assert component("entrypoint/h11")["purl"] == "pkg:pypi/h11@0.16"
    assert component("debian/libc6:amd64")["purl"] == (
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12")
    assert component("system") == {"bom-ref": "system", "name": "debian", "type": "operating-system", "version": "12"}
    assert not [one for one in make()["components"] if one["name"] == "gone"]


def test_a_patched_package_has_the_wheel_as_its_ancestor() -> None:
    sglang = component("server/sglang")
    assert "hashes" not in sglang  # what is installed is not the wheel
    assert sglang["licenses"] == [{"expression": "Apache-2.0"}]
    (ancestor,) = sglang["pedigree"]["ancestors"]
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": "cd" * 32}]
    resolved = [patch["resolves"][0] for patch in sglang["pedigree"]["patches"]]
    assert [(one["id"], one["name"], one["description"]) for one in resolved] == [
        ("0001-a.patch", "all-reduce", f"sha256:{'56' * 32}"), ("0002-b.patch", "0002-b.patch", f"sha256:{'78' * 32}")]
    assert {"name": "buildctl:tree", "value": "34" * 32} in sglang["properties"]


def test_who_needs_whom_comes_from_the_lock() -> None:
    needs = {one["ref"]: one.get("dependsOn", []) for one in make()["dependencies"]}
    assert needs["image/sglang"] == ["entrypoint/h11", "server/sglang", "server/torch"]
    assert needs["server/torch"] == ["server/dep"]
    assert needs["server/dep"] == []


def test_an_image_that_is_no_debian() -> None:
    made = json.loads(sbom.document(FACTS, LOCK, {"server": [], "entrypoint": []}, "", ""))
    assert made["components"] == []


def test_the_build_writes_what_the_host_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sbom", sbom)
    script = runpy.run_path(str(ROOT / "images/tools/bin/sbom/write.py"))
    root = tmp_path / "root"
    for number, text in enumerate(SERVER):
        folder = root / f"opt/venv/lib/python3.11/site-packages/p{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(text)
    for path, text in ((sbom.DPKG_STATUS, STATUS), ("usr/lib/os-release", SYSTEM)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (tmp_path / "image.json").write_text(json.dumps(FACTS))
    (tmp_path / "lock.json").write_text(json.dumps(LOCK))
    assert script["make"](tmp_path, root) == sbom.document(FACTS, LOCK, {"server": SERVER, "entrypoint": []}, STATUS,
                                                           SYSTEM)
    monkeypatch.setattr(sys, "argv", ["write.py", str(tmp_path), str(tmp_path / "out" / "sbom.json")])
    assert script["main"]() == 0
    assert (tmp_path / "out" / "sbom.json").stat().st_mtime == LOCK["epoch"]
