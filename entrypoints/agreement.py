"""The contract against the installed SGLang, in the build: `python -m entrypoints.agreement IMAGE_JSON REPORT`.

What nothing works without ends the build. What else is missing stands in the report and on stderr; what it feeds is
then `unavailable`. An image without SGLang has nothing to judge and gets no report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from entrypoints import check, contract, image
from entrypoints.errors import EntrypointError, Problem, Unusable


def judge(source: Path, version: str) -> list[contract.Entry]:
    """Entries that this source lacks, none of them required. Raises `Unusable` with all required ones."""
    if not source.is_dir():
        raise Unusable(Problem(what="SGLang is not where the server's interpreter looks", where=str(source),
                               found="no such folder", expected=f"SGLang {version}",
                               todo="see the steps of the sglang layer"))
    missing = contract.missing_in_source(source, version)
    if any(one.required for one in missing):
        raise Unusable(Problem(what=f"the entrypoint does not work without {one.kind} {one.name} of SGLang",
                               where=str(source), found=f"«{one.literal}» is in no Python file of SGLang {version}",
                               expected=f"entrypoints/contract.toml: since {one.since or 'the oldest'}, before "
                                        f"{one.before or 'any'}",
                               todo="lock a SGLang that has it, or teach the entrypoint and its contract what this one "
                                    "has instead") for one in missing if one.required)
    return missing


def main(argv: Sequence[str]) -> int:
    """0, or 1 with every required entry that is missing on stderr."""
    facts, report = Path(argv[0]), Path(argv[1])
    version = json.loads(facts.read_text(encoding="utf-8"))["packages"].get("sglang")
    if version is None:
        return 0
    try:
        found, site = check.packages(image.load(facts))
        missing = judge((site or Path(found.get("", "no answer"))) / "sglang", version)
    except EntrypointError as error:
        print(error, file=sys.stderr)
        return 1
    for one in missing:
        print(f"SGLang {version} lacks {one.kind} {one.name}; unavailable: {', '.join(one.consumers)}", file=sys.stderr)
    report.write_text(json.dumps({"sglang": version, "missing": [one.as_dict() for one in missing]}, indent=1) + "\n",
                      encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
