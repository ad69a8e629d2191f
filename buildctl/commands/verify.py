"""`buildctl verify`: an image, here or in a registry, against a lock."""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from buildctl import attestations, compose, contents, expectation, host, installed, project, stack, verify
from buildctl import lock as locks
from buildctl.attestations import Attestation
from buildctl.cli import emit
from buildctl.commands._options import json_option, retry_options, wheelhouse_option
from buildctl.commands.promote import Clients
from buildctl.contents import Image
from buildctl.engine import Engine
from buildctl.errors import Problem, UsageError
from buildctl.image_config import config_labels, config_of
from buildctl.reference import Reference, parse
from buildctl.retry import Policy
from buildctl.units import size
from buildctl.verify import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildctl.expectation import Expectation
    from buildctl.registry import Registry

_STACK_LABEL = "buildctl.stack"


@click.command("verify")
@click.argument("reference", metavar="IMAGE")
@click.option("--stack", "stack_name", metavar="NAME",
              help="The stack whose lock counts; default: the one that the image's label names.")
@click.option("--lock", "lock_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Another lock of that stack, such as an older one.")
@click.option("--local", is_flag=True, help="Take the image from the engine although its name has a registry.")
@retry_options
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, reference: str, stack_name: str | None, lock_file: Path | None, local: bool,
            attempts: int, wait: float, wheelhouses: tuple[Path, ...], as_json: bool) -> int:
    """Compare IMAGE with a lock, package by package, file by file, patch by patch.

    A name with a registry is read from there, without an engine; any other from the engine. Nothing of it is run.
    Where --wheelhouse has the locked wheels, the image's files are held against those, else against its own RECORDs.
    Exit code 7 when anything differs.
    """
    named = parse(reference)
    found = project.find(root)
    lent = host.read(wheelhouses)
    with ExitStack() as open_ends:
        registry = None
        if named.registry and not local:
            if not (named.tag or named.digest):
                raise UsageError(Problem("the image must name a tag or digest", reference, "",
                                         "REGISTRY/IMAGE:TAG or REGISTRY/IMAGE@sha256:...", "write it in full"))
            registry = Clients(open_ends, Policy(attempts, wait), "pull")(named.registry)
        engine = Engine()
        labels = _labels(registry, named) if registry else _engine_labels(engine, reference)
        composition = _composed(found, stack_name or _stack_of(labels, reference), lock_file)
        wanted = expectation.of(composition, _image_of(composition, labels, named))
        wheels = _records(wanted, lent)
        teller = _Teller(sys.stderr.isatty())
        if registry:
            image = contents.from_registry(registry, named, composition.stack.platform, installed.keep, teller)
        else:
            image = contents.from_export(engine.export(reference), reference, installed.keep, teller)
        teller.end()
        report = verify.compare(image, wanted, wheels)
        known = _attested(registry, named, image, wanted, report) if registry else ()
    source = "registry" if registry else "engine"
    if as_json:
        emit({"image": reference, "source": source, "digest": image.digest, "stack": composition.stack.name,
              "layers": len(image.layers), "bytes": image.size, **report.as_dict(),
              "attached": [{"kind": one.kind, "digest": one.digest} for one in known]})
    else:
        _tell(image, source, wanted, report)
    return 7 if report.differences else 0


def _labels(registry: Registry, named: Reference) -> Mapping[str, str]:
    config = config_of(registry, named.repository, registry.existing(named))
    if config is None:
        raise UsageError(Problem("no such image in the registry", str(named), "", "an image that was pushed",
                                 "push it first, or correct the reference"))
    return config_labels(registry, named.repository, config)


def _engine_labels(engine: Engine, reference: str) -> Mapping[str, str]:
    there = engine.image(reference)
    if there is None:
        raise UsageError(Problem("no such image in the engine", reference, "", "an image that was built or pulled here",
                                 "build it first, or name its registry as well"))
    return there.labels


def _attested(registry: Registry, named: Reference, image: Image, wanted: Expectation,
              report: Report) -> tuple[Attestation, ...]:
    """Hold what is attached to the image against image and lock."""
    head = registry.head(named.repository, named.digest or named.tag)
    digests = dict.fromkeys([image.digest, *([head.digest] if head else [])])
    known = tuple(one for digest in digests for one in attestations.attached(registry, named.repository, digest))
    report.differences += verify.attested(image, wanted, digests, [(one.kind, one.content) for one in known])
    for kind in ("provenance", "sbom"):
        report.compared[f"attached {kind}"] = sum(one.kind == kind for one in known)
    return known


def _stack_of(labels: Mapping[str, str], reference: str) -> str:
    name = labels.get(_STACK_LABEL, "")
    if not name:
        raise UsageError(Problem("the image names no stack", reference, f"no label {_STACK_LABEL}",
                                 "an image that buildctl built, or --stack", "say which stack it should be: --stack"))
    return name


def _composed(found: project.Project, name: str, lock_file: Path | None) -> compose.Composition:
    loaded = stack.load(found, name)
    locked = locks.read(lock_file.resolve(), found) if lock_file else locks.load(loaded, found)
    if locked.stack != loaded.name:
        raise UsageError(Problem("the lock is of another stack", str(lock_file), locked.stack, loaded.name,
                                 f"name that stack (--stack {locked.stack}), or another lock"))
    return compose.compose(found, loaded, locked, host.Host(None, None, None, ()))


def _image_of(composition: compose.Composition, labels: Mapping[str, str], named: Reference) -> str:
    """Which of the stack's images it should be: by its label, by its name, else the last one."""
    known = [image.name for image in composition.images]
    wanted = (labels.get("org.opencontainers.image.title", ""), named.repository.rpartition("/")[2])
    return next((name for name in wanted if name in known), known[-1])


def _records(wanted: Expectation, lent: host.Host) -> dict[str, dict[str, str]]:
    """The RECORDs of the locked wheels that this host has, each wheel held against its hash in the lock."""
    here = lent.local_wheels()
    records = {}
    for wheel in (*wanted.part.wheels, *wanted.part.entrypoint):
        path = here.get(wheel.file)
        if path is None:
            continue
        with path.open("rb") as stream:
            same = hashlib.file_digest(stream, "sha256").hexdigest() == wheel.sha256
        if same:
            records[wheel.file] = installed.wheel_record(path)
        else:
            click.echo(f"warning: {path.name} in the wheelhouse is not the locked wheel; not used", err=True)
    return records


def _tell(image: Image, source: str, wanted: Expectation, report: Report) -> None:
    count = report.compared.get
    click.echo(f"{image.reference}  {image.digest}  ({source}; {len(image.layers)} layers, {size(image.size)} read)")
    click.echo(f"  against stack {wanted.stack}, image {wanted.image}, lock {locks.text_digest(wanted.part)[:16]}")
    click.echo(f"  {count('packages', 0)} packages with {count('files', 0)} files, {count('patches', 0)} patches, "
               f"{count('entrypoint files', 0)} files of the entrypoint, {count('debian packages', 0)} Debian packages "
               f"with {count('debian files', 0)} files, {count('labels', 0)} labels, {count('settings', 0)} settings")
    click.echo(f"  RECORDs held against {count('wheels', 0)} locked wheels; bytecode not compared by content: "
               f"{count('bytecode', 0)} files; made by the build: {count('made', 0)} files")
    if source == "registry":
        click.echo(f"  attached: {count('attached provenance', 0)} provenance, {count('attached sbom', 0)} bill of "
                   "materials (unsigned)")
    for note in report.notes:
        click.echo(f"  note: {note}")
    if not report.differences:
        click.echo("equal")
        return
    click.echo(f"different: {len(report.differences)}")
    for one in report.differences:
        click.echo(f"{one.where}: {one.what}\n  found:    {one.found}\n  expected: {one.expected}")
        if one.layer:
            click.echo(f"  layer:    {one.layer} of {len(image.layers)}, {one.step}")


class _Teller:
    """Says on stderr how far the reading is: on a terminal all the time, else when a layer is done or takes long."""

    def __init__(self, live: bool) -> None:
        self._live, self._shown, self._began = live, time.monotonic(), time.monotonic()
        self._done = self._current = 0
        self._number = 0

    def __call__(self, number: int, count: int, read: int) -> None:
        if read < self._current or number != self._number:
            self._done += self._current
        self._number, self._current = number, read
        now = time.monotonic()
        if now - self._shown > (0.2 if self._live else 10):
            self._shown = now
            layer = f"layer {number} of {count}, " if count else ""
            text = f"reading: {layer}{size(self._done + read)}"
            click.echo(f"\r\x1b[K{text}" if self._live else text, err=True, nl=not self._live)

    def end(self) -> None:
        """Clear the line, say what was read."""
        text = f"read {size(self._done + self._current)} in {time.monotonic() - self._began:.0f} s"
        click.echo(f"\r\x1b[K{text}" if self._live else text, err=True)


