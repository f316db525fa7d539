"""nsa-dcp's part in the resolution of sglang's arguments: refuse what cannot be served, choose what was left open.

Both hooks run in the launcher, before any GPU memory is taken. They use sglang's own resolution hooks and never assign
to the arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from nsa_dcp.choices import WIRE_VARIABLE
from nsa_dcp.planning.dimensions import dims_from_config
from nsa_dcp.planning.index_key_choice import INDEX_KEYS_VARIABLE
from nsa_dcp.planning.pipelines import PARTITION_VARIABLE
from nsa_dcp.planning.served_format import row_bytes
from nsa_dcp.sglang_plugin.admission.rules.kv_head_rules import OTHER_ATTENTION, find_kv_head_problems
from nsa_dcp.sglang_plugin.admission.rules.weight_rules import projection_format, read_quantization
from nsa_dcp.sglang_plugin.admission.server_settings import PREFILL_VARIABLE, Problem, is_foreign_draft, settle_typed
from nsa_dcp.sglang_plugin.admission.validation import (
    HOPPER,
    SPARSE_BACKEND,
    ModelFacts,
    ServerSettings,
    describe_problems,
    find_problems,
    find_typed_problems,
    is_served_here,
)

logger = logging.getLogger(__name__)

# The first step whose hook knows the checkpoint, and one of the last, where everything is resolved.
FIRST_STEP, LAST_STEP = "handle_decode_context_parallelism", "handle_other_validations"


def check_requested_settings(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse a command as typed, all its problems at once, and give unset sparse backends the one that works.

    Runs around sglang's `handle_decode_context_parallelism`, and in its place for CP-DCP, which it refuses.

    Args:
        server_args: sglang's ServerArgs, half resolved.
        previous: sglang's own step.

    Raises:
        ValueError: the command cannot be served.
        RuntimeError: this sglang is not the one that nsa-dcp was written against.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    from nsa_dcp.sglang_plugin.compat import check_version

    settings, model, capability = read_command(server_args, typed=True)
    ours = is_served_here(settings, model, capability)
    if ours:
        check_version()
        refuse(find_typed_problems(settings, model, capability), settings.dcp_size)
        unset = {
            field: SPARSE_BACKEND
            for field in ("dsa_prefill_backend", "dsa_decode_backend")
            if getattr(settings, field) is None and capability == HOPPER
        }
        if unset:
            # Before sglang's model overrides, which would fill them with a Blackwell backend.
            declare_resolution(server_args, "nsa_dcp", **unset)
            logger.warning("nsa-dcp: %s resolve to %s.", " and ".join(unset), SPARSE_BACKEND)
        if settings.wire == "peer":
            _leave_query_projections_split(server_args)
    if ours and settings.enable_prefill_cp:
        _resolve_context_parallel_dcp(server_args)
    else:
        previous(server_args)


def _leave_query_projections_split(server_args: Any) -> None:
    """Over a wire our backend gathers queries: sglang would hold copies of their projection that nothing reads."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    # sglang's model override would turn it on.
    declare_resolution(server_args, "nsa_dcp", dcp_replicate_q_proj=False)


def _resolve_context_parallel_dcp(server_args: Any) -> None:
    """Do what is left of sglang's step once `check_command` has passed: choose how the ranks' results are exchanged."""
    from sglang.srt.arg_groups.overrides import (
        _dcp_comm_backend_default,
        declare_resolution,
        run_post_process_pass,
    )

    run_post_process_pass(server_args, _dcp_comm_backend_default)
    # sglang's model override would turn it on; here every rank has the whole query projection.
    declare_resolution(server_args, "nsa_dcp", dcp_replicate_q_proj=False)


def check_resolved_settings(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what resolution made of a command, and say which cache dtype `auto` became.

    Runs around sglang's `handle_other_validations`. Args and errors: as `check_requested_settings`.
    """
    previous(server_args)
    settings, model, capability = read_command(server_args)
    refuse(find_kv_head_problems(settings, model, capability), settings.dcp_size)
    if not is_served_here(settings, model, capability):
        return
    check_command(settings, model, capability)
    _check_served_dims(server_args)
    if server_args.kv_cache_dtype == "auto":
        logger.warning(
            "nsa-dcp: --kv-cache-dtype auto became %s (%s bytes a token and layer); fp8_e4m3 takes %d.",
            settings.kv_cache_dtype,
            f"{row_bytes('bfloat16'):,}",
            row_bytes("fp8_e4m3"),
        )


def _check_served_dims(server_args: Any) -> None:
    """Read what the start-up line will read: a field that cannot be read is said before the weights are loaded."""
    from sglang.srt.arg_groups.overrides import model_config_of

    dims_from_config(model_config_of(server_args).hf_config.to_dict(), name="served", source=server_args.model_path)


def check_command(settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None) -> None:
    """Raise everything that is wrong with a command that concerns nsa-dcp.

    Raises:
        ValueError: the command cannot be served.
        RuntimeError: this sglang is not the one that nsa-dcp was written against.
    """
    from nsa_dcp.sglang_plugin.compat import check_version

    check_version()
    refuse(find_problems(settings, model, capability), settings.dcp_size)


def refuse(problems: list[Problem], dcp_size: int) -> None:
    """Raise ValueError, all problems in it, if there are any."""
    if problems:
        raise ValueError(describe_problems(problems, dcp_size))


def read_command(server_args: Any, *, typed: bool = False) -> tuple[ServerSettings, ModelFacts, tuple[int, int] | None]:
    """Read what `find_problems` needs from sglang's arguments, as far as they are resolved, and from the GPU.

    Args:
        server_args: sglang's ServerArgs.
        typed: nothing is resolved yet: fields whose typed value does not matter count as what sglang makes of them, and
            sglang has yet to divide the prefill chunk by the attention-DP shards.

    Returns:
        The settings, the checkpoint's facts, and the GPU's compute capability (None without a GPU).
        Without DCP neither the checkpoint nor the GPU is looked at.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    view = resolving_view(server_args)
    prefill_backend, decode_backend = attention_backends_of(view)
    same_name = [field.name for field in fields(ServerSettings) if field.name not in ServerSettings.DERIVED]
    values = {name: getattr(view, name) for name in (*same_name, "enable_dp_attention")}
    values = settle_typed(values) if typed else values
    settings = ServerSettings(
        prefill_attention_backend=prefill_backend,
        decode_attention_backend=decode_backend,
        prefill_cuda_graph=_cuda_graph_backend(view, "prefill"),
        decode_cuda_graph=_cuda_graph_backend(view, "decode"),
        foreign_draft=is_foreign_draft(view.speculative_draft_model_path, view.model_path),
        pp_layer_partition=os.environ.get(PARTITION_VARIABLE),
        prefill_way=os.environ.get(PREFILL_VARIABLE),
        wire=os.environ.get(WIRE_VARIABLE),
        index_keys=os.environ.get(INDEX_KEYS_VARIABLE),
        chunk_is_divided=not typed,
        **{name: values[name] for name in same_name},
    )
    if settings.dcp_size <= 1:
        return settings, ModelFacts(is_dsa=False), None
    return settings, _read_model_facts(server_args, view.model_path), _gpu_capability()


def _read_model_facts(server_args: Any, model_path: str) -> ModelFacts:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import (
        AttentionArch,
        dsa_layer_skips_topk,
        get_dsa_index_kpool,
        is_deepseek_dsa,
    )
    from sglang.srt.connector import ConnectorType
    from sglang.srt.utils.common import parse_connector_type

    if parse_connector_type(model_path) == ConnectorType.INSTANCE:
        # The checkpoint lies in another server's memory; the scheduler looks again once it has the model.
        return ModelFacts(is_dsa=False)
    model_config = model_config_of(server_args)
    hf_config = model_config.hf_config
    architecture = (hf_config.architectures or ("",))[0]
    if not is_deepseek_dsa(hf_config):
        if model_config.attention_arch != AttentionArch.MHA or architecture in OTHER_ATTENTION:
            return ModelFacts(is_dsa=False, architecture=architecture)
        return ModelFacts(
            is_dsa=False,
            has_kv_heads=True,
            architecture=architecture,
            num_attention_heads=model_config.num_attention_heads or 0,
            num_key_value_heads=model_config.get_total_num_kv_heads(),
        )
    return ModelFacts(
        is_dsa=True,
        architecture=architecture,
        num_attention_heads=model_config.num_attention_heads,
        kv_lora_rank=model_config.kv_lora_rank,
        qk_rope_head_dim=model_config.qk_rope_head_dim,
        index_topk=hf_config.index_topk,
        index_kpool=get_dsa_index_kpool(hf_config),
        num_hidden_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        context_length=model_config.context_len,
        indexer_layers=tuple(
            layer for layer in range(hf_config.num_hidden_layers) if not dsa_layer_skips_topk(hf_config, layer)
        ),
        projection_format=projection_format(
            read_quantization(hf_config.to_dict(), Path(model_path)), hf_config.num_hidden_layers
        ),
    )


def _gpu_capability() -> tuple[int, int] | None:
    import torch

    if torch.version.hip is not None:
        return None  # an AMD GPU's numbers mean other GPUs: gfx90a would count as Hopper
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _cuda_graph_backend(view: Any, phase: str) -> str | None:
    """Return the graph backend that was asked for in a phase, or what resolution made of it."""
    config, asked = view.cuda_graph_config, getattr(view, f"cuda_graph_backend_{phase}")
    if config is None:
        return asked
    if isinstance(config, dict):
        return config.get(phase, {}).get("backend", asked)
    return getattr(config, phase).backend


HOOKS = ((FIRST_STEP, check_requested_settings), (LAST_STEP, check_resolved_settings))


def missing_hooks() -> list[tuple[str, Callable[[Any, Callable[[Any], None]], None]]]:
    """The hooks that sglang does not hold, each with its step."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return [(step, hook) for step, hook in HOOKS if hook not in _HOOKS.get(step, ())]
