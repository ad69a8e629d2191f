"""Is an optimisation really active? Each claim: declared, observed, effective, and a state.

Flags prove nothing: SGLang accepts several and then does without. A state is `active` only with evidence from the run
itself (a patch's marker, a count of the server, a kernel in a trace); `unverified` is the default and says why.

States: `active`; `fallback` (asked for, and the server said that it does without, or NCCL does most of the work);
`unsupported` (this hardware or
version cannot); `inactive` (not asked for, or shown to be off); `unverified` (asked for, and nothing shows it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from entrypoints import contract
from entrypoints.image import Patch
from entrypoints.trace import Summary

#: claims about every server start; a patch of the image adds `patch PACKAGE/NAME`, and `speculation` comes from the
#: requests of all starts together (`result`)
CLAIMS = ("attention-backend", "cuda-graphs", "all-reduce-fusion", "torch-symmetric-memory", "custom-all-reduce",
          "pcie-ipc-all-reduce", "no-jit-while-measuring")
#: flags that switch what a claim is about: an ablation that differs in one of them shows what it is worth
TOGGLES: Mapping[str, str] = {
    "attention-backend": "attention-backend", "decode-attention-backend": "attention-backend",
    "disable-cuda-graph": "cuda-graphs", "enable-flashinfer-allreduce-fusion": "all-reduce-fusion",
    "flashinfer-allreduce-fusion-backend": "all-reduce-fusion", "enable-torch-symm-mem": "torch-symmetric-memory",
    "disable-custom-all-reduce": "custom-all-reduce"}
#: worst first: a claim over several server starts is as good as its worst one
WORST = ("inactive", "unsupported", "fallback", "unverified", "active")
EXCERPT = 200
#: the contract's kernels of what all the other ways are to replace
NCCL = "nccl-all-reduce"


@dataclass(frozen=True)
class Observation:
    """All that one server start shows. None where something was not looked at.

    `jit_files` is how many kernel files appeared in the measured window.
    """

    arm: str
    version: str
    server_info: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Sequence[str] = ()
    patches: Sequence[Patch] = ()
    jit_files: int | None = None
    trace: Summary | None = None


@dataclass(frozen=True)
class Claim:
    """One line of evidence."""

    claim: str
    arm: str
    state: str
    declared: str
    observed: str = ""
    effective: str = ""
    reason: str = ""
    required: bool = False
    sources: tuple[Mapping[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return {**asdict(self), "sources": [dict(one) for one in self.sources]}


def known(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Every claim that can be required of an image with these patches."""
    return ("speculation", *CLAIMS, *(_patch_claim(one) for one in patches))


def observe(seen: Observation, *, required: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Every claim about one server start."""
    wanted = set(required)
    claims = [_attention(seen), _graphs(seen), *_all_reduce(seen), _no_jit(seen),
              *(_patch(seen, one) for one in seen.patches)]
    return [{**one.as_dict(), "required": one.claim in wanted} for one in claims]


def merge(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Evidence over several server starts: for each claim and arm the worst state, with its own reasons.

    A trace is taken of one start of an arm. What it showed stands for the others, which have the same flags: that they
    have no trace does not take it back. That they said something else does.
    """
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for one in (*old, *new):
        key = (str(one["claim"]), str(one["arm"]))
        if key not in table or _rank(one) < _rank(table[key]):
            table[key] = dict(one)
    return list(table.values())


def _rank(claim: Mapping[str, Any]) -> float:
    """Place in `WORST`; shown by a trace comes before not looked at."""
    rank = WORST.index(str(claim["state"]))
    traced = any(one["kind"] == "trace" for one in claim.get("sources") or ())
    return WORST.index("unverified") - 0.5 if claim["state"] == "active" and traced else rank


def _attention(seen: Observation) -> Claim:
    """The resolved backend is what the server chose after its own rules; a trace shows its kernels."""
    info = seen.server_info
    backend = str(info.get("decode_attention_backend") or info.get("attention_backend") or "")
    if not backend:
        return Claim("attention-backend", seen.arm, "unverified", "not reported", reason="/server_info does not say")
    source = {"kind": "server_info", "ref": "attention_backend", "excerpt": backend}
    if seen.trace is None or not seen.trace.on_gpu:
        why = "no trace was taken" if seen.trace is None else "the trace holds no GPU kernels"
        return Claim("attention-backend", seen.arm, "unverified", backend, reason=why, sources=(source,))
    families = {one.backend: one.name for one in contract.select("kernel", seen.version, claim="attention-backend")}
    if backend not in families:
        return Claim("attention-backend", seen.arm, "unverified", backend, sources=(source,),
                     reason=f"no kernel names are known for {backend}")
    return _by_kernels(seen, "attention-backend", backend, families[backend], seen.trace, (source,))


def _by_kernels(seen: Observation, claim: str, declared: str, family: str, trace: Summary,
                sources: tuple[Mapping[str, str], ...]) -> Claim:
    """A way around NCCL is taken when its kernels outnumber NCCL's: one of them proves that it exists, not its use."""
    count = trace.families.get(family, 0)
    rate = trace.per_step(family)
    observed = f"{count} kernels in the trace" + (f", {rate:g} per step" if rate is not None else "")
    state, reason = ("active", "") if count else ("inactive", "its kernels are not in the trace")
    if claim != "attention-backend":
        nccl, per_step = trace.families.get(NCCL, 0), trace.per_step(NCCL)
        observed += f"; {nccl} NCCL all-reduces" + (f", {per_step:g} per step" if per_step is not None else "")
        if 0 < count <= nccl:
            state, reason = "fallback", f"NCCL does most of it: {observed}"
    source = {"kind": "trace", "ref": family, "excerpt": observed}
    return Claim(claim, seen.arm, state, declared, observed=observed, reason=reason, sources=(*sources, source))


def _graphs(seen: Observation) -> Claim:
    """Share of decode lines that say that a graph was replayed."""
    info = seen.server_info
    if info.get("device") == "cpu":
        return Claim("cuda-graphs", seen.arm, "unsupported", "on by default", reason="no CUDA device")
    decode = (info.get("cuda_graph_config") or {}).get("decode") or {}
    if info.get("disable_cuda_graph") or decode.get("backend") == "disabled":
        return Claim("cuda-graphs", seen.arm, "inactive", "disabled", reason="not asked for")
    entry = next((one for one in contract.select("pattern", seen.version) if one.name == "decode-graph"), None)
    found = [(hit["graph"], line) for line in seen.log
             if entry and entry.pattern and (hit := entry.pattern.search(line)) and "Decode batch" in line]
    if not found:
        return Claim("cuda-graphs", seen.arm, "unverified", "on", reason="no decode line in the log says")
    yes = sum(graph == "True" for graph, _ in found)
    observed = f"{yes} of {len(found)} decode lines"
    eager = next((line for graph, line in found if graph != "True"), found[-1][1])
    return Claim("cuda-graphs", seen.arm, "active" if yes == len(found) else "fallback", "on", observed=observed,
                 reason="" if yes == len(found) else "some decode steps ran without a graph: batch above the largest "
                 "captured size?", sources=(_line(eager, "decode line"),))


def _all_reduce(seen: Observation) -> list[Claim]:
    """The four ways around NCCL's all-reduce. On one GPU there is nothing to reduce."""
    info = seen.server_info
    pcie = str(seen.environment.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "")).lower() in {"1", "true", "yes"}
    fusion = info.get("enable_flashinfer_allreduce_fusion") or info.get("flashinfer_allreduce_fusion_backend")
    asked = {
        "all-reduce-fusion": str(fusion) if fusion else "",
        "torch-symmetric-memory": "on" if info.get("enable_torch_symm_mem") else "",
        "custom-all-reduce": "" if info.get("disable_custom_all_reduce") else "on by default",
        "pcie-ipc-all-reduce": "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" if pcie else ""}
    alone = int(info.get("tp_size") or 1) <= 1
    return [_way(seen, claim, declared, alone=alone) for claim, declared in asked.items()]


def _way(seen: Observation, claim: str, declared: str, *, alone: bool) -> Claim:
    lines = {entry.state: line for entry in contract.select("pattern", seen.version, claim=claim)
             for line in seen.log if entry.pattern and entry.pattern.search(line)}
    worst = next((state for state in ("unsupported", "fallback") if state in lines), "")
    if not declared:
        note = f"not asked for; the server says: {lines[worst][:EXCERPT]}" if worst else "not asked for"
        return Claim(claim, seen.arm, "inactive", "off", reason=note)
    if alone:
        return Claim(claim, seen.arm, "inactive", declared, reason="one GPU: nothing to reduce")
    if worst:
        return Claim(claim, seen.arm, worst, declared, observed="in effect: NCCL", sources=(_line(lines[worst]),),
                     reason=lines[worst].strip()[:EXCERPT])
    marker = next((one for one in seen.patches if one.marker and one.concern in _CONCERNS.get(claim, ())
                   and (line := _find(seen.log, one.marker))), None)
    if seen.trace is not None and seen.trace.on_gpu:
        return _by_kernels(seen, claim, declared, claim_family(claim), seen.trace, ())
    if line := lines.get("setup") or _find(seen.log, marker.marker if marker else ""):
        return Claim(claim, seen.arm, "unverified", declared, observed="set up", sources=(_line(line),),
                     reason="set up, and only a trace (--trace) shows whether it is used")
    why = "no trace was taken, and the log says nothing either way"
    if not contract.select("pattern", seen.version, claim=claim):
        why = f"no trace was taken, and no log lines are known for SGLang {seen.version or 'of unknown version'}"
    return Claim(claim, seen.arm, "unverified", declared, reason=why)


#: concerns of patches whose marker shows that a way was set up
_CONCERNS: Mapping[str, tuple[str, ...]] = {
    "torch-symmetric-memory": ("symm-mem",), "all-reduce-fusion": ("allreduce-fusion",)}


def claim_family(claim: str) -> str:
    """Name of the contract's kernel family that shows a claim."""
    return next((one.name for one in contract.load() if one.kind == "kernel" and one.claim == claim), claim)


def _no_jit(seen: Observation) -> Claim:
    claim = "no-jit-while-measuring"
    if seen.jit_files is None:
        return Claim(claim, seen.arm, "unverified", "", reason="the cache folders were not compared")
    observed = f"{seen.jit_files} new files in the kernel caches"
    return Claim(claim, seen.arm, "inactive" if seen.jit_files else "active", "", observed=observed,
                 reason="kernels were compiled in the measured window" if seen.jit_files else "")


def _patch_claim(patch: Patch) -> str:
    return f"patch {patch.package}/{patch.name}"


def _patch(seen: Observation, patch: Patch) -> Claim:
    """A patch shows itself when its branch is reached: by the text that it writes to the log."""
    claim, declared = _patch_claim(patch), f"in the image, sha256 {patch.sha256[:12]}"
    if not patch.marker:
        return Claim(claim, seen.arm, "unverified", declared, reason="the patch writes no marker")
    if line := _find(seen.log, patch.marker):
        return Claim(claim, seen.arm, "active", declared, observed="marker in the log",
                     sources=(_line(line, "marker"),))
    return Claim(claim, seen.arm, "unverified", declared, reason="its code was not reached, or says nothing")


def _find(log: Iterable[str], text: str) -> str:
    return next((line for line in log if text and text in line and "server_args=" not in line), "")


def _line(line: str, ref: str = "log line") -> Mapping[str, str]:
    return {"kind": "marker" if ref == "marker" else "log", "ref": ref, "excerpt": line.strip()[:EXCERPT]}
