"""The guard of a layer: what it refuses, what it says then, and what it lets pass."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.guards import BIN, elf, fatbin, tool

guard = tool("guard/guard")
loading = tool("guard/loader")
Made = Callable[..., Any]


def package(name: str, version: str = "1.0", requires: Iterable[str] = (),
            files: Mapping[Path, str] | None = None) -> Any:
    return guard.Installed(name, version, frozenset(requires), dict(files or {}))


@pytest.fixture
def library(tmp_path: Path) -> Made:
    def make(owner: Any, path: str, *needed: str, **extra: Any) -> Any:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(elf(needed, **extra))
        return guard.Found(target, owner, guard.read(target))
    return make


def text(differences: Iterable[Any]) -> str:
    return "\n".join(str(one) for one in differences)


# --- CUDA ------------------------------------------------------------------------------------------------------------


def test_a_kernel_wheel_of_another_cuda_is_named_with_its_library_and_our_advice(library: Made) -> None:
    """The wheel of the public index in a CUDA 13 image (user-reports K1-1)."""
    kernel = package("sgl-kernel", "0.3.21")
    found = [library(kernel, "sgl_kernel/common_ops.so", "libnvrtc.so.12", "libc.so.6")]
    said = text(guard.check_majors(found, "13.0", ()))
    assert "sgl_kernel/common_ops.so of sgl-kernel 0.3.21" in said
    assert "libnvrtc.so.12" in said
    assert "cu130 build of sgl-kernel" in said
    assert "pip install" not in said


def test_the_same_wheel_for_the_right_cuda_passes(library: Made) -> None:
    kernel = package("sgl-kernel", "0.3.21+cu130")
    found = [library(kernel, "common_ops.so", "libnvrtc.so.13", "libcublasLt.so.13", "libcufft.so.12", "libcudnn.so.9")]
    assert list(guard.check_majors(found, "13.0", ())) == []
    assert list(guard.check_names([kernel], "13.0")) == []


def test_a_library_that_calls_itself_of_another_cuda_is_refused(library: Made) -> None:
    found = [library(package("x"), "lib/libcudart-1234.so", soname="libcudart.so.12")]
    assert "libcudart.so.12" in text(guard.check_majors(found, "13.0", ()))


def test_the_stack_may_let_a_library_pass(library: Made) -> None:
    found = [library(package("triton"), "triton/cupti/libcupti.so.12", soname="libcupti.so.12")]
    assert list(guard.check_majors(found, "13.0", ["triton/cupti/libcupti.so*"])) == []
    assert list(guard.check_majors(found, "13.0", ["other/libcupti.so*"])) != []


@pytest.mark.parametrize(("name", "version", "wrong"), [
    ("nvidia-cublas-cu12", "12.8", True), ("nvidia-cudnn-cu13", "9.24", False), ("torch", "2.9.1+cu128", True),
    ("torch", "2.9.1+cu130", False), ("nvidia-cublas", "13.1", False), ("cupy-cuda12x", "13", True),
    ("cupy-cuda13x", "14", False), ("tensorrt-cu12-libs", "10", True), ("x-cu129", "1", True), ("docu12", "1", False)])
def test_names_and_labels_tell_the_cuda(name: str, version: str, wrong: bool) -> None:
    assert bool(list(guard.check_names([package(name, version)], "13.0"))) is wrong


def test_the_trio_is_of_one_release() -> None:
    """A cubin of the base layer stays behind (user-reports K2-2)."""
    def said(cuda: str | None = "13.0", **versions: str) -> str:
        return text(guard.check_trio([package(name.replace("_", "-"), version) for name, version in versions.items()],
                                     cuda))

    assert said(flashinfer_python="0.6.3") == ""
    assert said(flashinfer_python="0.6.3", flashinfer_cubin="0.6.3", flashinfer_jit_cache="0.6.3+cu130") == ""
    wrong = said(flashinfer_python="0.7.2", flashinfer_cubin="0.6.13")
    assert "flashinfer-cubin 0.6.13, flashinfer-python 0.7.2" in wrong
    assert "cu129" in said(flashinfer_python="0.6.3", flashinfer_jit_cache="0.6.3+cu129")


# --- the loader ------------------------------------------------------------------------------------------------------


def loader(**cache: str) -> Any:
    return loading.Loader({f"{name}.so.13": path for name, path in cache.items()}, ())


def test_nvidia_library_off_the_loaders_path_is_refused_though_it_is_installed(library: Made) -> None:
    nvrtc, kernel = package("nvidia-cuda-nvrtc"), package("sglang-kernel", requires=["nvidia-cuda-nvrtc"])
    found = [library(nvrtc, "nvidia/cu13/lib/libnvrtc.so.13", soname="libnvrtc.so.13"),
             library(kernel, "sgl_kernel/common_ops.so", "libnvrtc.so.13")]
    said = text(guard.check_linkage(guard.link(found, [nvrtc, kernel], loader()), ()))
    assert "libnvrtc.so.13 is not on the loader's path" in said
    assert "sgl_kernel/common_ops.so of sglang-kernel" in said
    linkage = guard.link(found, [nvrtc, kernel], loader(libnvrtc="/x/libnvrtc.so.13"))
    assert list(guard.check_linkage(linkage, ())) == []


def test_what_the_driver_brings_is_listed_and_not_refused(library: Made) -> None:
    owner = package("sglang-kernel")
    found = [library(owner, "ops.so", "libcuda.so.1", "libnvidia-ml.so.1")]
    linkage = guard.link(found, [owner], loader())
    assert set(linkage.driver) == {"libcuda.so.1", "libnvidia-ml.so.1"}
    assert list(guard.check_linkage(linkage, ())) == []


def test_libraries_that_a_required_package_loads_first_count(library: Made) -> None:
    owners = [package("ours", requires=["middle"]), package("middle", requires=["far"]), package("far"),
              package("torch"), package("stranger")]
    far = library(owners[2], "far/libfar.so", soname="libfar.so.1")
    torch = library(owners[3], "torch/lib/libc10.so", soname="libc10.so")
    ours = library(owners[0], "ours/ext.so", "libfar.so.1", "libc10.so")
    linkage = guard.link([far, torch, ours], owners, loader())
    assert set(linkage.loaded) == {"libfar.so.1", "libc10.so"}
    stranger = library(owners[4], "stranger/ext.so", "libfar.so.1", "libc10.so")
    linkage = guard.link([far, torch, stranger], owners, loader())
    assert set(linkage.missing) == {"libfar.so.1"}


def test_an_optional_library_may_lack_what_it_needs(library: Made) -> None:
    owner = package("nvidia-nvshmem-cu13")
    found = [library(owner, "nvshmem/lib/nvshmem_bootstrap_mpi.so.3", "libmpi.so.40")]
    linkage = guard.link(found, [owner], loader())
    assert list(guard.check_linkage(linkage, ["nvshmem_bootstrap_*"])) == []
    found.append(library(package("other"), "other.so", "libmpi.so.40"))
    said = text(guard.check_linkage(guard.link(found, [owner], loader()), ["nvshmem_bootstrap_*"]))
    assert "other.so of other" in said
    assert "bootstrap" not in said


def test_a_driver_in_the_image_is_refused(library: Made) -> None:
    """A compat folder hides the host's newer driver (user-reports K1-5)."""
    assert "libcuda.so.1 at /compat/libcuda.so.1" in text(
        guard.check_stubs([], loading.Loader({"libcuda.so.1": "/compat/libcuda.so.1"}, ())))
    found = [library(package("x"), "x.so", "libcuda.so.1", runpath="/usr/local/cuda/lib64/stubs")]
    assert "stub folder" in text(guard.check_stubs(found, loader()))
    assert list(guard.check_stubs([library(package("y"), "y.so", runpath="$ORIGIN/../lib")], loader())) == []


# --- files -----------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_changed_and_removed_files_are_named(tmp_path: Path) -> None:
    kept, changed = tmp_path / "kept.py", tmp_path / "changed.py"
    kept.write_bytes(b"kept")
    changed.write_bytes(b"other")
    owner = package("p", files={kept: digest(b"kept"), changed: digest(b"changed"), tmp_path / "gone.py": digest(b"")})
    said = text(guard.check_files(owner, True, ()))
    assert "changed.py of p was changed" in said
    assert "gone.py of p is gone" in said
    assert "kept.py" not in said
    assert "changed.py" not in text(guard.check_files(owner, False, ()))
    assert "changed.py" not in text(guard.check_files(owner, True, [changed]))


def test_two_owners_are_refused_unless_the_lock_knows_the_pair() -> None:
    """Two wheels own one library (user-reports K2-6)."""
    path = Path("/site/build_backend.py")
    one, other = package("one", files={path: digest(b"1")}), package("other", files={path: digest(b"2")})
    shared = guard.shared_files([one, other])
    assert "one and other" in text(guard.check_owners(shared, ()))
    assert list(guard.check_owners(shared, [("other", "one")])) == []
    same = package("same", files={path: digest(b"1")})
    assert guard.shared_files([one, same]) == {}


# --- torch and compilers ---------------------------------------------------------------------------------------------


def facts(cuda: str | None, *architectures: str) -> dict[str, Any]:
    return {"version": "2.14.1", "cuda": cuda, "architectures": list(architectures)}


def test_torch_has_the_stacks_cuda_and_targets() -> None:
    """A build of another CUDA came in (user-reports K2-3, K2-5)."""
    assert list(guard.check_torch(facts("13.0", "sm_90", "sm_120"), "13.0", ["sm120"])) == []
    assert list(guard.check_torch(facts(None), None, ["cpu"])) == []
    said = text(guard.check_torch(facts("12.8", "sm_90"), "13.0", ["sm120"]))
    assert "2.14.1 for CUDA 12.8" in said
    assert "no kernels for a target" in said


def test_modules_compiled_ahead_hold_code_for_the_targets(library: Made) -> None:
    ours = package("compiled ahead")
    norm = library(ours, "aot/norm/norm.so", kernels=fatbin(120))
    assert list(guard.check_ahead([norm], ["sm120"])) == []
    assert "sm_120" in text(guard.check_ahead([norm], ["sm120", "sm121"]))
    assert list(guard.check_ahead([library(ours, "aot/host/host.so")], ["sm120"])) == []


def program(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


def test_the_first_nvcc_on_path_is_the_toolkits(tmp_path: Path) -> None:
    """The distribution's 11.5 ahead of the real one (user-reports K1-4 c)."""
    program(tmp_path / "cuda" / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    program(tmp_path / "usr" / "bin" / "nvcc", "Cuda compilation tools, release 11.5, V11.5.1")
    (tmp_path / "link").symlink_to(tmp_path / "cuda")

    def said(*folders: str) -> str:
        path = ":".join(str(tmp_path / folder / "bin") for folder in folders)
        return text(guard.check_compiler("13.0", {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": path}))

    assert said("cuda", "usr") == said("link", "usr") == ""
    for words in ("PATH finds another nvcc", f"{tmp_path}/usr/bin/nvcc of CUDA 11.5",
                  f"{tmp_path}/cuda/bin/nvcc of CUDA 13.0", "put CUDA_HOME/bin before"):
        assert words in said("usr", "cuda")
    assert "found:    none" in said("nowhere")


def test_the_compiler_is_of_the_stacks_cuda(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvcc", "Cuda compilation tools, release 11.5, V11.5.1")
    ptxas = program(tmp_path / "bin" / "ptxas", "")
    environment = {"CUDA_HOME": str(tmp_path), "TRITON_PTXAS_PATH": str(ptxas), "PATH": f"{tmp_path}/bin:/usr/bin"}
    said = text(guard.check_compiler("13.0", environment))
    assert f"{tmp_path}/bin/nvcc" in said
    assert "11.5" in said
    assert list(guard.check_compiler("11.5", environment)) == []
    assert list(guard.check_compiler("13.0", {})) == []
    ptxas.unlink()
    assert "TRITON_PTXAS_PATH" in text(guard.check_compiler("11.5", environment))
    assert "No such file" in text(guard.check_compiler("13.0", {"CUDA_HOME": str(tmp_path / "none")}))


# --- all of it, as the build runs it ---------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv", with_pip=False)
    return next((tmp_path / "venv" / "lib").glob("python3.*")) / "site-packages"


def install(site: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{metadata.name}/METADATA,,", f"{metadata.name}/RECORD,,"]
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        lines.append(f"{path},{digest(data)},{len(data)}")
    (metadata / "RECORD").write_text("\n".join(lines) + "\n")


def run(tmp_path: Path, *wheels: tuple[str, str], cuda: str | None = None) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "image"
    folder.mkdir(exist_ok=True)
    facts = {"image": "layer", "cuda": cuda, "targets": ["cpu"], "profile": None}
    (folder / "image.json").write_text(json.dumps(facts))
    (folder / "lock.json").write_text(json.dumps({"patches": {}, "wheels": [
        {"name": name, "version": version, "layer": "layer", "sha256": ""} for name, version in wheels]}))
    (tmp_path / "optional.json").write_text("{}")
    return subprocess.run([str(tmp_path / "venv" / "bin" / "python"), str(BIN / "guard" / "guard.py"), str(folder),
                           str(tmp_path / "optional.json"), str(tmp_path / "guard.json")],
                          capture_output=True, text=True, check=False)


def test_a_good_layer_passes_and_leaves_a_report(tmp_path: Path, site: Path) -> None:
    install(site, "good", "1.0", {"good/__init__.py": b"", "good/ext.so": elf(["libc.so.6", "libcuda.so.1"])})
    done = run(tmp_path, ("good", "1.0"), cuda="13.0")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "guard.json").read_text())
    assert report["packages"] == 1
    assert report["libraries"] == 1
    assert report["driver"] == {"libcuda.so.1": [str(site / "good" / "ext.so")]}


def test_everything_wrong_is_said_at_once_and_no_report_is_left(tmp_path: Path, site: Path) -> None:
    install(site, "bad", "1.0+cu128", {"bad/ext.so": elf(["libnvrtc.so.12"]), "bad/cut.so": elf(["libc.so.6"])[:100]})
    (site / "bad" / "data.py").write_bytes(b"")
    done = run(tmp_path, ("bad", "1.0+cu128"), cuda="13.0")
    assert done.returncode == 1
    for words in ("image layer is not what its lock says", "cut.so of bad is damaged", "is made for CUDA 12",
                  "libnvrtc.so.12 is not on the loader's path", "is made for another CUDA", "do:"):
        assert words in done.stderr
    assert not (tmp_path / "guard.json").exists()


def test_a_module_that_does_not_import_is_refused_with_the_reason(tmp_path: Path, site: Path) -> None:
    install(site, "sglang", "0.5", {"sglang/__init__.py": b"", "sglang/launch_server.py": b"import nothing_there\n"})
    done = run(tmp_path, ("sglang", "0.5"))
    assert done.returncode == 1
    assert "sglang.launch_server cannot be imported" in done.stderr
    assert "No module named 'nothing_there'" in done.stderr


def test_torch_is_asked_by_the_layer_that_brings_it(tmp_path: Path, site: Path) -> None:
    code = ("class version: cuda = '12.8'\nclass backends:\n class cudnn:\n  version = staticmethod(lambda: 91002)\n"
            "class cuda: get_arch_list = staticmethod(lambda: ['sm_90'])\n__version__ = '2.9.1'\n")
    install(site, "torch", "2.9.1", {"torch/__init__.py": code.encode()})
    done = run(tmp_path, ("torch", "2.9.1"), cuda="13.0")
    assert done.returncode == 1
    assert "2.9.1 for CUDA 12.8" in done.stderr
    assert sys.version_info >= (3, 11)


# --- Debian ----------------------------------------------------------------------------------------------------------

STATUS = """Package: libc6
Status: install ok installed
Version: 2.36-9
Description: GNU C Library
 more: of it

Package: gone
Status: deinstall ok config-files
Version: 1
"""


def test_debian_packages_are_held_against_the_lock() -> None:
    have = guard.debian_installed(STATUS)
    assert have == {"libc6": "2.36-9"}
    locked = {"base": {"libc6": "2.36-9 sha256:aa"}, "cuda": {}}
    assert guard.debian_drift(have, locked) == {}
    assert guard.debian_drift(have, {}) == {}  # a lock without a record
    assert guard.debian_drift({"libc6": "2.36-10", "extra": "1"}, {**locked, "cuda": {"python3": "3 sha256:bb"}}) == {
        "extra": ["", "1"], "libc6": ["2.36-9", "2.36-10"], "python3": ["3", ""]}
