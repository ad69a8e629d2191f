"""Compatibility rules: each says no to what is wrong and yes to what is right. Inputs are those of real reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import compat
from buildctl import stack as stacks
from buildctl.compat.kinds import KINDS
from buildctl.compat.rules import RULES
from buildctl.compat.view import View
from buildctl.errors import CompatibilityError, ManifestError
from buildctl.lock import PUBLIC, Lock, LockedBase, LockedSeries, Overlap, Unlocked, Wheel
from buildctl.stack import Accepted, Base, Cuda, Profile, Rule, Stack
from tests.conftest import ROOT
from tests.unit.projects import ready

FIXTURES = ROOT / "tests" / "fixtures"
#: a stack for SM120 that fits: versions of sglang-0.5.23-cu130
NEW: dict[str, Any] = {
    "torch": ("2.14.1", {"requires": ("cuda-toolkit==13.0.3", "triton~=3.8.0"), "via": (".", "flashinfer-python")}),
    "torchvision": "0.29.2", "triton": ("3.8.0", {"via": ("torch",)}), "cuda-toolkit": "13.0.3",
    "nvidia-cuda-nvcc": ("13.0.88", {"via": ("cuda-toolkit",)}),
    "nvidia-cuda-nvrtc": ("13.0.88", {"via": ("cuda-toolkit",)}), "nvidia-nccl-cu13": ("2.30.7", {"via": ("torch",)}),
    "flashinfer-python": "0.7.2", "sglang-kernel": ("0.4.10", {"requires": ("torch==2.14.1",), "via": ("sglang",)}),
    "sglang": "0.5.23",
}
#: SGLang 0.5.9 with torch 2.9.1+cu130
OLD: dict[str, Any] = {
    "torch": ("2.9.1+cu130", {"index": "pytorch-cu130"}), "torchvision": ("0.24.1+cu130", {"index": "pytorch-cu130"}),
    "torchaudio": "2.9.1", "triton": "3.5.1", "nvidia-cudnn-cu13": "9.16.0.29", "flashinfer-python": "0.6.3",
    "flashinfer-cubin": "0.6.3", "sgl-kernel": ("0.3.21+cu130", {"index": "sgl-project"}), "sglang": "0.5.9",
    "nvidia-cuda-nvcc": "13.0.88",
}
EAGLE: dict[str, Any] = {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 3, "speculative-eagle-topk": 1,
         "speculative-num-draft-tokens": 4}
SERVER: dict[str, Any] = {"attention-backend": "flashinfer", "mem-fraction-static": 0.8, "max-running-requests": 48,
          "cuda-graph-max-bs-decode": 48}
HOMES = {"CUDA_HOME": "/opt/cuda", "TRITON_PTXAS_PATH": "/opt/cuda/bin/ptxas",
         "PATH": "/opt/venv/bin:/opt/cuda/bin:/usr/bin"}
SERIES = {"sglang": ("0001-symm-mem.patch", "0002-allreduce-fusion.patch"),
          "flashinfer": ("0001-trtllm-comm-arch.patch",)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stack, Lock]:
    _, loaded, lock = ready(tmp_path_factory.mktemp("project"))
    return loaded, lock


def rules(entries: Mapping[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(text, reason, "stack.yaml:9") for text, reason in entries.items())


def build(small: tuple[Stack, Lock], packages: Mapping[str, Any], *, change: Mapping[str, Any] | None = None,
          cuda: str | None = "13.0", source: str = "wheels", base: str = "debian:12",
          targets: tuple[str, ...] = ("sm120",),
          environment: Mapping[str, str] | None = None, variables: Mapping[str, str] | None = None,
          server: Mapping[str, Any] | None = None, baseline: Mapping[str, Any] | None = None,
          eagle: Mapping[str, Any] | None = None, profile: str = "", requirements: tuple[str, ...] = ("sglang==1",),
          overrides: Mapping[str, str] | None = None, excludes: Mapping[str, str] | None = None,
          constraints: Mapping[str, str] | None = None, unlocked: tuple[Unlocked, ...] = (),
          patches: Mapping[str, tuple[str, ...]] | None = None, overlaps: tuple[Overlap, ...] = (), line: str = "",
          accept: tuple[Accepted, ...] = ()) -> tuple[Stack, Lock]:
    """A stack and its lock; `change` replaces packages, None removes one."""
    wheels = []
    for name, entry in {**packages, **(change or {})}.items():
        if entry is None:
            continue
        version, rest = entry if isinstance(entry, tuple) else (entry, {})
        fields = {"layer": "torch", "index": PUBLIC, "file": f"{name}.whl", "sha256": "00", "size": 1, "via": (".",),
                  "requires": (), **rest}
        wheels.append(Wheel(name=name, version=version, **fields))
    loaded, lock = small
    sglang = next((wheel.version for wheel in wheels if wheel.name == "sglang"), "none")
    bottom = replace(loaded.layers[0], dockerfile=loaded.layers[0].dockerfile + line)
    return replace(
        loaded, targets=targets, cuda=Cuda(cuda, source) if cuda else None, base=Base(base, None),
        layers=(bottom, *loaded.layers[1:]), environment=HOMES if environment is None else environment,
        requirements={"torch": requirements}, overrides=rules(overrides or {}), excludes=rules(excludes or {}),
        constraints=rules(constraints or {}), accept=accept,
        profile=Profile(profile or sglang, variables or {}, SERVER if server is None else server,
                        {"baseline": baseline or {}, "eagle3": EAGLE if eagle is None else eagle}),
    ), replace(lock, wheels=tuple(wheels), unlocked=unlocked, overlaps=overlaps, base=LockedBase("bootstrap"),
               patches={name: LockedSeries(f"{name}/x", "0", tuple((one, "0") for one in names), "0")
                        for name, names in (patches or {}).items()})


def old(**more: Any) -> dict[str, Any]:
    """SGLang 0.5.9 as its stack runs it, changed a little."""
    return {"packages": OLD, "source": "base", "base": "nvidia/cuda:13.0.1-devel-ubuntu24.04", "patches": SERIES,
            "variables": {"SGLANG_ENABLE_SPEC_V2": "1"},
            "server": {**SERVER, "cuda-graph-max-bs-decode": False, "cuda-graph-max-bs": 48}, **more}


def unlocked(text: str) -> tuple[Unlocked, ...]:
    return (Unlocked(text.partition("==")[0], text, "torch", "special"),)


LONG = Overlap("a", "b", 99, tuple(f"tests/{number}" for number in range(20)))
NCCL = Overlap("nvidia-nccl-cu12", "nvidia-nccl-cu13", 2, ("README.md", "nvidia/nccl/lib/libnccl.so.2"))

#: rule, what is changed, words that its finding must hold
NO: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # K1-4
    ("gpu-cuda", {"cuda": "12.8"}, ("SM 12.x needs CUDA 12.9 or later", "CUDA 12.8", "sm120")),
    ("gpu-cuda", {"cuda": "12.8", "targets": ("sm103",)}, ("SM 10.3 needs CUDA 12.9",)),
    ("gpu-cuda", {"cuda": None}, ("no CUDA",)),
    # K2-6, K2-1: any cu12 package, who asked for it, and an override to one
    ("one-cuda", {"change": {"nvidia-nccl-cu12": ("2.29.3", {"via": ("helper",)}),
                             "helper": ("1", {"via": ("sglang",)})}},
     ("CUDA 12 in a stack for CUDA 13", "nvidia-nccl-cu12 <- helper <- sglang <- the stack")),
    ("one-cuda", {"change": {"torch": "2.11.0+cu129"}}, ("torch 2.11.0+cu129", "cu130 build")),
    ("one-cuda", {"overrides": {"nvidia-cudnn-cu12==9.16.0.29": "as the hint says"}},
     ("asks for a library of CUDA 12", "nvidia-cudnn-cu12==9.16.0.29", "name cu12 wheels")),
    *(("one-cuda", {"change": {name: "1"}}, (f"{name} 1", f"CUDA {major} in a stack for CUDA 13")) for name, major in
      [("cupy-cuda12x", 12), ("cupy-cuda11x", 11), ("thing-cuda12", 12), ("thing-cuda129", 12),
       ("x-jit-cache-cu129", 12), ("tensorrt-cu12-libs", 12)]),
    ("one-cuda", {"overrides": {"cupy-cuda12x==13.6": "x"}}, ("asks for a library of CUDA 12", "cupy-cuda12x==13.6")),
    ("cuda-minor", {"change": {"nvidia-cuda-nvcc": ("13.5.37", {"via": ("cuda-tile",)})}},
     ("nvidia-cuda-nvcc 13.5.37", "13.0.*", "cuda-tile")),
    ("cuda-minor", {"change": {"torch": ("2.15.0+cu132", {"index": "x"})}}, ("built for another CUDA", "+cu130")),
    # K1-2
    ("nvcc", {"source": "base", "base": "nvidia/cuda:13.0.1-runtime-ubuntu24.04"},
     ("neither nvcc nor ptxas", "-devel")),
    ("nvcc", {"change": {"nvidia-cuda-nvcc": None}}, ("no compiler in the image", "no nvidia-cuda-nvcc in the lock")),
    ("cuda-home", {"environment": {"TRITON_PTXAS_PATH": "/x"}}, ("does not set CUDA_HOME",)),
    ("ptxas", {"environment": {"CUDA_HOME": "/x"}}, ("does not set TRITON_PTXAS_PATH", "sm_121a")),
    ("ptxas", {"environment": {"CUDA_HOME": "/x"}, "targets": ("sm121",)}, ("does not set TRITON_PTXAS_PATH",)),
    # K1-4 (b)
    ("cuda-path", {"environment": {**HOMES, "PATH": "/usr/local/bin:/opt/cuda/bin"}},
     ("/opt/cuda/bin is not ahead", "PATH=/usr/local/bin:/opt/cuda/bin", "before /usr/local/bin", "nvcc 11.5")),
    ("cuda-path", {"environment": {**HOMES, "CUDA_HOME": "/usr/local/cuda"}}, ("/usr/local/cuda/bin", "/opt/cuda/bin")),
    ("cuda-path", {"environment": {**HOMES, "PATH": "/opt/venv/bin"}}, ("expected: /opt/cuda/bin on PATH",)),
    # K1-5
    ("cuda-compat", {"line": "RUN echo /usr/local/cuda/compat > /etc/ld.so.conf.d/00-cuda.conf\n"}, ("Error 803",)),
    ("cuda-compat", {"line": "ENV LD_LIBRARY_PATH=/usr/local/cuda-13.0/compat:/usr/lib\n"},
     ("images/cuda/Dockerfile",)),
    ("cuda-compat", {"environment": {**HOMES, "LD_LIBRARY_PATH": "/usr/local/cuda/compat"}}, ("environment",)),
    ("cuda-compat", {"line": "ENV LD_LIBRARY_PATH /usr/local/cuda/compat\n"}, ("images/cuda/Dockerfile", "Error 803")),
    ("cuda-compat", {"line": "ENV LD_LIBRARY_PATH=/usr/lib:/usr/local/cuda/compat\n"}, ("images/cuda/Dockerfile",)),
    # K2-3, K2-5
    ("torch-cuda", {"change": {"torch": ("2.10.0+cpu", {"index": "x"})}}, ("torch is the CPU build", "2.10.0+cpu")),
    ("torch-cuda", {"change": {"torch": "2.11.0"}, "cuda": "12.9"}, ("torch is built for CUDA 13.0", "CUDA 12.9")),
    ("torch-cuda", {"change": {"torch": ("2.99.0", {"requires": ("cuda-toolkit==13.2.2",)})}}, ("CUDA 13.2",)),
    ("torch-cuda", {"change": {"torch": "2.99.0"}}, ("not known for which CUDA",)),
    ("torch-cuda", {"change": {"torch": ("2.99.0", {"requires": ("cuda-toolkit>=13",)})}}, ("not known",)),
    ("torch-family", {"change": {"torchvision": "0.28.0"}}, ("torchvision 0.28.0 does not fit torch 2.14.1", "0.29.*")),
    ("torch-family", old(change={"triton": "3.9.0"}), ("triton 3.9.0", "triton==3.5.*")),
    ("torchaudio-end", {"change": {"torchaudio": "2.11.0"}}, ("torchaudio 2.11.0", "SGLang pins 2.11.0")),
    # K2-1
    ("cudnn-floor", old(change={"nvidia-cudnn-cu13": "9.13.0.50"}),
     ("nvidia-cudnn-cu13 9.13.0.50 does not fit torch 2.9.1+cu130", ">=9.15", "override with a reason")),
    # K2-4
    ("kernel-torch", {"change": {"torch": "2.11.0", "sglang-kernel": "0.4.6.post1"}},
     ("torch 2.11.0", "torch==2.13.*")),
    ("kernel-torch", {"change": {"sglang-kernel": "0.9.0"}}, ("ABI not verified",)),
    # K1-1: the wheel of the public index is for CUDA 12
    ("kernel-cuda", old(change={"sgl-kernel": "0.3.21"}),
     ("linked to CUDA 12", "libnvrtc.so.12", "docs.sglang.ai/whl/cu130", "brings the same file")),
    ("kernel-gpu", {"targets": ("sm121",)}, ("has no code for sm121", "SM 12.1")),
    ("one-kernel", {"change": {"sgl-kernel": "0.3.21+cu130"}}, ("sgl-kernel 0.3.21+cu130 and sglang-kernel 0.4.10",)),
    # K2-2
    ("flashinfer-trio", {"change": {"flashinfer-python": "0.6.16", "flashinfer-cubin": "0.6.13"}},
     ("flashinfer-cubin 0.6.13 with flashinfer-python 0.6.16", "leave flashinfer-cubin out")),
    ("flashinfer-trio", {"change": {"flashinfer-python": "0.6.10", "flashinfer-cubin": "0.6.8.post1"}},
     ("0.6.8.post1",)),
    ("patched-and-prebuilt", old(change={"flashinfer-jit-cache": ("0.6.3+cu130", {"index": "flashinfer"})}),
     ("flashinfer-jit-cache 0.6.3+cu130 is used in place",)),
    # K2-4 (a)
    ("requires", {"change": {"torch": ("2.9.1+cu130", {"index": "x"}),
                             "sglang-kernel": ("0.4.7", {"requires": ("torch==2.13.0",), "via": ("sglang",)})}},
     ("sglang-kernel 0.4.7 requires torch==2.13.0, the stack has 2.9.1+cu130",)),
    ("requires", old(change={"torch": ("2.9.1+cu130", {"requires": ("nvidia-cudnn-cu13==9.13.0.50",)})}),
     ("torch 2.9.1+cu130 requires nvidia-cudnn-cu13==9.13.0.50, the stack has 9.16.0.29",)),
    ("requires", {"change": {"sglang": ("0.5.23", {"requires": ("gone>=1",)})}},
     ("requires gone>=1, and the lock has none",)),
    ("requires", {"change": {f"p{number}": ("1", {"requires": None}) for number in range(8)}},
     ("METADATA of 8 wheels", "...")),
    ("same-file", {"overlaps": (NCCL,)},
     ("both install nvidia/nccl/lib/libnccl.so.2 and 1 more", "nvidia-nccl-cu13 2.30.7")),
    ("same-file", {"overlaps": (LONG,)}, ("both install tests/0 and 98 more",)),
    ("open-range", {"requirements": ("sglang-kernel>=0.4.0",)}, ("sglang-kernel>=0.4.0", "by a range")),
    ("open-range", {"requirements": ("torch==2.*",)}, ("torch==2.*",)),
    ("bypass", {"variables": {"SGLANG_DISABLE_CUDNN_CHECK": "1"}},
     ("SGLANG_DISABLE_CUDNN_CHECK=1", "profile.environment")),
    ("bypass", {"line": "ENV A=1 \\\n  FLASHINFER_DISABLE_VERSION_CHECK=1\n"}, ("images/cuda/Dockerfile",)),
    ("bypass", {"line": "ENV SGLANG_DISABLE_CUDNN_CHECK 1\n"},
     ("images/cuda/Dockerfile", "SGLANG_DISABLE_CUDNN_CHECK=1")),
    ("silent-edit", {"line": "RUN sed -i s/a/b/ /opt/venv/x.py\n"}, ("sed -i", "patch of a series")),
    ("profile-version", {"profile": "0.5.9"}, ("profile: 0.5.9", "0.5.23")),
    # K1-3
    ("attention", {"server": {**SERVER, "attention-backend": False, "prefill-attention-backend": "trtllm_mla"}},
     ("trtllm_mla does not run prefill on sm120", "flashinfer, triton")),
    ("attention", old(server={**SERVER, "attention-backend": "trtllm_mha"}), ("trtllm_mha does not run prefill",)),
    ("attention", old(server={**SERVER, "attention-backend": "trtllm_mha"}, change={"sglang": "0.5.12"}),
     ("trtllm_mha",)),
    ("attention", {"server": {**SERVER, "attention-backend": "fa3"}, "targets": ("sm121",)}, ("fa3", "sm121")),
    ("attention", {"server": {key: value for key, value in SERVER.items() if key != "attention-backend"}},
     ("leaves the attention backend on sm120 to SGLang's choice", "flashinfer, triton")),
    ("fusion-fatal", {"server": {**SERVER, "flashinfer-allreduce-fusion-backend": "trtllm"}},
     ("requires SM90 or SM10X",)),
    ("fusion-ignored", old(baseline={"enable-flashinfer-allreduce-fusion": True}, patches={"sglang": SERIES["sglang"]}),
     ("accepted and does nothing", "profile, baseline")),
    ("symm-mem-crash", old(eagle={**EAGLE, "enable-torch-symm-mem": True}, patches={}), ("KeyError: 12", "eagle3")),
    # K4-6
    ("symm-mem-off", {"server": {**SERVER, "enable-torch-symm-mem": True}}, ("falls back to NCCL",)),
    ("nccl-symm-mem", {"server": {**SERVER, "enable-symm-mem": True}}, ("needs NVLink",)),
    ("pcie-ipc", old(variables={"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}), ("does not know the variable",)),
    # K4-3
    ("arms-equal", {"server": {"attention-backend": "flashinfer", "mem-fraction-static": 0.8,
                               "cuda-graph-max-bs-decode": 8}},
     ("leaves max-running-requests to a default", "48 with it")),
    ("arms-equal", {"eagle": {**EAGLE, "max-running-requests": 8}}, ("baseline: 48, eagle3: 8",)),
    ("arms-equal", {"baseline": {"context-length": 4096}}, ("baseline: 4096, eagle3: default",)),
    ("arms-equal", {"server": {**SERVER, "cuda-graph-max-bs-decode": 8} | {"max-running-requests": 8},
                    "eagle": {**EAGLE, "cuda-graph-max-bs-decode": 4}}, ("differ in cuda-graph-max-bs-decode",)),
    ("eagle", {"eagle": {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 3}},
     ("gives 1 of EAGLE's three",)),
    ("eagle", {"eagle": {**EAGLE, "speculative-num-draft-tokens": 8}}, ("8 draft tokens with top-k 1 and 3 steps",)),
    ("spec-v2", old(variables={}), ("without the overlap scheduler in SGLang 0.5.9", "no SGLANG_ENABLE_SPEC_V2")),
    ("spec-v2", old(variables={"SGLANG_ENABLE_SPEC_V2": "0"}, change={"sglang": "0.5.12"}),
     ("SGLANG_ENABLE_SPEC_V2=0",)),
    ("spec-v2", old(eagle={**EAGLE, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}), ("top-k 4",)),
]

#: rule, what is changed: the rule must find nothing
YES: list[tuple[str, dict[str, Any]]] = [
    *(("gpu-cuda", {"targets": (target,), "cuda": cuda}) for target, cuda in
      [("sm89", "12.1"), ("sm90", "12.1"), ("sm100", "12.8"), ("sm103", "12.9"), ("sm120", "12.9"), ("sm121", "13.0")]),
    ("gpu-cuda", {"targets": ("cpu",), "cuda": None}),
    ("one-cuda", {"change": {"cuda-python": "12.9", "nvidia-ml-py": "13.615.71", "nvidia-mathdx": "25.6.0",
                             "humming-kernels": "0.1", "cu12-like": "1", "nvidia-cudnn-cu13": "9.24",
                             "cupy-cuda13x": "14", "thing-cuda13": "1", "x-jit-cache-cu130": "1",
                             "tensorrt-cu13-libs": "1", "docu12": "1"}}),
    ("one-cuda", old()), ("one-cuda", {"cuda": None, "change": {"nvidia-nccl-cu12": "2"}}),
    ("cuda-minor", {"change": {"nvidia-cuda-nvcc": "13.0.1", "nvidia-cublas": "13.1.1.3"}}), ("cuda-minor", old()),
    ("cuda-minor", {"cuda": None, "change": {"nvidia-cuda-nvcc": "13.5"}}),
    ("nvcc", old()), ("nvcc", {"change": {"flashinfer-python": None, "triton": None, "nvidia-cuda-nvcc": None}}),
    ("cuda-home", {}), ("cuda-home", {"change": {"flashinfer-python": None}, "environment": {}}),
    ("cuda-home", {"environment": {}, "line": "ENV CUDA_HOME=/opt/cuda\n"}),
    ("cuda-home", {"environment": {}, "line": "ENV CUDA_HOME /opt/cuda\n"}),
    ("cuda-path", {"environment": {"PATH": "/opt/cuda/bin:/bin"}, "line": "ENV CUDA_HOME /opt/cuda\n"}),
    ("cuda-path", {}), ("cuda-path", old()), ("cuda-path", {"environment": {}}), ("cuda-path", {"targets": ("cpu",)}),
    ("cuda-path", {"environment": {**HOMES, "PATH": "${CUDA_HOME}/bin:/usr/bin"}}),
    ("cuda-path", {"environment": {**HOMES, "PATH": "/x:$CUDA_HOME/bin/"}}),
    ("cuda-path", {"change": {"flashinfer-python": None}, "environment": {**HOMES, "PATH": "/bin"}}),
    ("ptxas", {}), ("ptxas", {"targets": ("sm90",), "environment": {}}),
    ("cuda-compat", {"line": "RUN echo /usr/local/cuda/lib64 > /etc/ld.so.conf.d/cuda.conf\n"
                             "ENV LD_LIBRARY_PATH=/usr/lib:/usr/local/cuda/lib64\n"}),
    ("torch-cuda", {}), ("torch-cuda", old()), ("torch-cuda", {"change": {"torch": None}}),
    ("torch-cuda", {"change": {"torch": ("2.13.0", {"requires": None})}}), ("torch-cuda", {"cuda": None}),
    ("torch-family", {}), ("torch-family", old()), ("torch-family", {"change": {"torch": None, "torchvision": "0.1"}}),
    ("torchaudio-end", old()), ("torchaudio-end", {"change": {"torchaudio": "2.14.0"}}),
    ("cudnn-floor", old()), ("cudnn-floor", {"change": {"nvidia-cudnn-cu13": "9.13"}}),
    ("kernel-torch", {}), ("kernel-torch", old()),
    ("kernel-torch", {"change": {"sglang-kernel": ("0.9.0", {"requires": ("torch==2.14.1",)})}}),
    ("kernel-cuda", {}), ("kernel-cuda", old()), ("kernel-cuda", old(change={"sgl-kernel": "0.3.21"}, cuda="12.9")),
    ("kernel-gpu", {}), ("kernel-gpu", {"targets": ("sm121",), "change": {"sglang-kernel": "0.5.0"}}),
    ("one-kernel", {}), ("one-kernel", old()),
    ("flashinfer-trio", old()), ("flashinfer-trio", {}),
    ("flashinfer-trio", old(change={"flashinfer-jit-cache": ("0.6.3+cu130", {"index": "flashinfer"})})),
    ("patched-and-prebuilt", old()), ("patched-and-prebuilt", {"change": {"flashinfer-jit-cache": "0.7.2+cu130"}}),
    # K2-1 with an override and a reason; K2-2: underscore and hyphen are one package
    ("requires", old(change={"torch": ("2.9.1+cu130", {"requires": ("nvidia-cudnn-cu13==9.13.0.50",)}),
                             "sglang": ("0.5.9", {"requires": ("flashinfer_python==0.6.3", "torch==2.9.1")})},
                     overrides={"nvidia-cudnn-cu13==9.16.0.29": "Conv3d"})),
    ("requires", {"change": {"sglang": ("0.5.23", {"requires": ("gone",)})}, "excludes": {"gone": "not needed"}}),
    ("requires", {"change": {"torch": None, "sglang": ("0.5.23", {"requires": ("torch==2.14.1", "open>=2")})},
                  "unlocked": (*unlocked("torch==2.14.1+cu130"), Unlocked("open", "open>=2", "torch", "special"))}),
    ("same-file", {"overlaps": (Overlap("a", "b", 2, ("build_backend.py", "tests/x.py")),)}),
    ("open-range", {"requirements": ("torch==2.14.1", "numpy>=2", "triton")} | {"constraints": {"triton==3.8.0": "r"}}),
    ("bypass", {"variables": {"SGLANG_DISABLE_CUDNN_CHECK": "0"}}),
    ("bypass", {"line": "ENV SGLANG_DISABLE_CUDNN_CHECK 0\n"}),
    ("silent-edit", {"line": "RUN sed -n s/a/b/ x\n"}),
    ("profile-version", {}), ("profile-version", {"change": {"sglang": None}}),
    ("attention", {}), ("attention", {"server": {**SERVER, "attention-backend": "trtllm_mha"}}),
    *(("attention", {"targets": (target,), "server": {**SERVER, "attention-backend": "trtllm_mla"}})
      for target in ("sm89", "sm90", "sm100", "sm103")),
    ("attention", {"server": {**SERVER, "decode-attention-backend": "trtllm_mla"}}),
    ("attention", old(server={**SERVER, "decode-attention-backend": "trtllm_mha"}, change={"sglang": "0.5.12"})),
    ("attention", {"change": {"sglang": None}, "server": {}}),
    ("fusion-fatal", {"server": {**SERVER, "flashinfer-allreduce-fusion-backend": "trtllm"}, "targets": ("sm100",)}),
    ("fusion-fatal", {"server": {**SERVER, "flashinfer-allreduce-fusion-backend": "trtllm"}, "patches": SERIES}),
    ("fusion-fatal", {"server": {**SERVER, "enable-flashinfer-allreduce-fusion": False}}),
    ("fusion-ignored", old(server={**SERVER, "enable-flashinfer-allreduce-fusion": True})),
    ("symm-mem-crash", old(server={**SERVER, "enable-torch-symm-mem": True})),
    ("symm-mem-off", {"server": {**SERVER, "enable-torch-symm-mem": True}, "patches": SERIES}),
    ("nccl-symm-mem", {}),
    ("pcie-ipc", {"variables": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}}),
    ("arms-equal", {}), ("arms-equal", old()), ("arms-equal", {"server": {}, "eagle": {"attention-backend": "x"}}),
    ("arms-equal", {"targets": ("cpu",), "cuda": None,
     "server": {"mem-fraction-static": 1, "max-running-requests": 1}}),
    ("eagle", {}), ("eagle", {"eagle": {"speculative-algorithm": "NGRAM"}}),
    ("eagle", {"eagle": {**EAGLE, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}}),
    ("spec-v2", {}), ("spec-v2", old()), ("spec-v2", old(variables={}, change={"sglang": "0.5.12"})),
    ("spec-v2", old(variables={}, eagle={"x": 1})),
]


def test_the_free_resolution_of_sglang_is_refused(small: tuple[Stack, Lock]) -> None:
    """What uv chooses for sglang==0.5.23 without any constraint, recorded from the public index on 2026-12-01."""
    rows = json.loads((FIXTURES / "resolution-sglang-0.5.23.json").read_text())
    packages = {row["name"]: (row["version"], {"via": tuple(row["via"]), "requires": tuple(row["requires"])})
                for row in rows}
    report = compat.check(*build(small, packages, requirements=("sglang==0.5.23",)))
    refused = {problem.what for problem in report.errors}
    minors = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-nvjitlink", "nvidia-nvvm")
    assert refused == {"a library for CUDA 12 in a stack for CUDA 13 (rule one-cuda)",
                       *(f"{name} is of another CUDA than the stack (rule cuda-minor)" for name in minors)}
    said = "\n".join(map(str, (*report.errors, *report.warnings)))
    for words in ("nvidia-cuda-nvcc 13.5.37: nvidia-cuda-nvcc <- humming-kernels <- sglang <- the stack",
                  "nvidia-cutlass-dsl-libs-cu12 4.8.0", "torchaudio 2.11.0 does not fit torch 2.14.1"):
        assert words in said


def findings(report: compat.Report, rule: str) -> list[str]:
    return [str(problem) for problem in (*report.errors, *report.warnings) if f"(rule {rule})" in problem.what]


def made(small: tuple[Stack, Lock], change: dict[str, Any]) -> tuple[Stack, Lock]:
    return build(small, **{"packages": NEW, **change})


@pytest.mark.parametrize(("rule", "change", "words"), NO, ids=[f"{rule}-{n}" for n, (rule, *_) in enumerate(NO)])
def test_no_to_what_is_wrong(small: tuple[Stack, Lock], rule: str, change: dict[str, Any],
                             words: tuple[str, ...]) -> None:
    found = "\n".join(findings(compat.check(*made(small, change)), rule))
    for word in words:
        assert word in found


@pytest.mark.parametrize(("rule", "change"), YES, ids=[f"{rule}-{n}" for n, (rule, _) in enumerate(YES)])
def test_yes_to_what_is_right(small: tuple[Stack, Lock], rule: str, change: dict[str, Any]) -> None:
    assert findings(compat.check(*made(small, change)), rule) == []


@pytest.mark.parametrize("change", [{}, old()], ids=["0.5.23", "0.5.9"])
def test_the_two_tracks_fit_as_a_whole(small: tuple[Stack, Lock], change: dict[str, Any]) -> None:
    report = compat.check(*made(small, change))
    assert (report.errors, report.warnings, report.accepted) == ((), (), ())


def test_every_rule_is_tested_both_ways_and_well_formed() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))
    assert {rule for rule, *_ in NO} == set(ids)
    assert {rule for rule, _ in YES} == set(ids)
    words = {"cuda": "13.0", "cu": "cu130", "sglang": "0.5.9"}
    for rule in RULES:
        assert rule.kind in KINDS
        assert rule.level in ("error", "warning")
        assert all((rule.reason, rule.source, rule.advice.format_map(words)))
    assert {rule.kind for rule in RULES} == set(KINDS)


def test_the_unconstrained_resolution_is_reported(small: tuple[Stack, Lock]) -> None:
    """What uv gives for sglang 0.5.23 when nothing is constrained (2026-12)."""
    free = {"torchaudio": "2.11.0", "nvidia-cuda-nvcc": ("13.5.37", {"via": ("cuda-tile",)}),
            "nvidia-nvvm": ("13.5.37", {"via": ("nvidia-cuda-nvcc",)}), "nvidia-nvjitlink": "13.5.37",
            "nvidia-cutlass-dsl-libs-cu12": ("4.8.0", {"via": ("nvidia-cutlass-dsl",)}),
            "nvidia-cutlass-dsl": ("4.8.0", {"via": ("sglang",)})}
    report = compat.check(*made(small, {"change": free}))
    assert len(findings(report, "cuda-minor")) == 3
    assert len(findings(report, "one-cuda")) == 1
    assert len(findings(report, "torchaudio-end")) == 1
    with pytest.raises(CompatibilityError) as caught:
        report.raise_errors()
    assert (caught.value.exit_code, len(caught.value.problems)) == (4, 4)


def test_a_stack_lives_with_a_finding_on_purpose(small: tuple[Stack, Lock]) -> None:
    variables = {"SGLANG_DISABLE_CUDNN_CHECK": "1", "FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    one = Accepted("bypass", "sglang-disable-cudnn-check", "no Conv3d in our models", "stack.yaml:7")
    report = compat.check(*made(small, {"variables": variables, "accept": (one,)}))
    assert len(findings(report, "bypass")) == 1
    (problem,) = report.accepted
    assert problem.todo == "accepted: no Conv3d in our models"
    whole = Accepted("bypass", "", "both", "stack.yaml:7")
    assert compat.check(*made(small, {"variables": variables, "accept": (whole,)})).errors == ()


def test_an_idle_acceptance_is_a_warning_and_an_unknown_rule_an_error(small: tuple[Stack, Lock]) -> None:
    idle = (Accepted("bypass", "x", "why", "stack.yaml:7"), Accepted("eagle", "", "why", "stack.yaml:8"))
    report = compat.check(*made(small, {"accept": idle}))
    assert [problem.found for problem in report.warnings] == ["accept: bypass of x", "eagle"]
    with pytest.raises(ManifestError, match="there is no rule 'bypas'") as caught:
        compat.check(*made(small, {"accept": (replace(idle[0], rule="bypas"),)}))
    assert "did you mean 'bypass'?" in str(caught.value)


def test_accept_is_read_from_the_stack(tmp_path: Path) -> None:
    project, loaded, _ = ready(tmp_path)
    loaded.path.write_text(loaded.path.read_text() + "accept:\n  - {rule: bypass, of: Some_Name, reason: because}\n")
    (entry,) = stacks.load(project, "small").accept
    assert (entry.rule, entry.subject, entry.reason) == ("bypass", "some-name", "because")


def test_the_drivers_floor(small: tuple[Stack, Lock]) -> None:
    assert compat.driver_floor(made(small, {})[0]) == "580"
    assert compat.driver_floor(made(small, {"cuda": "12.9"})[0]) == "525"
    assert compat.driver_floor(made(small, {"cuda": None})[0]) is None


def test_what_the_rules_see(small: tuple[Stack, Lock]) -> None:
    view = View.of(*made(small, {
        "change": {"odd": "not a version", "lonely": ("1", {"via": ()}), "a": ("1", {"via": ("b",)}),
                   "b": ("1", {"via": ("a",)}), "label": "1+cu12", "cxx": "1+cu130.torch29", "other": "1+local"},
        "unlocked": unlocked("sgl-kernel==0.3.21+cu130"),
        "line": "ENV A='one two' B=2\nENV BROKEN='\nRUN echo ENV\n"}))
    assert "odd" not in view.packages
    assert {name: view.packages[name].cuda for name in ("label", "cxx", "other", "lonely")} == {
        "label": "12", "cxx": "13.0", "other": "", "lonely": ""}
    assert not view.packages["sgl-kernel"].locked
    assert (view.chain("lonely"), view.chain("a"), view.chain("absent")) == (
        "lonely <- the stack", "a", "absent <- the stack")
    assert [(one.name, one.value) for one in view.variables][:2] == [("A", "one two"), ("B", "2")]
    bare = View.of(*made(small, {"change": {"sglang": None}, "cuda": None, "profile": "0.5.9"}))
    assert bare.words == {"cuda": "none", "cu": "cpu", "sglang": "0.5.9"}
    assert not bare.sglang_in(">=0")
