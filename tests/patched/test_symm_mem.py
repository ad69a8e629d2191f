"""symm-mem: the communicator of both releases, on every card and group size, with and without multicast."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.patched import loading
from tests.patched.loading import CARDS, SGLANG_0523, SGLANG_059, SM12X

MODULE = "sglang.srt.distributed.device_communicators.torch_symm_mem"
TABLE = "sglang.srt.distributed.device_communicators.all_reduce_utils"
MIB = 1024 * 1024
SERIES = pytest.mark.parametrize("series", [SGLANG_059, SGLANG_0523])


def communicator(series: str, card: str, world: int, *, multicast: bool,
                 patched: bool = True) -> tuple[Any, ModuleType]:
    torch = loading.torch(card)
    torch.bfloat16 = SimpleNamespace(itemsize=2)
    dist = loading.StandIn(name="torch.distributed")
    dist.get_world_size.return_value = world
    memory = loading.StandIn(name="torch.distributed._symmetric_memory")
    memory.rendezvous.return_value.multicast_ptr = 0x7F00 if multicast else 0
    table = loading.load(series, TABLE, patched=patched)
    environ = loading.StandIn(name="environ")
    environ.envs.SGLANG_OPT_USE_INKLING_CUSTOM_AR.get.return_value = False
    module = loading.load(series, MODULE, {
        **loading.checks(series, card), "torch": torch, "torch.distributed": dist,
        "torch.distributed._symmetric_memory": memory, TABLE: table, "sglang.srt.environ": environ}, patched=patched)
    return module.TorchSymmMemCommunicator(group=SimpleNamespace(group_name="tp"), device=0), module


@SERIES
@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize(("world", "size"), [(2, 64 * MIB), (4, 64 * MIB), (8, 128 * MIB)])
def test_on_sm12x_without_multicast_it_is_enabled(series: str, card: str, world: int, size: int,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    found, _ = communicator(series, card, world, multicast=False)

    assert not found.disabled
    assert found.max_size == size
    assert f"buildctl patch symm-mem: two-shot all-reduce enabled, capability 12, world size {world}" in caplog.text


@SERIES
@pytest.mark.parametrize("world", [3, 6, 16])
def test_other_group_sizes_are_refused_with_upstreams_warning(series: str, world: int,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    found, _ = communicator(series, "12.0", world, multicast=False)

    assert found.disabled
    assert f"World size {world} not supported" in caplog.text


@SERIES
@pytest.mark.parametrize("multicast", [True, False])
def test_on_sm12x_the_two_shot_kernel_is_taken_and_never_multimem(series: str, multicast: bool) -> None:
    found, module = communicator(series, "12.0", 8, multicast=multicast)
    found.should_torch_symm_mem_allreduce = lambda tensor: True

    found.all_reduce(loading.StandIn())

    assert module.torch.ops.symm_mem.two_shot_all_reduce_.called
    assert not module.torch.ops.symm_mem.multimem_all_reduce_.called


@SERIES
@pytest.mark.parametrize("card", ["9.0", "10.0", "10.3"])
@pytest.mark.parametrize("world", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("multicast", [True, False])
def test_on_other_cards_nothing_changes(series: str, card: str, world: int, multicast: bool) -> None:
    def facts(patched: bool) -> tuple[bool, int | None]:
        found, _ = communicator(series, card, world, multicast=multicast, patched=patched)
        return found.disabled, getattr(found, "max_size", None)

    assert facts(True) == facts(False)


def test_upstream_059_dies_where_the_patch_is_for() -> None:
    with pytest.raises(KeyError, match="12"):
        communicator(SGLANG_059, "12.0", 8, multicast=False, patched=False)


def test_upstream_0523_goes_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = communicator(SGLANG_0523, "12.0", 8, multicast=False, patched=False)

    assert found.disabled
    assert "Device capability 12 not supported" in caplog.text


def test_a_capability_that_no_table_knows_is_refused_and_not_a_key_error(caplog: pytest.LogCaptureFixture,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, "11.0", (11, 0))

    found, _ = communicator(SGLANG_059, "11.0", 8, multicast=False)

    assert found.disabled
    assert "not supported" in caplog.text


@pytest.mark.parametrize(("card", "sizes"), [("10.0", (4, 6, 8)), ("12.0", ()), ("12.1", ())])
def test_kernels_that_take_enabled_for_multicast_are_kept_away(card: str, sizes: tuple[int, ...]) -> None:
    """The Inkling models of 0.5.23 write to the multicast address of any communicator that is not disabled."""
    module = loading.load(SGLANG_0523, "sglang.srt.models.inkling_common.kernels.comm",
                          {**loading.checks(SGLANG_0523, card), "torch": loading.torch(card), "msgspec.Struct": object})
    module.torch.cuda.is_current_stream_capturing.return_value = False

    assert sizes == module._INKLING_AR_WORLD_SIZES
    plain = SimpleNamespace(multimem=False, group=SimpleNamespace(group_name="tp"))
    assert module._get_inkling_ar_resources(plain) is None
