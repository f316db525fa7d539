"""Read a `launch_server` command line into what `validation.find_problems` judges.

sglang's own parser is used where sglang can be imported (`read_with_sglang`, a few seconds). Elsewhere
`read_without_sglang` knows the flags that validation judges, and says that it is partial: it cannot tell a misspelt
flag from one that it does not know.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from nsa_dcp.planning.config_fields import first_architecture, language_fields, positive_integer, read_json_object
from nsa_dcp.planning.dimensions import indexer_layers, preset_dims
from nsa_dcp.planning.pipelines import PARTITION_VARIABLE
from nsa_dcp.sglang_plugin.admission.validation import ModelFacts, ServerSettings
from nsa_dcp.sglang_plugin.admission.weight_rules import projection_format, read_quantization

_LAUNCHERS = (("-m", "sglang.launch_server"), ("sglang", "serve"))
_PRESET_ARCHITECTURES = {"glm-5.2": "GlmMoeDsaForCausalLM", "deepseek-v3.2": "DeepseekV32ForCausalLM"}
# The spellings of sglang 0.5.23; `--tp`, `--dp` and `--pp` are the abbreviations people type.
_VALUE_FLAGS = {
    "model_path": (("--model-path", "--model"), str),
    "dcp_size": (("--dcp-size", "--decode-context-parallel-size"), int),
    "tp_size": (("--tp-size", "--tensor-parallel-size", "--tp"), int),
    "dp_size": (("--dp-size", "--data-parallel-size", "--dp"), int),
    "pp_size": (("--pp-size", "--pipeline-parallel-size", "--pp"), int),
    "pp_async_batch_depth": (("--pp-async-batch-depth",), int),
    "attn_dp_size": (("--attn-dp-size", "--attention-data-parallel-size"), int),
    "attn_cp_size": (("--attn-cp-size", "--attention-context-parallel-size"), int),
    "cp_strategy": (("--cp-strategy",), str),
    "attention_backend": (("--attention-backend",), str),
    "prefill_attention_backend": (("--prefill-attention-backend",), str),
    "decode_attention_backend": (("--decode-attention-backend",), str),
    "dsa_prefill_backend": (("--dsa-prefill-backend",), str),
    "dsa_decode_backend": (("--dsa-decode-backend",), str),
    "kv_cache_dtype": (("--kv-cache-dtype",), str),
    "page_size": (("--page-size",), int),
    "chunked_prefill_size": (("--chunked-prefill-size",), int),
    "dcp_comm_backend": (("--dcp-comm-backend",), str),
    "dsa_topk_backend": (("--dsa-topk-backend",), str),
    "cuda_graph_backend_prefill": (("--cuda-graph-backend-prefill",), str),
    "cuda_graph_backend_decode": (("--cuda-graph-backend-decode",), str),
    "grammar_backend": (("--grammar-backend",), str),
    "dtype": (("--dtype",), str),
    "quantization": (("--quantization",), str),
    "cpu_offload_gb": (("--cpu-offload-gb",), int),
    "rl_on_policy_target": (("--rl-on-policy-target",), str),
    "radix_cache_backend": (("--radix-cache-backend",), str),
    "elastic_ep_backend": (("--elastic-ep-backend",), str),
    "speculative_algorithm": (("--speculative-algorithm",), str),
    "speculative_eagle_topk": (("--speculative-eagle-topk",), int),
    "speculative_draft_model_path": (("--speculative-draft-model-path", "--speculative-draft-model"), str),
    "disaggregation_mode": (("--disaggregation-mode",), str),
}
_SWITCHES = {
    "enable_prefill_cp": ("--enable-prefill-cp",),
    "enable_dsa_cache_layer_split": ("--enable-dsa-cache-layer-split",),
    "enable_dp_attention": ("--enable-dp-attention",),
    "enable_dynamic_chunking": ("--enable-dynamic-chunking",),
    "enable_hisparse": ("--enable-hisparse",),
    "enable_hierarchical_cache": ("--enable-hierarchical-cache", "--enable-hicache"),
    "enable_lmcache": ("--enable-lmcache",),
    "enable_flexkv": ("--enable-flexkv",),
    "enable_unified_cache_external_linker": ("--enable-unified-cache-external-linker",),
    "enable_unified_memory": ("--enable-unified-memory",),
    "enable_two_batch_overlap": ("--enable-two-batch-overlap",),
    "enable_pdmux": ("--enable-pdmux",),
    "enable_return_routed_experts": ("--enable-return-routed-experts",),
    "enable_return_indexer_topk": ("--enable-return-indexer-topk",),
    "debug_cuda_graph": ("--debug-cuda-graph",),
    "enable_torch_compile": ("--enable-torch-compile",),
    "enable_deterministic_inference": ("--enable-deterministic-inference",),
    "speculative_adaptive": ("--speculative-adaptive",),
    "enable_multi_layer_eagle": ("--enable-multi-layer-eagle",),
    "enable_lora": ("--enable-lora",),
    "checkpoint_engine_wait_weights_before_ready": ("--checkpoint-engine-wait-weights-before-ready",),
    "enable_memory_saver": ("--enable-memory-saver",),
    "enable_weights_cpu_backup": ("--enable-weights-cpu-backup",),
}
_ON_OFF = {"dcp_replicate_q_proj": "--dcp-replicate-q-proj", "enable_cp_decode_attn_tp": "--enable-cp-decode-attn-tp"}
READ_FIELDS = (*_VALUE_FLAGS, *_SWITCHES, *_ON_OFF)


@dataclass(frozen=True)
class ServerCommand:
    """A command line as read.

    Args:
        settings: what validation judges.
        model_path: `--model-path`; None when the command names none.
        partial: whether flags may have gone unread, because sglang's own parser was not used.
        unread: words that the partial parser did not know.
    """

    settings: ServerSettings
    model_path: str | None
    partial: bool
    unread: tuple[str, ...] = ()


def strip_launcher(words: Sequence[str]) -> list[str]:
    """The server's arguments of a command line, without `python -m sglang.launch_server` or `sglang serve`.

    ValueError: the words before the first flag are no known launcher.
    """
    words = list(words)
    for first, second in _LAUNCHERS:
        for at in range(len(words) - 1):
            if words[at].rsplit("/", 1)[-1] == first and words[at + 1] == second:
                return words[at + 2 :]
    if words and not words[0].startswith("-"):
        raise ValueError(
            f"the command must begin with a flag, `python -m sglang.launch_server` or `sglang serve`, got {words[0]!r}"
        )
    return words


def read_without_sglang(arguments: Sequence[str]) -> ServerCommand:
    """Read the flags that validation judges. ValueError: one of them has a value of the wrong kind, or none."""
    parser = _QuietParser(allow_abbrev=False, add_help=False, prog="launch_server")
    for field, (flags, kind) in _VALUE_FLAGS.items():
        parser.add_argument(*flags, dest=field, type=kind)
    for field, flags in _SWITCHES.items():
        parser.add_argument(*flags, dest=field, action="store_true")
    for field, flag in _ON_OFF.items():
        parser.add_argument(flag, dest=field, action=argparse.BooleanOptionalAction)
    known, unread = parser.parse_known_args(list(arguments))
    return command_from_fields(vars(known), partial=True, unread=tuple(unread))


def read_with_sglang(arguments: Sequence[str]) -> dict[str, object]:
    """Read a command with sglang's own parser; returns plain data for `command_from_fields`.

    Imports sglang. Like sglang's, exits with status 2 and a message on stderr when the command is not one.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="launch_server")
    ServerArgs.add_cli_args(parser)
    known = parser.parse_args(list(arguments))
    return {field: getattr(known, field, None) for field in READ_FIELDS}


def command_from_fields(
    fields_read: Mapping[str, object], *, partial: bool, unread: tuple[str, ...] = ()
) -> ServerCommand:
    """A command from parsed fields, named as in sglang's `ServerArgs`; None is "not given"."""
    given = {name: value for name, value in fields_read.items() if value is not None}
    if given.get("enable_dp_attention"):
        given.setdefault("dp_size", 1)
        if given.get("attn_dp_size", 1) == 1:
            given["attn_dp_size"] = given["dp_size"]
            given["dp_size"] = min(given["dp_size"], 1)
    both = given.get("attention_backend")
    given.setdefault("prefill_attention_backend", both)
    given.setdefault("decode_attention_backend", both)
    for phase in ("prefill", "decode"):
        given[f"{phase}_cuda_graph"] = given.get(f"cuda_graph_backend_{phase}")
    given["pp_layer_partition"] = os.environ.get(PARTITION_VARIABLE)
    given["foreign_draft"] = given.get("speculative_draft_model_path") not in (None, given.get("model_path"))
    known = {field.name for field in fields(ServerSettings)}
    settings = ServerSettings(**{name: value for name, value in given.items() if name in known})
    return ServerCommand(settings, given.get("model_path"), partial, unread)


def read_model_facts(model_path: str | Path) -> ModelFacts:
    """Facts of a checkpoint on this machine, from its `config.json`.

    ValueError: there is no readable config, or the field that would say is not of its kind.
    """
    path = Path(model_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model must be a directory with a config.json, or that file, got {str(model_path)!r}")
    config = read_json_object(path)
    architecture = first_architecture(config, str(path))
    text = language_fields(config, "index_topk", str(path))
    if not text.get("index_topk"):
        return ModelFacts(is_dsa=False, architecture=architecture)
    numbers = {
        field: positive_integer(text, field, str(path))
        for field in ("num_attention_heads", "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_topk")
    }
    return ModelFacts(
        is_dsa=True,
        architecture=architecture,
        index_kpool=positive_integer(text, "index_kpool", str(path), default=1),
        indexer_layers=indexer_layers(text, source=str(path), architecture=architecture),
        projection_format=projection_format(read_quantization(config, path.parent), numbers["num_hidden_layers"]),
        **numbers,
    )


def preset_model_facts(preset: str) -> ModelFacts:
    """Facts of a published model, by the planner's preset name. ValueError: the name is unknown."""
    dims = preset_dims(preset)
    return ModelFacts(
        is_dsa=True,
        architecture=_PRESET_ARCHITECTURES[preset],
        num_attention_heads=dims.num_attention_heads,
        kv_lora_rank=dims.kv_lora_rank,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        index_topk=dims.index_topk,
        num_hidden_layers=dims.num_hidden_layers,
        indexer_layers=dims.indexer_layers,
    )


class _QuietParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"the command could not be read: {message}")
