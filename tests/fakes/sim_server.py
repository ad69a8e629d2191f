"""A stand-in for the SGLang server whose true speed is known: the benchmark must find out what was put in here.

Speaks `/ready`, `/server_info`, `/v1/tokenize`, `/flush_cache` and a streamed `/generate` as SGLang 0.5.23 does
(field names recorded from the real server). Started as the image's python: `SCRIPT -m sglang.launch_server FLAGS`.
The variable SIM_SERVER names a JSON file:

    {"state": DIR, "seed": 1, "arms": {"baseline": {...}, "eagle3": {...}}}

Keys of an arm (`eagle3` is the one with --speculative-algorithm): `rate` tokens/s of one stream; `at` {concurrency:
rate}; `by_steps` {speculative steps: rate}; `tau`; `restart_sd`, `drift` (log, per start), `bimodal` [share, factor];
`warm_factor` speed-up for a prompt seen before; `flush` HTTP status; `flush_works`; `garbage`; `no_spec_counts`;
`split` chance per token of another token, `tie_gap` nats between the two best there; `info` entries of /server_info;
`log` lines; `tokenize` HTTP status; `health` HTTP statuses in turn; `error_after`, `die_after`, `hang_after`,
`end_after` measured requests (it dies when one more comes; it ends once that many are answered); `last_words` lines
and exit `status` of such a death; `stillborn`: so many starts die so before they listen; `stillborn_steps`: starts
with so many speculative steps die so; `mute`: it never listens; `hang_at_ties`: it answers no question about
two best tokens; `die_at_flush`; `ignore_term`; `length` factor;
`wrong` share of problems answered wrongly; `kernels` names in a profiler trace. `answers` beside `arms` {text of a
problem: its answer}: for the task check.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

TOKENS = 2000


def parse_flags(argv: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            flags[name] = value or True
        elif name:
            with contextlib.suppress(ValueError):
                flags[name] = float(word)
                flags[name] = int(word)
            if flags[name] is True:
                flags[name] = word
    return flags


def start_number(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        with contextlib.suppress(FileExistsError):
            with (folder / f"start-{number}").open("x") as file:
                file.write(" ".join("=".join(one) for one in os.environ.items() if one[0].startswith("NCCL_")))
            return number
    raise RuntimeError("too many starts")


class Sim:
    def __init__(self, config: dict[str, Any], flags: dict[str, Any]) -> None:
        self.flags = flags
        self.speculative = "speculative_algorithm" in flags
        arms = config["arms"]
        self.arm: dict[str, Any] = arms.get("eagle3" if self.speculative else "baseline", {})
        self.state = Path(config["state"])
        self.number = start_number(self.state)
        nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        (Path(config["state"]) / f"environment-{self.number}").write_text(json.dumps(nccl))
        dice = random.Random(config.get("seed", 1) * 7919 + self.number)
        self.factor = pow(2.718281828, dice.gauss(0, self.arm.get("restart_sd", 0.0))
                          + self.arm.get("drift", 0.0) * self.number)
        share, other = self.arm.get("bimodal", [0.0, 1.0])
        if dice.random() < share:
            self.factor *= other
        self.seen: dict[str, int] = {}
        self.asked: set[str] = set()
        self.running = self.served = self.health_asked = 0
        self.dice = random.Random(config.get("seed", 1) * 31 + self.number)
        self.answers: dict[str, int] = config.get("answers", {})

    def die(self) -> NoReturn:
        print("\n".join(self.arm.get("last_words", (
            "Scheduler hit an exception: Traceback (most recent call last):", "RuntimeError: simulated"))), flush=True)
        os._exit(self.arm.get("status", 3))

    def info(self) -> dict[str, Any]:
        state = {"effective_max_running_requests_per_dp": self.flags.get("max_running_requests", 48),
                 "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
        extra = dict(self.arm.get("info", {}))
        state.update(extra.pop("internal", {}))
        return {"model_path": self.flags["model_path"], "version": "0.5.23", "speculative_algorithm": None,
                "attention_backend": "torch_native", "device": "cpu", "tp_size": 1, "disable_cuda_graph": True,
                "disable_custom_all_reduce": True, "enable_torch_symm_mem": False,
                "enable_flashinfer_allreduce_fusion": False, **self.flags,
                "disable_overlap_schedule": self.speculative, "internal_states": [state], **extra}

    def prompts_seen(self, ids: list[int]) -> tuple[list[int], int]:
        """The longest prompt seen that these ids begin with, and how many tokens follow it."""
        known = [json.loads(key) for key in self.asked if ids[:len(json.loads(key))] == json.loads(key)]
        prompt = max(known, key=len)
        return prompt, len(ids) - len(prompt)

    def true_ids(self, prompt: list[int], count: int) -> list[int]:
        dice = random.Random(hashlib.sha256(json.dumps(prompt).encode()).hexdigest())
        return [dice.randrange(10, TOKENS) for _ in range(count)]

    def ids(self, prompt: list[int], count: int) -> list[int]:
        if self.arm.get("garbage") and self.served:
            return [7] * count
        split = self.arm.get("split", 0.0)
        made = []
        off = 0
        for token in self.true_ids(prompt, count):
            if split and self.dice.random() < split:
                off = 1
            made.append((token + off) % TOKENS)
        return made

    def text(self, prompt: list[int]) -> str:
        """The answer to a problem of the task check, or nothing."""
        asked = "".join(map(chr, prompt[2:]))
        if asked not in self.answers:
            return ""
        wrong = random.Random(asked).random() < self.arm.get("wrong", 0.0)
        return f"Answer: {self.answers[asked] + wrong}"

    def rate(self, seen: bool) -> float:
        rate = float(self.arm.get("at", {}).get(str(self.running), self.arm.get("rate", 400.0)))
        rate = float(self.arm.get("by_steps", {}).get(str(self.flags.get("speculative_num_steps")), rate))
        return rate * float(self.factor) * (float(self.arm.get("warm_factor", 1.0)) if seen else 1.0)

    async def generate(self, body: dict[str, Any], write: Any) -> None:
        prompt = body.get("input_ids") or [ord(letter) for letter in body.get("text", "")]
        wanted = int(body["sampling_params"]["max_new_tokens"] * self.arm.get("length", 1.0))
        ids, text = self.ids(prompt, max(2, wanted)), self.text(prompt)
        key = json.dumps(prompt)
        self.asked.add(key)
        cached = self.seen.get(key, 0)
        self.seen[key] = len(prompt) - 1
        self.served += body["sampling_params"]["max_new_tokens"] >= 64  # neither the readiness probe nor the warm-up
        if self.served > self.arm.get("die_after", 10**9):
            self.die()
        if self.served > self.arm.get("error_after", 10**9):
            write({"error": {"message": "simulated", "code": 500}})
            write(None)
            return
        self.running += 1
        tau = float(self.arm.get("tau", 2.0)) if self.speculative else 1.0
        step = max(1, round(tau))
        loop = asyncio.get_running_loop()
        moment = loop.time() + 0.003
        sent, rounds = 0, 0
        try:
            while sent < len(ids):
                await asyncio.sleep(max(0.0, moment - loop.time()))
                if self.served > self.arm.get("hang_after", 10**9) and sent > 4:
                    await asyncio.sleep(3600)
                new = 1 if sent == 0 else step
                rounds += sent > 0
                sent = min(len(ids), sent + new)
                moment += step / self.rate(cached > 0)
                meta: dict[str, Any] = {"id": "x", "finish_reason": None, "prompt_tokens": len(prompt),
                                        "completion_tokens": sent, "cached_tokens": cached}
                if sent == len(ids):
                    meta["finish_reason"] = {"type": "length", "length": sent}
                    if self.speculative and not self.arm.get("no_spec_counts"):
                        accepted = round(rounds * (tau - 1))
                        meta.update(spec_verify_ct=rounds, spec_num_correct_drafts=accepted,
                                    spec_accept_length=sent / max(rounds, 1),
                                    spec_num_proposed_drafts=5 * rounds,
                                    spec_correct_drafts_histogram=[rounds - accepted, accepted])
                write({"text": text, "output_ids": ids[:sent], "meta_info": meta})
            write(None)
        finally:
            self.running -= 1

    def flush(self) -> int:
        if self.arm.get("die_at_flush"):
            self.die()
        status = int(self.arm.get("flush", 200))
        if status == 200 and self.arm.get("flush_works", True):
            self.seen.clear()
        return status

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split()
            length = next((int(line.split(":")[1]) for line in head.split("\r\n")
                           if line.lower().startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            key = self.flags.get("api_key")
            if key and f"authorization: bearer {key}" not in head.lower() and path not in {"/health", "/ready"}:
                path = "/unauthorized"
            await self.answer(method, path.partition("?")[0], body, writer)
            await writer.drain()
            while self.served >= self.arm.get("end_after", 10**9) and not self.running:
                await asyncio.sleep(0)
                if not writer.transport.get_write_buffer_size():
                    self.die()
        writer.close()

    async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        def plain(status: int, value: Any) -> None:
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
                         + data)

        if path in {"/ready", "/health"}:
            answers = self.arm.get("health", [200])
            plain(answers[min(self.health_asked, len(answers) - 1)], "")
            self.health_asked += 1
        elif path == "/unauthorized":
            plain(401, {"error": "Unauthorized"})
        elif path == "/server_info":
            plain(200, self.info())
        elif path == "/v1/tokenize" and "tokenize" in self.arm:
            plain(self.arm["tokenize"], {"detail": "prompt: field required"})
        elif path == "/v1/tokenize":
            text = "".join(message["content"] for message in body["messages"])
            plain(200, {"tokens": [0, 3, *(ord(letter) % TOKENS for letter in text)], "count": len(text)})
        elif path == "/start_profile":
            names = self.arm.get("kernels", [])
            (Path(body["output_dir"]) / "1-TP-0.trace.json").write_text(json.dumps({"traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "step[DECODE bs=1]"},
                *({"ph": "X", "cat": "kernel", "name": name} for name in names)]}))
            plain(200, "Start profiling.")
        elif path == "/flush_cache":
            plain(self.flush(), "Cache flushed.")
        elif path == "/generate" and body.get("return_logprob") and self.arm.get("hang_at_ties"):
            (self.state / "hung").touch()
            await asyncio.Event().wait()
        elif path == "/generate" and body.get("return_logprob"):
            # the baseline's own next token is the best, the one that a split takes instead is second
            prompt, told = self.prompts_seen(body["input_ids"])
            best = self.true_ids(prompt, told + 1)[told]
            second = (best + 1) % TOKENS if "tie_gap" in self.arm else 3
            gap = float(self.arm.get("tie_gap", 0.1))
            others = [[-0.5 - gap - place, (best + 3 + place) % TOKENS, None]
                      for place in range(1, body["top_logprobs_num"] - 1)]
            plain(200, {"meta_info": {"output_top_logprobs": [
                [[-0.5, best, None], [-0.5 - gap, second, None], *others]]}})
        elif path == "/generate":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                         b"Connection: close\r\n\r\n")

            def chunk(value: Any) -> None:
                data = b"data: " + (b"[DONE]" if value is None else json.dumps(value).encode()) + b"\n\n"
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

            await self.generate(body, chunk)
            writer.write(b"0\r\n\r\n")
        else:
            plain(404, "")


async def main() -> None:
    flags = parse_flags(sys.argv[1:])
    config = json.loads(Path(os.environ["SIM_SERVER"]).read_text())
    sim = Sim(config, flags)
    print(f"server_args={flags}", flush=True)
    for line in sim.arm.get("log", []):
        print(line, flush=True)
    if sim.arm.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sim.number < sim.arm.get("stillborn", 0) or flags.get("speculative_num_steps") in sim.arm.get(
            "stillborn_steps", ()):
        sim.die()
    if sim.arm.get("mute"):
        await asyncio.Event().wait()
    server = await asyncio.start_server(sim.serve, "127.0.0.1", flags["port"])
    print("The server is fired up and ready to roll!", flush=True)
    async with server:
        await server.serve_forever()


def render(state: Path) -> None:
    """Stands in for the tokenizer of the server's environment: `python -c SCRIPT` with the prompts on stdin."""
    with (state / "templates").open("a") as file:
        file.write("once")
    asked = json.load(sys.stdin)
    print("RENDERED", json.dumps({name: [0, 3, *(ord(letter) % TOKENS for letter in messages[-1]["content"])]
                                  for name, messages in asked["prompts"].items()}))


if __name__ == "__main__" and "ServerArgs" in sys.argv[2]:  # the server's parser is asked about flags
    for words in json.loads(sys.argv[3]):
        print("VERDICT", json.dumps("unrecognized arguments: --nonsense" if "--nonsense" in words else None))
elif __name__ == "__main__" and sys.argv[1] == "-c":
    render(Path(json.loads(Path(os.environ["SIM_SERVER"]).read_text())["state"]))
elif __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
