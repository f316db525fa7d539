"""`nsa-dcp doctor`: is this machine right, has the plugin taken hold, and what would a `launch_server` command do here?

A command is judged by `validation.find_problems`, the function that refuses it in the server. Doctor itself imports
neither torch nor sglang: processes that do are started first, all at once, and findings are printed as they come in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from nsa_dcp.planning.dimensions import PRESETS
from nsa_dcp.sglang_plugin.admission import server_command
from nsa_dcp.sglang_plugin.admission.held_report import describe_held_memory
from nsa_dcp.sglang_plugin.admission.server_command import ServerCommand
from nsa_dcp.sglang_plugin.admission.stock_rules import find_stock_refusals
from nsa_dcp.sglang_plugin.admission.validation import (
    HOPPER,
    SPARSE_BACKEND,
    ModelFacts,
    Problem,
    find_problems,
    head_bucket,
    is_served_here,
)
from nsa_dcp.sglang_plugin.doctor import machine_checks
from nsa_dcp.sglang_plugin.doctor.machine_checks import FAILED, OK, SKIPPED, Check
from nsa_dcp.sglang_plugin.doctor.probe import DEFAULT_TIMEOUT_S, Ask, Trials, Unanswered, list_trials

_MARKS = {OK: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped", machine_checks.WARNING: "warning"}
# Lines are printed before the later names are known.
_NAME_WIDTH = len("plugin entry point")


@dataclass(frozen=True)
class CommandVerdict:
    """What a command would do.

    Args:
        served_by: `nsa-dcp`, or `sglang` when nsa-dcp leaves the command alone.
        facts: what would run, in words, one fact each.
        problems: why it would be refused; empty when it would start.
        notes: limits of the judgement itself.
    """

    served_by: str
    facts: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


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
    model.add_argument("--preset", metavar="NAME", help=f"or one of {', '.join(PRESETS)}")
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
    given = _given_model_facts(args.config, args.preset) if words else None
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
                verdict = judge_command(command, *(given or _own_model_facts(command)))
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
    """Read a command with sglang's own parser where sglang is installed, else with the partial one.

    `ask` waits for the step `command` of processes that were started with this command's arguments; without it one is
    started here. ValueError: the words are not a launch_server command; the message is sglang's where its parser was
    used. RuntimeError: sglang did not get to read it.
    """
    arguments = server_command.strip_launcher(words)
    if not use_sglang or machine_checks.installed_version("sglang") is None:
        return server_command.read_without_sglang(arguments)
    if ask is None:
        with Trials([("command",)], arguments) as trials:
            answer = trials.ask("command")
    else:
        answer = ask("command")
    if isinstance(answer, Unanswered):
        raise RuntimeError(f"sglang could not read the command: {answer.reason}")
    if "refused" in answer:
        raise ValueError(f"sglang could not read the command: {answer['refused']}")
    return server_command.command_from_fields(answer["fields"], partial=False)


def judge_command(command: ServerCommand, model: ModelFacts, source: str) -> CommandVerdict:
    """What a command would do on a Hopper node. `source` says where the model's facts come from."""
    settings = command.settings
    notes = [f"model facts from {source}", "judged as on a Hopper GPU (9.0)"]
    if command.partial:
        notes.append(
            "sglang was not used to read the command: only the flags that nsa-dcp judges were read"
            + (f", not {' '.join(command.unread)}" if command.unread else "")
        )
    stock_checks = "sglang's own checks of its other flags are made when the server starts"
    if not is_served_here(settings, model, HOPPER):
        refusals = find_stock_refusals(settings)
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
    problems = tuple(find_problems(settings, model, HOPPER) or find_stock_refusals(settings))
    if problems:
        return CommandVerdict("nsa-dcp", (), problems, tuple(notes))
    cp, groups = settings.enable_prefill_cp, settings.tp_size // settings.dcp_size
    local_heads = model.num_attention_heads // (
        settings.tp_size // settings.attn_dp_size // settings.context_parallel_size
    )
    gathered = model.num_attention_heads if cp else local_heads * settings.dcp_size
    facts = [
        f"mode: {'CP-DCP' if cp else 'TP-DCP'}, {groups} DCP group(s) of {settings.dcp_size} GPUs",
        f"heads: {local_heads} per rank, {gathered} gathered, in FlashMLA's {head_bucket(gathered)}-head kernel",
        f"backends: prefill {settings.dsa_prefill_backend or SPARSE_BACKEND}, "
        f"decode {settings.dsa_decode_backend or SPARSE_BACKEND}",
        f"merge: {settings.dcp_comm_backend or 'a2a'}",
        f"KV cache: {settings.kv_cache_dtype}"
        + (", which sglang resolves to bfloat16 on Hopper" if settings.kv_cache_dtype == "auto" else ""),
    ]
    held = describe_held_memory(settings, model)
    if held:
        facts.append(held)
    return CommandVerdict("nsa-dcp", tuple(facts), (), (*notes, stock_checks))


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
        lines = [f"this command would start, served by {verdict.served_by}:"]
        lines += [f"  {fact}" for fact in verdict.facts]
    return "\n".join([*lines, *(f"  note: {note}" for note in verdict.notes)])


def _given_model_facts(config: str | None, preset: str | None) -> tuple[ModelFacts, str] | None:
    if preset is not None:
        return server_command.preset_model_facts(preset), f"preset {preset}"
    if config is not None:
        return server_command.read_model_facts(config), config
    return None


def _own_model_facts(command: ServerCommand) -> tuple[ModelFacts, str]:
    if command.settings.dcp_size <= 1:
        return ModelFacts(is_dsa=False), f"nothing: --dcp-size is {command.settings.dcp_size}"
    if command.model_path is None:
        raise ValueError(
            "the command must name a model with --model-path, or give doctor --config or --preset, got neither"
        )
    try:
        return server_command.read_model_facts(command.model_path), command.model_path
    except ValueError as error:
        raise ValueError(f"{error}; when the model is not on this machine give doctor --config or --preset") from error


def _as_dict(verdict: CommandVerdict | None) -> dict[str, object] | None:
    return None if verdict is None else {"refused": bool(verdict.problems), **asdict(verdict)}
