"""What becomes of a launch command: by doctor with either reader, and by sglang's own resolution with the plugin.

A server's resolution runs here on a CPU that pretends to be a Hopper machine; everything up to the start of its
processes is sglang's own code.
"""

import contextlib
import io
import logging
import os
from dataclasses import dataclass

from nsa_dcp.sglang_plugin.admission.reading import server_command
from nsa_dcp.sglang_plugin.admission.reading.launch_line import read_launch_line
from nsa_dcp.sglang_plugin.doctor import doctor

UNREADABLE = "unreadable"
_INFINIBAND = "InfiniBand"


@dataclass(frozen=True)
class Verdict:
    """`outcome`: of `doctor.CommandVerdict`, or `unreadable`; for a server `refused`, `starts` or `unreadable`."""

    outcome: str
    why: str = ""


def by_doctor(words, *, with_sglang, parser=None):
    """The verdict of doctor on a command line, and the command as it was read (None where it was not)."""
    try:
        line = read_launch_line(words, {})
        if with_sglang:
            fields = read_with_sglang(parser, list(line.arguments))
            command = server_command.command_from_fields(fields, line.environment)
        else:
            command = server_command.read_without_sglang(line.arguments, line.environment)
        if command.model_path is None:
            return Verdict(UNREADABLE, "no model"), None
    except ValueError as error:
        return Verdict(UNREADABLE, str(error)), None
    try:
        verdict = doctor.judge_command(command, *doctor._own_model_facts(command))
    except ValueError as error:
        return Verdict(doctor.REFUSED, str(error)), command
    return Verdict(verdict.outcome, " | ".join(map(str, verdict.problems))), command


def read_with_sglang(parser, arguments):
    """`server_command.read_with_sglang` with a parser that is made once. ValueError: sglang does not take the words."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            return vars(parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(arguments)))
        except SystemExit:
            raise ValueError(said.getvalue()) from None
        except (AssertionError, AttributeError) as error:
            raise ValueError(str(error)) from error


def by_server(words):
    """The verdict of sglang's resolution and of its last checks, with whatever plugin is registered."""
    from sglang.srt.server_args import prepare_server_args

    try:
        line = read_launch_line(words, {})
    except ValueError as error:
        return Verdict(UNREADABLE, str(error))
    kept, level = dict(os.environ), logging.root.manager.disable
    said = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        os.environ.update(line.environment)
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                # A GPU is pretended, and sglang would not find it.
                server_args = prepare_server_args([*line.arguments, "--device", "cuda"])
            except (SystemExit, Exception) as error:
                return Verdict(UNREADABLE, said.getvalue() or str(error))
            try:
                server_args.resolve_once()
                server_args.check_server_args()
            except (SystemExit, Exception) as error:
                # What this machine lacks is no fault of the command's.
                machine = isinstance(error, RuntimeError) and _INFINIBAND in str(error)
                return Verdict(doctor.STARTS if machine else doctor.REFUSED, f"{type(error).__name__}: {error}")
        return Verdict(doctor.STARTS)
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(kept)


def disagreement(own, theirs, server):
    """In words, how three verdicts and two readings contradict each other; empty when they do not.

    Args:
        own, theirs: of `by_doctor` without and with sglang's parser.
        server: of `by_server`.
    """
    (own_verdict, own_command), (their_verdict, their_command) = own, theirs
    if own_command != their_command:
        return f"the two readers differ:\n  {own_command}\n  {their_command}"
    if own_verdict.outcome != their_verdict.outcome:
        return f"doctor says {own_verdict}, and {their_verdict} with sglang's parser"
    outcome = own_verdict.outcome
    if (outcome == UNREADABLE) != (server.outcome == UNREADABLE):
        return f"doctor says {own_verdict}, the server {server}"
    if outcome in (doctor.STARTS, doctor.REFUSED) and outcome != server.outcome:
        return f"doctor says {own_verdict}, the server {server}"
    if outcome in (doctor.UNDECIDED, doctor.LEFT_TO_SGLANG) and "nsa-dcp cannot serve" in server.why:
        return f"doctor has no objection, the server {server}"
    return ""
