"""Doctor says what the server does: published, hand-written and drawn commands go through both readers of doctor and
through sglang's own resolution with the plugin."""

import argparse
import ast
import dataclasses
import json
import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

import nsa_dcp.sglang_plugin
from nsa_dcp.sglang_plugin.admission.advice import Advice
from nsa_dcp.sglang_plugin.admission.reading import launch_parser, sglang_flags
from nsa_dcp.sglang_plugin.admission.server_settings import Problem
from nsa_dcp.sglang_plugin.admission.validation import find_problems
from nsa_dcp.sglang_plugin.doctor import doctor
from tests import launch_commands, server_verdicts
from tests.following_advice import follow
from tests.served_settings import GLM, TP_DCP
from tests.sglang.admission.test_feature_rules import COMMANDS
from tests.sglang.conftest import TINY_GLM_DSA

# Another number draws other commands.
SEED = os.environ.get("NSA_DCP_TEST_SEED", str(os.getpid()))
DRAWN = 240
ROOT = Path(__file__).parents[3]
YAML = {
    "SERVER.yaml": {"model-path": "GLM", "tp-size": 8, "dcp-size": 8, "trust-remote-code": True},
    "HISPARSE.yaml": {"model": "GLM", "tp-size": 8, "dcp-size": 8, "enable-hisparse": True},
    "OLD.yaml": {"model": "GLM", "tp-size": 8, "enable-dp-attention": True},
}
needs_sglang = [pytest.mark.sglang, pytest.mark.usefixtures("models", "registered", "on_a_hopper_machine")]


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Models and files of the commands, in the working directory."""
    glm = TINY_GLM_DSA | {"num_hidden_layers": 8, "index_topk_freq": 4}
    deepseek = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_attention_heads": 128}
    configs = {
        "GLM": glm,
        "DS": TINY_GLM_DSA | {"num_hidden_layers": 8, "num_key_value_heads": 128} | deepseek,
        "NO_TOPK": {name: value for name, value in glm.items() if name != "index_topk"},
        "ZERO_TOPK": glm | {"index_topk": 0},
        "LONG_PATTERN": glm | {"index_topk_pattern": "F" * 9},
        "SHORT_PATTERN": glm | {"index_topk_pattern": "FFSS"},
        "QWEN": glm | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8},
    }
    configs["QWEN_MOE"] = configs["QWEN"] | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name, settings in YAML.items():
        (tmp_path / name).write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def on_a_hopper_machine(on_hopper):
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_cuda=True, is_sm90=True, is_hopper_with_cuda_12_3=True):
        yield


@pytest.fixture
def sglangs_parser():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    return parser


@pytest.fixture
def check(sglangs_parser):
    """A function that returns what contradicts itself about a command, with the command, and doctor's outcome."""

    def run(words):
        own = server_verdicts.by_doctor(words, with_sglang=False)
        theirs = server_verdicts.by_doctor(words, with_sglang=True, parser=sglangs_parser)
        found = server_verdicts.disagreement(own, theirs, server_verdicts.by_server(words))
        return found and f"{shlex.join(words)}\n{found}", own[0].outcome

    return run


@pytest.mark.sglang
def test_the_table_of_flags_is_that_of_sglangs_own_parser(sglangs_parser):
    described = json.loads(json.dumps(launch_parser.describe_parser(sglangs_parser)))
    optional = [
        {key: value for key, value in entry.items() if key != "required"} for entry in launch_parser.read_table()
    ]
    assert described == optional
    again = launch_parser.describe_parser(_with_sglangs_names(launch_parser.build_parser(optional)))
    assert [entry["flags"] for entry in again] == [entry["flags"] for entry in optional]


def _with_sglangs_names(parser):
    names = {"_OldSwitch": "DeprecatedStoreTrueAction", "_OldValue": "DeprecatedStoreConstAction"}
    names |= {"_Adapters": "LoRAPathAction", "_AskedForHelp": "_HelpAction"}
    for action in parser._actions:
        name = type(action).__name__
        if name in names:
            action.__class__ = type(names[name], (type(action),), {})
    return parser


class TestAgreement:
    pytestmark = needs_sglang

    def test_published_commands(self, check):
        commands = list(launch_commands.published())
        assert len(commands) > 80
        results = {name: check(words) for name, words in commands}
        assert [found for found, _ in results.values() if found] == []

    def test_hand_written_commands(self, check):
        commands = launch_commands.hand_written()
        assert len(commands) > 80
        results = [check(words) for words in commands]
        assert [found for found, _ in results if found] == []
        assert {outcome for _, outcome in results} == {"starts", "refused", "unreadable", "undecided", "left to sglang"}

    def test_drawn_commands(self, check):
        results = [check(words) for words in launch_commands.draw(SEED, DRAWN)]
        found = [found for found, _ in results if found]
        assert found == [], f"seed {SEED}: {len(found)} of {DRAWN} commands"
        counts = Counter(outcome for _, outcome in results)
        # Doctor decides nearly all of them, and they are not all refused.
        assert counts["undecided"] < DRAWN / 8 and counts["starts"] > DRAWN / 16, f"seed {SEED}: {counts}"

    @pytest.mark.parametrize("mode", ["", "--attn-dp-size 2", "--enable-prefill-cp --cp-strategy interleave"])
    def test_flags_that_count_as_inert_are_no_reason_for_sglang_to_refuse(self, mode):
        dcp_size = 4 if "dp" in mode else 8
        base = f"python -m sglang.launch_server --model-path GLM --tp 8 --dcp-size {dcp_size} {mode}".split()
        values = {"int": "3", "float": "0.5", "human_readable_int": "8k", "str": "text"}
        refused = {}
        for entry in launch_parser.read_table():
            if entry["field"] not in sglang_flags.INERT or entry["field"] == "device":
                continue
            flag = entry["flags"][0]
            value = str(entry["choices"][-1]) if "choices" in entry else values.get(entry.get("type"), "text")
            words = [flag] if entry["kind"] in ("switch", "old switch") else [flag, value]
            verdict = server_verdicts.by_server([*base, *words])
            if verdict.outcome != doctor.STARTS:
                refused[" ".join(words)] = verdict.why
        assert refused == {}


# A command for each rule, beside those that other tests have.
REFUSED = [
    *(f"{launch_commands.F} {flags}" for flags in COMMANDS if "draft-model" not in flags),
    f"{launch_commands.F} --lora-paths a=b",
    f"{launch_commands.F} --speculative-algorithm EAGLE --speculative-draft-model-path DS",
    f"{launch_commands.F} --dcp-replicate-q-proj --dcp-comm-backend ag_rs",
    f"{launch_commands.F} --dcp-comm-backend fi_a2a",
    f"{launch_commands.F} --cuda-graph-backend-prefill full",
    f"{launch_commands.F} --kv-cache-dtype fp8_e5m2",
    f"{launch_commands.F} --enable-dsa-cache-layer-split",
    f"{launch_commands.F} --attn-dp-size 2 --dp-size 2 --dcp-size 4",
    f"{launch_commands.F} --attn-cp-size 8",
    f"{launch_commands.F} --enable-prefill-cp",
    f"{launch_commands.CP} --cp-strategy zigzag --speculative-algorithm EAGLE",
    f"{launch_commands.CP} --cp-strategy zigzag --dsa-topk-backend flashinfer",
    f"{launch_commands.CP} --cp-strategy zigzag --model-path DS",
    f"{launch_commands.CP} --attn-dp-size 2 --dcp-size 4",
    f"{launch_commands.CP} --attn-dp-size 2 --dcp-size 4 --grammar-backend none --speculative-algorithm EAGLE",
    f"{launch_commands.CP} --attn-dp-size 2 --dcp-size 4 --grammar-backend none --enable-cp-decode-attn-tp",
    f"{launch_commands.CP} --enable-cp-decode-attn-tp --model-path DS",
    f"{launch_commands.F} --enable-cp-decode-attn-tp --model-path DS",
    f"{launch_commands.CP} --dcp-replicate-q-proj",
    f"{launch_commands.CP} --prefill-attention-backend nsa --decode-attention-backend dsa",
    f"{launch_commands.F} --pp-size 2 --attn-dp-size 2 --dcp-size 4 --model-path DS",
    f"{launch_commands.F} --pp-size 2 --speculative-algorithm EAGLE --model-path DS",
    f"{launch_commands.F} --pp-size 2 --pp-async-batch-depth 1 --model-path DS",
    f"{launch_commands.F} --pp-size 2 --enable-dynamic-chunking --model-path DS",
    f"{launch_commands.CP} --cp-strategy zigzag --pp-size 2",
    f"{launch_commands.F} --pp-size 9",
    *(
        f"{launch_commands.F} --{flag} 0"
        for flag in ("tp-size", "dp-size", "pp-size", "attn-dp-size", "attn-cp-size", "page-size")
    ),
    f"{launch_commands.P} --tp 8 --dcp-comm-backend a2a",
    f"{launch_commands.P} --tp 8 --dcp-replicate-q-proj",
    f"{launch_commands.P} --tp 8 --attn-dp-size 2 --dp-size 2",
    f"{launch_commands.P} --tp 8 --attn-cp-size 3",
    f"{launch_commands.P} --tp 8 --enable-prefill-cp",
    f"{launch_commands.F} --chunked-prefill-size 131072",
    f"{launch_commands.F} --chunked-prefill-size 10000",
    f"{launch_commands.F} --chunked-prefill-size -1 --max-prefill-tokens 1000000",
    f"{launch_commands.CP} --enable-cp-decode-attn-tp --quantization humming",
    f"{launch_commands.F} --attention-backend fa3",
    f"{launch_commands.F} --dsa-decode-backend fa3",
    f"{launch_commands.F} --enable-memory-saver",
    f"NSA_DCP_INDEX_KEYS=sharded {launch_commands.F}",
    f"NSA_DCP_INDEX_KEYS=some {launch_commands.F}",
    f"NSA_DCP_WIRE=tcp {launch_commands.F}",
    f"NSA_DCP_WIRE=peer {launch_commands.F} --dcp-replicate-q-proj",
    f"NSA_DCP_WIRE=peer NSA_DCP_PREFILL=auto {launch_commands.F}",
    f"NSA_DCP_PREFILL=row {launch_commands.F}",
    f"NSA_DCP_PREFILL=rows {launch_commands.CP}",
    *(
        f"python -m sglang.launch_server --model-path {flags}"
        for flags in (
            "QWEN --tp 8 --dcp-size 8",
            "QWEN --tp 16 --dcp-size 4 --attention-backend triton",
            "QWEN --tp 16 --dcp-size 2 --decode-attention-backend flashinfer",
            "QWEN_MOE --tp 16 --dcp-size 2 --attention-backend triton",
            "QWEN_MOE --tp 16 --dcp-size 2 --attention-backend triton --speculative-algorithm NGRAM",
        )
    ),
    *(
        f"{launch_commands.F} --json-model-override-args {shlex.quote(json.dumps(overrides))}"
        for overrides in (
            {"index_kpool": 4},
            {"kv_lora_rank": 256},
            {"index_topk": 2000},
            {"architectures": ["DeepseekV3ForCausalLM"]},
        )
    ),
]
RULES = ("validation", "feature_rules", "kv_head_rules", "pipeline_rules", "stock_rules", "chunk_rules", "weight_rules")


@pytest.mark.usefixtures("models")
class TestAdvice:
    def test_what_any_refusal_advises_is_accepted_when_it_is_followed(self, monkeypatch):
        sites = _record_sites(monkeypatch)
        stuck = {}
        commands = [*map(shlex.split, REFUSED), *launch_commands.hand_written(), *launch_commands.draw(SEED, 200)]
        # A file's flags are changed in the file.
        commands = [words for words in commands if "--config" not in words]
        for words in commands:
            for problem in _problems(words):
                for change in problem.instead.changes if isinstance(problem.instead, Advice) else ():
                    left = _problems(follow(words, change))
                    # The other problems of a command may stay, and what advises to have no DCP leads to sglang's rules.
                    if problem in left or _follow_on(follow(words, change)):
                        stuck[f"{shlex.join(words)}: {problem} [{change}]"] = list(map(str, left))
        assert stuck == {}, f"seed {SEED}"
        # What no command leads to: another GPU, and a resolution that does not set the page.
        assert find_problems(TP_DCP, GLM, (10, 0))
        assert find_problems(dataclasses.replace(TP_DCP, page_size=128), GLM, (9, 0))
        missed = _rule_sites() - sites
        assert missed == set(), "rules that no command here is refused by"

    def test_the_runbooks_table_names_every_flag_that_is_refused_and_no_other(self):
        section = (ROOT / "docs" / "runbook.md").read_text().split("## 6.")[1].split("\n## ")[0]
        first_column = "\n".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| "))
        commands = [*map(shlex.split, REFUSED), *launch_commands.hand_written()]
        asked = "\n".join(problem.asked for words in commands for problem in _problems(words))
        # A refused backend is named by its phase, and not by the flag that it came from.
        typed = "\n".join(shlex.join(words) for words in commands if _problems(words))
        described, refused, given = (set(re.findall(r"--[a-z][a-z-]+", text)) for text in (first_column, asked, typed))
        assert refused <= described, "refused and not in the runbook"
        assert described <= refused | given, "in the runbook and not refused"

    def test_every_size_that_is_advised_on_a_grid_is_accepted(self):
        refused = []
        for model in ("GLM", "DS"):
            for tp_size in (2, 3, 4, 6, 8, 12, 16, 32):
                for dcp_size in (2, 3, 4, 8, 16):
                    for more in (
                        "",
                        "--attn-dp-size 2",
                        "--attn-dp-size 4",
                        "--enable-prefill-cp --cp-strategy interleave",
                    ):
                        command = f"--model-path {model} --tp {tp_size} --dcp-size {dcp_size} {more}"
                        for problem in _problems(command.split()):
                            for change in problem.instead.changes:
                                left = [
                                    other
                                    for other in _problems(follow(command.split(), change))
                                    if "grammar" not in str(other)
                                ]
                                if left and any(word.startswith(("--tp-size", "--dcp-size")) for word in change.use):
                                    refused.append((command, str(change), list(map(str, left))))
        assert refused == []


def _problems(words):
    try:
        line = server_verdicts.read_launch_line(words, {})
        command = server_verdicts.server_command.read_without_sglang(line.arguments, line.environment)
        return doctor.judge_command(command, *doctor._own_model_facts(command)).problems
    except ValueError:
        return ()


def _follow_on(words):
    """What is left of a command's problems when the first advice of the first one has been followed, over and over."""
    for _ in range(8):
        problems = _problems(words)
        if not problems or not isinstance(problems[0].instead, Advice):
            break
        words = follow(words, problems[0].instead.changes[0])
    return [problem for problem in problems if isinstance(problem.instead, Advice)]


def _rule_files():
    folder = Path(nsa_dcp.sglang_plugin.__file__).parent
    return [path for path in folder.rglob("*.py") if path.stem in RULES]


def _rule_sites():
    """(module, line) of every place where a rule refuses."""
    return {
        (path.stem, node.lineno)
        for path in _rule_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem"
    }


def _record_sites(monkeypatch):
    sites, made = set(), Problem.__init__

    def record(self, *args, **kwargs):
        frame = sys._getframe(1)
        sites.add((Path(frame.f_code.co_filename).stem, frame.f_lineno))
        made(self, *args, **kwargs)

    monkeypatch.setattr(Problem, "__init__", record)
    return sites
