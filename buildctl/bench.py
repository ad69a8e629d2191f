"""A benchmark of built images from the host: how their containers run, and in which order several of them do.

Pure but for looking into model and run folders. The benchmark itself is the image's own.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from buildctl import container
from buildctl.container import Spec
from buildctl.engine import LocalImage
from buildctl.errors import Problem, UsageError
from buildctl.image_config import KEY_LABEL

TARGETS_LABEL = "buildctl.targets"
RESULTS, MODELS = "/results", "/models"
PROMPTS = "prompts.jsonl"
#: the volume that README's `docker run` uses as well: kernels keyed by image, models of the hub once for all
CACHE = "sglang-cache"
#: shared memory is a limit, not a reservation; NCCL and the schedulers of 8 GPUs want more than Docker's 64 MB
SHM_GPU, SHM_CPU = "32g", "1g"
#: of the host, passed on by name where a model comes from the hub
HUB_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy",
                 "no_proxy")
#: options of the entrypoint that are ours to give
_OURS: Mapping[str, str] = {
    "--model": "--model", "--draft": "--draft", "--results": "--out", "--cache": "--cache", "--resume": "--resume",
    "--json": "--json", "--prompts": "--prompts", "--config": "the options themselves"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_GPUS = re.compile(r"all|[0-9]+|device=[A-Za-z0-9,:-]+")
_SIZE = re.compile(r"[0-9]+[kmg]?", re.IGNORECASE)
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: exit codes of the entrypoint that are verdicts (docs/benchmark.md)
VERDICTS = {0: "win", 10: "loss", 11: "equivalent", 12: "inconclusive", 13: "invalid"}
VALID = frozenset({0, 10, 11, 12})


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of `buildctl bench` that shape a container; `words` go to the entrypoint."""

    model: str = ""
    draft: str = ""
    words: tuple[str, ...] = ()
    gpus: str = ""
    shm: str = ""
    cache: str = CACHE
    environment: tuple[str, ...] = ()
    prompts: Path | None = None
    resume: Path | None = None


@dataclass(frozen=True, slots=True)
class Mounted:
    """A model as the container sees it: `source` on the engine's host, empty for a name of the hub."""

    source: str
    target: str
    name: str


def needs_gpu(image: LocalImage) -> bool:
    """Whether some target of the image is a GPU."""
    return any(target not in {"", "cpu"} for target in image.labels.get(TARGETS_LABEL, "").split(","))


def checked(reference: str, image: LocalImage | None) -> LocalImage:
    """The image, if it is one of ours. Raises `UsageError`."""
    if image is None:
        raise UsageError(Problem("no such image in the engine", reference, "", "an image that was built or pulled",
                                 "`buildctl build`, or `docker pull`"))
    if not image.labels.get(KEY_LABEL):
        raise UsageError(Problem("this image was not built by buildctl", reference, "no label " + KEY_LABEL,
                                 "an image with an entrypoint of ours", "`buildctl list` names what the stacks make"))
    return image


def check_different(images: Mapping[str, LocalImage]) -> None:
    """Names of the same content are nothing to compare. Raises `UsageError`."""
    known: dict[str, str] = {}
    problems = []
    for reference, image in images.items():
        key = image.labels[KEY_LABEL]
        if key in known:
            problems.append(Problem("two names of the same content", f"{known[key]} and {reference}",
                                    f"content key {key[:16]}", "images that differ", "name each image once"))
        known.setdefault(key, reference)
    if problems:
        raise UsageError(problems)


def check(wanted: Wanted, images: Mapping[str, LocalImage], environ: Mapping[str, str], *, local: bool) -> None:
    """Everything that can be known before a container is made. Raises `UsageError` with all problems.

    :param local: whether the engine sees this machine's files; else paths are those of its own host.
    """
    problems = container.unfit(wanted.environment, environ)
    for role, name in (("model", wanted.model), ("draft", wanted.draft)):
        problems += _model_problems(role, name, local=local)
    if wanted.resume is None and not wanted.model:
        problems.append(Problem("no model", "--model", "", "a folder or a name on the hub", "--model DIR|NAME"))
    if wanted.resume is not None:
        problems += _resume_problems(wanted, images)
    for word in itertools.takewhile(lambda one: one != "--", wanted.words):
        if (ours := _OURS.get(word.partition("=")[0])) is not None:
            problems.append(Problem(f"{word.partition('=')[0]} is not given to the entrypoint here", "after --", word,
                                    "an option of `entrypoint benchmark`", f"give {ours} before the --"))
    for option, value, form, example in (("--gpus", wanted.gpus, _GPUS, "all, a number, or device=0,1"),
                                         ("--shm-size", wanted.shm, _SIZE, "a size such as 32g"),
                                         ("--cache", wanted.cache, _VOLUME, "the name of a volume")):
        if value and not form.fullmatch(value):
            problems.append(Problem("this value cannot be used", option, value, example, "correct it"))
    problems += [Problem("this image runs on the CPU", "--gpus", f"{reference}: target "
                         f"{image.labels.get(TARGETS_LABEL, '')}", "an image with a GPU target", "leave --gpus out")
                 for reference, image in images.items() if wanted.gpus and not needs_gpu(image)]
    if problems:
        raise UsageError(problems)


def is_folder(name: str) -> bool:
    """Whether a model is meant as a folder and not as a name on the hub."""
    return name.startswith(("/", ".", "~")) or Path(name).is_dir()


def _model_problems(role: str, name: str, *, local: bool) -> list[Problem]:
    if not name:
        return []
    if not is_folder(name):
        return [] if _HUB_NAME.fullmatch(name) else [
            Problem(f"the {role} is neither a folder nor a name on the hub", f"--{role}", name, "a folder, or ORG/NAME",
                    "correct it")]
    if not local:
        return [] if PurePosixPath(name).is_absolute() else [
            Problem(f"the engine is on another machine, and this path of the {role} is relative", f"--{role}", name,
                    "an absolute path on the engine's host", "write it in full")]
    folder = Path(name).expanduser().resolve()
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        return [Problem(f"the {role} folder has no readable config.json", f"--{role}", f"{folder}: {error.strerror}",
                        "a folder with config.json and weights", "name the folder that holds config.json itself")]
    except ValueError as error:
        return [Problem(f"the {role}'s config.json is not JSON", str(folder), str(error), "a JSON object",
                        "download the model again")]
    if not isinstance(content, dict):
        return [Problem(f"the {role}'s config.json is not JSON", str(folder), type(content).__name__, "a JSON object",
                        "download the model again")]
    root = _root(folder)
    outside = sorted(path.name for path in folder.iterdir()
                     if path.is_symlink() and not path.resolve().is_relative_to(root))
    if outside:
        return [Problem(f"files of the {role} are links that lead out of the folder", str(folder),
                        ", ".join(outside[:4]), "files that are there when this folder is mounted",
                        "name the folder that the links lead to, or copy the files")]
    return []


def _root(folder: Path) -> Path:
    """What to mount for a model folder: itself, or the hub cache's repository whose blobs its links lead to."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1]
    return folder


def _resume_problems(wanted: Wanted, images: Mapping[str, LocalImage]) -> list[Problem]:
    assert wanted.resume is not None
    where = str(wanted.resume)
    try:
        plan = json.loads((wanted.resume / "plan.json").read_text(encoding="utf-8"))
        context = json.loads((wanted.resume / "context.json").read_text(encoding="utf-8"))
        key, values = str(plan["image"]["key"]), dict(context["values"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Problem("not a run that can be resumed", where, str(error), "a folder with plan.json and context.json",
                        "name the run's own folder")]
    problems = []
    for reference, image in images.items():
        if image.labels.get(KEY_LABEL) != key:
            problems.append(Problem("the run was made by another image", where, f"content key {key[:16]}",
                                    f"{image.labels.get(KEY_LABEL, '')[:16]} ({reference})",
                                    f"resume it with the image that has key {key[:16]}"))
    for role, given in (("model", wanted.model), ("draft", wanted.draft)):
        before = str(values.get(role) or "")
        if before.startswith(f"{MODELS}/") and not given:
            problems.append(Problem(f"the {role} of the run was a folder", where, "no folder now", f"--{role} DIR",
                                    "name the same folder again; its place on the host is in no file of the run"))
    return problems


def mounted(role: str, name: str, *, local: bool) -> Mounted:
    """Where a model lies for the container."""
    if not is_folder(name):
        return Mounted("", "", name)
    folder = Path(name).expanduser().resolve() if local else Path(name)
    root, target = _root(folder), f"{MODELS}/{role}"
    inside = folder.relative_to(root).as_posix()
    return Mounted(str(root), target, target if inside == "." else f"{target}/{inside}")


def new_name(purpose: str) -> str:
    """A container name that nobody else has."""
    return f"buildctl-{purpose}-{secrets.token_hex(4)}"


def spec(reference: str, image: LocalImage, wanted: Wanted, environ: Mapping[str, str], *, name: str,
         local: bool) -> Spec:
    """The container of one run."""
    gpu = needs_gpu(image)
    options = [*container.hardened(), "--shm-size", wanted.shm or (SHM_GPU if gpu else SHM_CPU)]
    if gpu:
        gpus = wanted.gpus or "all"
        # docker reads the value as CSV: a list of devices must be one field of it
        options += ["--gpus", f'"{gpus}"' if "," in gpus else gpus, "--ulimit", "memlock=-1", "--ulimit",
                    "stack=67108864"]
    options += [*container.mount("volume", RESULTS), *container.mount("volume", "/cache", wanted.cache)]
    words = ["benchmark"]
    hub = False
    for role, given in (("model", wanted.model), ("draft", wanted.draft)):
        if not given:
            continue
        one = mounted("target" if role == "model" else role, given, local=local)
        if one.source:
            options += container.mount("bind", one.target, one.source, readonly=True)
        hub = hub or not one.source
        words += [f"--{role}", one.name]
    if wanted.resume is not None:
        words += ["--resume", f"{RESULTS}/{wanted.resume.resolve().name}"]
    if wanted.prompts is not None:
        words += ["--prompts", f"{RESULTS}/{PROMPTS}"]
    names = [*wanted.environment, *(one for one in HUB_VARIABLES if hub and environ.get(one))]
    return Spec(name, reference, tuple(options), (*words, *wanted.words), {one: environ[one] for one in names})


def uploads(wanted: Wanted) -> dict[str, Path]:
    """What is put into the results volume before the start, by name."""
    found = {}
    if wanted.resume is not None:
        found[wanted.resume.resolve().name] = wanted.resume
    if wanted.prompts is not None:
        found[PROMPTS] = wanted.prompts
    return found


def script(spec: Spec, wanted: Wanted, out: Path) -> str:
    """The docker commands of one run, in order, as `--dry-run` prints them."""
    commands = [("docker", "create", *spec.arguments()), ("docker", "start", "--attach", spec.name),
                ("docker", "cp", f"{spec.name}:{RESULTS}/.", str(out)),
                ("docker", "rm", "--force", "--volumes", spec.name)]
    lines = [shlex.join(words) for words in commands]
    lines[1:1] = [f"# {path} goes to {spec.name}:{RESULTS}/{name}, owned by the container's user"
                  for name, path in uploads(wanted).items()]
    return "\n".join(lines)


def alternating(images: Sequence[str], rounds: int, seed: int) -> list[str]:
    """The order of runs: each image once in a round, each second round mirrors the one before, a coin says who begins.

    A drift of the machine then falls on all images alike.
    """
    coin, order = random.Random(seed), []  # noqa: S311 - a coin of the design, not a secret
    turn: list[str] = []
    for number in range(rounds):
        turn = turn[::-1] if number % 2 else coin.sample(list(images), len(images))
        order += turn
    return order


def short(words: Sequence[str]) -> tuple[str, ...]:
    """The entrypoint's words for one of several alternating runs: one pair of starts, unless they say otherwise."""
    given = {word.partition("=")[0] for word in itertools.takewhile(lambda one: one != "--", words)}
    return tuple(words) if given & {"--pairs", "--effort"} else ("--pairs", "1", *words)


def keys(folders: Iterable[Path]) -> list[tuple[str, str]]:
    """When each run was planned, and the content key of its image. Raises `UsageError` with every other folder."""
    found: list[tuple[str, str]] = []
    problems = []
    for folder in folders:
        try:
            plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
            found.append((str(plan["created_at"]), str(plan["image"]["key"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(Problem("not a folder of a run", str(folder), str(error), "a folder with plan.json",
                                    "name the run's own folder, as `bench` printed it"))
    if problems:
        raise UsageError(problems)
    return found


def newest(runs: Iterable[tuple[str, str]], images: Mapping[str, LocalImage]) -> str:
    """The reference of the image to compare with: that of the latest run whose image the engine has.

    :param images: content key to image.
    :raises UsageError: the engine has none of the images.
    """
    for _, key in sorted(runs, reverse=True):
        if key in images:
            return images[key].tags[0]
    raise UsageError(Problem("the engine has none of the images that made these runs", "engine",
                             "no image with their content keys", ", ".join(sorted({key[:16] for _, key in runs})),
                             "pull or build one of them, or name any newer image: --image IMAGE"))
