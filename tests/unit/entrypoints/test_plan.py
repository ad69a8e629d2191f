from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from entrypoints import image, plan, prompts
from entrypoints.errors import BadConfig, Invalid, Usage
from entrypoints.settings import Settings

EAGLE = {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 3}


def made(cuda: str | None = "13.0", server: dict[str, Any] | None = None, **arms: dict[str, Any]) -> image.Image:
    profile = {"sglang": "0.5.23", "environment": {}, "server": server or {"mem-fraction-static": 0.8},
               "arms": arms or {"baseline": {}, "eagle3": EAGLE}}
    return image.parse({"schema": 1, "image": "sglang", "version": "1", "stack": "s", "key": "0" * 64,
                        "lock_sha256": "1", "targets": ["12.0"], "cuda": cuda, "python": "/p", "packages": {},
                        "patches": [], "trees": {}, "profile": profile}, "test")


def settings(**more: Any) -> Settings:
    return Settings(**{"model": "/m", "draft": "/d", **more})


def test_the_arms_of_the_profile_differ_in_speculation_only() -> None:
    base, spec = plan.arms(made(), settings())
    differ = plan.difference(plan.flags_of(base.argv), plan.flags_of(spec.argv))
    assert set(differ) == {"speculative-algorithm", "speculative-num-steps", "speculative-draft-model-path"}
    assert (base.speculative, spec.speculative) == (False, True)
    assert base.command(1234)[-2:] == ("--port", "1234")


def test_the_processes_of_a_server_meet_on_a_port_that_we_give() -> None:
    for arm in plan.arms(made(), settings()):
        assert plan.flags_of(arm.argv)["nccl-port"] == "{init_port}", "the plan does not depend on it"
        assert plan.flags_of(arm.command(1, 2))["nccl-port"] == "2"
        assert "{" not in " ".join(arm.command(1))
    for extra in (("--nccl-port", "5"), ("--dist-init-addr", "10.0.0.2:5"), ("--dp-size=2",)):
        for arm in plan.arms(made(), settings(extra=extra)):
            assert plan.flags_of(arm.argv).get("nccl-port") in {None, "5"}, "each replica needs one of its own"
    mixed = plan.arms(made(baseline={}, eagle3=EAGLE), settings(arm=("baseline", "wide=--dp 2")))
    assert [plan.flags_of(arm.argv).get("nccl-port") for arm in mixed] == [None, None]


def test_defaults_that_depend_on_speculation_are_pinned_in_both_arms() -> None:
    """K4-3: running requests 48 on one side and by cache size on the other."""
    base, spec = plan.arms(made(), settings(concurrency=(1, 64)))
    for arm in (base, spec):
        assert plan.flags_of(arm.argv)["max-running-requests"] == "64"
        assert "random-seed" in plan.flags_of(arm.argv)
    given = plan.arms(made(server={"max-running-requests": 8}), settings())
    assert {plan.flags_of(arm.argv)["max-running-requests"] for arm in given} == {"8"}


def test_an_arm_that_changes_more_than_speculation_is_refused_with_every_key() -> None:
    with pytest.raises(Invalid) as caught:
        plan.arms(made(baseline={}, eagle3={**EAGLE, "mem-fraction-static": 0.7, "page-size": 64}), settings())
    text = str(caught.value)
    assert "mem-fraction-static, page-size" in text
    assert "baseline 0.8, eagle3 0.7" in text
    assert "--mem-fraction-static VALUE" in text


def test_an_ablation_arm_may_differ_in_what_it_names() -> None:
    _, other = plan.arms(made(baseline={}, eagle3=EAGLE),
                         settings(arm=("baseline", "triton=--attention-backend triton")))
    assert plan.flags_of(other.argv)["attention-backend"] == "triton"
    assert not other.speculative


def test_an_ablation_under_speculation_is_about_what_it_names() -> None:
    """What an optimisation gives to verify and draft shows only while both arms speculate, in the same way."""
    flags = "--speculative-algorithm EAGLE3 --speculative-num-steps 3"
    _, other = plan.arms(made(), settings(arm=("eagle3", f"plain={flags} --disable-custom-all-reduce")))
    assert other.speculative
    with pytest.raises(Invalid, match="disable-custom-all-reduce"):
        plan.arms(made(), settings(arm=("eagle3", f"plain={flags[:-1]}5 --disable-custom-all-reduce")))


def test_only_claims_that_somebody_makes_can_be_required() -> None:
    plan.arms(made(), settings(require=("torch-symmetric-memory", "speculation")))
    with pytest.raises(Usage) as caught:
        plan.arms(made(), settings(require=("symmetric-memory", "patch sglang/0001-x.patch")))
    assert len(caught.value.problems) == 2
    assert "torch-symmetric-memory" in str(caught.value)
    with pytest.raises(Usage, match="no claim is called speculation"):
        plan.arms(made(), settings(arm=("baseline", "again="), require=("speculation",)))


@pytest.mark.parametrize(("arm", "text"), [
    (("baseline", "eagle"), "unknown arm eagle"), (("baseline",), "nothing to compare"),
    (("baseline", "baseline"), "arm baseline twice"), (("baseline", "x=stray --a"), "stray word stray"),
    (("baseline", "x=--chat-template 'a"), "cannot be split")])
def test_arms_that_make_no_sense_are_usage_errors(arm: tuple[str, ...], text: str) -> None:
    with pytest.raises(Usage, match=text):
        plan.arms(made(), settings(arm=arm))


def test_no_refusal_shows_a_secret() -> None:
    for arm, text in (("x=--api-key hunter2 stray", "stray word stray"), ("x=--api-key 'hunter2", "No closing quot")):
        with pytest.raises(Usage, match=text) as caught:
            plan.arms(made(), settings(arm=("baseline", arm)))
        assert "hunter2" not in str(caught.value)
    with pytest.raises(Invalid, match="api-key: baseline absent, eagle3 ") as refused:
        plan.arms(made(baseline={}, eagle3={**EAGLE, "api-key": "hunter2"}), settings())
    assert "hunter2" not in str(refused.value)


def test_the_port_is_not_for_the_user_and_a_draft_is_needed() -> None:
    with pytest.raises(Usage, match="--port is not for the user"):
        plan.arms(made(), settings(extra=("--port", "1")))
    with pytest.raises(BadConfig, match="no draft model"):
        plan.arms(made(), settings(draft=""))


def test_resolved_arguments_may_differ_in_speculation_and_what_it_forces() -> None:
    base, spec = plan.arms(made(), settings())
    here = {"speculative_algorithm": None, "disable_overlap_schedule": False, "page_size": 1}
    there = {"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": True, "page_size": 64}
    found = plan.check_resolved(base, spec, here, there)
    assert set(found["allowed"]) == {"speculative_algorithm", "disable_overlap_schedule"}
    assert found["forbidden"] == {"page_size": [1, 64]}
    assert "page_size" in str(plan.refuse(base, spec, found["forbidden"]))
    graphs = plan.refuse(base, spec, {"cuda_graph_config": [{"decode": {"bs": [1, 2, 4]}}, {"decode": {"bs": [1, 2]}}]})
    assert "--cuda-graph-max-bs-decode N" in str(graphs)


def test_resolved_arguments_leave_out_what_differs_at_each_start_and_mask_keys() -> None:
    info = {"port": 1, "startup_time": {}, "page_size": 1, "api_key": "secret", "watermark_key": "x",
            "internal_states": [{"effective_max_running_requests_per_dp": 48, "last_gen_throughput": 3.0}]}
    assert plan.resolved(info) == {"page_size": 1, "api_key": "***", "watermark_key": "***",
                                   "effective_max_running_requests_per_dp": 48}


@pytest.mark.parametrize("pairs", [1, 2, 3, 8])
def test_the_order_is_abba_with_a_coin(pairs: int) -> None:
    for seed in range(10):
        blocks = plan.order(("a", "b"), pairs, seed)
        assert [block.index for block in blocks] == list(range(2 * pairs))
        for pair in range(pairs):
            assert {block.arm for block in blocks if block.pair == pair} == {"a", "b"}
            if pair % 2:
                assert [block.arm for block in blocks if block.pair == pair] == [
                    block.arm for block in blocks if block.pair == pair - 1][::-1]
    firsts = {plan.order(("a", "b"), 1, seed)[0].arm for seed in range(20)}
    assert firsts == {"a", "b"}


def test_three_arms_mirror_too() -> None:
    names = [block.arm for block in plan.order(("a", "b", "c"), 2, 5)]
    assert names[:3] == names[:2:-1]


def test_looks_share_the_level() -> None:
    assert plan.looks(settings(effort="thorough")) == ((4, 6, 8, 10, 12), 0.0158)
    assert plan.looks(settings(effort="standard")) == ((4, 6, 8), 0.0221)
    assert plan.looks(settings(pairs=3)) == ((3,), 0.05)


def test_the_plan_has_a_hash_over_all_of_it() -> None:
    pack = prompts.load(per_stratum=1)
    document = plan.make(made(), settings(), plan.arms(made(), settings()), pack, run_id="r", created="now")
    assert document["sha256"] == plan.digest(document)
    assert plan.digest({**document, "margin": 0.05}) != document["sha256"]
    assert document["primary_endpoint"]["candidate"] == "eagle3"
    assert document["client"]["lag_share"] == 0.1
    assert plan.estimate(document, start_seconds=100, rate=100) > 16 * 100


def test_an_arm_with_the_flags_of_the_baseline_is_a_control_and_never_the_candidate() -> None:
    chosen = settings(arm=("baseline", "again=", "eagle3"))
    arms = plan.arms(made(), chosen)
    document = plan.make(made(), chosen, arms, prompts.load(per_stratum=1), run_id="r", created="now")
    assert [arm["control"] for arm in document["arms"]] == [False, True, False]
    assert document["primary_endpoint"]["candidate"] == "eagle3"


def test_a_cpu_image_warms_up_with_a_wider_tolerance_that_the_plan_states() -> None:
    cpu, gpu = plan.warm_up(made(None), settings()), plan.warm_up(made(), settings())
    assert (cpu["tolerance"], cpu["required"]) == (0.25, False)
    assert (gpu["tolerance"], gpu["required"]) == (0.05, True)


def test_flags_with_lists_and_equals_are_compared_whole() -> None:
    assert plan.flags_of(("python", "-m", "x", "--a=1", "--b", "2", "3", "--c")) == {"a": "1", "b": "2 3", "c": ""}
    assert plan.parse_flags("--a 1 --b --c=x", "w") == {"a": "1", "b": True, "c": "x"}
    assert dataclasses.is_dataclass(plan.Arm)
    assert Path(prompts.SHIPPED).exists()


@pytest.mark.parametrize(("server", "extra", "flag"), [
    ({"cuda-graph-max-bs-decode": 48}, (), "cuda-graph-bs-decode"), ({"cuda-graph-max-bs": 48}, (), "cuda-graph-bs"),
    ({"cuda-graph-max-bs-decode": 8}, ("--cuda-graph-max-bs-decode", "48"), "cuda-graph-bs-decode")])
def test_the_captured_batch_sizes_are_the_same_in_both_arms(server: dict[str, Any], extra: tuple[str, ...],
                                                            flag: str) -> None:
    """SGLang generates another list when it speculates, even with the same largest size."""
    found = [plan.flags_of(arm.argv)[flag] for arm in plan.arms(made(server=server), settings(extra=extra))]
    assert found[0] == found[1]
    sizes = [int(word) for word in found[0].split()]
    assert sizes[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sizes[-1] == 48
    assert sizes == sorted(set(sizes))


def test_batch_sizes_that_somebody_chose_are_left_alone() -> None:
    for server, extra in (({}, ()), ({"cuda-graph-max-bs-decode": 48}, ("--cuda-graph-bs-decode", "1", "2"))):
        flags = plan.flags_of(plan.arms(made(server=server), settings(extra=extra))[0].argv)
        assert flags.get("cuda-graph-bs-decode", "1 2") == "1 2"
