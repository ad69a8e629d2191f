"""Resolution: the real uv against an index on this machine, and the pure parts around it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import resolve
from buildctl.errors import CompatibilityError, ManifestError, NetworkError, UsageError
from buildctl.host import Host
from buildctl.lock import PUBLIC
from buildctl.resolve import Request
from buildctl.stack import Index as Declared
from tests.unit.index import Index
from tests.unit.projects import ready

NOBODY = Host(ca=None, index=None, netrc=None, wheelhouses=())


@pytest.fixture(autouse=True)
def no_uv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports come back; what another test's index said does not."""
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


def request(*requirements: str, **rest: object) -> Request:
    return Request("3.11", "x86_64", "2.36", requirements, **rest)  # type: ignore[arg-type]


def versions(found: resolve.Resolution) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in found.wheels}


# --- pure ------------------------------------------------------------------------------------------------------------


def test_annotated_output_of_uv() -> None:
    found = resolve.parse_annotated(
        "# a comment\n"
        "aiohttp==3.1                # via sglang\n"
        "torch==2.9.1+cu130          # via stack (pyproject.toml), torchvision\n"
        "Under_Score==1.0 ; sys_platform == 'linux'  # via Some.Name[extra], -c chosen.txt\n"
        "lonely==2\n\n--index-url x\n")
    assert found == {"aiohttp": ("3.1", frozenset({"sglang"})),
                     "torch": ("2.9.1+cu130", frozenset({".", "torchvision"})),
                     "under-score": ("1.0", frozenset({"some-name"})), "lonely": ("2", frozenset())}


def test_tags_prefer_the_newest_glibc_that_fits() -> None:
    tags = resolve._tags(request())
    ranks = [resolve._rank(f"a-1-cp311-cp311-{platform}.whl", tags) for platform in
             ("manylinux_2_36_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux2010_x86_64",
              "manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64")]
    assert None not in ranks
    assert ranks == sorted(ranks, key=lambda rank: rank or 0)
    abi, pure = resolve._rank("a-1-cp310-abi3-manylinux_2_17_x86_64.whl", tags), resolve._rank(
        "a-1-py3-none-any.whl", tags)
    assert abi is not None
    assert pure is not None
    assert ranks[0] is not None
    assert ranks[0] < abi < pure


@pytest.mark.parametrize("file", ["a-1-cp311-cp311-manylinux_2_37_x86_64.whl", "a-1-cp312-cp312-linux_x86_64.whl",
                                  "a-1-cp311-cp311-manylinux_2_17_aarch64.whl", "a-1-cp311-cp311-win_amd64.whl",
                                  "not a wheel"])
def test_files_for_other_machines_do_not_fit(file: str) -> None:
    assert resolve._rank(file, resolve._tags(request())) is None


def test_environments_of_a_stack(tmp_path: Path) -> None:
    _, loaded, lock = ready(tmp_path)
    found = resolve.environments(loaded)
    assert found["server"].requirements == ("torch==2.0", "sglang==0.5")
    assert found["server"].machine == "x86_64"
    assert (found["entrypoint"].requirements, found["tools"].requirements) == (("h11",), ("uv",))
    owned = {wheel.name: wheel.layer for wheel in resolve.over_layers(loaded, (
        replace(wheel, via=("torch",)) if wheel.name == "needed" else
        replace(wheel, via=("sglang",)) if wheel.name == "helper" else wheel for wheel in lock.wheels))}
    assert owned == {"torch": "torch", "needed": "torch", "sglang": "sglang", "helper": "sglang"}


def test_a_request_without_some_packages() -> None:
    whole = request("torch==2.9.1+cu130", "sglang", constraints=("torch<3", "a<2"), overrides=("torch==2.9.1+cu130",),
                    excludes=("x",), preferences=("torch==2.9.1", "b==1"),
                    indexes=(Declared("pt", "http://x", ("torch", "torchvision")),))
    less = resolve.without(whole, {"torch"})
    assert (less.requirements, less.constraints, less.overrides) == (("sglang",), ("a<2",), ())
    assert (less.excludes, less.preferences) == (("x", "torch"), ("b==1",))
    assert less.indexes[0].packages == ("torchvision",)
    assert str(whole.requirement_of["torch"]) == "torch==2.9.1+cu130"


@pytest.mark.parametrize(("text", "kind", "word"), [
    ("× No solution found when resolving dependencies:\n  because a", CompatibilityError, "do not fit together"),
    ("error: Failed to fetch: `https://me:pw@index.example/simple/a/`", NetworkError, "does not answer"),
    ("error: something else", ManifestError, "refuses the stack"),
    ("", ManifestError, "uv said nothing"),
])
def test_what_uv_says_becomes_an_error_of_its_class(text: str, kind: type[Exception], word: str) -> None:
    host = replace(NOBODY, index="https://me:pw@index.example/simple")
    error = resolve.classify(text, host)
    assert type(error) is kind
    assert word in str(error)
    assert "pw" not in str(error)
    assert "index.example" not in str(error)


def test_credentials_of_any_index_are_hidden() -> None:
    assert "s3cret" not in str(resolve.classify("HTTP status 401 for https://u:s3cret@other.example/x", NOBODY))


def test_uv_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_uv_binary", lambda: str(tmp_path / "none"))
    with pytest.raises(ManifestError, match="cannot run uv"):
        resolve.resolve(request("a"), NOBODY)


def test_uv_lies_beside_the_interpreter_or_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve._uv_binary().endswith("/uv")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert resolve._uv_binary() == "uv"


def test_nothing_asked_nothing_resolved() -> None:
    assert resolve.resolve(request(), NOBODY).wheels == ()


# --- with the real uv ------------------------------------------------------------------------------------------------


def test_one_joint_resolution_with_hashes() -> None:
    with Index() as index:
        sha = index.add("app", "1.0", ["lib>=1", "Other_Name"])
        index.add("lib", "1.0")
        index.add("lib", "2.0", uploaded="2026-03-01T00:00:00Z")
        index.add("other-name", "5")
        found = resolve.resolve(request("app"), index.host())
    assert versions(found) == {"app": "1.0", "lib": "2.0", "other-name": "5"}
    app = found.wheels[0]
    assert (app.sha256, app.index, app.file, app.via) == (sha, PUBLIC, "app-1.0-py3-none-any.whl", (".",))
    assert app.size
    assert found.wheels[1].via == ("app",)
    assert found.epoch == 1772323200  # the youngest wheel, 2026-03-01
    assert found.urls["app-1.0-py3-none-any.whl"].endswith("/files/app-1.0-py3-none-any.whl")


def test_pins_of_an_earlier_lock_are_kept_where_they_fit() -> None:
    with Index() as index:
        for version in ("1.0", "2.0"):
            index.add("lib", version)
        assert versions(resolve.resolve(request("lib", preferences=("lib==1.0",)), index.host())) == {"lib": "1.0"}
        assert versions(resolve.resolve(request("lib>1", preferences=("lib==1.0",)), index.host())) == {"lib": "2.0"}


def test_constraints_overrides_and_excludes() -> None:
    with Index() as index:
        index.add("app", "1.0", ["lib==1.0", "unwanted"])
        for version in ("1.0", "2.0", "3.0"):
            index.add("lib", version)
        found = resolve.resolve(request("app", constraints=("lib<3",), overrides=("lib>=2",), excludes=("unwanted",)),
                                index.host())
    assert versions(found) == {"app": "1.0", "lib": "2.0"}


def test_prereleases_only_where_allowed() -> None:
    with Index() as index:
        index.add("app", "1.0", ["lib>=1.5b1"])
        index.add("lib", "1.0")
        index.add("lib", "2.0b1")
        found = resolve.resolve(request("app", prerelease=("lib",)), index.host())
    assert versions(found)["lib"] == "2.0b1"


def test_no_solution_names_both_sides() -> None:
    with Index() as index:
        index.add("app", "1.0", ["torch==2.13.0"])
        index.add("torch", "2.9.1")
        with pytest.raises(CompatibilityError, match=r"app==1\.0.*torch==2\.13\.0") as caught:
            resolve.resolve(request("app==1.0", "torch==2.9.1"), index.host())
    assert caught.value.exit_code == 4


def test_uvs_settings_of_this_host_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variables nor uv.toml: else the lock depends on who makes it, and nothing tells."""
    folder = tmp_path / "uv"
    folder.mkdir()
    (folder / "uv.toml").write_text('prerelease = "allow"\nconstraint-dependencies = ["lib<2"]\n')
    (tmp_path / "constraints.txt").write_text("lib<2\n")
    with Index() as index:
        index.add("app", "1.0", ["lib"])
        for version in ("1.0", "2.0", "3.0b1"):
            index.add("lib", version)
        wanted = resolve.resolve(request("app"), index.host()).wheels
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        for name, value in (("UV_PRERELEASE", "allow"), ("UV_RESOLUTION", "lowest"), ("UV_EXCLUDE_NEWER", "2020-01-01"),
                            ("UV_CONSTRAINT", str(tmp_path / "constraints.txt")), ("UV_OFFLINE", "1")):
            monkeypatch.setenv(name, value)
        assert resolve.resolve(request("app"), index.host()).wheels == wanted
        monkeypatch.setenv("UV_CONFIG_FILE", str(folder / "uv.toml"))
        assert resolve.resolve(request("app"), index.host()).wheels == wanted
    assert [wheel.version for wheel in wanted] == ["1.0", "2.0"]


def test_indexes_and_logins_that_builds_would_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_SPECIAL_PASSWORD", "s3cret")
    asked = request("torch", indexes=(Declared("special", "http://127.0.0.1:9/simple", ("torch",)),))
    with pytest.raises(UsageError) as caught:
        resolve.resolve(asked, replace(NOBODY, extra_indexes=("UV_EXTRA_INDEX_URL",)))
    assert [problem.where for problem in caught.value.problems] == ["UV_EXTRA_INDEX_URL", "UV_INDEX_SPECIAL_PASSWORD"]
    said = str(caught.value)
    assert ("s3cret" in said, "'indexes' of the stack" in said, "netrc" in said) == (False, True, True)


def test_the_wheel_of_the_target_is_chosen() -> None:
    with Index() as index:
        index.add("lib", "1.0", tag="cp311-cp311-manylinux_2_17_x86_64")
        index.add("lib", "1.0", tag="cp311-cp311-manylinux_2_28_x86_64")
        index.add("lib", "1.0", tag="cp311-cp311-manylinux_2_38_x86_64")
        index.add("lib", "1.0", tag="py3-none-any")
        found = resolve.resolve(request("lib"), index.host())
    assert found.wheels[0].file == "lib-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"


def test_files_of_others_are_no_wheel_for_the_platform() -> None:
    packages: list[dict[str, object]] = [
        {"name": "lib", "version": "1.0", "wheels": [{"url": "https://x/lib-1.0-cp312-cp312-linux_x86_64.whl"}]},
        {"name": "sourced", "version": "2.0"}]
    with pytest.raises(CompatibilityError) as caught:
        resolve._select(packages, {}, resolve._tags(request()), (), {})
    assert [problem.what for problem in caught.value.problems] == [
        "lib 1.0 has no wheel for the stack's platform", "sourced 2.0 has no wheel for the stack's platform"]


def test_exclude_newer_leaves_out_what_came_later(tmp_path: Path) -> None:
    with Index() as index:
        index.add("lib", "1.0", uploaded="2026-01-01T00:00:00Z")
        index.add("lib", "2.0", uploaded="2026-06-01T00:00:00Z")
        index.add("housed", "1.0")
        house = index.write(tmp_path, "housed-1.0-py3-none-any.whl").parent
        del index.files["housed-1.0-py3-none-any.whl"]
        asked = request("lib", "housed", exclude_newer="2026-03-01T00:00:00Z")
        assert versions(resolve.resolve(asked, index.host(house))) == {"lib": "1.0", "housed": "1.0"}


def test_a_package_comes_from_its_own_index_and_nothing_else_does() -> None:
    """The same version on two indexes, for two CUDAs (user-reports K2-5); the special index has newer others, too."""
    with Index() as public, Index() as special:
        public.add("torch", "2.11.0", ["lib"])
        public.add("lib", "1.0")
        sha = special.add("torch", "2.11.0+cu130", ["lib"])
        special.add("lib", "9.0")
        declared = (Declared("special", special.url, ("torch",)),)
        found = resolve.resolve(request("torch==2.11.0", indexes=declared), public.host())
    torch = next(wheel for wheel in found.wheels if wheel.name == "torch")
    assert (torch.version, torch.index, torch.sha256) == ("2.11.0+cu130", "special", sha)
    assert versions(found)["lib"] == "1.0"
    assert [wheel.index for wheel in found.wheels if wheel.name == "lib"] == [PUBLIC]


def test_an_index_counts_for_direct_requirements_and_the_rest_is_refused() -> None:
    with Index() as public, Index() as special:
        public.add("app", "1.0", ["torch"])
        public.add("torch", "2.11.0")
        special.add("torch", "2.11.0+cu130")
        declared = (Declared("special", special.url, ("torch",)),)
        with pytest.raises(CompatibilityError, match="torch must come from index 'special'"):
            resolve.resolve(request("app", indexes=declared), public.host())


def test_which_indexes_are_out_of_reach() -> None:
    with Index() as public, Index() as up, Index() as down, Index() as empty:
        up.add("torch", "1.0", ["dependency-that-nobody-has"])
        down.add("kernel", "1.0")
        declared = (Declared("up", up.url, ("torch",)), Declared("down", down.url, ("kernel",)),
                    Declared("empty", empty.url, ("nothing",)), Declared("idle", down.url, ("unasked",)))
        down.down()
        asked = request("torch", "kernel", "nothing", indexes=declared)
        assert [index.name for index in resolve.unreachable(asked, public.host())] == ["down"]
        with pytest.raises(NetworkError) as caught:
            resolve.resolve(asked, public.host())
        assert caught.value.exit_code == 11
        down.down = lambda: None  # type: ignore[method-assign] # it is down already


def test_a_wheelhouse_stands_in_for_an_index(tmp_path: Path) -> None:
    with Index() as public, Index() as special:
        sha = special.add("torch", "2.0+cpu")
        house = special.write(tmp_path, "torch-2.0+cpu-py3-none-any.whl").parent
        declared = (Declared("special", "http://127.0.0.1:9/simple", ("torch", "unasked")),)
        found = resolve.resolve(request("torch==2.0+cpu", indexes=declared), public.host(house))
        (torch,) = found.wheels
        assert (torch.index, torch.sha256, torch.size) == ("special", sha, len(special.files[torch.file]))
        with pytest.raises(NetworkError):
            resolve.resolve(request("torch==3.0", indexes=declared), public.host(house))


def test_a_file_without_a_hash_is_refused_unless_it_lies_here(tmp_path: Path) -> None:
    """Present uv reads such files itself; older ones leave the hash out."""
    packages = [{"name": "lib", "version": "1.0", "wheels": [{"path": "lib-1.0-py3-none-any.whl"}]}]
    with pytest.raises(NetworkError, match="gives no sha256"):
        resolve._select(packages, {}, resolve._tags(request()), (), {})
    with Index() as index:
        sha = index.add("lib", "1.0")
        path = index.write(tmp_path, "lib-1.0-py3-none-any.whl")
    (found,) = resolve._select(packages, {}, resolve._tags(request()), (), {path.name: path}).wheels
    assert (found.sha256, found.size, found.via) == (sha, path.stat().st_size, ())


def test_the_ca_bundle_reaches_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], env: dict[str, str], **rest: object) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 2, "", "error: stop here")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ManifestError, match="stop here"):
        resolve.resolve(request("a"), replace(NOBODY, ca=tmp_path / "bundle.crt"))
    assert seen["SSL_CERT_FILE"] == str(tmp_path / "bundle.crt")
