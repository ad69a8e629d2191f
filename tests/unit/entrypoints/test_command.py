"""The server's command line and environment."""

from __future__ import annotations

from pathlib import Path

from entrypoints.command import (
    CACHES,
    flag_argv,
    given_flags,
    mask,
    mask_text,
    secrets,
    server_argv,
    server_environment,
    tuning,
)
from entrypoints.image import load
from tests.unit.entrypoints.image import write


def argv(tmp_path: Path, arm: str, *extra: str, draft: str = "/d") -> tuple[str, ...]:
    image = load(write(tmp_path))
    return server_argv(image, image.profile.arms[arm], model="/m", draft=draft, host="127.0.0.1", port=9, extra=extra)


def test_flags_become_words() -> None:
    assert flag_argv({"tp": 2, "enable-metrics": True, "x": False, "y": "a b"}) == (
        "--tp", "2", "--enable-metrics", "--y", "a b")
    assert given_flags(["--tp=2", "-x", "--", "--y", "z"]) == {"tp", "y"}


def test_profile_arm_and_draft(tmp_path: Path) -> None:
    base, spec = argv(tmp_path, "baseline"), argv(tmp_path, "eagle3")
    assert base[1:3] == ("-m", "sglang.launch_server")
    assert "--skip-server-warmup" not in base
    assert "/d" not in base
    assert set(spec) - set(base) == {"--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3",
                                     "--speculative-draft-model-path", "/d"}


def test_the_user_wins_and_no_flag_appears_twice(tmp_path: Path) -> None:
    found = argv(tmp_path, "eagle3", "--mem-fraction-static=0.5", "--port", "7", "--model", "/other")
    assert "0.2" not in found
    assert "--model-path" not in found
    assert found.count("--port") == 1
    assert found[-5:] == ("--mem-fraction-static=0.5", "--port", "7", "--model", "/other")


def test_caches_lie_under_the_image_key_and_the_caller_wins(tmp_path: Path) -> None:
    image = load(write(tmp_path))
    environ = {"PATH": "/bin", "ENTRYPOINT_PAIRS": "2", "TRITON_CACHE_DIR": "/mine", "SGLANG_USE_CPU_ENGINE": "0"}
    found = server_environment(image, environ, cache_root=Path("/cache"))
    assert found["TRITON_CACHE_DIR"] == "/mine"
    assert found["SGLANG_USE_CPU_ENGINE"] == "0"
    assert found["PATH"] == "/bin"
    assert found["HF_HOME"] == "/cache/huggingface"
    assert "ENTRYPOINT_PAIRS" not in found
    assert int(found["MAX_JOBS"]) >= 1
    keyed = [found[name] for name in CACHES if name != "TRITON_CACHE_DIR"]
    assert all(path.startswith("/cache/abababababababab/") for path in keyed)
    assert len(set(keyed)) == len(keyed)


def test_what_of_the_environment_belongs_to_a_measurement() -> None:
    """K4-5: NCCL settings are said."""
    assert tuning({"NCCL_P2P_DISABLE": "1", "PATH": "/bin", "HOME": "/h", "TRITON_CACHE_DIR": "/cache/x/triton",
                   "SGLANG_ADMIN_API_KEY": "sesame", "CUDA_VISIBLE_DEVICES": "0,1"}) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_P2P_DISABLE": "1", "SGLANG_ADMIN_API_KEY": "***"}


def test_secrets_in_a_command_line() -> None:
    assert mask(("--api-key", "x", "--tp", "2")) == ["--api-key", "***", "--tp", "2"]
    assert mask(("--admin-api-key=x", "y", "--flag")) == ["--admin-api-key=***", "y", "--flag"]
    assert secrets(("--api-key", "sesame", "--admin-api-key=open=it", "--tp", "2")) == ("sesame", "open=it")
    assert secrets(("--api-key", "abc", "--x")) == (), "so short a word is everywhere"


def test_a_beginning_of_a_secret_flag_is_that_flag() -> None:
    """SGLang's parser completes `--admin-api`."""
    assert mask(("--admin-api", "hunter2", "--api_key", "x", "--tp", "2")) == [
        "--admin-api", "***", "--api_key", "***", "--tp", "2"]
    assert mask(("--api=hunter2", "--watermark", "3")) == ["--api=***", "--watermark", "***"]
    assert secrets(("--admin-api", "hunter2", "--ssl-keyfile-p=sesame")) == ("hunter2", "sesame")
    plain = ["--ssl-keyfile", "/keys/k.pem", "--", "-x", "--api-keys", "3"]
    assert mask(plain) == plain, "a file is no secret, nor is a flag of another name"


def test_secrets_in_one_text() -> None:
    assert mask_text("--x '1  2'  --b") == "--x '1  2'  --b", "as it was"
    assert mask_text("--x '1  2' --api-key 'so long' --b") == "--x '1  2' --api-key *** --b"
    assert mask_text("--api-key='so long'") == "--api-key=***"
    assert mask_text("--api-key 'so") == "--api-key ***", "a quote that nobody closed"
