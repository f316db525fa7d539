"""How many tokens one prefill forward may have: what kernels reach with 32 bits, and what sglang itself asks of chunks.

A chunk is judged by the rows that a forward has, after sglang has divided the flag by the attention-DP shards. Without
chunks that is the longest prompt.
"""

from __future__ import annotations

from nsa_dcp.planning.limits import Limit, Sizes, largest_chunk
from nsa_dcp.planning.served_format import PAGE_SIZE
from nsa_dcp.sglang_plugin.admission.advice import advise, use
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings

_USUAL_CHUNK = 8_192


def prefill_sizes(settings: ServerSettings, model: ModelFacts) -> Sizes:
    """What a prefill multiplies, but for its rows. The sizes divide: `settings` has been judged.

    Args:
        settings: the server's arguments.
        model: the checkpoint's facts.
    """
    spread = settings.enable_prefill_cp
    shard = settings.tp_size // settings.attn_dp_size
    local_heads = model.num_attention_heads if spread else model.num_attention_heads // shard
    return Sizes(
        local_heads=local_heads,
        attended_heads=local_heads if spread else local_heads * settings.dcp_size,
        dcp_size=settings.dcp_size,
        shards=settings.attn_dp_size,
        spread=spread,
        zigzag=settings.cp_strategy == "zigzag",
        draft=settings.speculative_algorithm is not None,
        hidden_size=model.hidden_size,
        index_topk=model.index_topk,
    )


def find_chunk_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    """Return why a prefill of this command could not be served rightly; empty when it can, or nothing is known.

    Args: as `prefill_sizes`.
    """
    typed, shards = settings.chunked_prefill_size, 1 if settings.chunk_is_divided else settings.attn_dp_size
    if typed is None or not model.num_attention_heads:
        return []
    found = largest_chunk(prefill_sizes(settings, model))
    if found is None:
        return []
    most, limit = found
    chunk = typed // shards
    if chunk <= 0:
        return _problems_without_chunks(settings, model, most, limit)
    asked = f"--chunked-prefill-size {typed}" + (f", {chunk} for each of {shards} shards" if shards > 1 else "")
    # What sglang divides again, where this is already the divided size.
    factor = settings.attn_dp_size
    unit = PAGE_SIZE * factor
    usual = f"--chunked-prefill-size {min(_USUAL_CHUNK, most // PAGE_SIZE * PAGE_SIZE) * factor}"
    instead = advise(
        use(usual, said=f"use {usual}, or another multiple of {unit} of at most {most // PAGE_SIZE * unit}")
    )
    if chunk > most:
        return [Problem(asked, _describe(most, limit), instead)]
    if chunk % PAGE_SIZE:
        return [Problem(asked, f"sglang wants a chunk of whole pages of {PAGE_SIZE} tokens", instead)]
    return []


def _problems_without_chunks(settings: ServerSettings, model: ModelFacts, most: int, limit: Limit) -> list[Problem]:
    asked = f"--chunked-prefill-size {settings.chunked_prefill_size}"
    context = settings.context_length or model.context_length
    together = settings.max_prefill_tokens
    if context and max(context, together) <= most:
        return []
    longest = f"of up to {context:,} tokens" if context else "of any length"
    narrower = [f"--context-length {most}"] if context > most or not context else []
    narrower += [f"--max-prefill-tokens {most}"] if together > most else []
    return [
        Problem(
            asked,
            f"a prompt {longest} would be one chunk, and {_describe(most, limit)}",
            advise(
                use(f"--chunked-prefill-size {_USUAL_CHUNK * settings.attn_dp_size}"),
                use(*narrower, said=" with ".join(narrower)),
            ),
        )
    ]


def _describe(most: int, limit: Limit) -> str:
    return f"of more than {most:,} tokens at once the offsets of the {limit.name} exceed 32 bits"
