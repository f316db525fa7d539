"""Read a `launch_server` command line into what `validation.find_problems` judges.

sglang's own parser is used where sglang can be imported (`read_with_sglang`, a few seconds). Elsewhere
`read_without_sglang` uses the same grammar from a table (`admission.launch_parser`). Either hands its fields to
`command_from_fields`, so that the two come to the same settings.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nsa_dcp.choices import WIRE_VARIABLE
from nsa_dcp.planning.config_fields import (
    first_architecture,
    language_fields,
    natural_integer,
    positive_integer,
    read_json_object,
)
from nsa_dcp.planning.dimensions import indexer_layers, preset_dims
from nsa_dcp.planning.index_key_choice import INDEX_KEYS_VARIABLE
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS, kv_head_preset
from nsa_dcp.planning.pipelines import PARTITION_VARIABLE
from nsa_dcp.planning.served_format import DEEPSEEK, GLM
from nsa_dcp.sglang_plugin.admission.reading import launch_parser
from nsa_dcp.sglang_plugin.admission.reading.attention_family import facts_without_selection
from nsa_dcp.sglang_plugin.admission.reading.launch_config import merge_config_file
from nsa_dcp.sglang_plugin.admission.reading.launch_line import strip_launcher as strip_launcher
from nsa_dcp.sglang_plugin.admission.reading.sglang_flags import list_unjudged
from nsa_dcp.sglang_plugin.admission.rules.weight_rules import projection_format, read_quantization
from nsa_dcp.sglang_plugin.admission.server_settings import PREFILL_VARIABLE, is_foreign_draft, settle_typed
from nsa_dcp.sglang_plugin.admission.validation import ModelFacts, ServerSettings

_GLM, _DEEPSEEK = "glm_moe_dsa", "deepseek_v32"
# Of both in transformers, where a config does not say.
_DEFAULT_TOPK = 2048
# A folder that holds nothing, for models that have none.
_NOWHERE = os.devnull
# sglang takes these for DSA models, if their config has an index_topk.
DSA_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    DEEPSEEK,
    "DeepseekV3ForCausalLMNextN",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    GLM,
    "GlmMoeDsaForCausalLMNextN",
    "Glm5NextForConditionalGenerationNextN",
    "Glm5NextForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "LongcatFlashForCausalLMNextN",
    "Dots3NoteForCausalLM",
    "Dots3NoteForCausalLMNextN",
    "HYV4ForCausalLM",
    "HYV4ForCausalLMNextN",
)
_SAME_NAME = tuple(field.name for field in fields(ServerSettings) if field.name not in ServerSettings.DERIVED)


@dataclass(frozen=True)
class ServerCommand:
    """A command line as read.

    Args:
        settings: what validation judges.
        model_path: `--model-path`; None when the command names none.
        model_override_args: `--json-model-override-args`, for `read_overrides`.
        unjudged: flags and variables on which only sglang can judge.
    """

    settings: ServerSettings
    model_path: str | None
    model_override_args: str = "{}"
    unjudged: tuple[str, ...] = ()


def read_without_sglang(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> ServerCommand:
    """Read a command with sglang 0.5.23's grammar.

    Args:
        arguments: of the server.
        environment: of the server; None is this process's.

    ValueError: sglang's parser would not take the command.
    """
    parser = _parser()
    try:
        known = parser.parse_args(merge_config_file(parser, arguments))
    except ValueError as error:
        raise ValueError(f"the command could not be read: {error}") from error
    return command_from_fields(vars(known), environment)


def read_with_sglang(arguments: Sequence[str]) -> dict[str, object]:
    """Read a command with sglang's own parser; returns plain data for `command_from_fields`.

    Imports sglang. Like sglang's, exits with status 2 and a message on stderr when the command is not one.
    ValueError: sglang does not take its `--config` file.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="launch_server")
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    words = list(arguments)
    if "--config" in words:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        words = ConfigArgumentMerger(parser).merge_config_with_args(words)
    return vars(parser.parse_args(words))


def command_from_fields(
    fields_read: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> ServerCommand:
    """A command from all parsed fields, named as in sglang's `ServerArgs`.

    Args:
        fields_read: from either parser.
        environment: of the server; None is this process's.

    ValueError: a value is none that sglang would take.
    """
    environment = os.environ if environment is None else environment
    read = settle_typed(fields_read)
    values = {name: read[name] for name in _SAME_NAME}
    for phase in ("prefill", "decode"):
        asked = read[f"{phase}_attention_backend"] or read["attention_backend"]
        values[f"{phase}_attention_backend"] = asked
        config = (read["cuda_graph_config"] or {}).get(phase, {})
        values[f"{phase}_cuda_graph"] = config.get("backend", read[f"cuda_graph_backend_{phase}"])
    values["pp_layer_partition"] = environment.get(PARTITION_VARIABLE)
    values["prefill_way"] = environment.get(PREFILL_VARIABLE)
    values["wire"] = environment.get(WIRE_VARIABLE)
    values["index_keys"] = environment.get(INDEX_KEYS_VARIABLE)
    values["foreign_draft"] = is_foreign_draft(read["speculative_draft_model_path"], read["model_path"])
    given = {name: value for name, value in fields_read.items() if value != _defaults().get(name)}
    return ServerCommand(
        ServerSettings(**values),
        read["model_path"],
        read["json_model_override_args"],
        list_unjudged(given, environment),
    )


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = launch_parser.build_parser()
    for action in parser._actions:
        # Doctor may be told of a model that the command does not name.
        action.required = False
    return parser


@functools.cache
def _defaults() -> dict[str, object]:
    return {entry["field"]: entry.get("default") for entry in launch_parser.read_table()}


def read_overrides(text: str) -> dict[str, object]:
    """Fields of the model's config that `--json-model-override-args` replaces. ValueError: it is no JSON object."""
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--json-model-override-args must be JSON, got {text!r}: {error}") from error
    if not isinstance(overrides or {}, dict):
        raise ValueError(f"--json-model-override-args must be a JSON object, got {type(overrides).__name__}")
    # sglang passes over whatever is empty.
    return overrides or {}


def read_model_facts(model_path: str | Path, overrides: Mapping[str, object] | None = None) -> ModelFacts:
    """Facts of a checkpoint on this machine, from its `config.json` with the fields that a command replaces.

    ValueError: there is no readable config, or the field that would say is not of its kind.
    """
    path = Path(model_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model must be a directory with a config.json, or that file, got {str(model_path)!r}")
    return _facts_from_config(read_json_object(path), overrides or {}, source=str(path), folder=path.parent)


def _facts_from_config(
    config: Mapping[str, object], overrides: Mapping[str, object], *, source: str, folder: Path | None = None
) -> ModelFacts:
    """What sglang makes of a config's fields and of those that a command replaces.

    Source: sglang 0.5.23 `is_deepseek_dsa`, `get_config`; transformers 5.24 `GlmMoeDsaConfig.__post_init__`.
    """
    config = dict(config)
    architecture = first_architecture(config, source)
    if "text_config" not in config and config.get("model_type") in (_GLM, _DEEPSEEK):
        config.setdefault("index_topk", _DEFAULT_TOPK)
    text = dict(language_fields(config, "index_topk", source))
    if config.get("model_type") == _GLM and text.get("num_hidden_layers") is not None:
        # Read before fields are replaced: a replaced frequency or pattern does not reach it.
        selecting = set(indexer_layers(text, source=source, architecture=architecture))
        layers = positive_integer(text, "num_hidden_layers", source)
        text["indexer_types"] = ["full" if layer in selecting else "shared" for layer in range(layers)]
    text |= overrides
    if "architectures" in overrides:
        architecture = first_architecture(overrides, source)
    if architecture not in DSA_ARCHITECTURES or text.get("index_topk") is None:
        return facts_without_selection(text, architecture)
    numbers: dict[str, Any] = {  # integers
        field: positive_integer(text, field, source)
        for field in ("num_attention_heads", "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    }
    return ModelFacts(
        is_dsa=True,
        architecture=architecture,
        # 0 is refused by its name, as a width that the kernel does not have.
        index_topk=natural_integer(text, "index_topk", source),
        index_kpool=positive_integer(text, "index_kpool", source, default=1),
        indexer_layers=indexer_layers(text, source=source, architecture=architecture),
        projection_format=projection_format(
            read_quantization({**config, **overrides}, folder or Path(_NOWHERE)), numbers["num_hidden_layers"]
        ),
        hidden_size=_size_or_unknown(text.get("hidden_size")),
        context_length=_size_or_unknown(text.get("max_position_embeddings")),
        **numbers,
    )


def _size_or_unknown(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def preset_model_facts(preset: str, overrides: Mapping[str, object] | None = None) -> ModelFacts:
    """Facts of a published model, by the planner's preset name, with the fields that a command replaces.

    ValueError: the name is unknown.
    """
    if preset in KV_HEAD_PRESETS:
        model = kv_head_preset(preset)
        published: dict[str, object] = {
            "architectures": [model.architecture],
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
        }
        return _facts_from_config(published, overrides or {}, source=f"preset {preset}")
    dims = preset_dims(preset)
    config: dict[str, object] = {
        "architectures": [dims.architecture],
        "num_attention_heads": dims.num_attention_heads,
        "kv_lora_rank": dims.kv_lora_rank,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "index_topk": dims.index_topk,
        "hidden_size": dims.hidden_size,
        "max_position_embeddings": dims.max_context,
        "num_hidden_layers": dims.num_hidden_layers,
        "indexer_types": [
            "full" if layer in dims.indexer_layers else "shared" for layer in range(dims.num_hidden_layers)
        ],
    }
    return _facts_from_config(config, overrides or {}, source=f"preset {preset}")
