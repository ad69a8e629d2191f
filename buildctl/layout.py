"""An image of a registry as an OCI image layout on this disk, by digest: what a build without network stands on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from buildctl import reference
from buildctl.errors import ManifestError, NetworkError, Problem
from buildctl.oci import Descriptor, Manifest, platforms_of
from buildctl.registry import Registry
from buildctl.retry import Failed, Policy


def path_of(folder: Path, digest: str) -> Path:
    """Where the layout of an image lies in a folder that `buildctl fetch` fills."""
    return folder / "base" / f"oci-{digest.removeprefix('sha256:')[:16]}"


def save(image: str, digest: str, platform: str, path: Path, policy: Policy | None = None) -> int:
    """Save one platform of an image; blobs that are there are kept.

    :param image: the image's name, as FROM takes it; the digest says what is taken.
    :param policy: attempts and waits.
    :returns: bytes that were fetched.
    :raises NetworkError: the registry does not answer, or gives something else than the digest.
    :raises ManifestError: the image has no such platform.
    """
    parsed = reference.base(image)
    fetched = 0
    with Registry(parsed.registry, policy=policy) as registry:
        top = _manifest(registry, parsed.repository, digest)
        manifests = [top]
        if top.children:
            manifests.append(_manifest(registry, parsed.repository, _child(top, platform, image)))
        for blob in manifests[-1].blobs:
            fetched += _blob(registry, parsed.repository, blob, path)
    for manifest in manifests:
        _write(path, manifest.digest, manifest.body)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
    # last: a layout without it is not whole
    index = {"schemaVersion": 2, "manifests": [top.descriptor.as_dict()]}
    partial = path / ".index.json"
    partial.write_text(json.dumps(index) + "\n")
    partial.replace(path / "index.json")
    return fetched


def _manifest(registry: Registry, repository: str, digest: str) -> Manifest:
    found = registry.manifest(repository, digest)
    if found is None:
        raise NetworkError(Problem("the registry does not have the base any more", f"{registry.host}/{repository}",
                                   found="no such digest", expected=digest,
                                   todo="lock again, or fetch where a mirror still has it"))
    _check(digest, hashlib.sha256(found.body).hexdigest(), repository)
    return found


def _child(top: Manifest, platform: str, image: str) -> str:
    found = platforms_of(top.content["manifests"])
    if platform not in found:
        raise ManifestError(Problem("the base has no image for the stack's platform", image,
                                    found=", ".join(sorted(found)), expected=platform,
                                    todo="change 'base' or 'platform' of the stack"))
    return found[platform].digest


def _blob(registry: Registry, repository: str, blob: Descriptor, path: Path) -> int:
    """Fetch a blob unless it is there; a cut is tried again as often as the registry's policy allows."""
    target = _place(path, blob.digest)
    if target.is_file() and target.stat().st_size == blob.size:
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".fetching-{target.name}")

    def attempt() -> str:
        state = hashlib.sha256()
        with scratch.open("wb") as partial:
            for chunk in registry.stream(repository, blob.digest):
                state.update(chunk)
                partial.write(chunk)
        return state.hexdigest()

    try:
        _check(blob.digest, registry.policy.run(attempt), repository)
        scratch.replace(target)
    except Failed as failed:
        raise NetworkError(Problem("the registry does not give a blob of the base", f"{registry.host}/{repository}",
                                   found=failed.fault.text, expected=f"{blob.size} bytes of {blob.digest}",
                                   todo="run the same command again: what is whole is kept")) from None
    finally:
        scratch.unlink(missing_ok=True)
    return blob.size


def _check(digest: str, found: str, repository: str) -> None:
    if digest != f"sha256:{found}":
        raise NetworkError(Problem("the registry gives something else than the digest names", repository,
                                   found=f"sha256:{found}", expected=digest,
                                   todo="run the same command again; distrust the registry or mirror when it stays so"))


def _write(path: Path, digest: str, content: bytes) -> None:
    target = _place(path, digest)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _place(path: Path, digest: str) -> Path:
    return path / "blobs" / "sha256" / digest.removeprefix("sha256:")
