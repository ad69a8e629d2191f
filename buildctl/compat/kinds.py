"""The engine: one function per kind of rule. Each reads a view and yields findings; what it looks for is data."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from buildctl import fragment
from buildctl.compat.rules import Finding, Rule
from buildctl.compat.view import Package, View
from buildctl.lock import PUBLIC
from buildctl.manifest import Scalar
from buildctl.stack import TARGETS

Kind = Callable[[Rule, View], Iterator[Finding]]
#: nvidia-nccl-cu12, flashinfer-jit-cache-cu129, cupy-cuda12x, tensorrt-cu12-libs
_SUFFIX = re.compile(r"-cu(?:da)?(\d\d)(?:\d|x)?(?=-|$)")


def _matching(view: View, text: str) -> Package | None:
    """The package of a requirement such as `torch==2.9.1`, when it is there in such a version."""
    requirement = Requirement(text)
    package = view.packages.get(canonicalize_name(requirement.name))
    return package if package is not None and package.fits(requirement.specifier) else None


# --- CUDA ------------------------------------------------------------------------------------------------------------


def target_cuda(rule: Rule, view: View) -> Iterator[Finding]:
    """A GPU target needs a CUDA version. `minimum`: target -> version."""
    for target in view.gpus:
        least = rule.options["minimum"].get(target)
        if not view.cuda:
            yield Finding(target, f"target {target} is a GPU and the stack has no CUDA", "", "a 'cuda' in the stack")
        elif least is not None and Version(view.cuda) < Version(least):
            yield Finding(target, f"SM {_capability(target)} needs CUDA {least} or later", f"CUDA {view.cuda}",
                          f"CUDA {least} or later for {target}")


def _capability(target: str) -> str:
    major = TARGETS[target].partition(".")[0]
    return f"{major}.x" if major == "12" else TARGETS[target]


def cuda_major(rule: Rule, view: View) -> Iterator[Finding]:  # noqa: ARG001 - one signature for all kinds
    """One CUDA major: by the suffix of names, by local labels, and in what the stack asks for."""
    if not view.cuda:
        return
    major = view.cuda.partition(".")[0]
    for package in view.packages.values():
        suffix = _SUFFIX.search(package.name)
        other = suffix[1] if suffix else package.cuda.partition(".")[0]
        if other and other != major:
            yield Finding(package.name, f"a library for CUDA {other} in a stack for CUDA {major}",
                          f"{package}: {view.chain(package.name)}", f"builds for CUDA {major} alone")
    for text, place in (*((rule.text, rule.place) for rule in view.stack.overrides),
                        *((text, view.stack.place) for texts in view.stack.requirements.values() for text in texts)):
        name = canonicalize_name(Requirement(text).name)
        suffix = _SUFFIX.search(name)
        if suffix and suffix[1] != major and name not in view.packages:
            yield Finding(name, f"the stack asks for a library of CUDA {suffix[1]}", text,
                          f"builds for CUDA {major} alone", place)


def cuda_minor(rule: Rule, view: View) -> Iterator[Finding]:
    """Packages whose versions are CUDA's, and local labels: the minor is the stack's. `packages`: names."""
    if not view.cuda:
        return
    wanted = Version(view.cuda).release
    for package in view.packages.values():
        if package.name in rule.options["packages"] and package.version.release[:2] != wanted:
            yield Finding(package.name, f"{package.name} is of another CUDA than the stack",
                          f"{package}: {view.chain(package.name)}", f"{view.cuda}.*")
        elif "." in package.cuda and package.cuda.partition(".")[0] == view.cuda.partition(".")[0] and \
                package.cuda != view.cuda:
            yield Finding(package.name, f"{package.name} is built for another CUDA than the stack", str(package),
                          f"+{view.words['cu']}")


def compiler(rule: Rule, view: View) -> Iterator[Finding]:
    """What compiles at run time needs the toolkit: a wheel of it, or a base image that holds it."""
    cuda, needed = view.stack.cuda, [name for name in rule.options["needed_by"] if name in view.packages]
    if cuda is None or not view.gpus or not needed:
        return
    wheel = rule.options["package"]
    if cuda.source == "wheels" and wheel not in view.packages:
        yield Finding(wheel, f"no compiler in the image, and {' and '.join(needed)} compile at run time",
                      f"no {wheel} in the lock", f"{wheel} {view.cuda}.*")
    image = view.stack.base.image or ""
    flavour = next((word for word in rule.options["base_without"] if word in image.partition("@")[0]), "")
    if cuda.source == "base" and flavour:
        yield Finding(wheel, f"the base has neither nvcc nor ptxas, and {' and '.join(needed)} compile at run time",
                      image, "a base image of the '-devel' flavour")


def environment(rule: Rule, view: View) -> Iterator[Finding]:
    """Variables that the image must set. `when`: a package, `targets`: GPUs (any when absent), `needs`: names."""
    targets = rule.options.get("targets", view.gpus)
    if rule.options["when"] not in view.packages or not set(targets) & set(view.gpus):
        return
    present = {variable.name for variable in view.variables}
    for name in rule.options["needs"]:
        if name not in present:
            yield Finding(name, f"the image does not set {name}", expected=f"{name} for {rule.options['when']}")


def first_on_path(rule: Rule, view: View) -> Iterator[Finding]:
    """The toolkit's programs come before the system's. `when`: a package, `home`: a variable, `before`: folders."""
    values = {variable.name: variable for variable in view.variables}
    home, path = values.get(rule.options["home"]), values.get("PATH")
    if rule.options["when"] not in view.packages or not view.gpus or home is None:
        return  # a missing home is another rule's
    wanted = f"{home.value.rstrip('/')}/bin"
    folders = [folder.rstrip("/") for folder in re.sub(rf"\$\{{?{home.name}\}}?", home.value,
                                                       path.value if path else "").split(":")]
    system = [folder for folder in folders if folder in rule.options["before"]]
    if wanted not in folders or (system and folders.index(wanted) > folders.index(system[0])):
        yield Finding("PATH", f"{wanted} is not ahead of the system's folders on PATH",
                      f"PATH={path.value}" if path else "no PATH in the image", f"{wanted} before {system[0]}"
                      if system else f"{wanted} on PATH", path.where if path else "")


def dockerfile(rule: Rule, view: View) -> Iterator[Finding]:
    """An instruction that no layer should have. `pattern`: a regular expression."""
    pattern = re.compile(rule.options["pattern"])
    for where, text in view.instructions:
        word, _ = fragment.split(text)
        if word != "ENV" and pattern.search(text):
            yield Finding(word, "a Dockerfile has a line that it should not have", text, "", where)
    for variable in view.variables:
        line = f"{variable.name}={variable.value}"
        if pattern.search(line):
            yield Finding(variable.name, "the environment has a value that it should not have", line, "",
                          variable.where)


# --- packages --------------------------------------------------------------------------------------------------------


def torch_cuda(rule: Rule, view: View) -> Iterator[Finding]:
    """The CUDA that torch is built for: by its label, else its METADATA, else the table `public`."""
    torch = view.packages.get("torch")
    if torch is None or not view.cuda:
        return
    if torch.label == "cpu":
        yield Finding("torch", "the stack is for GPUs and torch is the CPU build", str(torch), f"CUDA {view.cuda}")
        return
    if torch.label and torch.cuda:
        return  # labels are the business of the rules on CUDA's major and minor
    built = _built_for(torch) or next((row["cuda"] for row in rule.options["public"]
                                       if torch.index == PUBLIC and torch.fits(row["torch"])), "")
    if not built:
        yield Finding("torch", "not known for which CUDA this torch is built", str(torch), f"CUDA {view.cuda}",
                      level="warning")
    elif built != view.cuda:
        yield Finding("torch", f"torch is built for CUDA {built}", f"{torch} of index '{torch.index}'",
                      f"CUDA {view.cuda}")


def _built_for(torch: Package) -> str:
    for text in torch.requires or ():
        requirement = Requirement(text)
        if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu\d\d)?", requirement.name):
            pins = [item.version for item in requirement.specifier if item.operator == "=="]
            if pins:
                return ".".join(pins[0].split(".")[:2])
    return ""


def pairs(rule: Rule, view: View) -> Iterator[Finding]:
    """When one package is there in some versions, others must be in theirs. `pairs`: {when, needs}; `known`: packages
    that some pair must speak of."""
    for pair in rule.options["pairs"]:
        first = _matching(view, pair["when"])
        if first is None:
            continue
        for text in pair["needs"]:
            requirement = Requirement(text)
            second = view.packages.get(canonicalize_name(requirement.name))
            if second is not None and not second.fits(requirement.specifier):
                yield Finding(second.name, f"{second} does not fit {first}", f"{second}: {view.chain(second.name)}",
                              f"{second.name}{requirement.specifier} with {first}")
    for name in rule.options.get("known", ()):
        package = view.packages.get(name)
        if package is None or any(_matching(view, pair["when"]) for pair in rule.options["pairs"]):
            continue
        if not any(Requirement(text).name == "torch" for text in package.requires or ()):
            yield Finding(name, f"not known for which torch {package} is built: ABI not verified",
                          f"{package}, whose METADATA does not name torch", level="warning")


def wheel_cuda(rule: Rule, view: View) -> Iterator[Finding]:
    """The CUDA major of wheels without a label. `wheels`: {wheel, cuda}."""
    for row in rule.options["wheels"] if view.cuda else ():
        package = _matching(view, row["wheel"])
        if package is not None and not package.label and row["cuda"] != view.cuda.partition(".")[0]:
            yield Finding(package.name, f"{package} is linked to CUDA {row['cuda']}",
                          f"{package} of index '{package.index}', which needs libnvrtc.so.{row['cuda']}",
                          f"a wheel for CUDA {view.cuda}")


def wheel_targets(rule: Rule, view: View) -> Iterator[Finding]:
    """Wheels without code for some targets. `wheels`: requirements, `targets`: GPUs."""
    for text in rule.options["wheels"]:
        package = _matching(view, text)
        for target in rule.options["targets"] if package is not None else ():
            if target in view.gpus:
                yield Finding(str(package and package.name), f"{package} has no code for {target}", str(package),
                              f"code for SM {TARGETS[target]}")


def exclusive(rule: Rule, view: View) -> Iterator[Finding]:
    """Packages that exclude each other. `packages`: names."""
    present = [view.packages[name] for name in rule.options["packages"] if name in view.packages]
    if len(present) > 1:
        yield Finding(present[0].name, "two names of one package in one environment", " and ".join(map(str, present)),
                      "one of them")


def same(rule: Rule, view: View) -> Iterator[Finding]:
    """Packages of one public version. `packages`: names, the leading one first."""
    present = [view.packages[name] for name in rule.options["packages"] if name in view.packages]
    for package in present[1:]:
        if package.version.public != present[0].version.public:
            yield Finding(package.name, f"{package.name} and {present[0].name} are of different versions",
                          f"{package} with {present[0]}", f"{package.name}=={present[0].version.public}")


def shadowed(rule: Rule, view: View) -> Iterator[Finding]:
    """A package that is used in place of source that a series patches. `package`, `series`."""
    package = view.packages.get(rule.options["package"])
    series = view.lock.patches.get(rule.options["series"])
    if package is not None and series is not None:
        yield Finding(package.name, f"{package} is used in place of the source that {series.folder} patches",
                      f"{package}: {view.chain(package.name)}", "one of the two")


def metadata(rule: Rule, view: View) -> Iterator[Finding]:  # noqa: ARG001
    """What METADATA requires is there in a version that fits, or the stack overrides or excludes it with a reason."""
    replaced = {canonicalize_name(Requirement(entry.text).name) for entry in view.stack.overrides}
    excluded = {canonicalize_name(Requirement(entry.text).name) for entry in view.stack.excludes}
    unlocked = {entry.name for entry in view.lock.unlocked}
    unread = []
    for package in view.packages.values():
        if package.requires is None and package.locked:
            unread.append(package.name)
        for text in package.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            there = view.packages.get(name)
            if there is None and name not in excluded | unlocked:
                yield Finding(name, f"{package} requires {text}, and the lock has none", f"no {name}", text)
            elif there is not None and not there.fits(requirement.specifier) and name not in replaced:
                yield Finding(name, f"{package} requires {text}, the stack has {there.version}",
                              f"{there}: {view.chain(name)}", text)
    if unread:
        yield Finding("", f"the METADATA of {len(unread)} wheels is not in the lock", ", ".join(unread[:6]) +
                      (" ..." if len(unread) > 6 else ""), "an index that serves METADATA or byte ranges",
                      level="warning")


def overlaps(rule: Rule, view: View) -> Iterator[Finding]:
    """Two wheels that own one file with different content. `harmless`: patterns of paths."""
    def harmless(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in rule.options["harmless"])

    for pair in view.lock.overlaps:
        if pair.files <= len(pair.paths) and all(map(harmless, pair.paths)):
            continue
        telling = next((path for path in pair.paths if not harmless(path)), pair.paths[0])
        more = f" and {pair.files - 1} more" if pair.files > 1 else ""
        names = " and ".join(str(view.packages.get(name, name)) for name in (pair.first, pair.second))
        yield Finding(pair.first, f"both install {telling}{more}", names, "one owner for every file")


def ranges(rule: Rule, view: View) -> Iterator[Finding]:
    """Compiled packages that the stack asks for by a range. `packages`: names."""
    pinned = {canonicalize_name(Requirement(entry.text).name) for entry in (*view.stack.constraints,
              *view.stack.overrides) if _pins(Requirement(entry.text))}
    for layer, texts in view.stack.requirements.items():
        for text in texts:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name in rule.options["packages"] and name not in pinned and not _pins(requirement):
                yield Finding(name, f"layer {layer} asks for the compiled package {name} by a range", text,
                              f"{name}==VERSION")


def _pins(requirement: Requirement) -> bool:
    return any(item.operator in ("==", "===") and not item.version.endswith(".*") for item in requirement.specifier)


# --- the profile -----------------------------------------------------------------------------------------------------


def variables(rule: Rule, view: View) -> Iterator[Finding]:
    """Variables that should not be set. `names`; `sglang`: in which versions (any when absent)."""
    if "sglang" in rule.options and not view.sglang_in(rule.options["sglang"]):
        return
    for variable in view.variables:
        if variable.name in rule.options["names"] and variable.value.lower() not in ("", "0", "false"):
            yield Finding(variable.name, f"{variable.name} is set", f"{variable.name}={variable.value}", "",
                          variable.where)


def profile_version(rule: Rule, view: View) -> Iterator[Finding]:  # noqa: ARG001
    """The profile is for the locked SGLang."""
    named = view.stack.profile.sglang
    if view.sglang is not None and named != view.sglang.public:
        yield Finding("sglang", "the profile is for another SGLang than the lock has", f"profile: {named}",
                      view.sglang.public)


def _speculating(view: View) -> dict[str, Mapping[str, Scalar]]:
    """Arms with speculation, with what `server` gives them."""
    merged = {arm: {**view.stack.profile.server, **flags} for arm, flags in view.stack.profile.arms.items()}
    return {arm: flags for arm, flags in merged.items() if flags.get("speculative-algorithm")}


def _groups(view: View) -> dict[str, Mapping[str, Scalar]]:
    return {"server": view.stack.profile.server, **view.stack.profile.arms}


def attention(rule: Rule, view: View) -> Iterator[Finding]:
    """The attention backend is named and runs on the targets. `bad`: {backend, sglang, use: all | prefill}."""
    targets = [target for target in rule.options["targets"] if target in view.gpus]
    if not targets or view.sglang is None:
        return
    good = ", ".join(rule.options["good"])
    shown = ", ".join(targets)
    for arm, own in view.stack.profile.arms.items():
        flags = {**view.stack.profile.server, **own}
        both = flags.get("attention-backend")
        prefill, decode = (flags.get(f"{part}-attention-backend", both) for part in ("prefill", "decode"))
        if prefill is None or decode is None:
            yield Finding("attention-backend", f"arm {arm} leaves the attention backend on {shown} to SGLang's choice",
                          "no attention-backend", f"one of: {good}")
        for part, backend in (("prefill", prefill), ("decode", decode)):
            bad = next((row for row in rule.options["bad"] if row["backend"] == backend
                        and row["use"] in ("all", part) and view.sglang_in(row["sglang"])), None)
            if bad is not None:
                yield Finding("attention-backend", f"{backend} does not run {part} on {shown}",
                              f"{part} by {backend} in arm {arm}, SGLang {view.sglang}", f"one of: {good}")
                break


def flags(rule: Rule, view: View) -> Iterator[Finding]:
    """Flags that do harm or nothing. `flags`, `targets`, `sglang`; `unless_patched`: patches that mend all of it."""
    targets = [target for target in rule.options["targets"] if target in view.gpus]
    mended = rule.options.get("unless_patched", ())
    if not targets or not view.sglang_in(rule.options["sglang"]) or (mended and all(map(view.patched, mended))):
        return
    for group, given in _groups(view).items():
        for flag in rule.options["flags"]:
            if given.get(flag, False) is not False:
                yield Finding(flag, f"--{flag} on {', '.join(targets)} with SGLang {view.sglang}",
                              f"profile, {group}: {flag}: {given[flag]}")


def arms(rule: Rule, view: View) -> Iterator[Finding]:
    """What must be given, and equal in all arms, where an arm speculates. `required`, `required_on_gpu`, `equal`."""
    if not _speculating(view):
        return
    profile = view.stack.profile
    merged = {arm: {**profile.server, **own} for arm, own in profile.arms.items()}
    groups = [*rule.options["required"], *(rule.options["required_on_gpu"] if view.gpus else ())]
    for group in groups:
        for arm, given in merged.items():
            if not any(flag in given for flag in group):
                yield Finding(group[0], f"arm {arm} leaves {group[0]} to a default", f"no {' or '.join(group)}",
                              "the same explicit value in all arms")
    for flag in (*(flag for group in groups for flag in group), *rule.options["equal"]):
        values = {arm: given.get(flag) for arm, given in merged.items()}
        if len({str(value) for value in values.values()}) > 1:
            yield Finding(flag, f"the arms differ in {flag}",
                          ", ".join(f"{arm}: {value if value is not None else 'default'}"
                                    for arm, value in values.items()), "one value")


def eagle(rule: Rule, view: View) -> Iterator[Finding]:  # noqa: ARG001
    """EAGLE's three numbers are given together and fit."""
    names = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")
    for arm, given in _speculating(view).items():
        if not str(given["speculative-algorithm"]).upper().startswith("EAGLE"):
            continue
        missing = [name for name in names if name not in given]
        if missing:
            yield Finding(names[0], f"arm {arm} gives {3 - len(missing)} of EAGLE's three numbers",
                          f"no {', '.join(missing)}", "all three")
            continue
        steps, topk, tokens = (given[name] for name in names)
        if topk == 1 and isinstance(steps, int) and tokens != steps + 1:
            yield Finding(names[2], f"arm {arm} asks for {tokens} draft tokens with top-k 1 and {steps} steps",
                          f"{names[2]}: {tokens}", f"{steps + 1}")


def spec_v2(rule: Rule, view: View) -> Iterator[Finding]:
    """Releases where speculation costs the overlap scheduler. `default_on`, `gone`: versions."""
    if not _speculating(view) or view.sglang is None or view.sglang_in(rule.options["gone"]):
        return
    name = "SGLANG_ENABLE_SPEC_V2"
    given = next((variable.value for variable in reversed(view.variables) if variable.name == name), None)
    on = view.sglang_in(rule.options["default_on"]) if given is None else given.lower() in ("1", "true", "yes")
    if not on:
        yield Finding(name, f"speculation without the overlap scheduler in SGLang {view.sglang}",
                      f"{name}={given}" if given is not None else f"no {name}", f'{name}: "1"')
        return
    for arm, flags_given in _speculating(view).items():
        if flags_given.get("speculative-eagle-topk", 1) != 1:
            yield Finding(name, f"arm {arm} uses top-k {flags_given['speculative-eagle-topk']}, which {name} refuses",
                          f"{name} is on", "speculative-eagle-topk: 1", level="error")


KINDS: dict[str, Kind] = {
    "target-cuda": target_cuda, "cuda-major": cuda_major, "cuda-minor": cuda_minor, "compiler": compiler,
    "environment": environment, "first-on-path": first_on_path, "dockerfile": dockerfile, "torch-cuda": torch_cuda,
    "pairs": pairs,
    "wheel-cuda": wheel_cuda, "wheel-targets": wheel_targets, "exclusive": exclusive, "same": same,
    "shadowed": shadowed,
    "metadata": metadata, "overlaps": overlaps, "ranges": ranges, "variables": variables,
    "profile-version": profile_version, "attention": attention, "flags": flags, "arms": arms, "eagle": eagle,
    "spec-v2": spec_v2,
}
