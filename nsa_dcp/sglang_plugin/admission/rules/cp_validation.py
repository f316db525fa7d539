"""Which commands with prefill context parallelism and DCP (CP-DCP) can be served, and what to change about the others.

Part of `validation.find_problems`. One topology is served: the ranks of an attention-DP shard are the CP group, and the
DCP group is the same ranks, each with all the attention weights.
"""

from __future__ import annotations

from nsa_dcp.choices import CP_STRATEGIES
from nsa_dcp.planning.served_format import SLICED_ARCHITECTURES
from nsa_dcp.sglang_plugin.admission.advice import Advice, Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, ServerSettings

# sglang stops wider context parallelism: it was found to be inexact between machines.
MAX_CP_TP_SIZE = 8
_INTERLEAVE = use("--cp-strategy interleave")
_SPECULATION = (
    "--speculative-algorithm",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)
Fault = tuple[str, str, Advice | None]


def find_context_parallel_faults(settings: ServerSettings, model: ModelFacts, max_heads: int) -> list[Fault]:
    """Return why a command with context parallelism cannot be served; empty when it can, or when it has none.

    A fault is what was asked, why not, and what would work; None where that is other sizes, which `validation` finds.

    Args:
        settings, model: as in `validation.find_problems`. The attention-DP shard holds the DCP group.
        max_heads: query heads that the attention kernel takes.
    """
    if not settings.enable_prefill_cp and settings.attn_cp_size == 1:
        return []
    if not settings.enable_prefill_cp:
        return [
            (
                f"--attn-cp-size {settings.attn_cp_size} without --enable-prefill-cp",
                "its ranks would all work on every token of a prompt",
                advise(use("--enable-prefill-cp", "--cp-strategy interleave"), drop("--attn-cp-size")),
            )
        ]
    return [
        *_strategy_problems(settings, model),
        *_group_problems(settings, model, max_heads),
        *_slice_problems(settings, model),
        *_backend_problems(settings),
        *_attention_dp_problems(settings),
    ]


def _strategy_problems(settings: ServerSettings, model: ModelFacts) -> list[Fault]:
    if settings.cp_strategy not in CP_STRATEGIES:
        asked = f" --cp-strategy {settings.cp_strategy}" if settings.cp_strategy else " without --cp-strategy"
        return [
            (
                f"--enable-prefill-cp{asked}",
                "how a prompt's tokens are dealt to the ranks must be said",
                advise(_INTERLEAVE),
            )
        ]
    if settings.cp_strategy != "zigzag":
        return []
    problems: list[Fault] = []
    if model.architecture not in SLICED_ARCHITECTURES:
        problems.append(
            (
                f"--cp-strategy zigzag with {model.architecture}",
                "sglang itself refuses this pair",
                advise(_INTERLEAVE),
            )
        )
    if settings.speculative_algorithm is not None:
        problems.append(
            (
                f"--cp-strategy zigzag with --speculative-algorithm {settings.speculative_algorithm}",
                "the draft runs sglang's own DSA backend, which knows no zigzag order",
                advise(_INTERLEAVE, drop(*_SPECULATION)),
            )
        )
    if settings.dsa_topk_backend == "flashinfer":
        problems.append(
            (
                "--cp-strategy zigzag with --dsa-topk-backend flashinfer",
                "its page-table offsets would count a request's two blocks as two requests",
                advise(use("--dsa-topk-backend sgl-kernel"), _INTERLEAVE),
            )
        )
    return problems


def _group_problems(settings: ServerSettings, model: ModelFacts, max_heads: int) -> list[Fault]:
    shard, cp_size = settings.tp_size // settings.attn_dp_size, settings.context_parallel_size
    asked = f"--tp-size {settings.tp_size} --attn-cp-size {cp_size}"
    if settings.tp_size > MAX_CP_TP_SIZE:
        reason = f"sglang itself refuses prefill context parallelism over more than {MAX_CP_TP_SIZE} ranks"
        return [(f"--enable-prefill-cp with --tp-size {settings.tp_size}", reason, None)]
    if shard != cp_size:
        return [
            (
                f"{asked} with --dcp-size {settings.dcp_size}",
                f"attention would also be split over {shard / cp_size:g} tensor-parallel ranks in each CP rank",
                None,
            )
        ]
    if settings.dcp_size != cp_size:
        return [
            (
                f"--dcp-size {settings.dcp_size} with --attn-cp-size {cp_size}",
                "the ranks that share a prompt's tokens must be those that share its cache",
                None,
            )
        ]
    if model.num_attention_heads % cp_size:
        return [
            (
                asked,
                f"{model.num_attention_heads} attention heads do not divide over {cp_size} ranks",
                None,
            )
        ]
    if model.num_attention_heads > max_heads:
        return [
            (
                asked,
                f"each rank attends with all {model.num_attention_heads} heads, and FlashMLA takes at most {max_heads}",
                None,
            )
        ]
    return []


def _slice_problems(settings: ServerSettings, model: ModelFacts) -> list[Fault]:
    if not settings.enable_cp_decode_attn_tp:
        return []
    problems: list[Fault] = []
    if settings.attn_dp_size > 1:
        problems.append(
            (
                f"--enable-cp-decode-attn-tp with --attn-dp-size {settings.attn_dp_size}",
                "sglang sums the slices' results over all of --tp-size, other requests' ranks included",
                advise(drop("--enable-cp-decode-attn-tp"), _whole_shard(settings)),
            )
        )
    if model.architecture not in SLICED_ARCHITECTURES:
        problems.append(
            (
                f"--enable-cp-decode-attn-tp with {model.architecture}",
                f"sglang slices the attention weights of {' and '.join(SLICED_ARCHITECTURES)} alone",
                advise(drop("--enable-cp-decode-attn-tp"), because="every rank then projects all heads"),
            )
        )
    return problems


def _backend_problems(settings: ServerSettings) -> list[Fault]:
    problems: list[Fault] = []
    names = (settings.prefill_attention_backend, settings.decode_attention_backend)
    if None not in names and names[0] != names[1]:
        problems.append(
            (
                f"attention backends {names[0]} for prefill and {names[1]} for decode",
                "they are one backend, and sglang would build it twice",
                advise(
                    Change(
                        ("--attention-backend nsa",),
                        ("--prefill-attention-backend", "--decode-attention-backend"),
                        said="use --attention-backend nsa alone",
                    )
                ),
            )
        )
    if settings.dcp_replicate_q_proj:
        problems.append(
            (
                "--dcp-replicate-q-proj with --enable-prefill-cp",
                "every rank has the whole query projection already, and would gather copies of it",
                advise(drop("--dcp-replicate-q-proj", said="leave it out")),
            )
        )
    return problems


def _attention_dp_problems(settings: ServerSettings) -> list[Fault]:
    """What sglang's ranks agree on, with attention DP, over the attention-TP group alone, which has one rank here."""
    if settings.attn_dp_size == 1:
        return []
    asked = f"--enable-prefill-cp with --attn-dp-size {settings.attn_dp_size}"
    problems: list[Fault] = []
    if settings.grammar_backend != "none":
        # GrammarManager: each rank compiles a grammar for itself, and a request starts when all have.
        problems.append(
            (
                f"{asked} and structured outputs",
                "context-parallel ranks would start such a request at different steps, and wait for each other forever",
                advise(use("--grammar-backend none"), _whole_shard(settings)),
            )
        )
    if settings.speculative_algorithm is not None:
        # eagle_sample: the first rank's acceptance, where drafts are sampled.
        problems.append(
            (
                f"{asked} and --speculative-algorithm {settings.speculative_algorithm}",
                "context-parallel ranks would each decide which sampled drafts they accept",
                advise(drop(*_SPECULATION), _whole_shard(settings)),
            )
        )
    return problems


def _whole_shard(settings: ServerSettings) -> Change:
    """Context parallelism over all ranks, where attention DP had split them."""
    size = settings.tp_size
    return Change(
        (f"--attn-cp-size {size}", f"--dcp-size {size}"),
        ("--attn-dp-size", "--enable-dp-attention", "--dp-size"),
        said=f"use --attn-cp-size {size} --dcp-size {size} and drop --attn-dp-size",
    )
