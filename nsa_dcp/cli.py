"""The `nsa-dcp` command."""

import argparse
import os
import sys

from nsa_dcp import __version__
from nsa_dcp.capacity_cli import add_model_parser, add_plan_parser
from nsa_dcp.hf.generate import add_generate_parser
from nsa_dcp.sglang_plugin.doctor import add_doctor_parser


def build_parser() -> argparse.ArgumentParser:
    """Declare every subcommand. Each sets `run`, a function from parsed arguments to an exit status."""
    parser = argparse.ArgumentParser(prog="nsa-dcp", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate_parser(subparsers)
    add_plan_parser(subparsers)
    add_model_parser(subparsers)
    add_doctor_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. A refusal is one sentence on standard error and exit status 2."""
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has seen enough, as in `nsa-dcp plan ... | head`. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(f"nsa-dcp: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
