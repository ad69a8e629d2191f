"""Writes an image's bill of materials in its build: write.py FOLDER TARGET.

FOLDER has the image's image.json and lock.json. Everything else is read from the files of the finished layer and of the
entrypoint's environment, as `buildctl verify` reads them from outside; `sbom.py` beside it makes the document.
"""

import json
import os
import sys
from pathlib import Path

import sbom

_ENVIRONMENTS = {"server": "opt/venv", "entrypoint": "opt/entrypoint/venv"}


def text(root: Path, *paths: str) -> str:
    """The first of some files that is there."""
    return next(((root / path).read_text(errors="replace") for path in paths if (root / path).is_file()), "")


def make(folder: Path, root: Path) -> bytes:
    """The document of the image whose files lie under `root`."""
    metadata = {name: [path.read_text(errors="replace") for path in
                       sorted((root / place / "lib").glob("python3.*/site-packages/*.dist-info/METADATA"))]
                for name, place in _ENVIRONMENTS.items()}
    facts, lock = (json.loads((folder / name).read_text()) for name in ("image.json", "lock.json"))
    return sbom.document(facts, lock, metadata, text(root, sbom.DPKG_STATUS), text(root, *sbom.OS_RELEASE))


def main() -> int:
    """Write it, with the time of the lock: the same image gives the same layer."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    data = make(folder, Path("/"))
    epoch = json.loads((folder / "lock.json").read_text())["epoch"]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    for path in (target, target.parent):
        os.utime(path, (epoch, epoch))
    print(f"sbom: {len(json.loads(data)['components'])} components, {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
