"""What failed requests mean. The engine's texts are recorded: engine 26.1.5 and docker-registry 2.8.2."""

import pytest

from buildctl.errors import AuthError, NetworkError, ResourceError
from buildctl.fault import Fault, Kind, as_error, of_engine, of_status, tidy, wait_in

HOST = "http://127.0.0.1:41141/v2/regtest-rec"
PUT = (f'unexpected status from PUT request to {HOST}/blobs/uploads/b23fb15d-12cf-4450-962b-5311f9401fd9'
       '?_state=uNxznhETU1yBjrq1&digest=sha256%3Aba731725: ')

RECORDED = {
    f"unexpected status from POST request to {HOST}/blobs/uploads/: 500 Internal Server Error": Kind.TRANSIENT,
    f"unexpected status from POST request to {HOST}/blobs/uploads/: 403 Forbidden": Kind.DENIED,
    f"unexpected status from POST request to {HOST}/blobs/uploads/: 404 Not Found": Kind.MISSING,
    f'failed commit on ref "config-sha256:ba73": {PUT}413 Request Entity Too Large': Kind.TOO_LARGE,
    f'failed commit on ref "config-sha256:ba73": {PUT}404 Not Found': Kind.TRANSIENT,
    f'failed commit on ref "config-sha256:ba73": {PUT}507 Insufficient Storage': Kind.TRANSIENT,
    f'failed commit on ref "manifest-sha256:2565": unexpected status from PUT request to {HOST}/manifests/1: '
    "504 Gateway Timeout": Kind.TRANSIENT,
    f'failed commit on ref "manifest-sha256:97de": unexpected status from PUT request to {HOST}/manifests/1: '
    "401 Unauthorized": Kind.LOGIN,
    'failed commit on ref "manifest-sha256:0cf6": failed to do request: Put "https://127.0.0.1:3356/v2/x/manifests/1": '
    "read tcp 127.0.0.1:56644->127.0.0.1:33569: read: connection reset by peer": Kind.TRANSIENT,
    'failed to do request: Head "https://127.0.0.1:37317/v2/x/blobs/sha256:685b": dial tcp 127.0.0.1:37317: connect: '
    "connection refused": Kind.TRANSIENT,
    "failed to authorize: failed to fetch oauth token: unexpected status from GET request to "
    "http://127.0.0.1:39147/token?scope=repository%3Aregtest-rec%3Apull%2Cpush&service=proxy: 401 Unauthorized":
        Kind.LOGIN,
    "failed to authorize: failed to fetch anonymous token: unexpected status from GET request to "
    "http://127.0.0.1:34679/token?scope=repository%3Ax%3Apull%2Cpush&service=proxy: 403 Forbidden": Kind.DENIED,
    # other engines and registries, as quoted in their issue trackers
    "unauthorized: authentication required": Kind.LOGIN,
    "no basic auth credentials": Kind.LOGIN,
    "denied: permission_denied: write_package": Kind.DENIED,
    "denied: requested access to the resource is denied": Kind.DENIED,
    "server message: insufficient_scope: authorization failed": Kind.DENIED,
    "toomanyrequests: retry-after: 333.939671ms, allowed: 44000/minute": Kind.TRANSIENT,
    "received unexpected HTTP status: 502 Bad Gateway": Kind.TRANSIENT,
    "error parsing HTTP 413 response body: invalid character '<' looking for beginning of value: "
    '"<html>413 Request Entity Too Large</html>"': Kind.TOO_LARGE,
    "net/http: TLS handshake timeout": Kind.TRANSIENT,
    "write tcp 10.0.0.2:5432->10.0.0.9:443: write: broken pipe": Kind.TRANSIENT,
    "Put \"https://x/v2/\": EOF": Kind.TRANSIENT,
    "write /var/lib/containerd/tmp/x: no space left on device": Kind.DISK,
    "tag does not exist: 127.0.0.1:44545/regtest-a:1": Kind.TRANSIENT,
    "something that nobody has seen yet": Kind.UNKNOWN,
}


@pytest.mark.parametrize(("text", "kind"), RECORDED.items(), ids=range(len(RECORDED)))
def test_texts_of_the_engine(text: str, kind: Kind) -> None:
    assert of_engine(text).kind is kind


@pytest.mark.parametrize(("status", "kind"), [
    (408, Kind.TRANSIENT), (425, Kind.TRANSIENT), (429, Kind.TRANSIENT), (499, Kind.TRANSIENT), (500, Kind.TRANSIENT),
    (502, Kind.TRANSIENT), (504, Kind.TRANSIENT), (522, Kind.TRANSIENT), (524, Kind.TRANSIENT), (416, Kind.TRANSIENT),
    (401, Kind.LOGIN), (403, Kind.DENIED), (413, Kind.TOO_LARGE), (404, Kind.MISSING), (400, Kind.REFUSED),
    (405, Kind.REFUSED), (301, Kind.REFUSED)])
def test_statuses(status: int, kind: Kind) -> None:
    assert of_status(status) is kind


@pytest.mark.parametrize(("status", "code", "path", "kind"), [
    (404, "BLOB_UPLOAD_UNKNOWN", "/v2/a/blobs/uploads/1", Kind.TRANSIENT),
    (404, "", "/v2/a/blobs/uploads/1", Kind.TRANSIENT),
    (404, "NAME_UNKNOWN", "/v2/a/blobs/uploads/", Kind.MISSING),
    (400, "DIGEST_INVALID", "/v2/a/blobs/uploads/1", Kind.TRANSIENT),
    (400, "MANIFEST_INVALID", "/v2/a/manifests/1", Kind.REFUSED),
    (403, "UNAUTHORIZED", "/v2/a/blobs/uploads/", Kind.DENIED),
    (403, "TOOMANYREQUESTS", "/v2/a/blobs/uploads/", Kind.TRANSIENT),
    (500, "DENIED", "/v2/a/blobs/uploads/", Kind.TRANSIENT)])
def test_the_registrys_code_and_the_path_decide_where_the_status_is_ambiguous(status: int, code: str, path: str,
                                                                              kind: Kind) -> None:
    assert of_status(status, codes=(code,), path=path) is kind


@pytest.mark.parametrize(("text", "seconds"), [
    ("retry-after: 333.5ms", 0.3335), ("Retry-After: 2s", 2), ("retry-after: 3", 3), ("retry-after: 1m", 60), ("", 0)])
def test_a_wait_named_in_the_text(text: str, seconds: float) -> None:
    assert wait_in(text) == pytest.approx(seconds)


def test_query_strings_are_not_shown() -> None:
    shown = tidy('Put "https://storage.example/b?X-Amz-Signature=abc&x=1": EOF and http://r/v2/u?_state=s3cret: 500 no')
    assert "abc" not in shown
    assert "s3cret" not in shown
    assert shown.endswith("http://r/v2/u: 500 no")


@pytest.mark.parametrize(("kind", "error"), [
    (Kind.LOGIN, AuthError), (Kind.DENIED, AuthError), (Kind.TOO_LARGE, AuthError), (Kind.MISSING, AuthError),
    (Kind.REFUSED, AuthError), (Kind.DISK, ResourceError), (Kind.TRANSIENT, NetworkError),
    (Kind.UNKNOWN, NetworkError)])
def test_every_kind_has_its_exit_code_and_says_what_to_do(kind: Kind, error: type[Exception]) -> None:
    made = as_error(Fault(kind, "its own words"), "ghcr.io/team/a:1", attempts=3)
    assert type(made) is error
    problem = made.problems[0]
    assert problem.where == "ghcr.io/team/a:1"
    assert problem.found == "its own words (3 attempts)"
    assert problem.todo
    assert "{" not in str(made)


def test_a_wait_that_was_too_long_is_told() -> None:
    assert "asks to wait 3600 s" in str(as_error(Fault(Kind.TRANSIENT, "429", 3600.0), "a/b"))
