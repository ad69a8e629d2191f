"""Composition: one Dockerfile, keys that hold exactly what determines a layer, files that travel in the image."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import budget, context, expectation, fragment, plan, stack
from buildctl import compose as composing
from buildctl.compose import Composition, compose
from buildctl.errors import ManifestError, UsageError
from buildctl.host import Host
from buildctl.lock import LockedBase
from tests.unit.projects import IMAGES, STACK, lock_of, make, ready, wheel

NO_HOST = Host(None, None, None, ())


def composed(root: Path, host: Host = NO_HOST, stack_text: str = STACK, revision: str = "") -> Composition:
    project, loaded, lock = ready(root, stack_text)
    return compose(project, loaded, lock, host, revision)


def again(root: Path, host: Host = NO_HOST, **changes: Any) -> Composition:
    """Compose a project that lies there already, with a lock that fits it."""
    from buildctl.project import Project

    project = Project(root)
    loaded = stack.load(project, "small")
    return compose(project, loaded, replace(lock_of(project, loaded), **changes), host)


def keys(composition: Composition) -> dict[str, tuple[str, str]]:
    return {image.name: (image.chain.value, image.key.value) for image in composition.images}


def test_one_dockerfile_in_chain_order(tmp_path: Path) -> None:
    text = composed(tmp_path).dockerfile
    stages = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert stages == [
        "FROM scratch AS base",
        "FROM base AS tools", "FROM tools AS entrypoint-env", "FROM entrypoint-env AS entrypoint",
        "FROM base AS cuda-system", "FROM cuda-system AS cuda", "FROM cuda AS torch", "FROM torch AS sglang",
        "FROM cuda AS cuda-image", "FROM torch AS torch-image", "FROM sglang AS sglang-image"]
    assert "ADD base/base.tar /" in text


def test_the_stacks_environment_reaches_the_image_as_it_is(tmp_path: Path) -> None:
    value = "é 'quoted' \"twice\" back\\slash"
    text = STACK + f"environment:\n  ODD: {json.dumps(value, ensure_ascii=False)}\n"
    composition = composed(tmp_path, stack_text=text)
    stage = next(stage for stage in composition.stages if stage.name == "torch-image")
    assert f"ENV ODD={json.dumps(value, ensure_ascii=False)}\n" in stage.body
    assert expectation.settings_of(composition.stages, "torch-image").environment["ODD"] == value


def test_a_registry_base_is_pinned_by_digest(tmp_path: Path) -> None:
    composed(tmp_path)
    digest = "sha256:" + "1" * 64
    text = again(tmp_path, base=LockedBase("registry", image="debian:bookworm-slim", digest=digest)).dockerfile
    assert f"FROM debian:bookworm-slim@{digest} AS base\n" in text
    assert "base.tar" not in text
    # a lock from before the digest was split off
    old = LockedBase("registry", image=f"debian:bookworm-slim@{digest}", digest=digest)
    assert again(tmp_path, base=old).dockerfile == text


def test_a_share_lists_exact_hashes_per_index(tmp_path: Path) -> None:
    files = composed(tmp_path).files
    own = files["layers/torch/own/index/special.txt"].content().decode()
    assert own == f"--index-url https://index.example/simple\ntorch==2.0+cpu --hash=sha256:{'ab' * 32}\n"
    assert files["layers/torch/own/index/public.txt"].content() == b""
    assert files["layers/torch/wheels/index/public.txt"].content().decode().startswith("needed==1.0 --hash")


def test_the_guard_expects_everything_so_far_and_no_more(tmp_path: Path) -> None:
    files = composed(tmp_path).files
    assert files["layers/cuda/wheels/expect.txt"].content() == b""
    assert files["layers/torch/wheels/expect.txt"].content() == b"needed==1.0\n"
    assert files["layers/torch/own/expect.txt"].content() == b"needed==1.0\ntorch==2.0+cpu\n"
    assert files["layers/sglang/own/expect.txt"].content().split() == [
        b"helper==3", b"needed==1.0", b"ours==1.0", b"sglang==0.5", b"torch==2.0+cpu"]


def test_image_json_holds_what_the_entrypoint_needs(tmp_path: Path) -> None:
    composition = composed(tmp_path)
    facts = json.loads(composition.files["image/sglang/image.json"].content())
    assert facts["key"] == composition.image("sglang").key.value
    assert facts["patches"][0]["name"] == "0001-change.patch"
    assert facts["patches"][0]["marker"] == "changed"
    assert facts["trees"] == {"sglang": "12" * 32}
    assert facts["profile"]["arms"]["eagle3"]["speculative-algorithm"] == "EAGLE3"
    below = json.loads(composition.files["image/torch/image.json"].content())
    assert below["profile"] is None
    assert below["patches"] == []
    assert set(below["packages"]) == {"torch", "needed"}


def test_tags_and_labels(tmp_path: Path) -> None:
    image = composed(tmp_path, revision="c0ffee").image("torch")
    assert image.tags == ("torch:2.0-small", f"torch:key-{image.key.value[:16]}")
    assert image.labels["org.opencontainers.image.version"] == "2.0-small"
    assert image.labels["org.opencontainers.image.revision"] == "c0ffee"
    assert image.labels["buildctl.key"] == image.key.value
    assert "buildctl.patches" not in image.labels


def test_the_bake_file_names_secrets_and_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    ca, netrc = tmp_path / "ca.pem", tmp_path / "netrc"
    bake = composed(tmp_path / "p", Host(ca, "https://user:secret@index.example", netrc, ())).bake
    text = json.dumps(bake)
    assert "secret@" not in text
    target: dict[str, Any] = bake["target"]["torch-image"]  # type: ignore[index]
    assert target["secret"] == [f"id=ca,src={ca}", "id=index,env=BUILDCTL_INDEX_CONFIG", f"id=netrc,src={netrc}"]
    assert target["args"]["HTTPS_PROXY"] == "${HTTPS_PROXY}"
    assert target["args"]["IMAGE"] == "torch"
    assert bake["variable"] == {"HTTPS_PROXY": {"default": ""}}


# --- keys: only what determines a layer counts, and everything that does ----------------------------------------------


def test_keys_do_not_depend_on_place_time_commit_or_key_order(tmp_path: Path) -> None:
    first = composed(tmp_path / "a", revision="one")
    text = "\n".join(reversed([block for block in STACK.split("\n") if block in ("targets: [cpu]", "tag: small")]))
    reordered = STACK.replace("targets: [cpu]\n", "").replace("tag: small\n", "") + text + "\n"
    second = composed(tmp_path / "b", stack_text=reordered, revision="two")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (0, 0))
    assert keys(first) == keys(second) == keys(again(tmp_path / "b"))


def test_the_entrypoint_is_on_top_and_never_below(tmp_path: Path) -> None:
    before = composed(tmp_path)
    (tmp_path / "entrypoints" / "__init__.py").write_text('"""changed"""\n')
    after = again(tmp_path)
    for image in before.images:
        assert image.chain == after.image(image.name).chain
        assert image.key != after.image(image.name).key


def test_a_patch_changes_its_layer_alone(tmp_path: Path) -> None:
    before = composed(tmp_path)
    path = tmp_path / "patches" / "sglang" / "0.5" / "0001-change.patch"
    path.write_text(path.read_text().replace('"changed"', '"changed!"'))
    after = again(tmp_path)
    assert keys(before)["cuda"] == keys(after)["cuda"]
    assert keys(before)["torch"] == keys(after)["torch"]
    moved = {part for part, value in after.image("sglang").chain.parts.items()
             if before.image("sglang").chain.parts.get(part) != value}
    assert moved == {"layers/sglang/patches"}


@pytest.mark.parametrize(("change", "layers"), [
    ("torch wheel", {"torch", "sglang"}), ("base", {"cuda", "torch", "sglang"}), ("fragment", {"torch", "sglang"}),
    ("local package", {"sglang"}), ("apt", {"cuda", "torch", "sglang"}), ("tools", {"cuda", "torch", "sglang"})])
def test_everything_that_determines_a_layer_is_in_its_key(tmp_path: Path, change: str, layers: set[str]) -> None:
    before = composed(tmp_path)
    changes: dict[str, Any] = {}
    match change:
        case "torch wheel":
            changes["wheels"] = (wheel("torch", "2.0+cpu", "torch", index="special", sha256="00" * 32),
                                 *before.lock.wheels[1:])
        case "base":
            changes["base"] = LockedBase("bootstrap", suite="trixie")
        case "fragment":
            path = tmp_path / "images" / "torch" / "Dockerfile"
            path.write_text(path.read_text() + "RUN more\n")
        case "local package":
            (tmp_path / "images" / "sglang" / "packages" / "ours" / "new.py").write_text("x = 1\n")
        case "apt":
            (tmp_path / "images" / "cuda" / "image.yaml").write_text("description: base\napt: [python3, gcc]\n")
        case "tools":
            changes["tools"] = (wheel("uv", "0.10", ""),)
    after = again(tmp_path, **changes)
    assert {name for name in keys(before) if keys(before)[name][0] != keys(after)[name][0]} == layers


@pytest.mark.parametrize(("file", "old", "new", "images", "reason"), [
    ("images/torch/image.yaml", "description: torch", "description: other", {"torch"}, "description"),
    ("images/stacks/small.yaml", "tag: small", "tag: other", {"cuda", "torch", "sglang"}, "version")])
def test_what_an_image_says_of_itself_is_in_its_key_and_in_no_chain(
        tmp_path: Path, file: str, old: str, new: str, images: set[str], reason: str) -> None:
    """Labels and annotations: else a build says that there is nothing to do, and `verify` finds the old ones."""
    before = composed(tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text().replace(old, new))
    after = again(tmp_path)
    assert {name for name in keys(before) if keys(before)[name][1] != keys(after)[name][1]} == images
    assert {name: chain for name, (chain, _) in keys(before).items()} == \
        {name: chain for name, (chain, _) in keys(after).items()}
    planned = plan.make(after, (), plan.record_of(before.images))
    assert {change.image.name: change.reasons for change in planned.todo} == \
        dict.fromkeys(images, (f"label org.opencontainers.image.{reason}",))
    assert not any(change.chain for change in planned.todo)


def test_every_label_but_those_of_key_and_commit_is_in_the_key(tmp_path: Path) -> None:
    image = composed(tmp_path, revision="c0ffee").image("sglang")
    covered = {part.removeprefix("label ") for part in image.key.parts if part.startswith("label ")}
    assert set(image.labels) - covered == {"buildctl.key", "buildctl.chain", "org.opencontainers.image.revision"}
    assert f"stage {image.name}" in image.key.parts  # the chain's key


@pytest.mark.parametrize("inside", ["ours/src/local/mod.py", "local/mod.py"])
def test_a_folder_called_local_within_a_package_of_ours_counts(tmp_path: Path, inside: str) -> None:
    make(tmp_path)
    packages = tmp_path / "images" / "sglang" / "packages"
    if inside.startswith("local/"):
        shutil.move(packages / "ours", packages / "local")
        path = tmp_path / "images" / "stacks" / "small.yaml"
        path.write_text(path.read_text().replace("packages/ours", "packages/local"))
    module = packages / inside
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text("x = 1\n")
    before = again(tmp_path)
    module.write_text("x = 2\n")
    after = again(tmp_path)
    assert f"layers/sglang/own/packages/{inside}" in after.files
    assert before.image("sglang").chain != after.image("sglang").chain
    assert before.image("torch").chain == after.image("torch").chain


@pytest.mark.parametrize("line", ["RUN --mount=target=/x true", "COPY . /x", "COPY layers/* /x", "COPY ${WHAT} /x"])
def test_a_step_that_reads_what_no_key_holds_is_refused(tmp_path: Path, line: str) -> None:
    make(tmp_path)
    for name in ("torch", "runtime"):
        path = tmp_path / "images" / name / "Dockerfile"
        path.write_text(path.read_text() + f"{line}\n")
    with pytest.raises(ManifestError, match="a step reads what no key can hold") as error:
        again(tmp_path)
    assert [problem.where for problem in error.value.problems] == [
        f"stage '{name}'" for name in ("torch", "cuda-image", "torch-image", "sglang-image")]


@pytest.mark.parametrize("line", ["RUN --mount=src=layers/sglang/patches,target=/x true",
                                  'COPY ["layers/sglang/patches", "/x"]', "COPY ./layers/sglang/patches/ /x"])
def test_what_a_step_reads_is_in_its_key_however_it_is_written(tmp_path: Path, line: str) -> None:
    make(tmp_path)
    path = tmp_path / "images" / "torch" / "Dockerfile"
    path.write_text(path.read_text() + f"{line}\n")
    before = again(tmp_path)
    patch = tmp_path / "patches" / "sglang" / "0.5" / "0001-change.patch"
    patch.write_text(patch.read_text().replace('"changed"', '"changed!"'))
    assert before.image("torch").chain != again(tmp_path).image("torch").chain


def test_the_lines_of_a_heredoc_count(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "images" / "torch" / "Dockerfile"
    path.write_text(path.read_text() + "RUN <<EOF\nfirst\nEOF\n")
    before = again(tmp_path)
    path.write_text(path.read_text().replace("first", "second"))
    assert before.image("torch").chain != again(tmp_path).image("torch").chain


def test_comments_and_a_local_wheel_do_not_change_a_key(tmp_path: Path) -> None:
    before = composed(tmp_path / "p")
    path = tmp_path / "p" / "images" / "torch" / "Dockerfile"
    path.write_text("# a remark\n" + path.read_text())
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.0+cpu-py3-none-any.whl").write_bytes(b"wheel")
    after = again(tmp_path / "p", Host(None, None, None, (wheels,)))
    assert keys(before) == keys(after)
    assert "layers/torch/own/local/special.complete" in after.files


# --- what cannot be composed -----------------------------------------------------------------------------------------


def test_a_fragment_that_uses_an_unknown_stage(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "images" / "torch" / "Dockerfile").write_text("FROM parent AS layer\nCOPY --from=nobody /a /b\n")
    with pytest.raises(ManifestError, match="uses a stage that nothing defines") as error:
        again(tmp_path)
    assert "nobody" in str(error.value)


def test_a_fragment_whose_last_stage_has_another_name(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "images" / "torch" / "Dockerfile").write_text("FROM parent AS torch\nRUN x\n")
    with pytest.raises(ManifestError, match="the last stage of image 'torch' has the wrong name"):
        again(tmp_path)


def test_a_lock_without_the_package_that_gives_the_version(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ManifestError, match="the lock has no 'torch'"):
        again(tmp_path, wheels=(wheel("sglang", "0.5", "sglang"),))


def test_a_local_package_without_a_version(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "images" / "sglang" / "packages" / "ours" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(ManifestError, match="no name and version"):
        again(tmp_path)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_rendering_is_written_once_and_then_left_alone(tmp_path: Path) -> None:
    composition = composed(tmp_path / "p")
    folder = tmp_path / "out"
    context.write(composition.written(), folder)
    assert (folder / "Dockerfile").read_text() == composition.dockerfile
    assert json.loads((folder / "docker-bake.json").read_text()) == composition.bake
    assert (folder / "bin/wheels/install").stat().st_mode & 0o777 == 0o755
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    (folder / "layers" / "stale").mkdir()
    (folder / "layers" / "stale" / "file").write_text("old")
    (folder / "Dockerfile").write_text("changed by hand")
    context.write(composition.written(), folder)
    assert not (folder / "layers" / "stale").exists()
    assert (folder / "Dockerfile").read_text() == composition.dockerfile
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert {path for path in times if times[path] != after[path]} == {folder / "Dockerfile"}


def test_a_wheel_of_the_wheelhouse_with_another_hash_is_refused(tmp_path: Path) -> None:
    composed(tmp_path / "p")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.0+cpu-py3-none-any.whl").write_bytes(b"not it")
    composition = again(tmp_path / "p", Host(None, None, None, (wheels,)))
    with pytest.raises(ManifestError, match="is not the one that the lock names"):
        context.write(composition.written(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_good_wheel_is_linked(tmp_path: Path) -> None:
    import hashlib

    composed(tmp_path / "p")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    source = wheels / "torch-2.0+cpu-py3-none-any.whl"
    source.write_bytes(b"it")
    good = wheel("torch", "2.0+cpu", "torch", index="special", sha256=hashlib.sha256(b"it").hexdigest())
    host = Host(None, None, None, (wheels,))
    composition = again(tmp_path / "p", host, wheels=(good, wheel("sglang", "0.5", "sglang")))
    for _ in range(2):
        context.write(composition.written(), tmp_path / "out")
        assert (tmp_path / "out/layers/torch/own/local" / source.name).samefile(source)


def test_linking_falls_back_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("x")
    context.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"


def test_image_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="did you mean 'torch'"):
        composed(tmp_path).image("torhc")
    assert "torch" in IMAGES
    assert composing.version_of.__doc__
    shutil.rmtree(tmp_path)


def test_buildkits_attestations_are_for_those_who_ask(tmp_path: Path) -> None:
    plain = composed(tmp_path)
    off = ["type=provenance,disabled=true", "type=sbom,disabled=true"]

    def attest(composition: Composition, target: str) -> Any:
        return json.loads(composition.written()["docker-bake.json"].content())["target"][target]["attest"]

    assert plain.attested(()) is plain
    asked = plain.attested(["type=provenance,mode=max"])
    assert attest(asked, "sglang-image") == ["type=provenance,mode=max", "type=sbom,disabled=true"]
    assert attest(asked, "chain-sglang") == off  # what others build on stays what its key says
    assert attest(plain, "sglang-image") == off
    assert keys(asked) == keys(plain)
    with pytest.raises(UsageError, match="not an attestation"):
        plain.attested(["mode=max"])


@pytest.mark.parametrize("spec", ["type=provenance,mode=max", "type=provenance", "type=provenance,MODE=max",
                                  "type=provenance,mode=min,mode=max"])
def test_an_attestation_that_would_publish_a_proxys_login_is_refused(tmp_path: Path, spec: str) -> None:
    plain = composed(tmp_path)
    with pytest.raises(UsageError, match="would publish the login of a proxy") as error:
        plain.attested([spec], ["HTTPS_PROXY"])
    assert error.value.exit_code == 2
    (problem,) = error.value.problems
    assert ("HTTPS_PROXY" in problem.found, "mode=min" in problem.todo) == (True, True)
    assert plain.attested([spec]) is not plain
    assert plain.attested(["type=provenance,mode=min", "type=sbom"], ["HTTPS_PROXY"]) is not plain


def test_labels_are_annotations_too_and_the_standards_own(tmp_path: Path) -> None:
    composition = composed(tmp_path, revision="c" * 40)
    target = json.loads(composition.written()["docker-bake.json"].content())["target"]["sglang-image"]
    assert target["annotations"] == [f"manifest:{name}={value}" for name, value in target["labels"].items()]
    labels = composition.image("sglang").labels
    assert labels["org.opencontainers.image.revision"] == "c" * 40
    assert labels["buildctl.lock"] == hashlib.sha256(composition.files["image/sglang/lock.json"].content()).hexdigest()
    # image specification 1.1, annotations.md
    standard = {"created", "authors", "url", "documentation", "source", "version", "revision", "vendor", "licenses",
                "ref.name", "title", "description", "base.digest", "base.name"}
    prefix = "org.opencontainers.image."
    assert {name.removeprefix(prefix) for name in labels if name.startswith(prefix)} <= standard


def test_too_many_layers_are_known_before_the_build(tmp_path: Path) -> None:
    project, loaded, lock = ready(tmp_path)
    path = project.images / "torch" / "Dockerfile"
    composition = compose(project, loaded, lock, NO_HOST)
    room = budget.MOST_LAYERS - fragment.layers(composition.stages, "sglang-image")
    assert 100 < room < 120
    path.write_text(path.read_text() + "RUN true\n" * (room - 1) + "ENV A=1\nCOPY --from=tools /x /x\n")
    loaded = stack.load(project, "small")
    compose(project, loaded, lock, NO_HOST)
    path.write_text(path.read_text() + "WORKDIR /x\n")
    with pytest.raises(ManifestError) as error:
        compose(project, stack.load(project, "small"), lock, NO_HOST)
    (problem,) = error.value.problems
    assert problem.what == "image 'sglang' has too many layers"
    assert (problem.found, problem.expected) == ("128", "at most 127 in all that it stands on")
