"""Which sizes go together: tensor, context, attention-data and decode-context parallelism, and the model's heads.

Part of `validation.find_problems`. The sizes that a refusal advises are those that pass the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nsa_dcp.sglang_plugin.admission.advice import Advice, Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.rules.cp_validation import Fault, find_context_parallel_faults
from nsa_dcp.sglang_plugin.admission.rules.stock_rules import find_dsa_size_refusals
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings


def find_topology_problems(
    settings: ServerSettings, model: ModelFacts, max_heads: int, is_served: Callable[[ServerSettings], bool]
) -> list[Problem]:
    """Return why these sizes cannot be served; empty when they can. What is advised instead has been judged itself.

    Args:
        settings, model: as in `validation.find_problems`. No size is below 1.
        max_heads: query heads that the attention kernel takes.
        is_served: what the other rules say about sizes that these rules accept.
    """

    def accepts(sizes: Mapping[str, Any]) -> bool:
        changed = dataclasses.replace(settings, **sizes)
        if changed.dcp_size < 2:
            return False
        return not _faults(changed, model, max_heads) and not find_dsa_size_refusals(changed) and is_served(changed)

    faults = _faults(settings, model, max_heads)
    return [Problem(asked, reason, advice or _advise_sizes(settings, accepts)) for asked, reason, advice in faults]


def _faults(settings: ServerSettings, model: ModelFacts, max_heads: int) -> list[Fault]:
    """What was asked, why not, and advice where it is not about sizes."""
    asked = f"--tp-size {settings.tp_size} --dcp-size {settings.dcp_size}"
    if settings.attn_dp_size > 1:
        asked += f" --attn-dp-size {settings.attn_dp_size}"
    if settings.tp_size % settings.attn_dp_size:
        return [(asked, "--tp-size must be a multiple of --attn-dp-size", None)]
    span = shard_size(settings)
    if span % settings.dcp_size:
        straddles = settings.attn_dp_size > 1 and settings.tp_size % settings.dcp_size == 0
        reason = (
            f"a DCP group must lie inside one attention-DP shard ({_ranks(span)} with the same requests), and this one "
            "would span two"
            if straddles
            else f"--dcp-size must divide the {_ranks(span)} with the same requests"
        )
        return [(asked, reason, None)]
    if settings.enable_prefill_cp or settings.attn_cp_size > 1:
        return find_context_parallel_faults(settings, model, max_heads)
    attn_tp_size = span
    if model.num_attention_heads % attn_tp_size:
        reason = f"{model.num_attention_heads} attention heads do not divide over {attn_tp_size} ranks"
        return [(asked, reason, None)]
    gathered = model.num_attention_heads // attn_tp_size * settings.dcp_size
    if gathered > max_heads:
        reason = f"each rank would attend with {gathered} gathered heads, and FlashMLA takes at most {max_heads}"
        return [(asked, reason, None)]
    return []


def _advise_sizes(settings: ServerSettings, accepts: Callable[[Mapping[str, Any]], bool]) -> Advice:
    """The nearest sizes that would be served: other DCP groups, else other tensor parallelism, else none at all."""
    shard = max(settings.tp_size // settings.attn_dp_size, 1)
    context_parallel = settings.enable_prefill_cp
    tries: list[list[tuple[dict[str, int | bool | None], Change]]] = [
        [({"dcp_size": size}, use(f"--dcp-size {size}")) for size in range(2, shard + 1)]
    ]
    if context_parallel:
        sizes: dict[str, int | bool | None] = {"attn_cp_size": shard, "dcp_size": shard}
        tries.append([(sizes, use(f"--attn-cp-size {shard}", f"--dcp-size {shard}"))])
        for tp_size in (8, 4, 2):
            sizes = {"tp_size": tp_size, "attn_cp_size": tp_size, "dcp_size": tp_size, "attn_dp_size": 1, "dp_size": 1}
            words: tuple[str, ...] = (
                f"--tp-size {tp_size}",
                f"--attn-cp-size {tp_size}",
                f"--dcp-size {tp_size}",
            )
            tries.append([(sizes, _without_attention_dp(words, settings))])
        without = {"enable_prefill_cp": False, "attn_cp_size": 1, "cp_strategy": None}
        flags = ("--enable-prefill-cp", "--attn-cp-size", "--cp-strategy")
        tries += [[(without, drop(*flags))]]
        tries += [
            [(without | {"dcp_size": size}, Change((f"--dcp-size {size}",), flags)) for size in range(2, shard + 1)]
        ]
    else:
        tries.append(
            [({"tp_size": size}, use(f"--tp-size {size}")) for size in range(2, 2 * max(settings.tp_size, 8) + 1)]
        )
        for tp_size in (8, 4, 2):
            sizes = {"tp_size": tp_size, "dcp_size": tp_size, "attn_dp_size": 1, "dp_size": 1}
            words = (f"--tp-size {tp_size}", f"--dcp-size {tp_size}")
            tries.append([(sizes, _without_attention_dp(words, settings))])
    for alternatives in tries:
        served = [change for sizes, change in alternatives if accepts(sizes)]
        if served:
            return advise(*served)
    return advise(_without_attention_dp(("--dcp-size 1",), settings))


def shard_size(settings: ServerSettings) -> int:
    """Ranks of one attention-DP shard, which hold the same requests: attn_tp_size * attn_cp_size of them."""
    return settings.tp_size // settings.attn_dp_size


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _without_attention_dp(words: tuple[str, ...], settings: ServerSettings) -> Change:
    if settings.attn_dp_size == 1 and settings.dp_size == 1:
        return use(*words)
    flags = ("--attn-dp-size", "--enable-dp-attention", "--dp-size")
    return Change(words, flags, said=f"use {' '.join(words)} and drop --attn-dp-size")
