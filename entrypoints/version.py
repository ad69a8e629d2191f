"""`entrypoint version`: what is in this image."""

from __future__ import annotations

import re
from typing import Any

from entrypoints import __version__
from entrypoints.errors import Unusable
from entrypoints.image import Image, load

#: packages that people ask about; all are in `--json`
_SHOWN = re.compile(r"(torch|triton|sglang|sgl[-_]kernel|sglang[-_]kernel.*|flashinfer.*|nvidia[-_](cudnn|nccl).*|"
                    r"transformers|xgrammar)$")


def describe() -> dict[str, Any]:
    """The image's identity and content; outside an image only the entrypoint's version."""
    try:
        image = load()
    except Unusable:
        return {"entrypoint": __version__, "image": None}
    return {"entrypoint": __version__, "image": image.image, "version": image.version, "stack": image.stack,
            "key": image.key, "lock_sha256": image.lock_sha256, "targets": list(image.targets), "cuda": image.cuda,
            "packages": dict(image.packages), "trees": dict(image.trees),
            "patches": [{"package": one.package, "name": one.name, "sha256": one.sha256} for one in image.patches]}


def render(info: dict[str, Any]) -> str:
    """The same for people."""
    if info["image"] is None:
        return f"entrypoint {info['entrypoint']} (not inside an image built by buildctl)"
    lines = [f"{info['image']} {info['version']}  stack {info['stack']}  key {info['key'][:16]}",
             f"entrypoint {info['entrypoint']}  CUDA {info['cuda'] or 'none'}  targets {' '.join(info['targets'])}"]
    shown = {name: version for name, version in info["packages"].items() if _SHOWN.match(name)}
    lines += [f"  {name:<20} {version}" for name, version in shown.items()]
    if rest := len(info["packages"]) - len(shown):
        lines.append(f"  and {rest} more: version --json")
    lines += [f"  patch {one['package']}/{one['name']}  {one['sha256'][:12]}" for one in info["patches"]]
    return "\n".join(lines)


def of(image: Image) -> str:
    """SGLang's version in this image, "" when image.json does not say."""
    return image.packages.get("sglang") or image.profile.sglang
