"""An image against a lock: an equal one, and everything that can differ, each named with its layer."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import compose, contents, expectation, installed, patches, verify
from buildctl import lock as locks
from buildctl.contents import Image
from buildctl.expectation import Expectation, Settings, seconds
from buildctl.filesystem import FileSystem
from buildctl.fragment import Stage
from buildctl.host import Host
from buildctl.lock import LockedBase, LockedSeries, Overlap, Unlocked
from buildctl.verify import Difference, Report
from tests.unit import tars
from tests.unit.projects import lock_of, make, wheel

SITE = "opt/venv/lib/python3.11/site-packages"
HELPERS = "opt/entrypoint/venv/lib/python3.11/site-packages"
SOURCE = b"one = 1\ntwo = 2\nthree = 3\n"
PATCHED = b'one = 1\ntwo = "changed"\nthree = 3\n'


def urlsafe(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def distribution(site: str, name: str, version: str, files: Mapping[str, bytes],
                 licence: str = "MIT") -> dict[str, bytes | str | None]:
    """A package as uv installs it."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n".encode()
    own = {**files, f"{info}/METADATA": metadata}
    record = "".join(f"{path},{urlsafe(data)},{len(data)}\n" for path, data in own.items()) + f"{info}/RECORD,,\n"
    return {**{f"{site}/{path}": data for path, data in own.items()}, f"{site}/{info}/RECORD": record.encode(),
            f"{site}/{info}/INSTALLER": b"uv"}


@dataclass
class Lab:
    """A project, its lock, and an image that is as it should be; tests change the layers or the config."""

    composition: compose.Composition
    wanted: Expectation
    layers: list[dict[str, bytes | str | None]]
    settings: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    #: layers that the steps make and the image lacks
    layers_more: int = 0

    def image(self) -> Image:
        data = [tars.of(layer) for layer in self.layers]
        read = [tars.layer(one) for one in data]
        history = [{"created_by": f"step {number}"} for number, _ in enumerate(read, start=1)]
        config = {"config": self.settings, "history": history}
        return Image("sglang:1", "sha256:d", config, self.annotations, tuple(read), FileSystem(read))

    def compare(self, wheels: Mapping[str, Mapping[str, str]] | None = None, **changes: Any) -> Report:
        wanted = replace(self.wanted, **changes)
        settings = replace(wanted.settings, layers=len(self.layers) + self.layers_more)
        return verify.compare(self.image(), replace(wanted, settings=settings), wheels)

    def differences(self, **changes: Any) -> list[Difference]:
        return self.compare(**changes).differences

    def only(self, **changes: Any) -> Difference:
        (found,) = self.differences(**changes)
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    project = make(tmp_path)
    from buildctl import stack

    loaded = stack.load(project, "small")
    patch = (project.patches / "sglang/0.5/0001-change.patch").read_bytes()
    tree = patches.effective_tree({"sglang/a.py": PATCHED})
    lock = lock_of(project, loaded)
    series = LockedSeries("sglang/0.5", next(one.sha256 for one in lock.wheels if one.name == "sglang"),
                          (("0001-change.patch", hashlib.sha256(patch).hexdigest()),), tree)
    lock = replace(lock, patches={"sglang": series})
    composition = compose.compose(project, loaded, lock, Host(None, None, None, ()), "commit")
    wanted = expectation.of(composition, "sglang")
    plan = composition.image("sglang")
    base: dict[str, bytes | str | None] = {
        "etc/os-release": b'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n', "lib": "usr/lib",
        "usr/lib/libc.so.6": b"libc", "usr/bin/python3": b"python",
        "var/lib/dpkg/status": b"Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36\n\n"
                               b"Package: python3\nStatus: install ok installed\nArchitecture: amd64\nVersion: 3.11\n\n"
                               b"Package: old\nStatus: deinstall ok config-files\nVersion: 1\n",
        "var/lib/dpkg/info/libc6:amd64.md5sums": f"{hashlib.md5(b'libc').hexdigest()}  lib/libc.so.6\n".encode(),
        "var/lib/dpkg/info/python3.md5sums": (f"{hashlib.md5(b'python').hexdigest()}  usr/bin/python3\n"
                                              f"{'0' * 32}  usr/share/doc/python3/left-out\n").encode()}
    torch = {**distribution(SITE, "torch", "2.0+cpu", {"torch/__init__.py": b"torch"}),
             **distribution(SITE, "needed", "1.0", {"needed.py": b"needed"}),
             f"{SITE}/torch/__pycache__/__init__.cpython-311.pyc": b"code"}
    sglang = {**distribution(SITE, "sglang", "0.5", {"sglang/__init__.py": b"", "sglang/a.py": PATCHED}),
              **distribution(SITE, "helper", "3", {"helper.py": b"helper"}),
              **distribution(SITE, "ours", "1.0", {"ours.py": b"ours"})}
    top = {path.replace("image/sglang/", "etc/buildctl/"): file.content() for path, file in composition.files.items()
           if path.startswith("image/sglang/")}
    entry = {**distribution(HELPERS, "h11", "0.16", {"h11.py": b"h11"}),
             f"{HELPERS}/entrypoints.pth": b"/opt/entrypoint/lib\n", **top,
             "opt/entrypoint/venv/pyvenv.cfg": b"home = /usr/bin\n", "opt/entrypoint/bin/tini": b"tini",
             "opt/entrypoint/lib/entrypoints/__init__.py": b'"""entry"""\n',
             "opt/entrypoint/lib/entrypoints/__pycache__/__init__.cpython-311.pyc": b"code"}
    made = Lab(composition, wanted, [base, dict(torch), dict(sglang), dict(entry)],
               {"User": "1000", "Labels": dict(plan.labels)}, dict(plan.labels))
    made.layers.append({"etc/buildctl/sbom.json": verify.sbom_of(made.image())})
    return made


def test_an_image_that_is_as_it_should_be(lab: Lab) -> None:
    report = lab.compare()
    assert report.differences == []
    assert report.as_dict()["equal"] is True
    assert report.compared["packages"] == 6
    assert report.compared["files"] == 13
    assert report.compared["debian files"] == 2
    assert report.compared["patches"] == 1
    assert report.compared["bytecode"] == 1


# --- packages --------------------------------------------------------------------------------------------------------


def test_a_changed_file_is_named_with_its_package_and_layer(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/torch/__init__.py": b"evil"})
    found = lab.only()
    assert (found.subject, found.name) == ("file", f"/{SITE}/torch/__init__.py")
    assert found.what == "a file of torch 2.0+cpu was changed"
    assert found.found == f"sha256 {hashlib.sha256(b'evil').hexdigest()}"
    assert (found.layer, found.step) == (6, "step 6")
    problem = found.as_problem()
    assert problem.where == f"file /{SITE}/torch/__init__.py"
    assert problem.todo == "look at layer 6: step 6"
    assert found.as_dict()["layer"] == 6


def test_a_file_that_is_a_link_now(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/needed.py": "/tmp/other.py"})
    assert lab.only().found == "symlink"


def test_a_file_that_is_gone(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/.wh.helper.py": b""})
    assert lab.only().what == "a file of helper 3 is gone"


def test_another_version(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/.wh.needed-1.0.dist-info": b"", f"{SITE}/.wh.needed.py": b"",
                       **distribution(SITE, "needed", "2.0", {"needed2.py": b"2"})})
    found = {(one.subject, one.what, one.found, one.expected) for one in lab.differences()}
    assert ("package", "another version, in /opt/venv", "2.0", "1.0") in found
    assert {subject for subject, *_ in found} == {"package", "sbom"}


def test_missing_extra_and_twice(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/.wh.needed-1.0.dist-info": b"", f"{SITE}/.wh.needed.py": b"",
                       **distribution(SITE, "stranger", "9", {"stranger.py": b"9"}),
                       **distribution(SITE, "torch", "2.1", {"torch2.py": b"9"}),
                       **distribution(HELPERS, "stranger", "8", {"stranger.py": b"8"})})
    said = {(one.name, one.what, one.found) for one in lab.differences() if one.subject == "package"}
    assert ("needed", "a package of the lock is missing in /opt/venv", "none") in said
    assert ("stranger", "a package that the lock does not have, in /opt/venv", "9") in said
    assert ("stranger", "a package that the lock does not have, in /opt/entrypoint/venv", "8") in said
    assert any(name == "torch" and what == "the package is installed twice" for name, what, _ in said)


def test_files_that_no_package_owns(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/sitecustomize.py": b"evil", f"{SITE}/x.pth": b"import os", f"{SITE}/m.pyc": b"",
                       f"{HELPERS}/entrypoints.pth": b"/tmp\n", f"{SITE}/nvidia/cu13/lib64/libcudart.so": "x",
                       "etc/ld.so.preload": b"/tmp/x.so"})
    report = lab.compare()
    assert {one.name for one in report.differences} == {
        f"/{SITE}/sitecustomize.py", f"/{SITE}/x.pth", f"/{SITE}/m.pyc", f"/{HELPERS}/entrypoints.pth",
        "/etc/ld.so.preload"}
    assert report.compared["made"] == 1


def test_bytecode_comes_with_its_source(lab: Lab) -> None:
    lab.layers.append({f"{SITE}/torch/__pycache__/__init__.cpython-311.pyc": b"evil"})
    found = lab.only()
    assert found.what == "bytecode that was not made with its source"
    assert (found.found, found.expected) == ("in layer 6", "in layer 2, as its source")


def test_a_record_that_cannot_be_read(lab: Lab) -> None:
    lab.layers[1][f"{SITE}/needed-1.0.dist-info/RECORD"] = b"needed.py,md5=abc,6\n"
    lab.layers[2][f"{SITE}/.wh.x"] = b""
    lab.layers[2].pop(f"{SITE}/helper-3.dist-info/RECORD")
    said = {one.found for one in lab.differences() if one.what == "the package cannot be read"}
    assert said == {"RECORD cannot be read: needed.py has a hash of type 'md5'", "no RECORD"}


def test_metadata_that_names_nothing(lab: Lab) -> None:
    lab.layers[1][f"{SITE}/needed-1.0.dist-info/METADATA"] = b"nothing"
    assert "METADATA names no package and version" in {one.found for one in lab.differences()}


def test_an_environment_that_is_not_there(lab: Lab) -> None:
    lab.layers[3] = {path: data for path, data in lab.layers[3].items() if not path.startswith("opt/entrypoint")}
    lab.layers[4]["etc/buildctl/sbom.json"] = verify.sbom_of(lab.image())
    assert {one.what for one in lab.differences()} == {"the environment is not there",
                                                       "a file of the entrypoint is not the checkout's"}
    # nothing is missing where the lock wants none
    part = replace(lab.wanted.part, entrypoint=())
    assert not [one for one in lab.differences(part=part, entrypoint={}) if one.subject in ("package", "file")]


def test_pairs_that_share_files_are_known_to_the_lock(lab: Lab) -> None:
    lab.layers[2] |= distribution(SITE, "helper", "3", {"helper.py": b"helper", "needed.py": b"of helper"})
    assert {one.name for one in lab.differences()} == {f"/{SITE}/needed.py"}
    part = replace(lab.wanted.part, overlaps=(Overlap("helper", "needed", 1, ("needed.py",)),))
    differences = lab.differences(part=part)
    assert not [one for one in differences if one.subject == "file"]


def test_records_are_held_against_the_locked_wheels(lab: Lab) -> None:
    def rows(files: Mapping[str, bytes]) -> dict[str, str]:
        return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}

    helper = rows({"helper.py": b"helper"}) | {"helper-3.dist-info/RECORD": ""}
    sglang = rows({"sglang/__init__.py": b"", "sglang/a.py": SOURCE, "sglang-0.5.data/scripts/x": b"#!python"})
    files = {"helper": "helper-3-py3-none-any.whl", "sglang": "sglang-0.5-py3-none-any.whl"}
    report = lab.compare({files["sglang"]: sglang})
    assert report.differences == []  # the patched file differs from the wheel, and has to
    assert report.compared["wheels"] == 1
    # file and RECORD were both changed: without the wheel nobody sees it
    evil = distribution(SITE, "helper", "3", {"helper.py": b"evil", "more.py": b"more"})
    lab.layers.append(dict(evil))
    assert lab.differences() == []
    metadata = str(f"{SITE}/helper-3.dist-info/METADATA")
    content = evil[metadata]
    assert isinstance(content, bytes)
    found = {(one.name, one.what) for one in
             lab.compare({files["helper"]: helper | rows({"helper-3.dist-info/METADATA": content})}).differences}
    assert found == {(f"/{SITE}/helper.py", "RECORD of helper states another hash than the locked wheel"),
                     (f"/{SITE}/more.py", "RECORD of helper has a file that the locked wheel has not")}


def test_what_the_lock_leaves_open_may_have_any_version(lab: Lab) -> None:
    open_ends = (Unlocked("needed", "needed>=1", "torch", "special"),)
    part = replace(lab.wanted.part, unlocked=open_ends,
                   wheels=tuple(one for one in lab.wanted.part.wheels if one.name != "needed"))
    assert {one.subject for one in lab.differences(part=part)} == {"lock"}


# --- patches ---------------------------------------------------------------------------------------------------------


def test_a_patch_undone_in_the_files(lab: Lab) -> None:
    lab.layers.append(dict(distribution(SITE, "sglang", "0.5", {"sglang/__init__.py": b"", "sglang/a.py": SOURCE})))
    found = lab.only()
    assert (found.subject, found.name) == ("patch", "sglang")
    assert found.what == "the patched files make another effective tree"
    assert found.found == patches.effective_tree({"sglang/a.py": SOURCE})
    assert found.layer == 6
    lab.layers.append({f"{SITE}/sglang/.wh.a.py": b""})
    assert any("gone: sglang/a.py" in one.found for one in lab.differences())


def test_patches_missing_other_and_extra(lab: Lab) -> None:
    lab.layers.append({"etc/buildctl/patches/sglang/0001-change.patch": b"other",
                       "etc/buildctl/patches/sglang/0002-more.patch": b"more",
                       "etc/buildctl/patches/flashinfer/0001-x.patch": b"x"})
    assert {(one.name, one.what) for one in lab.differences()} == {
        ("sglang 0001-change.patch", "the patch is another one"),
        ("sglang 0002-more.patch", "a patch that the lock does not have"),
        ("flashinfer", "a series that the lock does not have")}
    lab.layers.append({"etc/buildctl/patches/.wh.sglang": b"", "etc/buildctl/patches/.wh.flashinfer": b""})
    found = lab.compare(patches={})
    assert [one.what for one in found.differences] == ["a patch is missing"]
    assert found.notes == ["the effective tree of sglang was not computed: its patches are not here"]


# --- what the image says of itself -----------------------------------------------------------------------------------


def test_another_lock(lab: Lab) -> None:
    newer = replace(lab.wanted.part, wheels=(*lab.wanted.part.wheels[:-1], wheel("helper", "4", "sglang")))
    said = {(one.subject, one.name) for one in lab.differences(part=newer)}
    assert said == {("lock", ""), ("lock", "image.json 'lock_sha256'"), ("lock", "image.json 'packages'"),
                    ("package", "helper")}


def test_an_image_without_any_of_it(lab: Lab) -> None:
    lab.layers.append({"etc/.wh.buildctl": b""})
    said = {(one.subject, one.name) for one in lab.differences()}
    assert {("lock", ""), ("sbom", ""), ("patch", "sglang 0001-change.patch")} <= said
    lab.layers.append({"etc/buildctl/image.json": b"{", "etc/buildctl/lock.json": b"[]",
                       "etc/buildctl/sbom.json": b"{}"})
    assert ("sbom", "none") in {(one.subject, one.expected) for one in lab.differences()}
    lab.layers.append({"etc/buildctl/image.json": b"[]"})
    assert ("lock", "image.json 'image'") in {(one.subject, one.name) for one in lab.differences()}


def test_an_image_that_is_no_debian(lab: Lab) -> None:
    lab.layers.append({"var/lib/.wh.dpkg": b""})
    report = lab.compare(apt=frozenset(), part=lab.wanted.part)
    assert {one.subject for one in report.differences} == {"sbom"}
    assert any("this is no Debian" in note for note in report.notes)


def test_the_record_of_a_wheel_file(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "a-1-py3-none-any.whl"
    for text, found in ((f"a.py,{urlsafe(b'a')},1\n\na-1.dist-info/RECORD,,\n",
                         {"a.py": hashlib.sha256(b"a").hexdigest(), "a-1.dist-info/RECORD": ""}),
                        ("a.py,sha512=x,1\n", {}), ("a.py,sha256=x,1\n", {})):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a-1.dist-info/RECORD", text)
        assert installed.wheel_record(path) == found
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
    assert installed.wheel_record(path) == {}
    assert installed.distributions(FileSystem([]), "nowhere") == ()
    assert installed.site_of(FileSystem([]), "opt/venv") is None


def test_labels_and_annotations(lab: Lab) -> None:
    lab.settings["Labels"]["buildctl.lock"] = "0" * 64
    lab.annotations.pop("org.opencontainers.image.title")
    assert {(one.subject, one.name, one.found) for one in lab.differences()} == {
        ("label", "buildctl.lock", "0" * 64), ("annotation", "org.opencontainers.image.title", "none")}
    lab.annotations.clear()
    report = lab.compare()
    assert [one.subject for one in report.differences] == ["label"]
    assert any("no annotations" in note for note in report.notes)


def test_a_bill_of_materials_of_other_files(lab: Lab) -> None:
    lab.layers.append({"etc/buildctl/sbom.json": b"{}\n"})
    assert lab.only().what == "the bill of materials is not the one of these files"


# --- settings --------------------------------------------------------------------------------------------------------

_BODY = """\
ENV A=1 B="two words" \\
    PATH=/opt/venv/bin:$PATH
USER 1000:1000
WORKDIR /results
VOLUME ["/cache"]
EXPOSE 30000 53/udp
HEALTHCHECK --interval=30s --timeout=1m30s CMD ["/e", "health"]
ENTRYPOINT ["/e"]
CMD serve it
"""


def test_settings_come_from_the_instructions_of_the_whole_chain() -> None:
    stages = [Stage("base", "scratch", "USER root\nENV A=0 C=3\n"), Stage("top", "base", _BODY),
              Stage("other", "base", "USER nobody\n")]
    assert expectation.settings_of(stages, "top") == Settings(
        "1000:1000", ("/e",), ("/bin/sh", "-c", "serve it"), "/results",
        {"A": "1", "B": "two words", "C": "3", "PATH": "/opt/venv/bin:$PATH"}, frozenset({"/cache"}),
        frozenset({"30000/tcp", "53/udp"}), ("CMD", "/e", "health"), {"interval": 30, "timeout": 90}, layers=1)
    older = expectation.settings_of([Stage("top", "scratch", "ENV A the older form\nexpose 1\n")], "top")
    assert (dict(older.environment), older.ports) == ({"A": "the older form"}, frozenset({"1/tcp"}))
    assert expectation.settings_of([Stage("top", "scratch", "HEALTHCHECK NONE\n")], "top").healthcheck == ("NONE",)
    assert seconds("1h2m3s500ms") == 3723.5


def wanted_settings() -> Settings:
    return expectation.settings_of([Stage("top", "scratch", _BODY)], "top")


def good_settings(lab: Lab) -> dict[str, Any]:
    return {"User": "1000:1000", "WorkingDir": "/results", "Entrypoint": ["/e"], "Cmd": ["/bin/sh", "-c", "serve it"],
            "Volumes": {"/cache": {}}, "ExposedPorts": {"30000/tcp": {}, "53/udp": {}},
            "Healthcheck": {"Test": ["CMD", "/e", "health"], "Interval": 30_000_000_000, "Timeout": 90_000_000_000},
            "Env": ["A=1", "B=two words", "PATH=/opt/venv/bin:/usr/bin"], "Labels": lab.settings["Labels"]}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("User", "root", "user"), ("User", None, "user"), ("WorkingDir", "/", "folder"),
    ("Entrypoint", ["/bin/sh"], "entrypoint"), ("Cmd", ["sh"], "cmd"), ("Volumes", {}, "volumes"),
    ("ExposedPorts", {"22/tcp": {}}, "ports"), ("OnBuild", ["RUN x"], "onbuild"), ("Shell", ["/evil"], "shell"),
    ("Healthcheck", {"Test": ["NONE"], "Interval": 30_000_000_000, "Timeout": 90_000_000_000}, "healthcheck"),
    ("Healthcheck", {"Test": ["CMD", "/e", "health"], "Interval": 1, "Timeout": 90_000_000_000},
     "healthcheck interval"),
    ("Env", ["A=2", "B=two words", "PATH=/x"], "A"), ("Env", ["A=1", "PATH=/x"], "B"),
    ("Env", ["A=1", "B=two words", "PATH=/x", "LD_PRELOAD=/x.so"], "LD_PRELOAD"),
    ("Env", ["A=1", "B=two words", "PATH=/x", "SGLANG_DISABLE_CUDNN_CHECK=1"], "SGLANG_DISABLE_CUDNN_CHECK")])
def test_a_container_that_would_start_otherwise(lab: Lab, name: str, value: object, said: str) -> None:
    lab.settings = good_settings(lab)
    assert lab.differences(settings=wanted_settings()) == []
    lab.settings[name] = value
    found = lab.only(settings=wanted_settings())
    assert (found.subject, found.name) == ("setting", said)


def test_secrets_in_variables_are_found_and_not_shown(lab: Lab) -> None:
    lab.settings = good_settings(lab)
    lab.settings["Env"].append("HF_TOKEN=hf_abcdef")
    assert lab.only(settings=wanted_settings()).found == "set"


def test_a_base_image_brings_variables_of_its_own_but_none_that_change_what_runs(lab: Lab) -> None:
    lab.settings = good_settings(lab)
    lab.settings["Env"] += ["NVIDIA_VISIBLE_DEVICES=all", "LD_LIBRARY_PATH=/usr/local/nvidia/lib"]
    lab.settings["Shell"] = ["/bin/bash", "-c"]
    part = replace(lab.wanted.part, base=LockedBase("registry", image="nvidia/cuda:13", digest="sha256:" + "1" * 64))

    def said() -> set[str]:
        return {one.name for one in lab.differences(settings=wanted_settings(), part=part) if one.subject == "setting"}

    assert said() == set()
    lab.settings["Env"] += ["LD_PRELOAD=/x", "PYTHONPATH=/y", "FLASHINFER_DISABLE_VERSION_CHECK=1"]
    assert said() == {"LD_PRELOAD", "PYTHONPATH", "FLASHINFER_DISABLE_VERSION_CHECK"}


# --- the base --------------------------------------------------------------------------------------------------------


def test_debians_files_by_debians_sums(lab: Lab) -> None:
    lab.layers.append({"usr/lib/libc.so.6": b"evil"})
    found = lab.only()
    assert (found.subject, found.name, found.what) == ("debian", "/usr/lib/libc.so.6",
                                                       "a file of libc6 2.36 was changed")


def test_another_debian_and_packages_that_are_missing(lab: Lab) -> None:
    found = lab.differences(apt=frozenset({"libnuma1", "python3"}),
                            part=replace(lab.wanted.part, base=LockedBase("bootstrap", suite="trixie")))
    assert {(one.subject, one.name) for one in found if one.subject in ("base", "debian")} == {
        ("base", "suite"), ("debian", "libnuma1")}


def test_layers_are_counted(lab: Lab) -> None:
    lab.layers_more = -1
    assert (lab.only().name, lab.only().found, lab.only().expected) == ("layers", "5", "4")
    part = replace(lab.wanted.part, base=LockedBase("registry", image="a/b:1", digest="sha256:" + "1" * 64))
    assert not [one for one in lab.differences(part=part) if one.name == "layers"]  # those of the base come on top
    lab.layers_more = 1
    assert [one.expected for one in lab.differences(part=part) if one.name == "layers"] == ["6 and those of the base"]


def test_files_that_somebody_added_anywhere(lab: Lab) -> None:
    lab.layers[1]["etc/ld.so.conf.d/nvidia-wheels.conf"] = b"known"
    lab.layers.append({"usr/local/bin/python3": b"evil", "etc/profile.d/x.sh": b"evil", "root/.cache/x": b"idle"})
    report = lab.compare()
    assert {one.name for one in report.differences} == {"/usr/local/bin/python3", "/etc/profile.d/x.sh"}
    assert report.compared["idle files"] == 1


def test_debian_packages_that_came_after_the_wheels(lab: Lab) -> None:
    status = lab.layers[0]["var/lib/dpkg/status"]
    lab.layers.append({"var/lib/dpkg/status": status, "usr/local/bin/x": b"hidden by it"})
    found = lab.only()
    assert found.what == "Debian's packages were changed after helper was installed"
    assert (found.found, found.expected, found.layer) == ("layer 6", "below layer 3", 6)


def test_the_entrypoint_is_the_checkouts(lab: Lab) -> None:
    lab.layers.append({"opt/entrypoint/lib/entrypoints/__init__.py": b"evil",
                       "opt/entrypoint/lib/entrypoints/more.py": b"evil", "opt/entrypoint/bin/tini": b"evil"})
    said = {one.name: one.what for one in lab.differences()}
    assert said == {
        "/opt/entrypoint/lib/entrypoints/__init__.py": "a file of the entrypoint is not the checkout's",
        "/opt/entrypoint/lib/entrypoints/more.py": "a file of the entrypoint is not the checkout's",
        "/opt/entrypoint/bin/tini": "a file that did not come with the entrypoint's environment"}
    lab.layers[-1] = {"opt/entrypoint/lib/entrypoints/.wh.__init__.py": b""}
    assert [one.found for one in lab.differences()] == ["nothing"]
    # an image from another commit has another key
    report = lab.compare(key="0" * 64)
    assert report.differences == []
    assert "1 files of the entrypoint are not those of this checkout" in report.notes[0]


def test_attached_documents(lab: Lab) -> None:
    from buildctl import provenance
    from buildctl.provenance import Build, Origin

    image, known = lab.image(), ["sha256:" + "e" * 64, "sha256:" + "d" * 64]
    own = image.files.content("etc/buildctl/sbom.json") or b""
    statement = provenance.statement("x", known[1], {"image": "sglang", "stack": "small", "version": "0.5", "key": "k"},
                                     lab.wanted.part, Origin(), Build(), {})
    assert verify.attested(image, lab.wanted, known, [("sbom", own), ("provenance", statement)]) == []
    said = verify.attested(image, lab.wanted, known[:1], [("sbom", b"other"), ("provenance", statement)])
    assert [(one.subject, one.what) for one in said] == [
        ("sbom", "the attached bill of materials is not the one in the image"),
        ("provenance", "the provenance is of another image")]


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "kept"), [
    (f"{SITE}/torch-2.0.dist-info/METADATA", True), (f"{SITE}/torch-2.0.dist-info/RECORD", True),
    (f"{HELPERS}/x.pth", True), (f"{SITE}/torch/x.py", False), ("etc/buildctl/patches/sglang/1.patch", True),
    ("etc/passwd", False), ("etc/os-release", True), ("var/lib/dpkg/status", True),
    ("var/lib/dpkg/info/libc6:amd64.md5sums", True), ("var/lib/dpkg/info/libc6:amd64.list", False)])
def test_little_is_kept(path: str, kept: bool) -> None:
    assert installed.keep(path) is kept


def export(layers: list[bytes], config: dict[str, Any], annotations: Mapping[str, str] | None = None,
           changes: Mapping[str, bytes] | None = None) -> bytes:
    """What `docker save` writes of an image on the containerd store."""
    def name(data: bytes) -> str:
        return f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"

    document = json.dumps(config).encode()
    manifest = json.dumps({"config": {"digest": f"sha256:{hashlib.sha256(document).hexdigest()}"},
                           "layers": [{"digest": f"sha256:{hashlib.sha256(one).hexdigest()}"} for one in layers],
                           "annotations": dict(annotations or {})}).encode()
    listed = json.dumps([{"Config": name(document), "Layers": [name(one) for one in layers]}]).encode()
    files = {**{name(one): one for one in (*layers, document, manifest)}, "manifest.json": listed,
             "oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "repositories": b"x", **(changes or {})}
    return tars.tar([tars.item("blobs"), *(tars.item(path, data) for path, data in files.items() if data)])


def exported(data: bytes) -> Image:
    return contents.from_export((data[at:at + 999] for at in range(0, len(data), 999)), "a:1", lambda _: True)


def test_an_export_of_either_store() -> None:
    plain = [tars.of({"a": b"1"}), tars.of({"b": b"2"})]
    diff_ids = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in plain]
    config = {"config": {"Labels": {"x": "y"}}, "rootfs": {"diff_ids": diff_ids},
              "history": [{"created_by": "ADD"}, {"created_by": "ENV", "empty_layer": True}, {"created_by": "COPY"}]}
    packed = [tars.pack(plain[0], "zstd"), tars.pack(plain[1], "gzip")]
    image = exported(export(packed, config, {"k": "v"}))
    assert (image.annotations, image.labels, image.size) == ({"k": "v"}, {"x": "y"}, sum(map(len, packed)))
    assert [found.path for found in image.files.under()] == ["a", "b"]
    assert (image.step(0), image.step(1), image.step(2)) == ("ADD", "COPY", "")
    # graph drivers: layers by name, no manifest of the registry's kind
    document = json.dumps(config).encode()
    old = tars.tar([tars.item("1/layer.tar", plain[0]), tars.item("2/layer.tar", plain[1]),
                    tars.item("c.json", document),
                    tars.item("manifest.json", json.dumps([{"Config": "c.json", "Layers": [
                        "1/layer.tar", "2/layer.tar"]}]).encode())])
    image = exported(old)
    assert image.digest == f"sha256:{hashlib.sha256(document).hexdigest()}"
    assert image.annotations == {}


def test_exports_that_are_not_whole() -> None:
    from buildctl.errors import AuditError

    plain = tars.of({"a": b"1"})
    config = {"rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]}}
    good = export([plain], config)
    with pytest.raises(AuditError, match="lacks a part"):
        exported(export([plain], config, changes={"manifest.json": b""}))
    with pytest.raises(AuditError, match="lacks a part"):
        exported(good[:700])
    with pytest.raises(AuditError, match="names other layers"):
        exported(export([plain], {"rootfs": {"diff_ids": ["sha256:0"]}}))
    with pytest.raises(AuditError, match="names other layers"):
        exported(export([plain], {"rootfs": {"diff_ids": []}}))
    blob = f"blobs/sha256/{hashlib.sha256(plain).hexdigest()}"
    with pytest.raises(AuditError, match="other bytes than the digest says"):
        exported(export([plain], config, changes={blob: tars.of({"b": b""})}))


def test_locks_are_named_by_the_bytes_of_their_file(lab: Lab) -> None:
    text = lab.composition.files["image/sglang/lock.json"].content()
    assert locks.text_digest(lab.wanted.part) == hashlib.sha256(text).hexdigest()
