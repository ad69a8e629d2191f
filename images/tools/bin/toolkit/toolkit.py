"""CUDA_HOME in the layout that compilers expect, out of NVIDIA's wheels.

The wheels have nvcc, headers and libraries, and neither `lib64`, nor the names that a linker looks for, nor the stub
of the driver's library that `-lcuda` needs. All of it is made in a `lib64` beside their files, which stay as they are
(nvcc looks there by the place of its real file, so a tree of links elsewhere does not do).

The stub is for the linker only: it has sections and symbols and no program headers, so no loader can ever map it in
the place of the driver.
"""

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HOME = Path("/usr/local/cuda")
SITE = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
#: a declared function of the driver: upper case after `cu`, unlike cudaMalloc of the runtime
_FUNCTION = re.compile(r"\b(cu[A-Z]\w*)\s*\(")


def wheels_root(site: Path) -> Path | None:
    """The folder of the toolkit's wheels, `nvidia/cu13` or the like; None when CUDA does not come from wheels."""
    found = sorted(path.parent.parent for path in site.glob("nvidia/cu*/bin/nvcc"))
    if len(found) > 1:
        raise SystemExit(f"toolkit: compilers of two CUDA versions are installed: {', '.join(map(str, found))}; "
                         "keep one in the stack's requirements")
    return found[0] if found else None


def link_names(files: Iterable[str]) -> dict[str, str]:
    """The names that a linker looks for, by the libraries that they stand for: `libcudart.so` -> `libcudart.so.13`."""
    names: dict[str, str] = {}
    for file in sorted(files):
        plain, dot, _ = file.partition(".so.")
        if dot:
            names.setdefault(f"{plain}.so", file)
        if file.endswith((".so", ".a")):
            names[file] = file
    return names


def functions(header: str) -> list[str]:
    """The functions that a preprocessed cuda.h declares."""
    return sorted(set(_FUNCTION.findall(header)))


def unloadable(elf: bytes) -> bytes:
    """A shared library without its program headers: a linker reads it, a loader refuses it."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    header = bytearray(elf)
    struct.pack_into("<Q", header, 32, 0)  # e_phoff
    struct.pack_into("<HH", header, 54, 0, 0)  # e_phentsize, e_phnum
    return bytes(header)


def make_stub(include: Path, target: Path) -> int:
    """Write the stub of the driver's library; the number of functions in it."""
    header = subprocess.run(["gcc", "-E", "-P", "-x", "c", "-I", str(include), "-"], input="#include <cuda.h>\n",
                            capture_output=True, text=True, check=True).stdout
    names = functions(header)
    source = "".join(f"void {name}(void) {{}}\n" for name in names)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "libcuda.so")
        subprocess.run(["gcc", "-shared", "-nostdlib", "-s", "-Wl,--build-id=none,-soname,libcuda.so.1", "-x", "c", "-",
                        "-o", str(made)], input=source, text=True, check=True)
        target.write_bytes(unloadable(made.read_bytes()))
    return len(names)


def main() -> int:
    """Make the toolkit, unless the base image brings one."""
    root = wheels_root(SITE)
    if root is None:
        if (HOME / "bin" / "nvcc").is_file():
            print(f"toolkit: {HOME} is the base image's")
            return 0
        print("toolkit: no nvcc, neither in the wheels nor in the base; require nvidia-cuda-nvcc in the stack",
              file=sys.stderr)
        return 1
    libraries = root / "lib64"
    (libraries / "stubs").mkdir(parents=True)
    HOME.symlink_to(root)
    for folder in sorted(SITE.glob("nvidia/*/lib")):
        for name, file in link_names(path.name for path in folder.iterdir() if path.is_file()).items():
            if not (libraries / name).is_symlink():
                (libraries / name).symlink_to(folder / file)
    count = make_stub(root / "include", libraries / "stubs" / "libcuda.so")
    print(f"toolkit: {HOME} of {root}, {len(list(libraries.iterdir())) - 1} libraries, stub with {count} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
