"""Image references and push targets: parse once, at the edge.

Grammar: github.com/distribution/reference (`reference.go`), read strictly. A name without a registry stays without one:
such a reference is local, it never means Docker Hub by accident. `base` alone reads a name as FROM does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from buildctl.errors import Problem, UsageError

DOCKER_HUB = "docker.io"

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"
                   r"|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_TAG_RULE = "1 to 128 letters, digits, '_', '.' or '-'; the first no '.' or '-'"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """`registry/repository:tag@digest`; registry, tag and digest may be empty."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    def tagged(self, tag: str) -> Reference:
        """The same repository with another tag and no digest."""
        return replace(self, tag=tag, digest="")

    def at(self, digest: str) -> Reference:
        """The same repository by digest alone."""
        return replace(self, tag="", digest=digest)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to push: a registry and an optional namespace in it."""

    registry: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.registry}/{self.namespace}" if self.namespace else self.registry

    def place(self, reference: Reference) -> Reference:
        """The reference under this target: the last part of its repository, and its tag."""
        last = reference.repository.rsplit("/", 1)[-1]
        repository = f"{self.namespace}/{last}" if self.namespace else last
        return Reference(self.registry, repository, reference.tag, reference.digest)


def parse(text: str) -> Reference:
    """Parse an image reference. Raises `UsageError`."""
    rest, _, digest = text.partition("@")
    if "@" in text and not _DIGEST.fullmatch(digest):
        raise _bad(text, "the digest is not one", digest, "sha256: and 64 hex digits")
    registry, repository = _split_registry(rest)
    repository, _, tag = repository.partition(":")
    if ":" in rest[len(registry) + 1 if registry else 0:] and not _TAG.fullmatch(tag):
        raise _bad(text, "the tag is not one", tag, _TAG_RULE)
    _check_name(text, registry, repository)
    return Reference(registry, repository, tag, digest)


def base(text: str) -> Reference:
    """Parse an image that builds stand on, as FROM reads it: a name without a registry is Docker Hub's, and there one
    without an owner is the library's. Raises `UsageError`."""
    found = parse(text)
    registry, repository = found.registry or DOCKER_HUB, found.repository
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return replace(found, registry=registry, repository=repository)


def parse_target(text: str) -> Target:
    """Parse `REGISTRY[/NAMESPACE]`; a scheme in front is refused. Raises `UsageError`."""
    if "://" in text:
        raise _bad(text, "a push target has no scheme", text, text.split("://", 1)[1])
    registry, _, namespace = text.rstrip("/").partition("/")
    if not (_HOST.fullmatch(registry) and _looks_like_host(registry)):
        raise _bad(text, "a push target starts with a registry host", registry, "for example ghcr.io/TEAM")
    if namespace:
        _check_name(text, registry, namespace)
    return Target(registry, namespace)


def check_tag(tag: str) -> str:
    """The tag itself when it is a valid one. Raises `UsageError`."""
    if not _TAG.fullmatch(tag):
        raise _bad(tag, "the tag is not one", tag, _TAG_RULE)
    return tag


def _looks_like_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first.lower() != first


def _split_registry(rest: str) -> tuple[str, str]:
    first, slash, after = rest.partition("/")
    if slash and _looks_like_host(first):
        return first, after
    return "", rest


def _check_name(text: str, registry: str, repository: str) -> None:
    if registry and not _HOST.fullmatch(registry):
        raise _bad(text, "the registry is not a host", registry, "HOST or HOST:PORT")
    for component in repository.split("/"):
        if not _COMPONENT.fullmatch(component):
            raise _bad(text, "the name has a part that registries refuse", component or "(empty)",
                       "lower-case letters and digits, separated by '.', '_', '__' or '-'")
    if len(registry) + len(repository) > _LONGEST_NAME:
        raise _bad(text, "the name is too long", f"{len(registry) + len(repository)} characters",
                   f"at most {_LONGEST_NAME}")


def _bad(where: str, what: str, found: str, expected: str) -> UsageError:
    return UsageError(Problem(what, where, found, expected, "write it as REGISTRY/NAME:TAG"))
