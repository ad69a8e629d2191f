"""Composition: one multi-stage Dockerfile, one build context and one bake file from a stack and its lock.

What comes out is plain: it can be read, linted, and built with `docker buildx bake` and without buildctl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from buildctl import budget, compat, context, fragment, patches
from buildctl import lock as locks
from buildctl.context import File
from buildctl.errors import ManifestError, Problem, UsageError
from buildctl.fragment import Stage
from buildctl.host import PROXIES, Host
from buildctl.image import TOOLS, LayerImage
from buildctl.image_config import CHAIN_LABEL, KEY_LABEL, LOCK_LABEL, STACK_LABEL
from buildctl.lock import Lock, Wheel, digest
from buildctl.manifest import Problems
from buildctl.project import Project
from buildctl.stack import Stack

# names that fragments may stand on, or give their last stage
_BASE, _PARENT, _LAYER = "base", "parent", "layer"
#: the stages that all images mount or copy from: the tools, and on top of them the entrypoint's environment
_SHARED = ("tools", "entrypoint-env")
#: part of every key: raise it when the meaning of a composition changes
_FORMAT = 2
#: what BuildKit can attest
_ATTESTATIONS = ("provenance", "sbom")
#: where the bootstrapped base lies in the context
BASE_TAR = "base/base.tar"
#: the environment variable that lends the host's index settings to a build, as a BuildKit secret
INDEX_VARIABLE = "BUILDCTL_INDEX_CONFIG"


@dataclass(frozen=True, slots=True)
class Key:
    """A content key and what it was made from, so that a change can be explained."""

    value: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """One tagged image of the composition."""

    name: str
    version: str
    chain: Key
    key: Key
    tags: tuple[str, ...]
    labels: Mapping[str, str]
    wheels: tuple[Wheel, ...]
    patches: tuple[str, ...]

    @property
    def stage(self) -> str:
        """The stage of the Dockerfile, and the bake target, that makes it."""
        return f"{self.name}-image"


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A stage that is published under its key, so that another builder can go on from there."""

    stage: str
    tag: str
    key: str

    @property
    def target(self) -> str:
        """The bake target that makes it."""
        return f"chain-{self.stage}"


@dataclass(frozen=True, slots=True)
class Composition:
    """Everything that a build needs."""

    stack: Stack
    lock: Lock
    stages: tuple[Stage, ...]
    bake: Mapping[str, object]
    #: the build context without the base, which is made when a build needs it
    files: Mapping[str, File]
    images: tuple[ImagePlan, ...]
    #: in build order, so the last of them that exists is the best to go on from
    chain: tuple[ChainStage, ...]

    @property
    def dockerfile(self) -> str:
        """The text of the Dockerfile."""
        return _header(self.stack) + "\n".join(stage.text() for stage in self.stages)

    def resumed(self, found: Mapping[str, str]) -> Composition:
        """The same composition with stages taken from where they were published.

        :param found: stage -> image reference, by digest.
        """
        stages = tuple(Stage(stage.name, found[stage.name], "") if stage.name in found else stage
                       for stage in self.stages)
        return replace(self, stages=stages)

    def attested(self, specifications: Iterable[str], secrets: Sequence[str] = ()) -> Composition:
        """The same composition with BuildKit's own attestations for its images, as `docker buildx build --attest` takes
        them: the digest then names an index, and is another at every build.

        :param secrets: names of build arguments that hold a secret. BuildKit writes all arguments into its provenance,
            unless its mode is `min`; its default is `max`.
        :raises UsageError: one is no `type=provenance` or `type=sbom`, or would publish a secret.
        """
        wanted: dict[str, str] = {}
        for text in specifications:
            fields = {name.strip().lower(): value for name, _, value in (part.partition("=") for part in
                                                                         text.split(","))}
            kind = fields.get("type", "")
            if kind == "provenance" and fields.get("mode") != "min" and secrets:
                raise UsageError(Problem("this attestation would publish the login of a proxy, among the arguments of "
                                         "the build", f"--buildkit-attest {text}",
                                         f"a login in {', '.join(secrets)}", "proxies without a login, or mode=min, "
                                         "which leaves arguments out", "--buildkit-attest type=provenance,mode=min"))
            if kind not in _ATTESTATIONS:
                raise UsageError(Problem("not an attestation of BuildKit", "--buildkit-attest", text,
                                         "type=provenance[,mode=max] or type=sbom", "write it as for buildx"))
            wanted[kind] = text
        if not wanted:
            return self
        bake = json.loads(json.dumps(self.bake))
        for image in self.images:
            bake["target"][image.stage]["attest"] = [wanted.get(kind, f"type={kind},disabled=true")
                                                     for kind in _ATTESTATIONS]
        return replace(self, bake=bake)

    def reached(self, targets: Iterable[str]) -> set[str]:
        """The stages that building these stages needs."""
        by_name = {stage.name: stage for stage in self.stages}
        open_ends, seen = list(targets), set()
        while open_ends:
            name = open_ends.pop()
            if name in by_name and name not in seen:
                seen.add(name)
                open_ends.extend(by_name[name].stages_used())
        return seen

    def written(self) -> dict[str, File]:
        """Everything that `render` writes, by path."""
        return {**self.files, "Dockerfile": File(self.dockerfile.encode()),
                "docker-bake.json": File(json.dumps(self.bake, indent=1).encode() + b"\n")}

    def image(self, name: str) -> ImagePlan:
        """The image of that name.

        :raises ManifestError: the stack has none.
        """
        self.stack.layer(name)
        return next(image for image in self.images if image.name == name)


def compose(project: Project, stack: Stack, lock: Lock, host: Host, revision: str = "") -> Composition:
    """Join the fragments of a stack.

    :param revision: the commit of the checkout, for a label; not part of any key.
    :raises ManifestError: with everything in the fragments that cannot be joined.
    """
    problems = Problems()
    files = {**context.collect(project, stack, lock, host.local_wheels()), **context.debs(stack, host)}
    stages = _chain(project, stack, lock, problems)
    runtime = _stages(project, stack.runtime, problems)
    problems.raise_any()
    keys = _stage_keys(stages, files, lock, problems)
    chain = _published(stack, stages, keys)
    images = []
    for layer in stack.layers:
        *aside, stage = _image_stages(stack, layer, runtime)
        facts = _facts(project, stack, lock, layer)
        name = f"image/{layer.name}/image.json"
        files.update(_etc(project, stack, lock, layer))
        files[name] = _json_file(facts)
        args = {"IMAGE": layer.name}
        for one in aside:
            keys[one.name] = _stage_key(one, files, keys, args, problems)
        labels = labels_of(stack, lock, layer)
        key = _with_labels(_stage_key(stage, files, keys, args, problems), labels)
        # the key joins the file after it is made: everything else in the file is part of the key
        files[name] = _json_file({**facts, "key": key.value})
        stages += [*aside, stage]
        images.append(_image(stack, lock, layer, keys[layer.name], key, labels, revision))
    _check_layers(project, stack, stages, problems)
    problems.raise_any()
    return Composition(stack, lock, tuple(stages), _bake(stack, lock, images, chain, host), files, tuple(images), chain)


def _check_layers(project: Project, stack: Stack, stages: Sequence[Stage], problems: Problems) -> None:
    """The limit that no engine gets past, before a long build runs into it; layers of a base image come on top."""
    for layer in stack.layers:
        count = fragment.layers(stages, f"{layer.name}-image")
        if count > budget.MOST_LAYERS:
            problems.add(f"image '{layer.name}' has too many layers", project.shown(layer.folder / "Dockerfile"),
                         found=str(count), expected=f"at most {budget.MOST_LAYERS} in all that it stands on",
                         todo="join RUN and COPY steps")


def _json_file(value: object) -> File:
    return File(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


# --- stages ----------------------------------------------------------------------------------------------------------


def _stages(project: Project, image: LayerImage, problems: Problems) -> tuple[Stage, ...]:
    where = project.shown(image.folder / "Dockerfile")
    stages = fragment.parse(image.dockerfile, where, problems)
    if image.name != TOOLS and stages and stages[-1].name != _LAYER:
        problems.add(f"the last stage of image '{image.name}' has the wrong name", where, found=stages[-1].name,
                     expected=f"AS {_LAYER}")
    return stages


def _chain(project: Project, stack: Stack, lock: Lock, problems: Problems) -> list[Stage]:
    """The base, the tools and the layers as stages, each layer's last stage called like the layer."""
    chain = [_base_stage(lock), *_stages(project, stack.tools, problems)]
    shared = {stage.name for stage in chain}
    parent = _BASE
    for layer in stack.layers:
        own = _stages(project, layer, problems)
        names = {stage.name: f"{layer.name}-{stage.name}" for stage in own}
        names[_LAYER] = layer.name
        names[_PARENT] = parent
        known = {*names, *shared}
        for stage in own:
            for used in stage.stages_used():
                if used not in known:
                    problems.add(f"stage '{stage.name}' of image '{layer.name}' uses a stage that nothing defines",
                                 project.shown(layer.folder / "Dockerfile"), found=used,
                                 expected=f"parent, {', '.join(sorted(known - {_PARENT}))}")
            chain.append(stage.renamed(names))
        parent = layer.name
    return chain


def _published(stack: Stack, stages: Iterable[Stage], keys: Mapping[str, Key]) -> tuple[ChainStage, ...]:
    """The stages that are worth publishing: those of the layers, and those that all images share."""
    owners = {layer.name: layer.name for layer in stack.layers}
    found = []
    for stage in stages:
        layer = next((name for name in owners if stage.name == name or stage.name.startswith(f"{name}-")), None)
        repository = layer or ("entrypoint" if stage.name in _SHARED else None)
        if repository is not None:
            key = keys[stage.name].value
            found.append(ChainStage(stage.name, f"{repository}:chain-{key[:16]}", key))
    return tuple(found)


def _image_stages(stack: Stack, layer: LayerImage, runtime: Iterable[Stage]) -> list[Stage]:
    """The stages that make an image of a layer. The first one gets the stack's environment: the guard reads it, too."""
    found = tuple(runtime)
    names = {stage.name: f"{layer.name}-{stage.name}" for stage in found}
    names[_PARENT] = layer.name
    names[_LAYER] = f"{layer.name}-image"
    renamed = [stage.renamed(names) for stage in found]
    environment = "".join(f"ENV {name}={json.dumps(value, ensure_ascii=False)}\n"
                          for name, value in sorted(stack.environment.items()))
    return [replace(renamed[0], body=renamed[0].body.rstrip("\n") + "\n" + environment), *renamed[1:]]


def _base_stage(lock: Lock) -> Stage:
    if lock.base.source == "bootstrap":
        return Stage(_BASE, "scratch", f"ADD {BASE_TAR} /\n")
    # without a digest: an unlocked base, which builds refuse unless that is allowed
    return Stage(_BASE, lock.base.pinned, "")


def _header(stack: Stack) -> str:
    return (f"# Composed by buildctl from the stack '{stack.name}'. Do not edit: edit the fragments under images/.\n"
            "# By hand, in this folder: docker buildx bake -f docker-bake.json\n\n")


def _stage_keys(stages: Iterable[Stage], files: Mapping[str, File], lock: Lock, problems: Problems) -> dict[str, Key]:
    base = lock.base
    identity = digest([base.source, base.image, base.digest, base.suite, list(base.include), base.snapshot,
                       lock.platform, lock.debian.get("base", {})])
    keys: dict[str, Key] = {}
    for stage in stages:
        keys[stage.name] = Key(identity, {"base": identity}) if stage.name == _BASE \
            else _stage_key(stage, files, keys, {}, problems)
    return keys


def _stage_key(stage: Stage, files: Mapping[str, File], keys: Mapping[str, Key], args: Mapping[str, str],
               problems: Problems) -> Key:
    """The key of a stage: its text, the stages and the context files that it reads. Times and modes do not count."""
    text = [list(fragment.instructions(stage.body)), list(fragment.heredocs(stage.body))]
    parts: dict[str, str] = {"instructions": digest([_FORMAT, *text])}
    for used in stage.stages_used():
        if used in keys:
            parts[f"stage {used}"] = keys[used].value
    for path in stage.paths_used():
        for name, value in args.items():
            path = path.replace(f"${{{name}}}", value)  # noqa: PLW2901 - the path as this target sees it
        if not context.holds(files, path):
            problems.add("a step reads what no key can hold", f"stage '{stage.name}'", found=path,
                         expected="a file or folder of the build context by its name, no pattern, variable or '.'",
                         todo="name it in the Dockerfile of the image; `buildctl render` shows the context")
        parts[path] = digest(context.digest_part(files, path))
    return Key(digest(sorted(parts.items())), parts)


def _with_labels(key: Key, labels: Mapping[str, str]) -> Key:
    """The key of an image: what its stage says, and what it says of itself by stack and lock (not by the commit)."""
    parts = {**key.parts, **{f"label {name}": digest(value) for name, value in labels.items()}}
    return Key(digest(sorted(parts.items())), parts)


# --- what travels in the image ---------------------------------------------------------------------------------------


def _below(stack: Stack, layer: LayerImage) -> tuple[LayerImage, ...]:
    return stack.layers[: stack.layers.index(layer) + 1]


def _facts(project: Project, stack: Stack, lock: Lock, layer: LayerImage) -> dict[str, object]:
    """image.json without its key; its form is described in docs/architecture.md."""
    below = _below(stack, layer)
    part = locks.restrict(lock, below)
    applied = []
    for package, locked in sorted(part.patches.items()):
        for patch in patches.read_series(project.patches / locked.folder).patches:
            applied.append({"package": package, "name": patch.name, "sha256": patch.sha256,
                            "concern": patch.header.concern, "marker": patch.header.marker,
                            "targets": list(patch.header.targets)})
    return {
        "schema": 1,
        "image": layer.name,
        "version": version_of(stack, lock, layer),
        "stack": stack.name,
        "lock_sha256": locks.text_digest(part),
        "targets": list(stack.targets),
        "cuda": stack.cuda.version if stack.cuda else None,
        # the lowest branch of the NVIDIA driver
        "driver": compat.driver_floor(stack),
        # what was built without a hash (build --allow-unlocked)
        "unlocked": list(part.open_ends),
        "python": "/opt/venv/bin/python",
        "packages": {wheel.name: wheel.version for wheel in part.wheels},
        "patches": applied,
        "trees": {package: locked.tree for package, locked in sorted(part.patches.items())},
        # only the whole chain holds a server to run
        "profile": stack.profile.as_dict() if layer is stack.layers[-1] else None,
    }


def _etc(project: Project, stack: Stack, lock: Lock, layer: LayerImage) -> dict[str, File]:
    prefix = f"image/{layer.name}"
    part = locks.restrict(lock, _below(stack, layer))
    files = {f"{prefix}/lock.json": File(locks.dump(part).encode())}
    for package, locked in part.patches.items():
        files.update(context.series(project, package, locked.folder, f"{prefix}/patches"))
    return files


def version_of(stack: Stack, lock: Lock, layer: LayerImage) -> str:
    """The version of an image: its package's, else the CUDA version, else `none`."""
    if layer.version_of is None:
        return stack.cuda.version if stack.cuda else "none"
    version = lock.version(layer.version_of)
    if version is None:
        raise ManifestError(Problem(f"the lock has no '{layer.version_of}', the version of image '{layer.name}'",
                                    stack.place, todo=f"require it in layer '{layer.name}', then run "
                                    f"`buildctl lock {stack.name}`"))
    return version.split("+")[0]


def labels_of(stack: Stack, lock: Lock, layer: LayerImage) -> dict[str, str]:
    """What an image says of itself by stack and lock alone: labels in its config, annotations on its manifest."""
    part = locks.restrict(lock, _below(stack, layer))
    base = lock.base
    labels = {
        "org.opencontainers.image.title": layer.name,
        "org.opencontainers.image.description": layer.description,
        "org.opencontainers.image.version": f"{version_of(stack, lock, layer)}-{stack.tag}",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": base.image or f"bootstrap:{base.suite}",
        "org.opencontainers.image.base.digest": base.digest,
        STACK_LABEL: stack.name,
        LOCK_LABEL: locks.text_digest(part),
        "buildctl.targets": ",".join(stack.targets),
        "buildctl.cuda": stack.cuda.version if stack.cuda else "",
        "buildctl.driver": compat.driver_floor(stack) or "",
        "buildctl.patches": ",".join(f"{package}@{one.tree[:16]}" for package, one in sorted(part.patches.items())),
    }
    return {name: value for name, value in labels.items() if value}


def _image(stack: Stack, lock: Lock, layer: LayerImage, chain: Key, key: Key, labels: Mapping[str, str],
           revision: str) -> ImagePlan:
    version = version_of(stack, lock, layer)
    labels = {**labels, KEY_LABEL: key.value, CHAIN_LABEL: chain.value,
              "org.opencontainers.image.revision": revision}
    return ImagePlan(layer.name, version, chain, key,
                     (f"{layer.name}:{version}-{stack.tag}", f"{layer.name}:key-{key.value[:16]}"),
                     {name: value for name, value in labels.items() if value}, lock.share(layer.name),
                     tuple(name for package in layer.patches if package in lock.patches
                           for name, _ in lock.patches[package].patches))


def _bake(stack: Stack, lock: Lock, images: Iterable[ImagePlan], chain: Iterable[ChainStage],
          host: Host) -> dict[str, object]:
    secrets = []
    if host.ca is not None:
        secrets.append(f"id=ca,src={host.ca}")
    if host.index is not None:
        secrets.append(f"id=index,env={INDEX_VARIABLE}")
    if host.netrc is not None:
        secrets.append(f"id=netrc,src={host.netrc}")
    proxies = [name for name in PROXIES if os.environ.get(name)]
    bottom = host.layout(lock.base.digest) if lock.base.digest else None

    def target(stage: str, tags: Iterable[str], labels: Mapping[str, str], **args: str) -> dict[str, object]:
        return {
            "context": ".",
            "dockerfile": "Dockerfile",
            "target": stage,
            "platforms": [stack.platform],
            "args": {**args, "SOURCE_DATE_EPOCH": str(lock.epoch), **{name: f"${{{name}}}" for name in proxies}},
            "labels": dict(labels),
            # of the manifest: registries and their tools show these without reading the config
            "annotations": [f"manifest:{name}={value}" for name, value in labels.items()],
            "tags": list(tags),
            "secret": secrets,
            **({"network": "none"} if host.offline else {}),
            **({"contexts": {_BASE: f"oci-layout://{bottom}@{lock.base.digest}"}} if bottom else {}),
            # one manifest and no attestations: the same inputs give the same digest
            "attest": [f"type={kind},disabled=true" for kind in _ATTESTATIONS],
            "output": ["type=image,oci-mediatypes=true,compression=zstd"],
        }

    targets = {image.stage: target(image.stage, image.tags, image.labels, IMAGE=image.name) for image in images}
    bake: dict[str, object] = {
        "group": {"default": {"targets": list(targets)}, "chain": {"targets": [stage.target for stage in chain]}},
        "target": {**targets, **{stage.target: target(stage.stage, [stage.tag], {KEY_LABEL: stage.key,
                                                                                 STACK_LABEL: stack.name})
                                 for stage in chain}}}
    if proxies:
        bake["variable"] = {name: {"default": ""} for name in proxies}
    return bake
