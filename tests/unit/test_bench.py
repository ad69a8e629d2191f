"""How a benchmark's containers are run, decided without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buildctl import bench
from buildctl.bench import Wanted
from buildctl.engine import LocalImage
from buildctl.errors import UsageError

KEY = "ab" * 32


def image(targets: str = "cpu", key: str = KEY, **labels: str) -> LocalImage:
    return LocalImage("sha256:1", "sha256:1", {"buildctl.key": key, "buildctl.targets": targets, **labels}, 1,
                      ("sglang:1",))


CPU, GPU = image(), image("12.0,12.1")


def model(folder: Path, config: str = "{}") -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    return str(folder)


def spec(wanted: Wanted, of: LocalImage = CPU, environ: dict[str, str] | None = None, *, local: bool = True) -> str:
    made = bench.spec("sglang:1", of, wanted, environ or {}, name="n", local=local)
    return " ".join(made.arguments())


def problems(wanted: Wanted, *, images: dict[str, LocalImage] | None = None, environ: dict[str, str] | None = None,
             local: bool = True) -> list[str]:
    try:
        bench.check(wanted, images or {"sglang:1": CPU}, environ or {}, local=local)
    except UsageError as error:
        for one in error.problems:
            assert one.where
            assert one.todo
        return [one.what for one in error.problems]
    return []


def test_a_cpu_container_is_closed_but_for_its_volumes(tmp_path: Path) -> None:
    words = spec(Wanted(model(tmp_path / "m"), model(tmp_path / "d"), ("--effort", "quick", "--", "--tp", "2")))
    assert words == (
        "--name n --read-only --tmpfs /tmp:exec --cap-drop ALL --security-opt no-new-privileges --pull never "
        "--stop-timeout 120 --shm-size 1g --mount type=volume,target=/results "
        "--mount type=volume,source=sglang-cache,target=/cache "
        f"--mount type=bind,source={tmp_path}/m,target=/models/target,readonly "
        f"--mount type=bind,source={tmp_path}/d,target=/models/draft,readonly "
        "sglang:1 benchmark --model /models/target --draft /models/draft --effort quick -- --tp 2")


def test_a_gpu_image_gets_gpus_shared_and_locked_memory(tmp_path: Path) -> None:
    """K6-6: what is run, and what `--dry-run` prints, has more than Docker's 64 MB of shared memory."""
    words = spec(Wanted(model(tmp_path / "m")), GPU)
    assert "--shm-size 32g --gpus all --ulimit memlock=-1 --ulimit stack=67108864" in words
    assert "--ipc" not in words
    assert "--privileged" not in words
    chosen = spec(Wanted(model(tmp_path / "n"), gpus="device=0,1", shm="64g"), GPU)
    assert '--shm-size 64g --gpus "device=0,1"' in chosen, "one field of docker's CSV"
    assert "--gpus 2 " in spec(Wanted(model(tmp_path / "o"), gpus="2"), GPU)


def test_secrets_go_by_name_and_only_where_they_are_needed(tmp_path: Path) -> None:
    environ = {"HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://u:p@proxy", "OTHER": "x", "NCCL_DEBUG": "INFO"}
    wanted = Wanted(model(tmp_path / "m"), environment=("NCCL_DEBUG",))
    local = bench.spec("i", CPU, wanted, environ, name="n", local=True)
    assert dict(local.environment) == {"NCCL_DEBUG": "INFO"}
    hub = bench.spec("i", CPU, Wanted("org/model"), environ, name="n", local=True)
    assert set(hub.environment) == {"HF_TOKEN", "HTTPS_PROXY"}
    shown = f"{hub} {bench.script(hub, Wanted('org/model'), Path('out'))}"
    assert "--env HF_TOKEN --env HTTPS_PROXY" in shown
    assert "secret" not in shown
    assert "u:p" not in shown


def test_a_model_in_the_hub_cache_brings_the_blobs_that_its_links_lead_to(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--m"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert problems(Wanted(str(snapshot))) == []
    words = spec(Wanted(str(snapshot)))
    assert f"source={repository},target=/models/target,readonly" in words
    assert "--model /models/target/snapshots/abc" in words


def test_paths_with_commas_and_quotes_stay_one_field(tmp_path: Path) -> None:
    folder = model(tmp_path / 'a,b "c"')
    made = bench.spec("i", CPU, Wanted(folder), {}, name="n", local=True)
    value = next(word for word in made.options if "models" in word)
    assert value == f'type=bind,"source={tmp_path}/a,b ""c""",target=/models/target,readonly'


def test_an_engine_elsewhere_has_its_own_paths() -> None:
    wanted = Wanted("/data/model", "draft/here")
    assert problems(Wanted("/data/model"), local=False) == []
    assert problems(Wanted("./model"), local=False) == [
        "the engine is on another machine, and this path of the model is relative"]
    assert "source=/data/model,target=/models/target" in spec(wanted, local=False)


@pytest.mark.parametrize(("wanted", "what"), [
    (Wanted(), "no model"),
    (Wanted("/nowhere"), "the model folder has no readable config.json"),
    (Wanted("m", draft="a/b/c"), "the draft is neither a folder nor a name on the hub"),
    (Wanted("m", draft="--privileged"), "the draft is neither a folder nor a name on the hub"),
    (Wanted("m", words=("--results=/x",)), "--results is not given to the entrypoint here"),
    (Wanted("m", words=("--json",)), "--json is not given to the entrypoint here"),
    (Wanted("m", gpus="all"), "this image runs on the CPU"),
    (Wanted("m", shm="lots"), "this value cannot be used"),
    (Wanted("m", cache="../x"), "this value cannot be used"),
    (Wanted("m", environment=("A=1",)), "variables are passed on by name"),
    (Wanted("m", environment=("ABSENT",)), "this variable is not set")])
def test_what_is_refused_before_a_container_is_made(wanted: Wanted, what: str) -> None:
    assert problems(wanted) == [what]


def test_words_for_the_server_are_not_ours() -> None:
    assert problems(Wanted("m", words=("--pairs", "2", "--", "--json", "--model", "x"))) == []


def test_everything_wrong_is_said_at_once() -> None:
    assert len(problems(Wanted("/nowhere", "/nor/here", ("--out",), "9x", "y", "/", ("Z",)))) == 7


@pytest.mark.parametrize("config", ["{", "[]"])
def test_a_config_that_is_no_json_object(tmp_path: Path, config: str) -> None:
    assert problems(Wanted(model(tmp_path / "m", config))) == ["the model's config.json is not JSON"]


def test_links_that_lead_out_of_the_folder_are_not_there_in_a_container(tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "m"))
    (tmp_path / "weights").touch()
    (folder / "model.safetensors").symlink_to("../weights")
    assert problems(Wanted(str(folder))) == ["files of the model are links that lead out of the folder"]


def run_folder(root: Path, key: str = KEY, created: str = "2026-12-01T10:00:00Z", **values: Any) -> Path:
    root.mkdir()
    (root / "plan.json").write_text(json.dumps({"image": {"key": key}, "created_at": created, "run_id": root.name}))
    (root / "context.json").write_text(json.dumps({"values": {"model": "/models/target", "draft": "", **values}}))
    return root


def test_a_run_is_resumed_with_its_image_and_its_models(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run-1")
    wanted = Wanted(model(tmp_path / "m"), resume=folder)
    assert problems(wanted) == []
    assert spec(wanted).endswith("benchmark --model /models/target --resume /results/run-1")
    assert bench.uploads(wanted) == {"run-1": folder}
    assert problems(Wanted(resume=folder)) == ["the model of the run was a folder"]
    assert problems(Wanted(resume=run_folder(tmp_path / "hub", model="org/m"))) == []
    assert problems(Wanted(resume=run_folder(tmp_path / "other", key="cd" * 32, model="org/m"))) == [
        "the run was made by another image"]
    assert problems(Wanted("m", resume=tmp_path)) == ["not a run that can be resumed"]


def test_users_prompts_are_put_into_the_container(tmp_path: Path) -> None:
    wanted = Wanted("m", prompts=tmp_path / "mine.jsonl")
    assert "--prompts /results/prompts.jsonl" in spec(wanted)
    made = bench.spec("i", CPU, wanted, {}, name="n", local=True)
    lines = bench.script(made, wanted, Path("my results")).splitlines()
    assert lines[1] == f"# {tmp_path}/mine.jsonl goes to n:/results/prompts.jsonl, owned by the container's user"
    assert [line.split()[1] for line in lines if line.startswith("docker")] == ["create", "start", "cp", "rm"]
    assert lines[3] == "docker cp n:/results/. 'my results'"


def test_images_alternate_in_mirrored_rounds() -> None:
    order = bench.alternating(["a", "b"], 4, 1)
    assert sorted(order[:2]) == ["a", "b"]
    assert order[2:4] == order[:2][::-1]
    assert order[6:] == order[4:6][::-1]
    assert order == bench.alternating(["a", "b"], 4, 1)
    assert len({tuple(bench.alternating(["a", "b"], 2, seed)) for seed in range(9)}) == 2, "a coin says who begins"
    three = bench.alternating(["a", "b", "c"], 2, 1)
    assert three[3:] == three[:3][::-1]


@pytest.mark.parametrize(("words", "short"), [
    ((), ("--pairs", "1")), (("--passes", "1"), ("--pairs", "1", "--passes", "1")),
    (("--pairs=2",), ("--pairs=2",)), (("--effort", "quick"), ("--effort", "quick")),
    (("--", "--pairs", "x"), ("--pairs", "1", "--", "--pairs", "x"))])
def test_alternating_runs_are_short_unless_told_otherwise(words: tuple[str, ...], short: tuple[str, ...]) -> None:
    assert bench.short(words) == short


def test_only_our_images_are_benchmarked() -> None:
    with pytest.raises(UsageError, match="no such image"):
        bench.checked("x:1", None)
    with pytest.raises(UsageError, match="not built by buildctl"):
        bench.checked("x:1", LocalImage("1", "1", {}, 1, ()))
    assert bench.checked("x:1", CPU) is CPU


def test_two_names_of_one_image_are_not_compared_for_hours() -> None:
    bench.check_different({"a:1": CPU, "b:1": image(key="cd" * 32)})
    with pytest.raises(UsageError, match="a:1 and b:1: two names of the same content"):
        bench.check_different({"a:1": CPU, "b:1": GPU})


def test_the_newest_image_that_is_there_compares(tmp_path: Path) -> None:
    old = run_folder(tmp_path / "a", "1", "2026-12-01T10:00:00Z")
    new = run_folder(tmp_path / "b", "2", "2026-12-02T10:00:00Z")
    runs = bench.keys([old, new])
    first, second = (LocalImage("i", "", {}, 1, (name,)) for name in ("x:old", "x:new"))
    assert bench.newest(runs, {"1": first, "2": second}) == "x:new"
    assert bench.newest(runs, {"1": first}) == "x:old"
    with pytest.raises(UsageError, match="has none of the images"):
        bench.newest(runs, {})
    (tmp_path / "c").mkdir()
    with pytest.raises(UsageError) as caught:
        bench.keys([old, tmp_path / "c", tmp_path / "d"])
    assert len(caught.value.problems) == 2
