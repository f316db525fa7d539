"""`nsa-dcp doctor`: is this machine right, has the plugin taken hold, and what would a `launch_server` command do here?

A command is judged by `validation.find_problems`, the function that refuses it in the server. Doctor itself imports
neither torch nor sglang: processes that do are started first, all at once, and findings are printed as they come in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from nsa_dcp.planning.dimensions import PRESETS
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS
from nsa_dcp.sglang_plugin.admission.advice import advise, use
from nsa_dcp.sglang_plugin.admission.held_report import describe_held_memory
from nsa_dcp.sglang_plugin.admission.reading import server_command
from nsa_dcp.sglang_plugin.admission.reading.launch_line import LaunchLine, read_launch_line
from nsa_dcp.sglang_plugin.admission.reading.server_command import ServerCommand
from nsa_dcp.sglang_plugin.admission.rules.kv_head_rules import find_kv_head_problems
from nsa_dcp.sglang_plugin.admission.rules.stock_rules import find_stock_refusals
from nsa_dcp.sglang_plugin.admission.server_shape import count_groups, shape_of_command
from nsa_dcp.sglang_plugin.admission.untried import list_untried
from nsa_dcp.sglang_plugin.admission.validation import (
    HOPPER,
    SPARSE_BACKEND,
    ModelFacts,
    Problem,
    ServerSettings,
    find_typed_problems,
    is_served_here,
)
from nsa_dcp.sglang_plugin.doctor import machine_checks
from nsa_dcp.sglang_plugin.doctor.machine_checks import FAILED, OK, SKIPPED, Check
from nsa_dcp.sglang_plugin.doctor.probe import DEFAULT_TIMEOUT_S, Ask, Trials, Unanswered, list_trials

_MARKS = {OK: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped", machine_checks.WARNING: "warning"}
# Lines are printed before the later names are known.
_NAME_WIDTH = len("plugin entry point")
REFUSED, STARTS, LEFT_TO_SGLANG, UNDECIDED = "refused", "starts", "left to sglang", "undecided"
_HEADINGS = {
    STARTS: "this command would start, served by nsa-dcp:",
    LEFT_TO_SGLANG: "this command was not judged:",
    UNDECIDED: "nsa-dcp would serve this command, if sglang starts it, which only sglang can say of {}:",
}


@dataclass(frozen=True)
class CommandVerdict:
    """What a command would do.

    Args:
        served_by: `nsa-dcp`, or `sglang` when nsa-dcp leaves the command alone.
        facts: what would run, in words, one fact each.
        problems: why it would be refused; empty when nothing is known that would.
        notes: limits of the judgement itself.
        unjudged: flags and variables on which only sglang can judge.
    """

    served_by: str
    facts: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    unjudged: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """`refused`; `starts`; `left to sglang`, unjudged as a whole; `undecided`, with `unjudged` flags."""
        if self.problems:
            return REFUSED
        if self.served_by == "sglang":
            return LEFT_TO_SGLANG
        return UNDECIDED if self.unjudged else STARTS


def add_doctor_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add `doctor` to the `nsa-dcp` parser; `args.run(args)` returns the exit status."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, the plugin and a launch_server command",
        description=__doc__.split("\n\n")[0],
        epilog="exit status: 0 all is well, 1 something failed or the command would be refused, 2 doctor was misused",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--command-only", action="store_true", help="judge the command, do not look at the machine")
    parser.add_argument(
        "--no-imports", action="store_true", help="do not try imports: fast, and blind to broken packages"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        help="give up imports that have not ended by then (%(default)g); they run all at once",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--config", metavar="FILE", help="the model's config.json, when --model-path is not on this machine"
    )
    model.add_argument("--preset", metavar="NAME", help=f"or one of {', '.join((*PRESETS, *KV_HEAD_PRESETS))}")
    model.add_argument(
        "--preset-if-absent", metavar="NAME", help="one of these, where the command's model is not on this machine"
    )
    parser.add_argument(
        "--dsa-only", action="store_true", help="refuse DCP for models that nsa-dcp leaves to sglang, as the scripts do"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="`python -m sglang.launch_server ...`, or its flags",
    )
    parser.set_defaults(run=run_doctor)
    return parser


def run_doctor(args: argparse.Namespace) -> int:
    """Print the findings; 0 when all is well, 1 when something failed or the command is refused, 2 when misused."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        return _find_and_print(args, words)
    except BrokenPipeError:
        raise  # the reader of stdout has left, which is no misuse
    except (ValueError, OSError) as error:
        print(f"nsa-dcp doctor: {error}", file=sys.stderr)
        return 2


def _find_and_print(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.command_only and not words:
        raise ValueError("--command-only must be followed by -- and a launch_server command, got none")
    if not 0 < args.timeout <= 3600:
        raise ValueError(f"--timeout must be above 0 and at most 3600, got {args.timeout:g}")
    # Whatever can be misused is looked at before the machine is.
    arguments = server_command.strip_launcher(words)
    given = args.config or args.preset
    if words and (given or args.preset_if_absent):
        _given_model_facts(args.config, args.preset or args.preset_if_absent, {})
    use_sglang = not args.no_imports and machine_checks.installed_version("sglang") is not None
    checks: list[Check] = []
    verdict = None

    def report(check: Check) -> None:
        checks.append(check)
        if not args.json:
            print(format_check(check), flush=True)

    with ExitStack() as stack:
        ask = None
        if not args.command_only and not args.no_imports:
            steps = list_trials(with_command=bool(words) and use_sglang)
            ask = stack.enter_context(Trials(steps, arguments, args.timeout)).ask
        elif words and use_sglang:
            ask = stack.enter_context(Trials([("command",)], arguments, args.timeout)).ask
        if not args.command_only:
            for check in examine_machine():
                report(check)
        if not args.command_only and ask is not None:
            if not args.json:
                print(f"nsa-dcp doctor: waiting for imports, {args.timeout:g} s at most", file=sys.stderr, flush=True)
            for check in examine_imports(ask):
                report(check)
        if words:
            try:
                command = read_command(words, use_sglang=use_sglang, ask=ask)
                if given:
                    overrides = server_command.read_overrides(command.model_override_args)
                    facts = _given_model_facts(args.config, args.preset, overrides)
                else:
                    facts = _own_model_facts(command, args.preset_if_absent)
                verdict = judge_command(command, *facts, dsa_only=args.dsa_only)
            except RuntimeError as error:
                if args.command_only:
                    raise ValueError(str(error)) from error
                report(Check("command", FAILED, str(error), "see above"))
    failed = any(check.status == FAILED for check in checks) or bool(verdict and verdict.problems)
    if args.json:
        found = {"ok": not failed, "checks": [asdict(check) for check in checks], "command": _as_dict(verdict)}
        print(json.dumps(found, indent=2))
    elif verdict is not None:
        print(("\n" if checks else "") + format_verdict(verdict))
    return 1 if failed else 0


def examine_machine() -> Iterator[Check]:
    """Findings that need no imports, in the order in which to fix things."""
    yield from machine_checks.check_packages()
    yield from machine_checks.check_gpus()


def examine_imports(ask: Ask) -> Iterator[Check]:
    """Findings of the processes that `ask` waits for, in the order in which to fix things."""
    yield from machine_checks.check_imports(ask)
    yield machine_checks.check_plugin(ask)


def read_command(words: Sequence[str], *, use_sglang: bool, ask: Ask | None = None) -> ServerCommand:
    """Read a command with sglang's own parser where sglang is installed, else with its grammar from a table.

    `ask` waits for the step `command` of processes that were started with this command's arguments; without it one is
    started here. ValueError: the words are not a launch_server command; the message is sglang's where its parser was
    used. RuntimeError: sglang did not get to read it.
    """
    line = read_launch_line(words)
    arguments = list(line.arguments)
    if not use_sglang or machine_checks.installed_version("sglang") is None:
        return _with_unread(server_command.read_without_sglang(arguments, line.environment), line)
    if ask is None:
        with Trials([("command",)], arguments) as trials:
            answer = trials.ask("command")
    else:
        answer = ask("command")
    if isinstance(answer, Unanswered):
        raise RuntimeError(f"sglang could not read the command: {answer.reason}")
    if "refused" in answer:
        raise ValueError(f"sglang could not read the command: {answer['refused']}")
    return _with_unread(server_command.command_from_fields(answer["fields"], line.environment), line)


def _with_unread(command: ServerCommand, line: LaunchLine) -> ServerCommand:
    return dataclasses.replace(command, unjudged=(*command.unjudged, *line.unread))


def judge_command(command: ServerCommand, model: ModelFacts, source: str, *, dsa_only: bool = False) -> CommandVerdict:
    """What a command would do on a Hopper node.

    Args:
        command: as read.
        model, source: the model's facts, and where they come from.
        dsa_only: whether DCP for a model without DeepSeek Sparse Attention is refused, and not left to sglang.
    """
    settings = command.settings
    notes = [f"model facts from {source}", "judged as on a Hopper GPU (9.0)"]
    stock_checks = "sglang's own checks of its other flags are made when the server starts"
    if not is_served_here(settings, model, HOPPER):
        refusals = find_stock_refusals(settings) or _find_kv_head_problems(settings, model)
        if dsa_only and settings.dcp_size > 1:
            refusals.insert(0, _refuse_other_model(model))
        if refusals:
            return CommandVerdict("sglang", (), tuple(refusals), tuple(notes))
        reason = (
            "--dcp-size is 1" if settings.dcp_size == 1 else f"{model.architecture or 'the model'} is not a DSA model"
        )
        return CommandVerdict(
            "sglang",
            (f"{reason}: nsa-dcp leaves this command to sglang as it is",),
            (),
            (*notes, stock_checks),
        )
    problems = find_typed_problems(settings, model, HOPPER)
    if problems:
        return CommandVerdict("nsa-dcp", (), tuple(problems), tuple(notes))
    shape = shape_of_command(settings, model)
    facts = [
        f"mode: {shape.mode}, {count_groups(settings)} DCP group(s) of {shape.dcp_size} GPUs",
        f"heads: {shape.local_heads} per rank, {shape.gathered_heads} gathered, in FlashMLA's {shape.head_bucket}-head "
        "kernel",
        f"backends: prefill {settings.dsa_prefill_backend or SPARSE_BACKEND}, "
        f"decode {settings.dsa_decode_backend or SPARSE_BACKEND}",
        f"merge: {settings.dcp_comm_backend or 'a2a'}"
        + (", over peer memory where it can be mapped (NSA_DCP_WIRE=peer)" if settings.wire == "peer" else ""),
        f"KV cache: {settings.kv_cache_dtype}"
        + (", which sglang resolves to bfloat16 on Hopper" if settings.kv_cache_dtype == "auto" else ""),
    ]
    held = describe_held_memory(settings, model)
    if held:
        facts.append(held)
    unjudged = command.unjudged
    if settings.context_length and not 0 < settings.context_length <= model.context_length:
        # Past the model's own, sglang asks how its positions are scaled.
        unjudged = ("--context-length", *unjudged)
    notes += list_untried(settings)
    return CommandVerdict("nsa-dcp", tuple(facts), (), (*notes, stock_checks), unjudged)


def format_check(check: Check) -> str:
    """A finding as text, one or two lines."""
    line = f"{_MARKS[check.status]}  {check.name:<{_NAME_WIDTH}}  {check.found}"
    return line + (f"\n{'':<9}{'':<{_NAME_WIDTH}}  fix: {check.fix}" if check.fix else "")


def format_verdict(verdict: CommandVerdict) -> str:
    """What a command would do, as text."""
    if verdict.problems:
        lines = [f"this command would be refused, for {len(verdict.problems)} reason(s):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(verdict.problems, 1)]
    else:
        lines = [_HEADINGS[verdict.outcome].format(", ".join(verdict.unjudged))]
        lines += [f"  {fact}" for fact in verdict.facts]
    return "\n".join([*lines, *(f"  note: {note}" for note in verdict.notes)])


def _given_model_facts(
    config: str | None, preset: str | None, overrides: Mapping[str, object]
) -> tuple[ModelFacts, str]:
    if preset is not None:
        return server_command.preset_model_facts(preset, overrides), f"preset {preset}"
    if config is None:
        raise ValueError("the model must be given by its config or by a preset, got neither")
    return server_command.read_model_facts(config, overrides), config


def _find_kv_head_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    phases = (settings.prefill_attention_backend, settings.decode_attention_backend)
    if settings.kv_cache_dtype == "fp8_e5m2" and set(phases) <= {None, "fa3"}:
        return []  # sglang takes triton or fa3 then, and which depends on how the backends were asked for
    return find_kv_head_problems(settings, model, HOPPER)


def _refuse_other_model(model: ModelFacts) -> Problem:
    return Problem(
        f"architecture {model.architecture or 'unknown'} with DCP",
        "nsa-dcp serves models with DeepSeek Sparse Attention, and this has none",
        advise(use("--dcp-size 1", said="serve it with --dcp-size 1, or with sglang's own commands")),
    )


def _own_model_facts(command: ServerCommand, preset_if_absent: str | None = None) -> tuple[ModelFacts, str]:
    if command.settings.dcp_size <= 1:
        return ModelFacts(is_dsa=False), f"nothing: --dcp-size is {command.settings.dcp_size}"
    if command.model_path is None:
        raise ValueError(
            "the command must name a model with --model-path, or give doctor --config or --preset, got neither"
        )
    overrides = server_command.read_overrides(command.model_override_args)
    if preset_if_absent is not None and not Path(command.model_path).exists():
        source = f"preset {preset_if_absent}, as {command.model_path} is not on this machine"
        return server_command.preset_model_facts(preset_if_absent, overrides), source
    try:
        return server_command.read_model_facts(command.model_path, overrides), command.model_path
    except ValueError as error:
        raise ValueError(f"{error}; when the model is not on this machine give doctor --config or --preset") from error


def _as_dict(verdict: CommandVerdict | None) -> dict[str, object] | None:
    if verdict is None:
        return None
    return {"refused": bool(verdict.problems), "outcome": verdict.outcome, **asdict(verdict)}
