"""Compile FlashInfer's modules ahead, at build time and without a GPU: ahead.py FOLDER.

FOLDER/modules.txt has a module or a pattern of modules per line, FOLDER/arch.txt the targets as FlashInfer takes them
(`12.0f`). What is built goes to where FlashInfer looks before it compiles, so a server neither compiles nor writes.
"""

import difflib
import fnmatch
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

#: what one nvcc of FlashInfer's sources may take, in bytes (users report 3 to 5 GB a job)
PER_JOB = 4 << 30


def jobs(cpus: int, memory: int) -> int:
    """How many compilers run at once without running out of memory."""
    return max(1, min(cpus, memory // PER_JOB))


def free_memory(meminfo: str, limit: str = "max") -> int:
    """Bytes that may be used: what the kernel calls available, or the control group's limit if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min(available, int(limit)) if limit.strip().isdigit() else available


def select(patterns: Iterable[str], known: Iterable[str]) -> list[str]:
    """The modules that patterns name.

    :raises SystemExit: a pattern names none, with the nearest names.
    """
    names = sorted(known)
    chosen: dict[str, None] = {}
    wrong = []
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, names, 3) or [name for name in names if pattern in name][:3]
            wrong.append(f"'{pattern}'" + (f" (like {', '.join(near)}?)" if near else ""))
        chosen.update(dict.fromkeys(found))
    if wrong:
        raise SystemExit(f"ahead: FlashInfer has no module {', '.join(wrong)} for these targets; "
                         "see 'jit' of the stack")
    return list(chosen)


def main() -> int:
    """Compile what is asked for."""
    folder = Path(sys.argv[1])
    patterns = (folder / "modules.txt").read_text().split()
    if not patterns:
        print("ahead: the stack lists no modules")
        return 0
    limit = Path("/sys/fs/cgroup/memory.max")
    memory = free_memory(Path("/proc/meminfo").read_text(), limit.read_text() if limit.is_file() else "max")
    os.environ.setdefault("MAX_JOBS", str(jobs(len(os.sched_getaffinity(0)), memory)))
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = (folder / "arch.txt").read_text().strip()
    programs = [str(Path(sys.executable).parent), f"{os.environ['CUDA_HOME']}/bin"]  # ninja and nvcc, called by name
    os.environ["PATH"] = os.pathsep.join([*programs, os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch
        return compile_all(patterns)


def compile_all(patterns: list[str]) -> int:
    """Compile the modules, and prove that FlashInfer finds each where it looks first."""
    # FlashInfer reads its environment when it is imported
    from flashinfer import aot
    from flashinfer.jit import env
    from flashinfer.jit.core import jit_spec_registry

    aot.register_default_modules()
    known = jit_spec_registry.get_all_specs()
    for name in select(patterns, known):
        began = time.monotonic()
        spec = known[name]
        spec.build()
        built = Path(spec.jit_library_path)
        target = env.FLASHINFER_AOT_DIR / name / f"{name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, target)
        if Path(spec.get_library_path()) != target:
            raise SystemExit(f"ahead: FlashInfer does not take {name} from {target}")
        print(f"ahead: {name} for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}, {target.stat().st_size / 1e6:.1f} MB, "
              f"{time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
