"""`nsa-dcp generate`: greedy generation under DCP from one command, checked against the unmodified model if asked."""

import argparse
import importlib
from pathlib import Path

from nsa_dcp.choices import COMM_BACKENDS, CP_STRATEGIES, INDEX_KEYS, KV_CACHE_DTYPES, MODES, PREFILL_WAYS, SELECTIONS
from nsa_dcp.command_line import dtype_argument, dtype_metavar
from nsa_dcp.hf.tiny import KV_HEAD_NAMES, NAMES

_DTYPES = ("auto", "float64", "float32", "bfloat16")


def add_generate_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("generate", help="generate with a transformers model under DCP", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help=f"checkpoint directory, or one of {', '.join((*NAMES, *KV_HEAD_NAMES))}")
    add("--prompts", required=True, type=Path, help="JSON list; each prompt a string or a list of token ids")
    add("--max-new-tokens", type=int, default=16)
    add("--tp-size", type=int, help="ranks; default: dcp-size")
    add("--dcp-size", type=int, default=1, help="ranks that share each request's latents")
    add("--mode", choices=MODES, default="tp", help="tp: head-sharded; cp: prompts token-sharded")
    add("--cp-strategy", choices=CP_STRATEGIES, default="interleave")
    add(
        "--kv-cache-dtype",
        type=dtype_argument(KV_CACHE_DTYPES),
        metavar=dtype_metavar(KV_CACHE_DTYPES),
        default="fp8_e4m3",
    )
    add("--chunked-prefill-size", type=int, default=8192, help="new prompt tokens in one step")
    add("--max-total-tokens", type=int, help="tokens that the pool holds; default: all prompts at once")
    add("--dcp-comm-backend", choices=COMM_BACKENDS, default="a2a")
    add("--index-selection", choices=SELECTIONS, default="row_split", help="who scores which query rows")
    add(
        "--prefill",
        choices=PREFILL_WAYS,
        default="auto",
        help="of head-sharded prompts: queries, heads gathered for every row; rows, pages gathered for the rows that a "
        "rank owns; auto: whichever moves fewer bytes",
    )
    add(
        "--index-keys",
        choices=INDEX_KEYS,
        default="replicated",
        help="every token's on every rank, or each rank's own tokens' alone: dcp-size times the tokens",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--dtype",
        type=dtype_argument(_DTYPES),
        metavar=dtype_metavar(_DTYPES),
        default="auto",
        help="of weights and activations; attention on cuda is bfloat16 in any case. auto: bfloat16 on cuda; on cpu "
        "float32, and float64 with a rounding cache, so that a byte never depends on the order of a sum",
    )
    add("--disable-cuda-graph", action="store_true", help="run decode steps eagerly on cuda")
    add("--seed", type=int, default=0, help="of a tiny model's weights")
    add("--ignore-eos", action="store_true", help="do not stop at the checkpoint's end-of-sequence id")
    add("--json", type=Path, help="write the result there; default: standard output")
    add("--check", action="store_true", help="run the unmodified transformers model too; fail unless all tokens agree")
    add("--timeout", type=float, default=600.0, help="seconds a collective may wait for a rank")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"generate needs torch, which cannot be imported here: {error}; `nsa-dcp doctor` looks at this machine and "
            "needs no torch, as do plan and model"
        ) from error
    from nsa_dcp.hf.generate import run_generate

    return run_generate(args)
