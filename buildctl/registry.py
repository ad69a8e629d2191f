"""An OCI registry over HTTP: manifests, blobs, tags, referrers.

Rules: github.com/opencontainers/distribution-spec 1.1, and the docker token protocol for logins. Every request is
repeated within the policy's bounds where the fault may pass, and logged in again once where a token has expired. Tokens
and passwords are in no message; addresses are shown without their query.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

from buildctl import fault as faults
from buildctl.credentials import Credentials, Source, lookup
from buildctl.errors import BuildctlError, NetworkError, Problem, UsageError
from buildctl.fault import Fault, Kind
from buildctl.oci import ACCEPT, MANIFESTS, OCI_INDEX, OCI_MANIFEST, Descriptor, Manifest, digest_of
from buildctl.reference import DOCKER_HUB, Reference
from buildctl.retry import Failed, Policy, Retry

if TYPE_CHECKING:
    import requests

_CHUNK = 1024 * 1024
#: what a cut may cost of a blob that is read in pieces
_PIECE = 256 * 1024
_LARGEST_MANIFEST = 4 * 1024 * 1024
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")

T = TypeVar("T")


class Registry:
    """One registry host.

    `actions` is what a login asks for: `pull`, or `pull,push` even to look where something is to be pushed (a registry
    that makes repositories by pushing may hide what is not there yet from others). `announce` hears of each wait.
    Methods raise the `BuildctlError` that fits the fault: `AuthError` where the registry refuses, `NetworkError` where
    it keeps failing.
    """

    def __init__(self, host: str, *, actions: str = "pull", source: Source = lookup, policy: Policy | None = None,
                 plain_http: bool = False, timeout: float = 60.0,
                 announce: Callable[[Retry], None] | None = None) -> None:
        self.host = host
        self.actions = actions
        self.policy = policy or Policy()
        self.base = f"{'http' if plain_http or is_local(host) else 'https'}://{_http_host(host)}"
        self._source, self._timeout, self._announce = source, timeout, announce
        self._tokens: dict[str, str] = {}
        self._open: requests.Session | None = None

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._open is not None:
            self._open.close()
            self._open = None

    # ------------------------------------------------------------------ manifests

    def head(self, repository: str, reference: str) -> Descriptor | None:
        """What a tag or digest points at, without fetching it; `None` when there is nothing."""
        answer = self._manifest("HEAD", repository, reference)
        if answer is None:
            return None
        digest = answer.headers.get("Docker-Content-Digest", "")
        if not digest:
            manifest = self.manifest(repository, reference)
            return manifest.descriptor if manifest else None
        return Descriptor(digest, _media_type(answer), int(answer.headers.get("Content-Length") or 0))

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest or index behind a tag or digest; `None` when there is nothing."""
        answer = self._manifest("GET", repository, reference)
        if answer is None:
            return None
        if _media_type(answer) not in MANIFESTS:
            raise self._error(Fault(Kind.REFUSED, f"a manifest of type {_media_type(answer)!r}; this is no registry, "
                                                  "or something in front of it answers"), repository)
        return Manifest(_media_type(answer), answer.content)

    def existing(self, reference: Reference) -> Manifest:
        """The manifest or index of an image that must be there.

        :raises UsageError: there is no such image.
        :raises NetworkError: the registry answers with other bytes than the digest names.
        """
        found = self.manifest(reference.repository, reference.digest or reference.tag)
        if found is None:
            raise UsageError(Problem("no such image in the registry", str(reference), "", "an image that was pushed",
                                     "push it first, or correct the reference"))
        if reference.digest and found.digest != reference.digest:
            raise NetworkError(Problem("the registry answers with other bytes than asked for", str(reference),
                                       found.digest, reference.digest, "repeat, then suspect the registry"))
        return found

    def put_manifest(self, repository: str, reference: str, manifest: Manifest) -> requests.Response:
        """Store a manifest under a tag or digest."""
        return self._ask("PUT", repository, f"manifests/{reference}", body=manifest.body,
                         headers={"Content-Type": manifest.media_type}, good={201})

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository; none for one that does not exist."""
        found: list[str] = []
        path = "tags/list"
        while path:
            answer = self._ask("GET", repository, path, good={200, 404})
            if answer.status_code == 404:
                break
            found.extend(self._json(answer, repository).get("tags") or [])
            following = answer.links.get("next", {}).get("url", "")
            path = f"tags/list?{urlsplit(following).query}" if following else ""
        return tuple(found)

    def _manifest(self, method: str, repository: str, reference: str) -> requests.Response | None:
        answer = self._ask(method, repository, f"manifests/{reference}", headers={"Accept": ACCEPT}, good={200, 404})
        return answer if answer.status_code == 200 else None

    # ------------------------------------------------------------------ blobs

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has this blob."""
        return self._ask("HEAD", repository, f"blobs/{digest}", good={200, 404}).status_code == 200

    def blob(self, repository: str, digest: str) -> bytes:
        """A small blob, checked against its digest (a config or a result file, not a layer)."""
        body = self._ask("GET", repository, f"blobs/{digest}", good={200}).content
        if digest_of(body) != digest:
            raise self._error(Fault(Kind.TRANSIENT, f"blob {digest} arrived as {digest_of(body)}"), repository)
        return body

    def check_push(self, repository: str) -> None:
        """Ask for the right to push by opening an upload and giving it up again: no bytes move."""
        answer = self._ask("POST", repository, "blobs/uploads/", good={202})
        self._ask("DELETE", repository, self._location(answer), good=None)

    def mount(self, repository: str, digest: str, source: str) -> bool:
        """Make a blob of another repository of this registry appear in this one; False when the registry will not."""
        answer = self._ask("POST", repository, f"blobs/uploads/?{urlencode({'mount': digest, 'from': source})}",
                           also_pull=source, good={201, 202})
        if answer.status_code == 202:
            self._ask("DELETE", repository, self._location(answer), good=None)
        return answer.status_code == 201

    def put_blob(self, repository: str, data: bytes) -> Descriptor:
        """Store a small blob; nothing is sent when it is there."""
        digest = digest_of(data)
        self.upload(repository, digest, len(data), lambda: iter([data]))
        return Descriptor(digest, "application/octet-stream", len(data))

    def upload(self, repository: str, digest: str, size: int, read: Callable[[], Iterator[bytes]]) -> int:
        """Store a blob of `size` bytes from `read()`, which is called anew at each attempt. Returns the bytes sent.

        Before each repetition the registry is asked whether it has the blob by now: many that answer with a fault have.
        """
        sent = 0

        def attempt() -> None:
            nonlocal sent
            if self._once("HEAD", repository, f"blobs/{digest}", good={200, 404}).status_code == 200:
                return
            opened = self._once("POST", repository, "blobs/uploads/", good={202})
            location = self._location(opened)
            location += ("&" if "?" in location else "?") + urlencode({"digest": digest})
            self._once("PUT", repository, location, body=_Body(read, size), good={201},
                       headers={"Content-Type": "application/octet-stream"})
            sent += size

        self._repeat(attempt, repository)
        return sent

    def stream(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob in pieces. The caller checks the digest; a cut raises `Failed`."""
        import requests

        answer = self._once("GET", repository, f"blobs/{digest}", good={200}, stream=True)
        try:
            yield from answer.iter_content(_CHUNK)
        except requests.RequestException as error:
            raise Failed(_cut(error)) from None
        finally:
            answer.close()

    def open_blob(self, repository: str, digest: str) -> Blob:
        """A blob of any size to read from. After a cut it goes on where it was, as often as the policy allows without
        a byte of progress. The caller checks the digest.
        """
        return Blob(self, repository, digest)

    # ------------------------------------------------------------------ referrers

    def referrers(self, repository: str, digest: str, artifact_type: str = "") -> tuple[dict[str, Any], ...]:
        """Descriptors of what refers to a digest: by the referrers API, by the tag schema where a registry has none."""
        answer = self._ask("GET", repository, f"referrers/{digest}", headers={"Accept": OCI_INDEX},
                           good={200, 404, 405})
        if answer.status_code == 200 and _media_type(answer) == OCI_INDEX:
            entries = self._json(answer, repository).get("manifests", [])
        else:
            index = self.manifest(repository, _referrers_tag(digest))
            entries = index.content.get("manifests", []) if index else []
        return tuple(entry for entry in entries if not artifact_type or entry.get("artifactType") == artifact_type)

    def attach(self, repository: str, subject: Descriptor, artifact_type: str, files: Mapping[str, tuple[str, bytes]],
               annotations: Mapping[str, str]) -> Descriptor:
        """Attach files (name -> media type, bytes) to a manifest as a referrer. Returns its descriptor."""
        empty = self.put_blob(repository, b"{}")
        layers = []
        for name, (media_type, data) in files.items():
            blob = self.put_blob(repository, data)
            layers.append({"mediaType": media_type, "digest": blob.digest, "size": blob.size,
                           "annotations": {"org.opencontainers.image.title": name}})
        content = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": artifact_type,
                   "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": empty.digest, "size": 2},
                   "layers": layers, "subject": subject.as_dict(), "annotations": dict(annotations)}
        return self.put_referrer(repository, Manifest(OCI_MANIFEST, json.dumps(content, sort_keys=True).encode()))

    def put_referrer(self, repository: str, manifest: Manifest) -> Descriptor:
        """Store a manifest that has a subject, its blobs being there, so that `referrers` finds it."""
        answer = self.put_manifest(repository, manifest.digest, manifest)
        if "OCI-Subject" not in answer.headers:
            content = manifest.content
            self._list_referrer(repository, content["subject"]["digest"], {
                **manifest.descriptor.as_dict(), "artifactType": content.get("artifactType", ""),
                "annotations": content.get("annotations", {})})
        return manifest.descriptor

    def _list_referrer(self, repository: str, subject: str, entry: Mapping[str, Any]) -> None:
        """Keep the index that stands in for the referrers API: there it is the client's duty. Another client may write
        it at the same time, so it is read again until the entry is in it.
        """
        tag = _referrers_tag(subject)
        for _ in range(self.policy.attempts):
            index = self.manifest(repository, tag)
            entries = list(index.content.get("manifests", [])) if index else []
            if any(one.get("digest") == entry["digest"] for one in entries):
                return
            body = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*entries, entry]}).encode()
            self.put_manifest(repository, tag, Manifest(OCI_INDEX, body))
        raise self._error(Fault(Kind.TRANSIENT, f"other writers keep replacing the index {tag}"), repository)

    # ------------------------------------------------------------------ requests

    def _ask(self, method: str, repository: str, path: str, **rest: Any) -> requests.Response:
        return self._repeat(lambda: self._once(method, repository, path, **rest), repository)

    def _json(self, answer: requests.Response, repository: str) -> dict[str, Any]:
        try:
            return dict(answer.json())
        except (ValueError, TypeError):
            raise self._error(Fault(Kind.REFUSED, f"{_media_type(answer)} where JSON belongs"), repository) from None

    def _repeat(self, attempt: Callable[[], T], repository: str) -> T:
        try:
            return self.policy.run(attempt, self._announce)
        except Failed as failed:
            attempts = self.policy.attempts if failed.fault.kind is Kind.TRANSIENT else 1
            raise self._error(failed.fault, repository, attempts) from None

    def _error(self, fault: Fault, repository: str, attempts: int = 1) -> BuildctlError:
        return faults.as_error(fault, f"{self.host}/{repository}", attempts=attempts)

    def _once(self, method: str, repository: str, path: str, *, also_pull: str = "",
              headers: Mapping[str, str] | None = None, body: bytes | _Body | None = None,
              good: Iterable[int] | None = (), stream: bool = False) -> requests.Response:
        """One request, logged in when asked to. `good` None takes any answer. Raises `Failed`."""
        url = urljoin(f"{self.base}/v2/{repository}/", path)
        scopes = [f"repository:{repository}:{self.actions}"]
        if also_pull:
            scopes.append(f"repository:{also_pull}:pull")
        key = " ".join(scopes)
        answer = self._send(method, url, self._tokens.get(key, ""), headers, body, stream=stream)
        if answer.status_code == 401:
            authorization = self._login(answer, scopes)
            answer.close()
            if authorization:
                self._tokens[key] = authorization
                answer = self._send(method, url, authorization, headers, body, stream=stream)
                if answer.status_code == 401 and "insufficient_scope" in answer.headers.get("WWW-Authenticate", ""):
                    answer.status_code = 403  # logged in, but not for this
        if good is None or answer.status_code in good:
            return answer
        try:
            raise Failed(_fault_of(answer, url))
        finally:
            answer.close()

    def _send(self, method: str, url: str, authorization: str, headers: Mapping[str, str] | None,
              body: bytes | _Body | None, *, stream: bool) -> requests.Response:
        import requests

        # credentials go to the registry itself only, never to a storage host that an upload location names
        own = urlsplit(url).netloc == urlsplit(self.base).netloc
        try:
            return self._session().request(method, url, headers=dict(headers or {}), data=body, stream=stream,
                                           auth=_Authorization(authorization if own else ""),
                                           timeout=self._timeout, allow_redirects=method in {"GET", "HEAD"})
        except requests.exceptions.SSLError as error:
            raise Failed(Fault(Kind.REFUSED, f"TLS: {_reason(error)}")) from None
        except requests.RequestException as error:
            raise Failed(_cut(error)) from None

    def _login(self, challenge: requests.Response, scopes: list[str]) -> str:
        """The value of the Authorization header that answers a challenge; empty when there is none to give."""
        scheme, _, rest = challenge.headers.get("WWW-Authenticate", "").partition(" ")
        login = self._source(self.host)
        if scheme.lower() == "basic":
            import requests

            return str(requests.auth._basic_auth_str(login.user, login.password)) if login.user else ""
        if scheme.lower() != "bearer":
            return ""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        return f"Bearer {self._token(fields, login, scopes)}"

    def _token(self, fields: Mapping[str, str], login: Credentials, scopes: list[str]) -> str:
        import requests

        realm = fields.get("realm", "")
        if not (realm.startswith("https://") or (realm.startswith("http://") and self.base.startswith("http://"))):
            raise Failed(Fault(Kind.REFUSED, f"it sends logins to {faults.tidy(realm)!r}, which is not https"))
        query: dict[str, Any] = {"service": fields.get("service", ""), "scope": scopes}
        auth: Any = _Authorization("")
        form = None
        if login.identity_token:
            form = {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": "sgl-buildctl",
                    "service": query["service"], "scope": " ".join(scopes)}
        elif login.user:
            auth = requests.auth.HTTPBasicAuth(login.user.encode(), login.password.encode())
        try:
            answer = self._session().request("POST" if form else "GET", realm, params=None if form else query,
                                             data=form, auth=auth, timeout=self._timeout)
            if answer.status_code != 200:
                raise Failed(_fault_of(answer, realm))
            content = dict(answer.json())
        except requests.RequestException as error:
            raise Failed(_cut(error)) from None
        return str(content.get("token") or content.get("access_token") or "")

    def _location(self, answer: requests.Response) -> str:
        return urljoin(answer.url, answer.headers.get("Location", ""))

    def _session(self) -> requests.Session:
        if self._open is None:
            import requests

            self._open = requests.Session()
            # identity: a layer is the bytes that its digest names, however they are packed
            self._open.headers.update({"User-Agent": "sgl-buildctl", "Accept-Encoding": "identity"})
            self._open.verify = ca_bundle(os.environ)
        return self._open


class Blob:
    """A blob of a registry, read in pieces; made by `Registry.open_blob`, to be closed."""

    def __init__(self, registry: Registry, repository: str, digest: str) -> None:
        self._registry, self._repository, self._digest = registry, repository, digest
        self._answer: requests.Response | None = None
        #: bytes read so far
        self.place = 0

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the end. Raises the `BuildctlError` that fits the fault."""
        piece: bytes = self._registry._repeat(lambda: self._read(size), self._repository)
        self.place += len(piece)
        return piece

    def close(self) -> None:
        """Hang up."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _read(self, size: int) -> bytes:
        import requests
        import urllib3.exceptions

        try:
            if self._answer is None:
                self._answer = self._open()
            return bytes(self._answer.raw.read(min(size, _PIECE)))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            self.close()
            raise Failed(_cut(error)) from None

    def _open(self) -> requests.Response:
        """The rest of the blob; what was read before is passed over where a registry gives blobs as a whole only."""
        headers = {"Range": f"bytes={self.place}-"} if self.place else {}
        answer = self._registry._once("GET", self._repository, f"blobs/{self._digest}", headers=headers,
                                      good={200, 206} if self.place else {200}, stream=True)
        rest = self.place if answer.status_code == 200 else 0
        while rest and (piece := answer.raw.read(min(rest, _CHUNK))):
            rest -= len(piece)
        return answer


class _Authorization:
    """Sets one header, and keeps requests from asking netrc for another."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request


class _Body:
    """A request body of known length that can be sent again from its start."""

    def __init__(self, read: Callable[[], Iterator[bytes]], size: int) -> None:
        self._read, self._size = read, size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return self._read()


def is_local(host: str) -> bool:
    """Whether a registry host is this machine, where plain HTTP is the custom (the engine's rule too)."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def plain_http(host: str, config: Mapping[str, Any]) -> bool:
    """Whether an engine is told to use plain HTTP for a registry, by its name or by its address.

    :param config: `RegistryConfig` of the engine's `info`.
    """
    entry = (config.get("IndexConfigs") or {}).get(host)
    if entry is not None:
        return not entry.get("Secure", True)
    try:
        address = ip_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    return any(address in ip_network(block, strict=False) for block in config.get("InsecureRegistryCIDRs") or ())


def ca_bundle(environment: Mapping[str, str]) -> str | bool:
    """The CA bundle to trust: one named in the environment, else this host's own, else the one that requests ships."""
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if environment.get(name):
            return environment[name]
    return str(_SYSTEM_CA) if _SYSTEM_CA.is_file() else True


def retry_after(value: str, now: float) -> float:
    """Seconds from a Retry-After header, which is a number or a date; 0 when it is neither."""
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (TypeError, ValueError):
        return 0.0


def _http_host(host: str) -> str:
    return "registry-1.docker.io" if host == DOCKER_HUB else host


def _media_type(answer: requests.Response) -> str:
    return answer.headers.get("Content-Type", "").partition(";")[0].strip()


def _referrers_tag(digest: str) -> str:
    return digest.replace(":", "-", 1)


def _fault_of(answer: requests.Response, url: str) -> Fault:
    """The fault in a registry's answer: its status, its error codes, its words."""
    import time

    address = url.partition("?")[0]
    body = "" if answer.request.method == "HEAD" else answer.text[:_LARGEST_MANIFEST]
    codes, words = _errors_in(body)
    text = f"{answer.request.method} {address}: {answer.status_code} {answer.reason}" + (f": {words}" if words else "")
    wait = retry_after(answer.headers.get("Retry-After", ""), time.time()) or faults.wait_in(body)
    return Fault(faults.of_status(answer.status_code, codes=codes, path=address), text, wait)


def _errors_in(body: str) -> tuple[tuple[str, ...], str]:
    """Error codes and messages of a registry's JSON error body; of any other body the first words."""
    try:
        errors = [error for error in json.loads(body).get("errors", []) if isinstance(error, dict)]
    except (ValueError, AttributeError, TypeError):
        return (), " ".join(re.sub(r"<[^>]*>", " ", body).split())[:200]
    codes = tuple(str(error.get("code", "")) for error in errors)
    return codes, "; ".join(f"{error.get('code', '')} {error.get('message', '')}".strip() for error in errors)


def _cut(error: Exception) -> Fault:
    return Fault(Kind.TRANSIENT, _reason(error))


def _reason(error: Exception) -> str:
    """The innermost reason of a requests error, without addresses (they may hold signatures)."""
    inner: BaseException = error
    while (following := inner.__cause__ or inner.__context__) is not None:
        inner = following
    return faults.tidy(str(inner)) or type(inner).__name__
