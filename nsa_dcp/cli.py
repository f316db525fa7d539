"""Decode context parallelism for DeepSeek Sparse Attention: plan it, predict it, check a server, or try it out."""

import argparse
import os
import pkgutil
import sys
import traceback

from nsa_dcp import __version__

# Imported one by one: planning needs no torch, and doctor must answer where torch is broken.
_COMMANDS = {
    "generate": "nsa_dcp.hf.generate_command:add_generate_parser",
    "plan": "nsa_dcp.planning.capacity_cli:add_plan_parser",
    "model": "nsa_dcp.planning.capacity_cli:add_model_parser",
    "doctor": "nsa_dcp.sglang_plugin.doctor.doctor:add_doctor_parser",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Declare a subcommand, or every one. Each sets `run`, a function from parsed arguments to an exit status.

    Args:
        command: the only one to declare, where it exists.
    """
    parser = argparse.ArgumentParser(prog="nsa-dcp", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [command] if command in _COMMANDS else _COMMANDS:
        pkgutil.resolve_name(_COMMANDS[name])(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. A refusal is one sentence on standard error and exit status 2; so does a fault of ours end.

    Status 1 is left to what a command found: tokens that differ, a machine or a command that is not right.
    """
    words = sys.argv[1:] if argv is None else argv
    args = build_parser(words[0] if words else None).parse_args(words)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has seen enough, as in `nsa-dcp plan ... | head`. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"nsa-dcp {words[0]}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(
            f"nsa-dcp {words[0]}: ended by a fault of nsa-dcp's own, {type(error).__name__}; please report the lines "
            "above",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
