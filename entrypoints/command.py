"""The server's command line and environment: the image's profile, then the arm's flags, then the user's (who wins)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from entrypoints import jobs
from entrypoints.image import Flags, Image

#: each cache variable of the server and its folder below the cache root
#: (read in the sources of SGLang, Triton, PyTorch Inductor, FlashInfer, DeepGEMM and the CUDA driver)
CACHES: Mapping[str, str] = {
    "XDG_CACHE_HOME": "xdg",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang-jit",  # its default does not follow SGLANG_CACHE_DIR
    "SGLANG_DG_CACHE_DIR": "deepgemm",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",
}
CACHE_ROOT = Path("/cache")
OUR_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


def flag_argv(flags: Flags) -> tuple[str, ...]:
    """`{"tp": 2, "enable-metrics": true, "x": false}` -> `("--tp", "2", "--enable-metrics")`."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return tuple(words)


def given_flags(argv: Iterable[str]) -> frozenset[str]:
    """Names (without dashes) of the flags in a command line; `--name=value` counts as `name`."""
    return frozenset(word[2:].partition("=")[0] for word in argv if word.startswith("--") and len(word) > 2)


def server_argv(image: Image, arm: Flags, *, model: str, draft: str = "", host: str, port: int,
                extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The whole command line of one server start.

    `arm` holds the arm's own flags; `extra` are the user's words for the server. A flag that the user names is left
    out of everything that we would write, so it appears once. The draft is passed only to an arm that speculates.
    """
    flags = dict(image.profile.server)
    flags.update({"model-path": model} if model else {})
    flags.update(arm)
    if draft and "speculative-algorithm" in arm:
        flags.setdefault("speculative-draft-model-path", draft)
    flags.update({"host": host, "port": port})
    users = set(given_flags(extra))
    for one, other in ALIASES:
        if users & {one, other}:
            users |= {one, other}
    ours = {name: value for name, value in flags.items() if name not in users}
    return (str(image.python), "-m", "sglang.launch_server", *flag_argv(ours), *extra)


#: two names of one server flag: naming either replaces ours
ALIASES: tuple[tuple[str, str], ...] = (
    ("model", "model-path"),
    ("tp", "tensor-parallel-size"), ("tp-size", "tensor-parallel-size"), ("tp", "tp-size"),
    ("speculative-draft-model", "speculative-draft-model-path"),
)


def server_environment(image: Image, environ: Mapping[str, str], *, cache_root: Path = CACHE_ROOT) -> dict[str, str]:
    """The full environment of a server: the caller's without our own variables, caches under the image's key, profile.

    A variable that the caller has set wins over the profile and over our cache folders, except those that are about
    our own interpreter. Model files of the hub are the
    same for every image and so lie beside the keyed folder, in `cache_root/huggingface`. How many compilers may run at
    once is added where nobody has said it.
    """
    keyed = cache_root / image.short_key
    environment = {variable: str(keyed / folder) for variable, folder in CACHES.items()}
    environment["PYTHONUNBUFFERED"] = "1"  # the last words of a killed process are the ones that matter
    environment["HF_HOME"] = str(cache_root / "huggingface")
    environment.update(image.profile.environment)
    environment.update({name: value for name, value in environ.items()
                        if not name.startswith("ENTRYPOINT_") and name not in OUR_INTERPRETER})
    environment.update(jobs.variables(environment))
    return environment


#: variables that change what a server does, by the programs that read them
_TUNING = ("NCCL_", "CUDA_", "SGLANG_", "SGL_", "FLASHINFER_", "TRITON_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "GLOO_",
           "UCX_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def tuning(environment: Mapping[str, str]) -> dict[str, str]:
    """What of a server's environment belongs to a measurement: settings of its libraries; no folders, no secrets."""
    return {name: "***" if any(word in name for word in _SECRET) else value
            for name, value in sorted(environment.items()) if name.startswith(_TUNING) and name not in CACHES}


#: flags whose values are secrets
SECRET_FLAGS = frozenset({"api-key", "admin-api-key", "ssl-keyfile-password", "watermark-key", "watermark-key-b"})
#: flags of their own that begin like one of those
_PLAIN_FLAGS = frozenset({"ssl-keyfile"})
#: stands for a secret in everything that is shown or written
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether a flag of this name (without dashes, `_` or `-` within) holds a secret.

    SGLang's parser takes every beginning of a flag's name for the flag, so a beginning counts, ambiguous or not.
    """
    name = name.replace("_", "-")
    return bool(name) and name not in _PLAIN_FLAGS and any(flag.startswith(name) for flag in SECRET_FLAGS)


def mask(argv: Iterable[str]) -> list[str]:
    """The command line for people and files: values of flags that are secrets become ***."""
    shown: list[str] = []
    hide = False
    for word in argv:
        name, given, _ = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        secret = is_secret(name)
        shown.append(HIDDEN if hide and not name else f"--{name}={HIDDEN}" if secret and given else word)
        hide = secret and not given
    return shown


def mask_text(text: str) -> str:
    """The same for flags in one text, quoted as for a shell; a text without secrets stays as it is."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that nobody closed: refused elsewhere, and shown there
        words = text.split()
    shown = mask(words)
    return text if shown == words else " ".join(word if HIDDEN in word else shlex.quote(word) for word in shown)


def secrets(argv: Iterable[str]) -> tuple[str, ...]:
    """The secrets in a command line, to be hidden where the server repeats them; less than 4 letters are none."""
    words = list(argv)
    found = [word.partition("=")[2] if shown.startswith("--") else word
             for word, shown in zip(words, mask(words), strict=True) if word != shown]
    return tuple(one for one in found if len(one) >= 4)
