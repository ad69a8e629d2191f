"""Registry credentials: from the environment, then from the docker configuration.

Read afresh at each login: a credential helper may hand out another secret after a long build. Nothing here is ever
part of a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from buildctl.errors import AuthError, Problem

#: all three together; the password goes to this host only
ENV_HOST, ENV_USER, ENV_PASSWORD = ("SGL_BUILDCTL_REGISTRY_HOST", "SGL_BUILDCTL_REGISTRY_USER",
                                    "SGL_BUILDCTL_REGISTRY_PASSWORD")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user and a secret; `identity_token` stands for both where a login handed one out."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    def as_auth_config(self) -> dict[str, str]:
        """What the engine takes as `X-Registry-Auth`; empty for anonymous."""
        if self.identity_token:
            return {"identitytoken": self.identity_token}
        return {"username": self.user, "password": self.password} if self.user else {}


ANONYMOUS = Credentials()
Source = Callable[[str], Credentials]


def lookup(host: str, environment: Mapping[str, str] | None = None) -> Credentials:
    """Credentials for a registry host. Raises `AuthError` when a credential helper fails."""
    environment = os.environ if environment is None else environment
    if host and environment.get(ENV_HOST) == host and environment.get(ENV_USER):
        return Credentials(environment[ENV_USER], environment.get(ENV_PASSWORD, ""))
    return _from_docker_config(host)


def _from_docker_config(host: str) -> Credentials:
    import docker.auth
    import docker.errors
    from docker.credentials.errors import StoreError

    try:
        entry = docker.auth.load_config().resolve_authconfig(host) or {}
    except (StoreError, docker.errors.DockerException, ValueError) as error:
        raise AuthError(Problem("the docker configuration names credentials that cannot be read", host,
                                f"{type(error).__name__} from the credential store", "a login for this registry",
                                f"run `docker login {host}`, or set {ENV_HOST}, {ENV_USER} and {ENV_PASSWORD}")
                        ) from None
    return Credentials(entry.get("Username") or entry.get("username") or "",
                       entry.get("Password") or entry.get("password") or "",
                       entry.get("IdentityToken") or entry.get("identitytoken") or "")
