"""`nsa-dcp plan` and `nsa-dcp model`: how many tokens a node holds, and what a decode step is predicted to take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa_dcp.choices import COMM_BACKENDS, WIRES
from nsa_dcp.command_line import check_output_file, dtype_argument, dtype_metavar
from nsa_dcp.planning import capacity
from nsa_dcp.planning.card_table import USUAL_REQUESTS, cards_as_dict, format_cards, most_beside, plan_cards
from nsa_dcp.planning.checkpoints import USUAL_FRACTION
from nsa_dcp.planning.dimensions import PRESETS, ModelDims, preset_dims, read_config
from nsa_dcp.planning.index_key_choice import (
    SHARDED_NOTE,
    add_index_keys_argument,
    add_index_shards_argument,
    compare,
    describe_other,
    plan_other,
    read_index_keys,
    shards_of,
)
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS
from nsa_dcp.planning.kv_heads.plan_cli import answer_for_kv_heads, kv_head_model
from nsa_dcp.planning.pipelines import PARTITION_VARIABLE
from nsa_dcp.planning.served_format import ARCHITECTURES, KV_CACHE_DTYPES, MOST_SMS, PAGE_SIZE, SLICED_ARCHITECTURES
from nsa_dcp.planning.steps import step_model

_PLAN_HELP = "tokens held at each dcp size"
_MODEL_HELP = "predicted decode step of TP, TP-DCP and CP-DCP"
_PLAN_DTYPES = (*KV_CACHE_DTYPES, "both")
# Of what a table of cards does not follow; the parser's own defaults.
_PLAN_DEFAULTS = {"attn_dp_size": 1, "pp_size": 1, "sm_count": MOST_SMS, "draft_layers": 0}
_UNSLICED = tuple(name for name in ARCHITECTURES if name not in SLICED_ARCHITECTURES)


def add_plan_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add `plan` to the `nsa-dcp` parser; `args.run(args)` returns the exit status."""
    parser = subparsers.add_parser("plan", help=_PLAN_HELP, description=capacity.__doc__.split("\n\n")[0])
    _add_model_arguments(parser, KV_HEAD_PRESETS)
    parser.add_argument(
        "--gpu-memory-gib",
        type=float,
        metavar="X",
        help="memory of one GPU; the pools get X * mem-fraction-static - weights-gib, so X alone is what they get. "
        "Without it the answer is a table of the usual cards",
    )
    parser.add_argument(
        "--mem-fraction-static", type=float, help=f"sglang's flag; default 1, of the usual cards {USUAL_FRACTION}"
    )
    parser.add_argument(
        "--weights-gib",
        type=float,
        help="static memory of one GPU beside the pools; default 0, of the usual cards as counted for a preset",
    )
    parser.add_argument(
        "--kv-cache-dtype", type=dtype_argument(_PLAN_DTYPES), metavar=dtype_metavar(_PLAN_DTYPES), default="both"
    )
    parser.add_argument("--dcp-size", type=int, action="append", help="only this dcp size; may be repeated")
    parser.add_argument("--tp-size", type=int, default=8)
    parser.add_argument("--attn-dp-size", type=int, help="attention data-parallel shards inside tp-size")
    parser.add_argument("--pp-size", type=int, help="pipeline stages of tp-size GPUs each; default 1")
    parser.add_argument(
        "--pp-layer-partition", metavar="N,N", help=f"layers of each stage, as in {PARTITION_VARIABLE}; default: even"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, help="default 8; where a pipeline spans nodes, the GPUs of all of them"
    )
    add_index_keys_argument(
        parser, "every token's on every rank, as served by default, or with the tokens; the other is shown too"
    )
    add_index_shards_argument(parser)
    parser.add_argument("--draft-layers", type=int, help="MTP layers kept in the pool; default 0")
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--context", type=int, help="tokens of the CP-DCP gather buffer; default: the largest context")
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument(
        "--max-running-requests", type=int, help="requests at once, for the memory beside the pools; default: sglang's"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens", type=int, metavar="N", help="default 4 with --draft-layers, 0 without"
    )
    parser.add_argument("--sm-count", type=int, help="132 on H100 and H200, 78 on H20")
    _add_output_arguments(parser)
    parser.set_defaults(run=run_plan, **_PLAN_DEFAULTS)
    return parser


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan; 0, or 2 with one sentence on stderr when an argument or config is wrong."""
    try:
        check_output_file("--plot", args.plot)
        if args.page_size != PAGE_SIZE:
            raise NotImplementedError(
                f"page_size must be {PAGE_SIZE}, the pages of the index-key cache and of FlashMLA, got {args.page_size}"
            )
        kv_heads = kv_head_model(args.preset, args.config)
        if kv_heads is not None:
            print(answer_for_kv_heads(args, kv_heads))
            return 0
        model = _model(args)
        if args.context is not None and args.context > model.max_context:
            raise ValueError(
                f"context must be at most {model.max_context}, the longest of {model.name}, got {args.context}"
            )
        dtypes = KV_CACHE_DTYPES if args.kv_cache_dtype == "both" else (args.kv_cache_dtype,)
        args.index_keys = read_index_keys(args.index_keys, args.index_shards, args.dcp_size or [args.tp_size])
        if args.gpu_memory_gib is None:
            text = _answer_for_cards(args, model)
        else:
            result = _plan_one_card(args, model, dtypes, args.index_keys)
            other = plan_other(lambda index_keys: _plan_one_card(args, model, dtypes, index_keys), args.index_keys)
            compared = compare(result, other, args.index_keys)
            if args.plot:
                from nsa_dcp.planning.plots.capacity_plot import plot_capacity

                plot_capacity(result, args.plot)
            text = format_plan(result, compared)
            if args.json:
                text = json.dumps(result.as_dict() | {"index_keys": args.index_keys, "other": compared}, indent=2)
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        return _refuse("plan", error)
    print(text)
    return 0


def _plan_one_card(
    args: argparse.Namespace, model: ModelDims, dtypes: tuple[str, ...], index_keys: str
) -> capacity.Plan:
    return capacity.plan(
        model,
        gpu_memory_gib=args.gpu_memory_gib,
        kv_cache_dtypes=dtypes,
        mem_fraction_static=1.0 if args.mem_fraction_static is None else args.mem_fraction_static,
        weights_gib=args.weights_gib or 0.0,
        tp_size=args.tp_size,
        attn_dp_size=args.attn_dp_size,
        pp_size=args.pp_size,
        pp_layer_partition=args.pp_layer_partition,
        gpus_per_node=_gpus_per_node(args),
        dcp_sizes=args.dcp_size,
        index_shards=shards_of(index_keys, max(1, args.tp_size)),
        draft_layers=args.draft_layers,
        page_size=args.page_size,
        context=args.context,
        chunked_prefill_size=args.chunked_prefill_size,
        sm_count=args.sm_count,
        max_running_requests=args.max_running_requests,
        draft_tokens=args.speculative_num_draft_tokens,
    )


def _answer_for_cards(args: argparse.Namespace, model: ModelDims) -> str:
    """The usual cards, a row each, as text or JSON. ValueError: an option that only one GPU's plan can follow."""
    asked = [name for name, default in _PLAN_DEFAULTS.items() if getattr(args, name) != default]
    unset = ("plot", "pp_layer_partition", "gpus_per_node", "speculative_num_draft_tokens")
    asked += [name for name in unset if getattr(args, name) is not None]
    if asked:
        raise ValueError(
            f"gpu_memory_gib must be given with {asked[0]}, which the table of usual cards does not follow"
        )
    dtype = "fp8_e4m3" if args.kv_cache_dtype == "both" else args.kv_cache_dtype
    requests = USUAL_REQUESTS if args.max_running_requests is None else args.max_running_requests
    rows = plan_cards(
        model,
        kv_cache_dtype=dtype,
        mem_fraction_static=args.mem_fraction_static,
        given_weights_gib=args.weights_gib,
        dcp_sizes=args.dcp_size,
        max_running_requests=requests,
        tp_size=args.tp_size,
        context=args.context,
        chunked_prefill_size=args.chunked_prefill_size,
        index_keys=args.index_keys,
    )
    if args.json:
        return json.dumps(cards_as_dict(model, rows), indent=2)
    return format_cards(model, rows, kv_cache_dtype=dtype, tp_size=args.tp_size, max_running_requests=requests)


def format_plan(result: capacity.Plan, compared: Sequence[dict[str, object]] = ()) -> str:
    """The plan as text: what was understood, the capacity table, the other choice's (`compare`), the buffer table."""
    model = result.model
    lines = [
        f"{model.name}: {model.num_hidden_layers} layers, {len(model.indexer_layers)} with an indexer, "
        f"{model.num_attention_heads} heads  ({model.source})",
        f"pools of {result.budget_bytes / capacity.GIB:.2f} GiB per GPU, tp {result.tp_size}, "
        f"attention dp {result.attn_dp_size}, page {result.page_size}, draft layers {result.draft_layers}",
        *_describe_stages(result),
        "",
        "                    bytes per token per GPU                  tokens            multiple    largest",
        "KV dtype  dcp  index   latent    index   draft    total     per GPU     per node  over dcp 1  context",
    ]
    for row in result.rows:
        cost = row.bytes_per_token
        lines.append(
            f"{row.kv_cache_dtype:<9} {row.dcp_size:>3}  {_index_layout(row):>5} {cost.latent:>8,.0f} "
            f"{cost.index_keys:>8,.0f} {cost.draft:>7,.0f} {cost.total:>8,.0f} "
            f"{row.tokens_per_gpu:>11,} {row.tokens_per_node:>12,} "
            f"{row.multiple_over_dcp1:>10.2f}x {row.largest_context:>9,}"
        )
    lines += describe_other(compared)
    lines += [
        "",
        "temporary buffers per GPU, MiB (beside the pools; leave room for them)",
        "prefill takes by queries gathered q and exchange, by rows row exchange and page gather, in CP-DCP page gather",
        "KV dtype  dcp  gathered q  attention scratch  exchange  row exchange  page gather  dequantised  padding page",
    ]
    mib = 1 << 20
    for row in result.rows:
        buffers = row.temporary_buffers
        lines.append(
            f"{row.kv_cache_dtype:<9} {row.dcp_size:>3} {buffers.gathered_q / mib:>11,.0f} "
            f"{buffers.attention_scratch / mib:>18,.0f} {buffers.exchange / mib:>9,.0f} "
            f"{buffers.row_exchange / mib:>13,.0f} {buffers.page_gather / mib:>12,.0f} "
            f"{buffers.dequantised / mib:>12,.0f} {row.reserved_bytes / mib:>13,.1f}"
        )
    lines += _describe_held(result)
    notes = [f"dcp {row.dcp_size}: refused, {row.refusal}" for row in result.rows if row.refusal]
    notes += [f"dcp {row.dcp_size}: the pool ends at {row.cap}" for row in result.rows if row.cap]
    notes += _describe_shortage(result)
    if any(row.index_shards > 1 for row in result.rows):
        notes.append(SHARDED_NOTE)
    if result.draft_layers == 0 and model.draft_layers_in_checkpoint and len(result.layers_of_stages) == 1:
        notes.append(
            f"the checkpoint has {model.draft_layers_in_checkpoint} draft layer(s): with speculative decoding add "
            f"--draft-layers {model.draft_layers_in_checkpoint}"
        )
    return "\n".join(lines + ([""] + notes if notes else []))


def _describe_held(result: capacity.Plan) -> list[str]:
    """What is held beside the pools: one line a row, in MiB."""
    columns: tuple[str, ...]
    columns = ("request table", "graph tables", "speculation", "eager decode", "joined q", "selections", "index keys")
    columns += ("draft prefill", "at most")
    heading = "KV dtype  dcp  requests" + "".join(f"  {name}" for name in columns)
    lines = ["", "held beside those, MiB per GPU (--max-running-requests sets most of it)", heading]
    for row in result.rows:
        sizes = [*row.held.as_bytes().values(), row.held.total]
        cells = "".join(f"  {size / (1 << 20):>{len(name)},.0f}" for name, size in zip(columns, sizes, strict=True))
        lines.append(f"{row.kv_cache_dtype:<9} {row.dcp_size:>3}  {row.requests:>8,}{cells}")
    return lines


def _describe_shortage(result: capacity.Plan) -> list[str]:
    """A note for each row whose server would need more beside its pools than is left of a GPU."""
    if not result.left_bytes:
        return []
    notes = []
    for row in result.rows:
        needed = most_beside(row)
        if needed > result.left_bytes:
            notes.append(
                f"{row.kv_cache_dtype} dcp {row.dcp_size}: {needed / capacity.GIB:.1f} GiB beside pools and weights at "
                f"the most, {result.left_bytes / capacity.GIB:.1f} are left: lower --max-running-requests (512, the "
                "largest graph's, needs no eager decode) or --mem-fraction-static"
            )
    return notes


def _gpus_per_node(args: argparse.Namespace) -> int:
    if args.gpus_per_node is not None:
        return args.gpus_per_node
    return 8 if args.pp_size == 1 else max(8, args.tp_size * args.pp_size)


def _describe_stages(result: capacity.Plan) -> list[str]:
    if len(result.layers_of_stages) == 1:
        return []
    counts = " + ".join(map(str, result.layers_of_stages))
    return [f"a pipeline of {counts} layers: bytes of the stage that costs most, tokens of a whole pipeline"]


def add_model_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add `model` to the `nsa-dcp` parser; `args.run(args)` returns the exit status."""
    parser = subparsers.add_parser("model", help=_MODEL_HELP, description=step_model.__doc__.split("\n\n")[0])
    _add_model_arguments(parser)
    parser.add_argument("--tp-size", type=int, default=8)
    parser.add_argument("--dcp-size", type=int, default=8)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="requests of a decode step"
    )
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768, 131072], help="tokens of each request")
    parser.add_argument("--dcp-comm-backend", choices=COMM_BACKENDS, default="a2a")
    parser.add_argument("--wire", choices=WIRES, default="nccl", help="what NSA_DCP_WIRE says on the server")
    parser.add_argument(
        "--dcp-replicate-q-proj", action=argparse.BooleanOptionalAction, help="default: on with a2a, as in sglang"
    )
    parser.add_argument(
        "--cp-decode-attn-tp",
        action=argparse.BooleanOptionalAction,
        help="slice heads in CP-DCP decode; default, where sglang does: GLM",
    )
    parser.add_argument(
        "--row-split-selection",
        action=argparse.BooleanOptionalAction,
        help="each rank scores and selects for 1/dcp of the rows; default, as the plugin: from 64 rows of a "
        "captured step on",
    )
    add_index_keys_argument(parser, "every token's on every rank, as served by default, or with the tokens")
    parser.add_argument(
        "--kv-cache-dtype",
        type=dtype_argument(KV_CACHE_DTYPES),
        metavar=dtype_metavar(KV_CACHE_DTYPES),
        default="fp8_e4m3",
        help="for what fits",
    )
    parser.add_argument(
        "--gpu-memory-gib", type=float, help="pool memory of one GPU: limits each mode's batch to what fits"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override an input; may be repeated"
    )
    parser.add_argument("--tables", type=Path, metavar="FILE", help="JSON file with measured tables that replace ours")
    parser.add_argument(
        "--show-inputs", action="store_true", help="print every input, its value and where it was measured"
    )
    _add_output_arguments(parser)
    parser.set_defaults(run=run_model)
    return parser


def run_model(args: argparse.Namespace) -> int:
    """Print predicted steps; 0, or 2 with one sentence on stderr when an argument or config is wrong."""
    try:
        check_output_file("--plot", args.plot)
        model = _model(args)
        inputs = step_model.override_inputs(step_model.measured_inputs(model), args.set, args.tables)
        unsliced = model.architecture in _UNSLICED
        setup = step_model.DecodeSetup(
            tp_size=args.tp_size,
            dcp_size=args.dcp_size,
            comm_backend=args.dcp_comm_backend,
            replicate_q_proj=args.dcp_replicate_q_proj,
            cp_decode_attn_tp=not unsliced if args.cp_decode_attn_tp is None else args.cp_decode_attn_tp,
            row_split_selection=args.row_split_selection,
            index_keys=args.index_keys,
            wire=args.wire,
        )
        if args.index_keys == "sharded" and args.row_split_selection:
            raise ValueError("row_split_selection must be off with sharded index keys, which every rank scores, got on")
        report = step_model.predict_report(
            model, setup, inputs, args.batch, args.context, args.gpu_memory_gib, args.kv_cache_dtype
        )
        if args.plot:
            from nsa_dcp.planning.plots.capacity_plot import plot_crossover

            plot_crossover(report, args.plot)
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        return _refuse("model", error)
    report["notes"] = []
    if "cp_dcp" in report["modes"] and setup.cp_decode_attn_tp and unsliced:
        report["notes"].append(
            f"CP-DCP here is a what-if: sglang does not slice {model.architecture}'s attention weights in decode; what "
            "is served is --no-cp-decode-attn-tp"
        )
    if args.index_keys == "sharded":
        report["notes"].append(SHARDED_NOTE)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join([step_model.format_report(report, show_inputs=args.show_inputs), *report["notes"]]))
    return 0


def _add_model_arguments(parser: argparse.ArgumentParser, more_presets: Sequence[str] | None = None) -> None:
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--config", metavar="FILE", help="a checkpoint's config.json, or its directory")
    names = PRESETS if more_presets is None else (*PRESETS, *more_presets)
    chosen.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(names)}")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write a plot: .png or .svg")


def _model(args: argparse.Namespace) -> ModelDims:
    return preset_dims(args.preset) if args.preset is not None else read_config(args.config)


def _index_layout(row: capacity.PlanRow) -> str:
    if row.dcp_size == 1:
        return "-"
    return "full" if row.index_shards == 1 else f"1/{row.index_shards}"


def _refuse(command: str, error: Exception) -> int:
    print(f"nsa-dcp {command}: {error}", file=sys.stderr)
    return 2
