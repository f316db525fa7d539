"""Before anything is served, the ranks of a server compare what decides a selection or a collective.

Ranks take each other's selections, and wait for each other in collectives. One node's ranks share an environment and a
command; two nodes have one each, and where these differ tokens are wrong without a word, or the server hangs. So each
rank sends what stands in the lists below to the others, once, as text, and a difference ends the server.

A new switch has its place here: an environment variable of ours in `OWN_VARIABLES`, one of sglang's in
`SGLANG_VARIABLES`, a field of its arguments in `ARGUMENTS`, a number that several ranks must decide alike by in
`CONSTANTS`. `tests/sglang/startup/test_agreement_lists.py` fails where the code reads one that is not listed.
What a rank decides for itself alone is not compared: memory fractions, paths, ports, the GPU's name and its SMs, which
only cut a rank's own rows into launches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nsa_dcp
import nsa_dcp_kernels
from nsa_dcp.choices import INDEX_KEYS
from nsa_dcp.planning.index_key_choice import INDEX_KEYS_VARIABLE
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, ServerSettings

# Name, and the value that stands for a variable that is not set.
OWN_VARIABLES: tuple[tuple[str, str], ...] = (
    ("NSA_DCP_TOPK", "exact"),
    ("NSA_DCP_WIRE", "nccl"),
    ("NSA_DCP_PREFILL", "queries"),
    (INDEX_KEYS_VARIABLE, INDEX_KEYS[0]),
)

# What a selection is, how ties fall in it, and which scores it is made from.
_SELECTION_VARIABLES = (
    "SGLANG_DSA_FUSE_TOPK",
    "SGLANG_OPT_USE_TOPK_V2",
    "SGLANG_DSA_TOPK_BROADCAST",
    "SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC",
    "SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
    "SGLANG_DISABLE_DSA_INDEXER_FUSION",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
)
# Which collective is called, over what, and by which algorithm.
_COLLECTIVE_VARIABLES = (
    "SGLANG_USE_AG_AFTER_QLORA",
    "SGLANG_SHARED_EXPERT_TP1",
    "SGLANG_DP_USE_REDUCE_SCATTER",
    "SGLANG_DP_USE_GATHERV",
    "SGLANG_DP_SHARED_EXPERT_LOCAL",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_DEEPEP_V2_FORCE_MAX_LEN",
    "SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    "SGLANG_USE_1STAGE_ALLREDUCE",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2",
    "SGLANG_CUSTOM_ALL_REDUCE_V2_MAX_SIZE_KB",
    "SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PULL_SIZE_KB",
    "SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PUSH_SIZE_KB",
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
    "SGLANG_PCIE_IPC_MAX_NUMEL",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER",
)
SGLANG_VARIABLES = _SELECTION_VARIABLES + _COLLECTIVE_VARIABLES

# Fields of sglang's arguments, as resolved, beside those of `ServerSettings`, all of which are compared.
_BATCH_ARGUMENTS = (
    "max_prefill_tokens",
    "prefill_max_requests",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "enable_prefill_delayer",
    "min_free_slots_delay",
    "enable_mixed_chunk",
    "schedule_policy",
    "schedule_conservativeness",
    "enable_priority_scheduling",
    "disable_priority_preemption",
    "default_priority_value",
    "abort_on_priority_when_disabled",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "retraction_policy",
    "allow_auto_truncate",
    "disable_overlap_schedule",
    "num_continuous_decode_steps",
    "scheduler_recv_interval",
    "disable_radix_cache",
    "disable_chunked_prefix_cache",
    "radix_eviction_policy",
    "sampling_backend",
    "cuda_graph_config",
    "disable_cuda_graph",
    "disable_cuda_graph_padding",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_use_rejection_sampling",
    "speculative_attention_mode",
)
_SELECTION_ARGUMENTS = ("dsa_paged_mqa_logits_backend", "speculative_dsa_topk_backend")
_COLLECTIVE_ARGUMENTS = (
    "nnodes",
    "pp_max_micro_batch_size",
    "moe_dp_size",
    "ep_size",
    "moe_dense_tp_size",
    "moe_a2a_backend",
    "deepep_mode",
    "ep_num_redundant_experts",
    "enable_eplb",
    "shared_experts_tp_size",
    "enable_shared_experts_attn_tp",
    "disable_shared_experts_fusion",
    "enforce_shared_experts_fusion",
    "enable_dense_mlp_attn_tp",
    "enable_dp_lm_head",
    "enable_tp_lm_head_all_to_all",
    "enable_attn_tp_input_scattered",
    "disable_attn_tp_gather",
    "enable_layernorm_sp",
    "enable_kv_cache_sharding",
    "enable_single_batch_overlap",
    "boundary_reduction",
    "disable_custom_all_reduce",
    "enable_mscclpp",
    "enable_symm_mem",
    "enable_torch_symm_mem",
    "enable_nccl_nvls",
    "enable_quant_communications",
    "enable_flashinfer_allreduce_fusion",
    "enforce_disable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_backend",
)
ARGUMENTS = _BATCH_ARGUMENTS + _SELECTION_ARGUMENTS + _COLLECTIVE_ARGUMENTS

# `module:name`, in this package. The sources are compared too; these are for the sentence to name.
CONSTANTS = (
    "selection.row_split_decode:MIN_ROWS",
    "admission.validation:PAGE_SIZE",
)

VERSION = "nsa-dcp"


def check_agreement(model_runner: Any, parallel: Any, settings: ServerSettings, model: ModelFacts) -> None:
    """Compare this rank with all that it shares selections or collectives with; every one of them must call it.

    A rank that fails before it takes its process, and so its connections, along: the others' exchange then fails at
    once. One that neither ends nor calls is waited for as long as sglang's CPU groups wait, two hours; but such a rank
    goes on to a collective that the others do not call, and ends by its timeout, `--dist-timeout` or torch's.

    Args:
        model_runner: sglang's ModelRunner, its pools built.
        parallel: sglang's parallel context.
        settings, model: the command and the checkpoint, as this rank has read them.

    Raises:
        RuntimeError: ranks differ, or one has gone.
    """
    mine = describe_rank(model_runner, settings, model)
    for group in _groups_to_ask(parallel):
        try:
            described = group.all_gather_object(mine)
        except RuntimeError as error:
            raise RuntimeError(
                f"nsa-dcp could not compare the settings of ranks {name_ranks(group.ranks)}: one of them has ended "
                f"before, and its log says why ({error})"
            ) from error
        differences = find_differences(dict(zip(group.ranks, described, strict=True)))
        if differences:
            raise RuntimeError(
                f"nsa-dcp needs the same on every rank, found {'; '.join(differences)}: give every node the same "
                "nsa-dcp, environment and command"
            )


def describe_rank(model_runner: Any, settings: ServerSettings, model: ModelFacts) -> dict[str, str]:
    """Return what this rank must have in common with others, by name, as text. Args: as `check_agreement`."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from nsa_dcp.sglang_plugin.compat import installed_version

    arguments = resolving_view(model_runner.server_args)
    pool = model_runner.token_to_kv_pool
    facts: dict[str, object] = {
        VERSION: f"{nsa_dcp.__version__} (sources {hash_sources()})",
        "sglang": installed_version(),
        # Shapes of what is exchanged: CP-DCP's buffer, row-split selections, and the requests that are admitted.
        "context length": model_runner.model_config.context_len,
        "pool rows per GPU": pool.size,
        "requests that run at once": model_runner.max_running_requests,
        "the checkpoint's quantization": model_runner.model_config.quantization,
    }
    facts |= {name: os.environ.get(name, unset) for name, unset in OWN_VARIABLES}
    facts |= {name: _read_sglang_variable(name) for name in SGLANG_VARIABLES}
    facts |= dataclasses.asdict(settings)
    facts |= {f"the checkpoint's {name}": value for name, value in dataclasses.asdict(model).items()}
    facts |= {name: getattr(arguments, name) for name in ARGUMENTS}
    facts |= {constant.partition(":")[2]: _read_constant(constant) for constant in CONSTANTS}
    return {name: str(value) for name, value in facts.items()}


def find_differences(described: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return in words what some ranks have otherwise than others, each difference with all its values and ranks.

    Args:
        described: what `describe_rank` returned, by global rank. Another nsa-dcp may know other names.
    """
    versions = _difference(VERSION, described)
    if versions:
        # What another version lists, and what it says of the same thing, need not compare.
        return [versions]
    names = dict.fromkeys(name for facts in described.values() for name in facts)
    return [difference for name in names if (difference := _difference(name, described))]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in ascending order, `0-3, 8` for five of them."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@functools.cache
def hash_sources() -> str:
    """Return a short hash of the Python files of both packages, as they lie on this machine."""
    digest = hashlib.sha256()
    for package in (nsa_dcp, nsa_dcp_kernels):
        directory = Path(package.__path__[0])
        for path in sorted(directory.rglob("*.py")):
            digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _groups_to_ask(parallel: Any) -> list[Any]:
    """The fewest groups with all ranks in them: TP has DCP and attention TP; a pipeline's stages are other ranks."""
    asked: list[Any] = []
    groups = [parallel.tp_group, parallel.attn_tp_group, parallel.dcp_group]
    for group in [*groups, *([parallel.pp_group] if parallel.pp_size > 1 else [])]:
        if group.world_size > 1 and not any(set(group.ranks) <= set(other.ranks) for other in asked):
            asked.append(group)
    return asked


def _difference(name: str, described: Mapping[int, Mapping[str, str]]) -> str | None:
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in described.items():
        ranks_of.setdefault(facts.get(name, "unknown"), []).append(rank)
    if len(ranks_of) == 1:
        return None
    values = (
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {name_ranks(ranks)}" for value, ranks in ranks_of.items()
    )
    return f"{name} {' and '.join(values)}"


def _read_sglang_variable(name: str) -> object:
    """The value that sglang acts by: `1` and `true` are one. A few are read without its registry, as they stand."""
    from sglang.srt.environ import envs

    variable = getattr(envs, name, None)
    return os.environ.get(name) if variable is None else variable.get()


def _read_constant(constant: str) -> object:
    module, _, name = constant.partition(":")
    return getattr(importlib.import_module(f"nsa_dcp.sglang_plugin.{module}"), name)
