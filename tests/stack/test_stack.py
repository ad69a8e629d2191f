"""What the images of the CUDA stack hold, asked of the real images: no GPU, no driver."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.conftest import SITE, Stack
from tests.unit.guards import tool

pytestmark = pytest.mark.stack

KERNELS = f"{SITE}/sgl_kernel"
NORM = f"{SITE}/flashinfer/data/aot/norm/norm.so"


@pytest.fixture(scope="session")
def cuobjdump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's own reader of kernels, from the public index; it needs neither GPU nor driver."""
    folder = tmp_path_factory.mktemp("cuobjdump")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder),
                    "nvidia-cuda-cuobjdump"], check=True)
    return next(folder.rglob("bin/cuobjdump"))


def list_elf(cuobjdump: Path, path: Path) -> str:
    return subprocess.run([str(cuobjdump), "--list-elf", str(path)], capture_output=True, text=True, check=True).stdout


def copy_out(stack: Stack, image: str, path: str, target: Path) -> Path:
    with target.open("wb") as stream:
        subprocess.run(["docker", "run", "--rm", "--network", "none", "--entrypoint", "/bin/cat", stack.tags[image],
                        path], stdout=stream, check=True)
    return target


def test_four_images_each_with_its_report_of_the_guard(stack: Stack) -> None:
    assert list(stack.tags) == ["cuda", "torch", "flashinfer", "sglang"]
    packages = 0
    for image in stack.tags:
        report = json.loads(stack.ok(image, "cat /etc/buildctl/guard.json"))
        facts = json.loads(stack.ok(image, "cat /etc/buildctl/image.json"))
        assert report["image"] == image
        assert report["packages"] == len(facts["packages"]) > packages
        assert set(report["driver"]) <= {"libcuda.so.1", "libnvidia-ml.so.1"}
        packages = report["packages"]
        assert "libc6" in report["debian"]["installed"]
        if image == "torch":
            assert report["torch"]["cuda"] == "13.0"
            assert "sm_120" in report["torch"]["architectures"]
        if image == "sglang":
            kernels = {Path(path).name: archs for path, archs in report["architectures"].items()
                       if path.startswith(f"{KERNELS}/sm100/")}
            assert kernels
            assert all(120 in archs for archs in kernels.values()), kernels


def test_everything_imports_without_a_gpu(stack: Stack) -> None:
    said = stack.ok("sglang", "python -c 'import torch, flashinfer, sglang.launch_server; print(torch.version.cuda)'")
    assert said.strip().splitlines()[-1] == "13.0"


def test_the_kernels_lack_the_driver_and_nothing_else(stack: Stack) -> None:
    """The real loader, which cannot know that torch is imported first, is told where torch's libraries are."""
    said = stack.ok("sglang", f"for f in $(find {KERNELS} -name '*.so'); do "
                              f"LD_LIBRARY_PATH={SITE}/torch/lib ldd $f | grep 'not found'; done; true")
    assert {line.split()[0] for line in said.splitlines()} <= {"libcuda.so.1"}
    refused = stack.run("sglang", "python -c 'import sgl_kernel'")
    assert "libcuda.so.1" in refused.stderr


def test_nvidias_libraries_are_found_without_any_variable(stack: Stack) -> None:
    code = ("import ctypes\n"
            "for name in ('libcudart.so.13', 'libnvrtc.so.13', 'libcublas.so.13', 'libcudnn.so.9', 'libnccl.so.2',\n"
            "             'libnvshmem_host.so.3', 'libcusparseLt.so.0', 'libnvrtc-builtins.so.13.0'):\n"
            "    ctypes.CDLL(name)\n")
    assert stack.ok("cuda", f"env | grep -c LD_LIBRARY_PATH; python -c \"{code}\"").strip() == "0"


def test_the_stub_never_stands_in_for_the_driver(stack: Stack) -> None:
    stub = "/usr/local/cuda/lib64/stubs/libcuda.so"
    for name in ("libcuda.so.1", "libcuda.so", stub):
        assert "OSError" in stack.run("sglang", f"python -c 'import ctypes; ctypes.CDLL(\"{name}\")'").stderr
    # also where someone points the loader at it
    forced = stack.run("sglang", f"ln -s {stub} /tmp/libcuda.so.1; LD_LIBRARY_PATH=/tmp "
                                 "python -c 'import ctypes; ctypes.CDLL(\"libcuda.so.1\")'")
    assert "OSError" in forced.stderr
    assert "libcuda.so" not in stack.ok("sglang", "/sbin/ldconfig -p")


def test_the_compiler_is_the_toolkits(stack: Stack) -> None:
    said = stack.ok("sglang", "command -v nvcc; nvcc --version; $TRITON_PTXAS_PATH --version; command -v g++ ninja")
    assert said.startswith("/usr/local/cuda/bin/nvcc")
    assert len(re.findall(r"release 13\.0", said)) == 2
    assert "/opt/venv/bin/ninja" in said


@pytest.mark.parametrize("target", ["120a", "120f"])
def test_a_small_program_compiles_and_links_for_the_target(stack: Stack, cuobjdump: Path, tmp_path: Path,
                                                           target: str) -> None:
    source = "__global__ void f(float *x) { *x = 1; }  int main() { f<<<1, 1>>>(nullptr); return 0; }"
    code = (f"cd /tmp && echo '{source}' > f.cu && nvcc -gencode arch=compute_{target},code=sm_{target} f.cu -o f "
            "&& base64 f")
    made = tmp_path / "f"
    made.write_bytes(base64.b64decode(stack.ok("flashinfer", code)))
    listed = list_elf(cuobjdump, made)
    assert set(re.findall(r"sm_(\w+)\.cubin", listed)) == {target if target.endswith("a") else "120"}


def test_the_module_that_was_compiled_ahead_is_for_the_target_and_is_taken(stack: Stack, cuobjdump: Path,
                                                                           tmp_path: Path) -> None:
    norm = copy_out(stack, "flashinfer", NORM, tmp_path / "norm.so")
    listed = list_elf(cuobjdump, norm)
    assert set(re.findall(r"sm_(\d+)", listed)) == {"120"}
    found = tool("guard/elf").read(norm)
    assert found.architectures == {120}  # our reader agrees with NVIDIA's
    assert "libcudart.so.13" in found.needed
    said = stack.ok("sglang", "python -c 'from flashinfer.jit.norm import gen_norm_module as g; s = g(); "
                              "print(s.is_aot, s.get_library_path())' 2>/dev/null", "--read-only", "--tmpfs", "/tmp",
                    "-e", "HOME=/tmp")
    assert said.split() == ["True", NORM]


def test_our_reader_of_kernels_agrees_with_nvidias(stack: Stack, cuobjdump: Path, tmp_path: Path) -> None:
    path = stack.ok("sglang", f"ls {KERNELS}/sm100/common_ops*.so").split()[0]
    kernels = copy_out(stack, "sglang", path, tmp_path / "common_ops.so")
    listed = list_elf(cuobjdump, kernels)
    assert tool("guard/elf").read(kernels).architectures == {int(text) for text in re.findall(r"sm_(\d+)", listed)}


def test_sizes_of_the_layers(stack: Stack) -> None:
    """Printed for the record (docs/stacks.md)."""
    below = 0
    for image, tag in stack.tags.items():
        compressed = next(one["bytes"] for one in stack.outcome["images"] if one["image"] == image)
        history = subprocess.run(["docker", "history", "--no-trunc", "--format", "{{.Size}}", tag], capture_output=True,
                                 text=True, check=True).stdout.split()
        print(f"{image:12} {(compressed - below) / 1e9:6.2f} GB compressed; steps: {', '.join(history)}")
        assert compressed > below
        below = compressed
