"""What a failed registry request means: whether to wait, to log in again, or to give up.

Two sources: HTTP answers of our own requests, and the texts in which the engine reports a failed push. The texts are
those of the real engine (26.1.5, containerd store) against Debian's docker-registry 2.8.2; the status line is at their
end, the method and the path in front of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from buildctl.errors import AuthError, BuildctlError, NetworkError, Problem, ResourceError


class Kind(Enum):
    """What to do about a fault."""

    TRANSIENT = "transient"      # wait and repeat
    LOGIN = "login"              # fetch credentials again, once
    DENIED = "denied"            # logged in, but no right
    TOO_LARGE = "too large"      # the registry or something in front of it refuses the size
    MISSING = "missing"          # no such repository or manifest
    REFUSED = "refused"          # any other answer that a repetition cannot change
    DISK = "disk"                # no space left where the engine works
    UNKNOWN = "unknown"          # a text that nobody has seen yet


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed request: what to do, what the other side said, and how long it asks to wait (seconds, 0: not said)."""

    kind: Kind
    text: str
    wait: float = 0.0


#: 499 is nginx's "client closed request", 522 and 524 are Cloudflare's connection and answer time-outs
_TRANSIENT = {408, 425, 429, 499}
_CODES = {"UNAUTHORIZED": Kind.LOGIN, "DENIED": Kind.DENIED, "TOOMANYREQUESTS": Kind.TRANSIENT,
          "NAME_UNKNOWN": Kind.MISSING, "MANIFEST_UNKNOWN": Kind.MISSING, "BLOB_UPLOAD_UNKNOWN": Kind.TRANSIENT,
          "BLOB_UPLOAD_INVALID": Kind.TRANSIENT, "SIZE_INVALID": Kind.TRANSIENT, "DIGEST_INVALID": Kind.TRANSIENT}
_STATUS = re.compile(r"unexpected (?:HTTP )?status(?: from \w+ request to (\S+?))?: (\d{3})\b")
_CUT = re.compile(r"connection re(?:set|fused)|broken pipe|unexpected EOF|\bEOF\b|i/o timeout|Client\.Timeout|"
                  r"TLS handshake timeout|no route to host|network is unreachable|use of closed network connection|"
                  r"server closed idle connection|deadline exceeded|temporary failure in name resolution|"
                  r"server misbehaving|stream error|http2: |transport connection broken|"
                  # another push on this engine took the name away
                  r"^tag does not exist: ", re.IGNORECASE)
_UPLOAD = re.compile(r"/blobs/uploads/[^/?]+")
_QUERY = re.compile(r"(https?://[^\s\"?]+)\?[^\s\":]*")
_WAIT = re.compile(r"retry-after:\s*([0-9.]+)\s*(ms|s|m)?(?![a-z])", re.IGNORECASE)


def of_status(status: int, *, codes: tuple[str, ...] = (), path: str = "") -> Kind:
    """The meaning of an HTTP status, given the registry's error codes and the request's path.

    429 is the one status that the codes cannot overrule. A 404 for an upload in progress means that the upload is
    lost, not that the repository is missing.
    """
    if status in _TRANSIENT or status >= 500:
        return Kind.TRANSIENT
    if status == 401:
        return Kind.LOGIN
    if status == 413:
        return Kind.TOO_LARGE
    for code in codes:
        if code in _CODES and status in {400, 403, 404, 416}:
            return Kind.DENIED if status == 403 and _CODES[code] is Kind.LOGIN else _CODES[code]
    if status == 403:
        return Kind.DENIED
    if status == 416 or (status == 404 and _UPLOAD.search(path)):
        return Kind.TRANSIENT
    return Kind.MISSING if status == 404 else Kind.REFUSED


def of_engine(text: str) -> Fault:
    """The meaning of an engine's push error."""
    clean = tidy(text)
    wait = wait_in(text)
    found = _STATUS.search(text)
    if found:
        return Fault(of_status(int(found[2]), path=found[1] or ""), clean, wait)
    lowered = text.lower()
    if "toomanyrequests" in lowered or "too many requests" in lowered:
        return Fault(Kind.TRANSIENT, clean, wait)
    if "no basic auth credentials" in lowered or "authentication required" in lowered or "unauthorized" in lowered:
        return Fault(Kind.LOGIN, clean)
    if "denied" in lowered or "insufficient_scope" in lowered or "forbidden" in lowered:
        return Fault(Kind.DENIED, clean)
    if "413" in text and "entity too large" in lowered:
        return Fault(Kind.TOO_LARGE, clean)
    if "no space left on device" in lowered:
        return Fault(Kind.DISK, clean)
    return Fault(Kind.TRANSIENT if _CUT.search(text) else Kind.UNKNOWN, clean, wait)


def wait_in(text: str) -> float:
    """Seconds that a registry asks to wait in the text of its answer (`retry-after: 333.9ms`), 0 if it does not."""
    found = _WAIT.search(text)
    if not found:
        return 0.0
    return float(found[1]) * {"ms": 0.001, "m": 60.0}.get((found[2] or "s").lower(), 1.0)


def tidy(text: str) -> str:
    """An engine's or registry's text without query strings, which hold upload states and now and then signatures."""
    return _QUERY.sub(r"\1", text).strip()


def as_error(fault: Fault, where: str, *, attempts: int = 1) -> BuildctlError:
    """The error for the user when nothing more is to be tried."""
    registry = where.split("/", 1)[0]
    text = fault.text + (f" ({attempts} attempts)" if attempts > 1 else "")
    if fault.kind is Kind.TRANSIENT and fault.wait:
        text += f"; it asks to wait {fault.wait:.0f} s"
    what, expected, todo = _ADVICE[fault.kind]
    problem = Problem(what, where, text, expected, todo.format(registry=registry))
    return _CLASS.get(fault.kind, NetworkError)(problem)


#: a refusal is exit code 10 whatever its reason: the registry has decided, a repetition does not help
_CLASS: dict[Kind, type[BuildctlError]] = {
    Kind.LOGIN: AuthError, Kind.DENIED: AuthError, Kind.TOO_LARGE: AuthError, Kind.MISSING: AuthError,
    Kind.REFUSED: AuthError, Kind.DISK: ResourceError}
_ADVICE = {
    Kind.LOGIN: ("the registry rejects the login", "a login with push right",
                 "run `docker login {registry}`; in CI check that the secret is set for this job"),
    Kind.DENIED: ("the registry denies access", "pull and push right on this repository",
                  "give this account or token write access to the package, or push elsewhere (--to)"),
    Kind.TOO_LARGE: ("the registry refuses the size of a layer",
                     "layers below the limits of the registry and of the proxies in front of it",
                     "split the layer, or raise the limit (nginx: client_max_body_size); repeating does not help"),
    Kind.MISSING: ("the registry does not know this repository or manifest",
                   "one that exists, or a registry that makes repositories by pushing",
                   "create the repository, or correct the name"),
    Kind.REFUSED: ("the registry refuses the request", "", "see what it says; repeating does not help"),
    Kind.DISK: ("no space left where the engine works", "room for the image's compressed layers",
                "free space (`docker buildx prune`, `docker image prune`), then repeat"),
    Kind.TRANSIENT: ("the registry keeps failing", "an answer",
                     "run the same command again later: finished layers are not sent twice"),
    Kind.UNKNOWN: ("the push failed", "", "the text is the engine's own; repeating may help"),
}
