"""The guard's stage in a composition: beside the chain, before the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import compose, stack
from buildctl.errors import ManifestError
from buildctl.host import Host
from buildctl.project import Project
from tests.unit.projects import STACK, lock_of, make, ready

NO_HOST = Host(None, None, None, ())
RUNTIME = ("FROM parent AS guard\nARG IMAGE\nRUN --mount=type=bind,source=image/${IMAGE},target=/image \\\n"
           "    --mount=type=bind,source=layers/guard,target=/layer \\\n"
           "    --mount=type=bind,source=bin/guard,target=/g true\n\n"
           "FROM parent AS layer\nARG IMAGE\nCOPY --from=guard /guard/ /etc/\nCOPY image/${IMAGE}/ /etc/\n")


def composed(root: Path) -> compose.Composition:
    project, loaded, lock = ready(root)
    (root / "images" / "runtime" / "Dockerfile").write_text(RUNTIME)
    guard = root / "images" / "tools" / "bin" / "guard"
    guard.mkdir()
    (guard / "guard.py").write_text("")
    return compose.compose(project, stack.load(project, loaded.name), lock, NO_HOST)


def test_each_layer_is_guarded_before_its_image_is_made(tmp_path: Path) -> None:
    text = composed(tmp_path).dockerfile
    assert "FROM torch AS torch-guard" in text
    assert text.index("AS torch-guard") < text.index("AS torch-image")
    assert "COPY --from=torch-guard /guard/ /etc/" in text
    assert "FROM torch AS sglang\n" in text  # the chain does not stand on a guard


def test_another_guard_is_another_image_on_the_same_chain(tmp_path: Path) -> None:
    before = composed(tmp_path)
    (tmp_path / "images" / "tools" / "bin" / "guard" / "guard.py").write_text("strict")
    after = compose.compose(Project(tmp_path), before.stack, before.lock, NO_HOST)
    assert [image.chain.value for image in after.images] == [image.chain.value for image in before.images]
    assert all(one.key.value != other.key.value for one, other in zip(after.images, before.images, strict=True))


def test_what_the_guard_lets_pass_changes_the_image_and_not_the_lock(tmp_path: Path) -> None:
    project = make(tmp_path, STACK + "optional:\n  - {library: libx.so*, reason: loaded on demand}\n")
    loaded = stack.load(project, "small")
    assert [(rule.text, rule.reason) for rule in loaded.optional] == [("libx.so*", "loaded on demand")]
    files = compose.compose(project, loaded, lock_of(project, loaded), NO_HOST).files
    assert b"loaded on demand" in files["layers/guard/optional.json"].content()


def test_kernels_need_targets(tmp_path: Path) -> None:
    text = STACK + "jit:\n  torch: [norm, 'batch_decode*']\n"
    with pytest.raises(ManifestError, match="FLASHINFER_CUDA_ARCH_LIST"):
        stack.load(make(tmp_path / "a", text), "small")
    project = make(tmp_path / "b", text + 'environment: {FLASHINFER_CUDA_ARCH_LIST: "12.0f"}\n')
    loaded = stack.load(project, "small")
    files = compose.compose(project, loaded, lock_of(project, loaded), NO_HOST).files
    assert files["layers/torch/jit/modules.txt"].content() == b"norm\nbatch_decode*\n"
    assert files["layers/torch/jit/arch.txt"].content() == b"12.0f\n"
    assert files["layers/sglang/jit/modules.txt"].content() == b""
    with pytest.raises(ManifestError, match="not the name or pattern of a module"):
        stack.load(make(tmp_path / "c", STACK + "jit:\n  torch: ['rm -rf /']\n"), "small")


def test_an_applier_with_nothing_to_apply_is_no_reason_to_build(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    assert "layers/sglang/applier/udiff.py" in composition.files
    assert "layers/sglang/patches/environment" in composition.files
    unpatched = STACK.replace("patches:\n  sglang: sglang/0.5\n", "")
    project = make(tmp_path / "b", unpatched)
    loaded = stack.load(project, "small")
    files = compose.compose(project, loaded, lock_of(project, loaded), NO_HOST).files
    assert [path for path in files if path.startswith("layers/sglang/applier")] == ["layers/sglang/applier/apply"]
    assert "layers/sglang/patches/environment" not in files
