"""What sglang 0.5.23 itself refuses among the flags that nsa-dcp reads, with DCP or without.

`nsa-dcp doctor` asks where nsa-dcp has no objection, so that it does not call a command good that the server's own
checks stop. sglang's checks of other flags are not repeated here.
"""

from __future__ import annotations

from nsa_dcp.sglang_plugin.admission.server_settings import Problem, ServerSettings

_ALL_TO_ALL = ("a2a", "fi_a2a")


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
        Problem(f"{flag} {size}", "it must be at least 1", "give a positive size, or leave it out")
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
                "drop it, or use a larger --dcp-size",
            )
        )
    if settings.dcp_size == 1 and settings.dcp_replicate_q_proj:
        problems.append(
            Problem(
                "--dcp-replicate-q-proj with --dcp-size 1",
                "there are no DCP ranks to replicate for",
                "drop it, or use a larger --dcp-size",
            )
        )
    if settings.enable_prefill_cp and settings.cp_strategy is None:
        problems.append(
            Problem(
                "--enable-prefill-cp without --cp-strategy",
                "how a prompt's tokens are dealt to the ranks must be said",
                "add --cp-strategy interleave",
            )
        )
    if settings.attn_dp_size > 1 and settings.dp_size > 1:
        problems.append(
            Problem(
                f"--dp-size {settings.dp_size} with --attn-dp-size {settings.attn_dp_size}",
                "sglang does not combine replicas with attention data parallelism",
                "drop one of the two",
            )
        )
    if settings.tp_size % (settings.attn_dp_size * settings.attn_cp_size):
        problems.append(
            Problem(
                f"--tp-size {settings.tp_size} --attn-dp-size {settings.attn_dp_size} "
                f"--attn-cp-size {settings.attn_cp_size}",
                "--tp-size must be a multiple of the product of the two others",
                "change one of the three",
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
                "drop it, or add --disaggregation-mode prefill --enable-prefill-cp --cp-strategy interleave",
            )
        )
    return problems
