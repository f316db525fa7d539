"""What sglang 0.5.23 itself refuses among the flags that nsa-dcp reads, of any model and of DSA models with DCP.

Asked where nsa-dcp has no objection: by `nsa-dcp doctor`, so that it does not call a command good that the server's own
checks stop, and by the server itself, whose own checks come later and often without a word. sglang's checks of other
flags are not repeated here: `sglang_flags` says which those are.
"""

from __future__ import annotations

from nsa_dcp.sglang_plugin.admission.advice import Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.server_settings import Problem, ServerSettings

_ALL_TO_ALL = ("a2a", "fi_a2a")
_DRAFTS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
_ATTENTION_DP = ("--attn-dp-size", "--enable-dp-attention", "--dp-size")
# Switches and flags that a size may come from, besides its own flag.
_SPELLINGS = {
    "--attn-dp-size": ("--attn-dp-size", "--enable-dp-attention"),
    "--dp-size": ("--dp-size", "--enable-dp-attention"),
}
_DRAFTS_OF_EAGLE = tuple(f"{flag} {value}" for flag, value in zip(_DRAFTS, (3, 1, 4), strict=True))


def find_size_problems(settings: ServerSettings) -> list[Problem]:
    """Every size below 1, by the name of its flag; None is "not given"."""
    sizes = {
        "--tp-size": settings.tp_size,
        "--dcp-size": settings.dcp_size,
        "--dp-size": settings.dp_size,
        "--pp-size": settings.pp_size,
        "--attn-dp-size": settings.attn_dp_size,
        "--attn-cp-size": settings.attn_cp_size,
        "--page-size": settings.page_size,
        "--speculative-eagle-topk": settings.speculative_eagle_topk,
    }
    return [
        Problem(
            f"{flag} {size}",
            "it must be at least 1",
            advise(drop(*_SPELLINGS.get(flag, (flag,)), said="give a positive size, or leave it out")),
        )
        for flag, size in sizes.items()
        if size is not None and size < 1
    ]


def find_stock_refusals(settings: ServerSettings) -> list[Problem]:
    """Return why sglang itself would stop at these arguments; empty when none of its rules below does."""
    problems = find_size_problems(settings)
    if problems:
        return problems
    if settings.dcp_size == 1 and settings.dcp_comm_backend in _ALL_TO_ALL:
        problems.append(
            Problem(
                f"--dcp-comm-backend {settings.dcp_comm_backend} with --dcp-size 1",
                "it exchanges the results of DCP ranks, and there is one",
                advise(drop("--dcp-comm-backend", said="drop it")),
            )
        )
    if settings.dcp_size == 1 and settings.dcp_replicate_q_proj:
        problems.append(
            Problem(
                "--dcp-replicate-q-proj with --dcp-size 1",
                "there are no DCP ranks to replicate for",
                advise(drop("--dcp-replicate-q-proj", said="drop it")),
            )
        )
    if settings.enable_prefill_cp and settings.cp_strategy is None:
        problems.append(
            Problem(
                "--enable-prefill-cp without --cp-strategy",
                "how a prompt's tokens are dealt to the ranks must be said",
                advise(use("--cp-strategy interleave")),
            )
        )
    if settings.attn_dp_size > 1 and settings.dp_size > 1:
        problems.append(
            Problem(
                f"--dp-size {settings.dp_size} with --attn-dp-size {settings.attn_dp_size}",
                "sglang does not combine replicas with attention data parallelism",
                advise(drop("--dp-size"), drop("--attn-dp-size")),
            )
        )
    if settings.tp_size % (settings.attn_dp_size * settings.attn_cp_size):
        problems.append(
            Problem(
                f"--tp-size {settings.tp_size} --attn-dp-size {settings.attn_dp_size} "
                f"--attn-cp-size {settings.attn_cp_size}",
                "--tp-size must be a multiple of the product of the two others",
                advise(drop(*_ATTENTION_DP, "--attn-cp-size", said="change one of the three")),
            )
        )
    if settings.enable_dsa_cache_layer_split and not (
        settings.disaggregation_mode == "prefill"
        and settings.enable_prefill_cp
        and settings.cp_strategy == "interleave"
        and settings.pp_size == 1
    ):
        problems.append(
            Problem(
                "--enable-dsa-cache-layer-split",
                "sglang splits the cache by layers on PD prefill workers with interleaved context parallelism alone",
                advise(drop("--enable-dsa-cache-layer-split", said="drop it")),
            )
        )
    return problems


def find_dsa_refusals(settings: ServerSettings) -> list[Problem]:
    """Return why sglang would stop at a DSA model with these arguments and DCP, as typed; empty when it would not."""
    return [
        *find_dsa_size_refusals(settings),
        *_backend_refusals(settings),
        *_draft_refusals(settings),
        *_name_refusals(settings),
    ]


def find_dsa_size_refusals(settings: ServerSettings) -> list[Problem]:
    """The part of `find_dsa_refusals` that is about sizes. None is below 1."""
    problems = []
    ranks = settings.tp_size * settings.pp_size
    if settings.nnodes < 1 or ranks % settings.nnodes:
        problems.append(
            Problem(
                f"--nnodes {settings.nnodes}",
                f"{ranks} ranks do not divide over as many nodes",
                advise(drop("--nnodes", "--node-rank")),
            )
        )
    elif settings.dp_size > 1 and settings.nnodes > 1:
        problems.append(
            Problem(
                f"--dp-size {settings.dp_size} with --nnodes {settings.nnodes}",
                "sglang does not spread replicas over nodes",
                advise(drop("--dp-size"), drop("--nnodes", "--node-rank")),
            )
        )
    if settings.moe_dense_tp_size not in (None, 1, settings.tp_size):
        problems.append(
            Problem(
                f"--moe-dense-tp-size {settings.moe_dense_tp_size}",
                "sglang takes 1 or --tp-size",
                advise(use("--moe-dense-tp-size 1")),
            )
        )
    return problems


def _backend_refusals(settings: ServerSettings) -> list[Problem]:
    phases = {"prefill": settings.prefill_attention_backend, "decode": settings.decode_attention_backend}
    given = [phase for phase, backend in phases.items() if backend is not None]
    if len(given) != 1:
        return []
    return [
        Problem(
            f"--{given[0]}-attention-backend {phases[given[0]]} alone",
            "sglang would choose fa3 for the other phase, which does not read a cache that DCP has spread",
            advise(
                Change(("--attention-backend nsa",), (f"--{given[0]}-attention-backend",)),
                drop(f"--{given[0]}-attention-backend", said="leave it out"),
            ),
        )
    ]


def _draft_refusals(settings: ServerSettings) -> list[Problem]:
    """sglang chooses all three numbers of EAGLE's drafts, or none: steps without a width end in a TypeError there."""
    if settings.speculative_algorithm is None:
        return []
    numbers = (settings.speculative_num_steps, settings.speculative_eagle_topk, settings.speculative_num_draft_tokens)
    steps, width, _ = numbers
    if (steps is None and numbers == (None, None, None)) or (steps is not None and width is not None):
        return []
    given = " ".join(f"{flag} {number}" for flag, number in zip(_DRAFTS, numbers, strict=True) if number is not None)
    missing = _DRAFTS[1] if steps is not None else _DRAFTS[0]
    return [
        Problem(
            f"--speculative-algorithm {settings.speculative_algorithm} {given} without {missing}",
            "sglang chooses the numbers of drafts together or not at all",
            advise(use(*_DRAFTS_OF_EAGLE), drop(*_DRAFTS)),
        )
    ]


def _name_refusals(settings: ServerSettings) -> list[Problem]:
    name = settings.served_model_name
    if name is None or ":" not in name or "://" in name:
        return []
    return [
        Problem(
            f"--served-model-name {name}",
            "sglang keeps the colon for names of adapters",
            advise(use(f"--served-model-name {name.replace(':', '-')}")),
        )
    ]
