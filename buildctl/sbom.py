"""The bill of materials of an image: CycloneDX 1.6, the same bytes for the same image.

Standard library only: it runs in the build, where it writes `/etc/buildctl/sbom.json`, and on the host, where `verify`
makes the document again from the image's files and compares. Hashes of packages are those of their wheels in the lock;
a patched package has the wheel as its ancestor and its patches by name and hash. Format: cyclonedx.org/docs/1.6/json.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.parser import HeaderParser
from typing import Any
from urllib.parse import quote

#: where an image has it, and what it is called in a registry
PATH = "etc/buildctl/sbom.json"
MEDIA_TYPE = "application/vnd.cyclonedx+json"
DPKG_STATUS = "var/lib/dpkg/status"
OS_RELEASE = ("etc/os-release", "usr/lib/os-release")
_LONGEST_NAME = 120


def document(facts: Mapping[str, Any], lock: Mapping[str, Any], metadata: Mapping[str, Iterable[str]],
             dpkg_status: str, os_release: str) -> bytes:
    """The bill of materials of one image.

    :param facts: its `/etc/buildctl/image.json`.
    :param lock: its `/etc/buildctl/lock.json`.
    :param metadata: environment (`server`, `entrypoint`) -> METADATA of each distribution installed in it.
    :param dpkg_status: the text of `/var/lib/dpkg/status`, empty where the image is no Debian.
    """
    system = dict(_assignments(os_release))
    shares = {"server": lock["wheels"], "entrypoint": lock["entrypoint"]}
    components = []
    for environment, texts in metadata.items():
        wheels = {wheel["name"]: wheel for wheel in shares[environment]}
        components += [_distribution(environment, text, wheels, facts, lock) for text in texts]
    components += [_debian(stanza, system) for stanza in stanzas(dpkg_status)]
    if system.get("ID"):
        components.append({"type": "operating-system", "bom-ref": "system", "name": system["ID"],
                           **({"version": system["VERSION_ID"]} if system.get("VERSION_ID") else {})})
    components.sort(key=lambda one: str(one["bom-ref"]))
    root = f"image/{facts['image']}"
    body = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, 'sgl-buildctl:' + facts['lock_sha256'])}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(lock["epoch"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"type": "application", "name": "sgl-buildctl"}]},
            "component": {"type": "container", "bom-ref": root, "name": facts["image"], "version": facts["version"],
                          "properties": _properties(_about(facts, lock))}},
        "components": components,
        "dependencies": _dependencies(root, components, shares)}
    return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def stanzas(status: str) -> Iterator[dict[str, str]]:
    """The fields of each installed package in a dpkg status file, continuation lines left out."""
    for text in re.split(r"\n\n+", status):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and line[:1] not in (" ", "\t"))
        if fields.get("Status", "").endswith(" installed") and "Package" in fields and "Version" in fields:
            yield fields


def licences(metadata: str) -> list[dict[str, Any]]:
    """The licence that a METADATA file states: expression, else its short name, else its classifiers."""
    header = HeaderParser().parsestr(metadata)
    if expression := header.get("License-Expression"):
        return [{"expression": str(expression).strip()}]
    names = [str(line).rpartition(" :: ")[2] for line in header.get_all("Classifier") or ()
             if str(line).startswith("License :: ") and not str(line).endswith("OSI Approved")]
    stated = str(header.get("License") or "").strip()
    if stated and "\n" not in stated and len(stated) <= _LONGEST_NAME and stated.upper() != "UNKNOWN":
        names = [stated]
    return [{"license": {"name": name}} for name in dict.fromkeys(names)]


def _about(facts: Mapping[str, Any], lock: Mapping[str, Any]) -> dict[str, str]:
    base = lock["base"]
    return {"stack": facts["stack"], "key": facts.get("key", ""), "lock": facts["lock_sha256"],
            "targets": ",".join(facts["targets"]), "cuda": facts.get("cuda") or "", "python": lock["python"],
            "base": base.get("image", "") or f"bootstrap:{base.get('suite', '')}",
            "base-digest": base.get("digest", "")}


def _properties(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": f"buildctl:{name}", "value": value} for name, value in sorted(values.items()) if value]


def _distribution(environment: str, metadata: str, wheels: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any],
                  lock: Mapping[str, Any]) -> dict[str, Any]:
    header = HeaderParser().parsestr(metadata)
    name = re.sub(r"[-_.]+", "-", str(header.get("Name", ""))).lower()
    version = str(header.get("Version", ""))
    wheel = wheels.get(name)
    component: dict[str, Any] = {
        "type": "library", "bom-ref": f"{environment}/{name}", "name": name, "version": version,
        # a package of ours is on no index
        "purl": f"pkg:{'pypi' if wheel else 'generic'}/{quote(name)}@{quote(version)}"}
    about = {"environment": environment}
    if wheel:
        about |= {"layer": wheel["layer"], "file": wheel["file"]}
        component["hashes"] = [{"alg": "SHA-256", "content": wheel["sha256"]}]
    if stated := licences(metadata):
        component["licenses"] = stated
    series = next((one for one in lock["patches"].values() if wheel and one["wheel_sha256"] == wheel["sha256"]), None)
    if series is not None and environment == "server":
        ancestor = {key: component[key] for key in ("type", "name", "version", "purl", "hashes")}
        del component["hashes"]
        about["tree"] = series["tree"]
        component["pedigree"] = {
            "ancestors": [ancestor],
            "patches": [_patch(patch, sha256, facts) for patch, sha256 in series["patches"]]}
    component["properties"] = _properties(about)
    return component


def _patch(name: str, sha256: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    known: Mapping[str, Any] = next((patch for patch in facts["patches"] if patch["name"] == name), {})
    return {"type": "unofficial",
            "resolves": [{"type": "enhancement", "id": name, "name": known.get("concern") or name,
                          "description": f"sha256:{sha256}"}]}


def _debian(stanza: Mapping[str, str], system: Mapping[str, str]) -> dict[str, Any]:
    name, version, architecture = stanza["Package"], stanza["Version"], stanza.get("Architecture", "")
    vendor = system.get("ID", "debian")
    distro = f"&distro={quote(vendor)}-{quote(system['VERSION_ID'])}" if system.get("VERSION_ID") else ""
    return {"type": "library", "bom-ref": f"debian/{name}:{architecture}", "name": name, "version": version,
            "purl": f"pkg:deb/{quote(vendor)}/{quote(name)}@{quote(version)}?arch={quote(architecture)}{distro}"}


def _dependencies(root: str, components: Iterable[Mapping[str, Any]],
                  shares: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Who needs whom, by the lock's `via`."""
    present = {str(component["bom-ref"]) for component in components}
    needs: dict[str, set[str]] = {ref: set() for ref in (root, *present)}
    for environment, wheels in shares.items():
        for wheel in wheels:
            ref = f"{environment}/{wheel['name']}"
            for parent in wheel["via"]:
                above = root if parent == "." else f"{environment}/{parent}"
                if ref in present and above in needs:
                    needs[above].add(ref)
    return [{"ref": ref, **({"dependsOn": sorted(below)} if below else {})} for ref, below in sorted(needs.items())]


def _assignments(os_release: str) -> Iterator[tuple[str, str]]:
    for line in os_release.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name, value.strip().strip('"')
