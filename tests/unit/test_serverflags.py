"""Flags of the server, read from the source of its parser."""

from __future__ import annotations

from buildctl import serverflags
from buildctl.serverflags import Flag
from buildctl.stack import Profile

OLD = '''
CHOICES = ["flashinfer", "triton"]
MORE = [*CHOICES, "fa3"]
COMPUTED = list(x for x in CHOICES)
a, b = 1, 2

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--mem-fraction-static", type=float, default=None)
        parser.add_argument("--attention-backend", type=str, choices=CHOICES)
        parser.add_argument("--prefill-attention-backend", choices=MORE + ["x"])
        parser.add_argument("--computed", choices=COMPUTED)
        parser.add_argument("--computed-too", choices=[*COMPUTED])
        parser.add_argument("--computed-more", choices=CHOICES + COMPUTED)
        parser.add_argument("--words", choices=[name for name in CHOICES])
        parser.add_argument("--some", choices=[1, f(2)])
        parser.add_argument("--level", type=int, choices=(0, 1))
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--radix", action=argparse.BooleanOptionalAction)
        parser.add_argument("--gone", action=DeprecatedAction)
        parser.add_argument("--gone-value", action=DeprecatedAction, nargs="?")
        parser.add_argument("--gone-too", action=DeprecatedStoreConstAction, nargs=None, choices=["amd"])
        parser.add_argument("--lora-paths", action=LoRAPathAction, nargs="*")
        parser.add_argument("positional")
        parser.add_argument("--json", type=json.loads)
        other_call("--not-a-flag")
'''
NEW = {"sglang/srt/server_args.py": '''
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.arg_groups.fields import x
from sglang.srt.arg_groups.absent import y
from sglang.srt.utils import z

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--sampling-backend", choices=backends)
''', "sglang/srt/arg_groups/fields/__init__.py": "from sglang.srt.arg_groups.choices import LOADS\n",
       "sglang/srt/arg_groups/choices.py": 'LOADS = ["auto", "dummy"]\n',
       "sglang/srt/arg_groups/fields/spec.py": '''
class Spec:
    speculative_algorithm: A[Optional[str], "help"] = None
    speculative_num_steps: A[int | None, "help"] = None
    steps_first: A[None | int, "help"] = None
    mem_fraction_static: Annotated[float, Arg(help="x")] = 0.9
    load_format: A[str, Arg(choices=LOADS)] = "auto"
    kind: A[Literal["ar", "rs"], Arg(help="x")] = "ar"
    one: A[Literal["only"], "help"] = "only"
    enable_metrics: A[bool, f"help {x}"] = False
    parsed: A[bool, Arg(type_parser=flag_parser)] = False
    tp_size: A[int, Arg(cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    sizes: A[List[int], Arg(help="x")] = None
    toggle: A[bool, Arg(action=argparse.BooleanOptionalAction)] = True
    old: A[bool, Arg(action=DeprecatedStoreTrueAction)] = False
    hidden: A[int, Arg(no_cli=True)] = 1
    derived: A[int, Derived("x")] = 1
    plain: int = 1
    other: Final[int] = 1
    self.x: A[int, "no field"] = 1
'''}


def of_old() -> dict[str, Flag]:
    return serverflags.of_source({"sglang/srt/server_args.py": OLD.encode()}.get)


def of_new() -> dict[str, Flag]:
    return serverflags.of_source({path: text.encode() for path, text in NEW.items()}.get)


def test_flags_by_add_argument() -> None:
    flags = of_old()
    assert "model" in flags
    assert "model-path" in flags
    assert flags["mem-fraction-static"] == Flag("mem-fraction-static", type="float")
    assert flags["attention-backend"].choices == ("flashinfer", "triton")
    assert flags["prefill-attention-backend"].choices == ("flashinfer", "triton", "fa3", "x")
    computed = ("computed", "computed-too", "computed-more", "words", "some")
    assert [flags[name].choices for name in computed] == [None] * 5
    assert flags["level"].choices == ("0", "1")
    assert {name for name, flag in flags.items() if flag.switch} == {"enable-metrics", "radix", "no-radix", "gone"}
    assert flags["json"].type == "loads"
    assert "not-a-flag" not in flags
    assert "positional" not in flags


def test_flags_by_annotated_fields() -> None:
    flags = of_new()
    assert flags["speculative-algorithm"] == Flag("speculative-algorithm")
    assert (flags["speculative-num-steps"].type, flags["steps-first"].type) == ("int", "int")
    assert flags["mem-fraction-static"].type == "float"
    assert flags["load-format"].choices == ("auto", "dummy")
    assert (flags["kind"].choices, flags["one"].choices) == (("ar", "rs"), ("only",))
    assert {name for name, flag in flags.items() if flag.switch} == {"enable-metrics", "toggle", "no-toggle", "old"}
    assert flags["parsed"].type == "flag_parser"
    assert {"tensor-parallel-size", "tp-size", "sampling-backend"} <= set(flags)
    assert flags["sizes"].type == "int"
    assert not {"hidden", "derived", "plain", "other", "x"} & set(flags)


def problems(server: dict[str, object], flags: dict[str, Flag] | None = None) -> list[str]:
    known = of_old() | {f"filler-{number}": Flag(f"filler-{number}") for number in range(100)}
    profile = Profile("0.5.9", {}, server, {"baseline": {}})  # type: ignore[arg-type]
    return [str(problem) for problem in serverflags.check(profile, flags or known, "stack.yaml", "0.5.9")]


def test_a_profile_that_the_parser_takes() -> None:
    assert problems({"mem-fraction-static": 0.5, "attention-backend": "triton", "enable-metrics": True, "level": 1,
                     "computed": "anything", "gone": False, "json": "{}", "mem-frac": "0.5"}) == []


def test_each_way_to_be_refused() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"mem-fraction-statik": 1}, "did you mean 'mem-fraction-static'?"),
        ({"filler": 1}, "the beginning of --filler-0"),
        ({"enable-metrics": "yes"}, "takes no value"),
        ({"mem-fraction-static": True}, "needs a value"),
        ({"mem-fraction-static": "much"}, "takes a number"),
        ({"attention-backend": "fa9"}, "flashinfer | triton")]
    for given, words in cases:
        (problem,) = problems(given)
        assert words in problem
        assert "stack.yaml, profile.server" in problem


def test_a_parser_of_another_form_is_said() -> None:
    (problem,) = problems({}, of_old())
    assert "cannot read the flags of SGLang 0.5.9" in problem
