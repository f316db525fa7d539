"""What a command's server will hold beside its pools, in one line: judged from the command, before there is a pool."""

from __future__ import annotations

from dataclasses import replace

from nsa_dcp.planning.held_memory import DEFAULT_CAPTURED, default_requests, held_memory, request_table_columns
from nsa_dcp.sglang_plugin.admission.rules.chunk_rules import prefill_sizes
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, ServerSettings

_GIB = 1 << 30
# What sglang chooses on GPUs of 80 GB and more, and for these models' drafts.
_DEFAULT_CHUNK, _DEFAULT_DRAFTS = 8_192, 4


def describe_held_memory(settings: ServerSettings, model: ModelFacts) -> str:
    """Return the line; empty where the model's longest context is not known.

    Args:
        settings: the server's arguments, which are served.
        model: the checkpoint's facts.
    """
    context = settings.context_length or model.context_length
    if not context:
        return ""
    drafts = (settings.speculative_num_draft_tokens or _DEFAULT_DRAFTS) if settings.speculative_algorithm else 0
    asked = settings.max_running_requests
    requests = max(asked // settings.attn_dp_size, 1) if asked else default_requests(0, context, drafts)
    shards = 1 if settings.chunk_is_divided else settings.attn_dp_size
    chunk = (settings.chunked_prefill_size or _DEFAULT_CHUNK) // shards
    captured = 0 if settings.decode_cuda_graph == "disabled" else DEFAULT_CAPTURED
    sizes = replace(
        prefill_sizes(settings, model),
        rows=chunk if chunk > 0 else context,
        requests=requests,
        context=request_table_columns(context, settings.dcp_size, drafts),
    )
    held = held_memory(sizes, longest=context, captured=captured, draft_tokens=drafts)
    prefill = held.joined_queries + held.selections + held.gathered_index_keys + held.draft_prefill
    parts = [f"request table {held.request_table / _GIB:.1f}"]
    parts += [f"tables of speculation {held.speculation / _GIB:.1f}"] if held.speculation else []
    parts += [f"a prefill chunk {prefill / _GIB:.1f}"]
    if held.eager_decode:
        parts.append(f"a step past the largest graph, with one context of that length, {held.eager_decode / _GIB:.1f}")
    chosen = "" if asked else ", sglang's default or more"
    of = f"{requests:,} requests{chosen}, of up to {context:,} tokens"
    return f"beside the pools: GiB a GPU, for {of}: {', '.join(parts)}"
