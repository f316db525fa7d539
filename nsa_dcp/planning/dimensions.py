"""The dimensions of a DSA model that decide what its caches hold and what a decode step reads.

They come from a checkpoint's `config.json` or from a preset. Nothing here imports torch or transformers, so that
planning works on a laptop. Which layers own an indexer is what sglang 0.5.23's `dsa_layer_skips_topk` finds after
transformers' `GlmMoeDsaConfig`: `indexer_types`, else `index_topk_pattern`, else `index_topk_freq` with
`index_skip_topk_offset`; a layer past the end of a list owns one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_dcp.planning.config_fields import (
    MOST_LAYERS,
    first_architecture,
    language_fields,
    natural_integer,
    positive_integer,
    read_json_object,
    shown,
)
from nsa_dcp.planning.served_format import DEEPSEEK, GLM, INDEX_HEAD_DIM, QUANT_TILE


@dataclass(frozen=True)
class ModelDims:
    """A DSA model's dimensions.

    Args:
        name: what the tables and plots call it.
        architecture: the config's first of `architectures`; empty if it names none.
        source: where the numbers come from: a path, or the public source of a preset.
        indexer_layers: layers that own an indexer, ascending; the others reuse the selection of the one before.
        max_context: longest context the checkpoint was made for, in tokens.
        draft_layers_in_checkpoint: multi-token-prediction layers the checkpoint carries (`num_nextn_predict_layers`).
        expert_bytes, dense_bytes: bytes per weight of the routed experts, and of everything else.
    The remaining fields are named as in the config. One that only the step model needs is None if the config lacks it.
    """

    name: str
    source: str
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    index_topk: int
    indexer_layers: tuple[int, ...]
    max_context: int
    architecture: str = ""
    draft_layers_in_checkpoint: int = 0
    hidden_size: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    index_n_heads: int | None = None
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int | None = None
    vocab_size: int | None = None
    expert_bytes: float = 1.0
    dense_bytes: float = 1.0

    @property
    def latent_dim(self) -> int:
        """Values of one cached row: `kv_lora_rank + qk_rope_head_dim`."""
        return self.kv_lora_rank + self.qk_rope_head_dim


_REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_topk",
    "index_head_dim",
    "max_position_embeddings",
)
_STEP_FIELDS = (
    "hidden_size",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
)

_GLM_52 = {
    "architectures": [GLM],
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 154880,
}
_DEEPSEEK_V32 = {
    "architectures": [DEEPSEEK],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
# name -> (config, source, bytes per routed-expert weight, bytes per other weight)
_PRESETS: dict[str, tuple[dict[str, object], str, float, float]] = {
    "glm-5.2": (
        _GLM_52,
        "transformers 5.24 GlmMoeDsaConfig; 21 of 78 indexers at layers 0, 1, 2, then every 4th: ROCm/ATOM#1260; "
        "1M context: tenstorrent/tt-metal#49315; weights as W4AFP8 (int4 experts, fp8 elsewhere)",
        0.5,
        1.0,
    ),
    "deepseek-v3.2": (
        _DEEPSEEK_V32,
        "transformers 5.24 DeepseekV32Config: every layer owns an indexer; weights as fp8",
        1.0,
        1.0,
    ),
}
PRESETS = tuple(_PRESETS)


def preset_dims(name: str) -> ModelDims:
    """Dimensions of a published model, by preset name (`PRESETS`). ValueError: the name is unknown."""
    if name not in _PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    config, source, expert_bytes, dense_bytes = _PRESETS[name]
    return dims_from_config(config, name=name, source=source, expert_bytes=expert_bytes, dense_bytes=dense_bytes)


def read_config(path: str | Path) -> ModelDims:
    """Read a checkpoint's `config.json`, or the one in a checkpoint directory.

    Raises:
        ValueError: the file is missing or not a JSON object, or a field is missing or unusable; the message names it.
        NotImplementedError: the model is valid but not of a shape that the caches here hold.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"config must be a config.json or a directory that holds one, got {str(path)!r}")
    config = read_json_object(path)
    return dims_from_config(config, name=_config_name(config, path), source=str(path))


def dims_from_config(
    config: Mapping[str, object],
    *,
    name: str,
    source: str = "config",
    expert_bytes: float = 1.0,
    dense_bytes: float = 1.0,
) -> ModelDims:
    """Dimensions from the fields of a `config.json`; errors as `read_config`."""
    architecture = first_architecture(config, source)
    config = language_fields(config, "num_hidden_layers", source)
    missing = [field for field in _REQUIRED if config.get(field) is None]
    if missing:
        dsa = "" if config.get("index_topk") is not None else "; without index_topk it is not a DSA model"
        raise ValueError(f"config must have {', '.join(missing)}, got a config without ({source}){dsa}")
    values = {field: positive_integer(config, field, source) for field in _REQUIRED}
    counts: dict[str, Any] = {}  # each an integer or None
    for field in _STEP_FIELDS:
        counts[field] = None if config.get(field) is None else positive_integer(config, field, source)
    for field in ("n_shared_experts", "first_k_dense_replace"):
        counts[field] = None if config.get(field) is None else natural_integer(config, field, source)
    if values.pop("index_head_dim") != INDEX_HEAD_DIM:
        raise NotImplementedError(f"index_head_dim must be {INDEX_HEAD_DIM}, got {config['index_head_dim']} ({source})")
    if values["kv_lora_rank"] % QUANT_TILE:
        raise NotImplementedError(
            f"kv_lora_rank must be a multiple of the tile {QUANT_TILE}, got {values['kv_lora_rank']} ({source})"
        )
    for field in ("index_kpool", "cli_factor"):
        if config.get(field) not in (None, 1):
            raise NotImplementedError(
                f"{field} must be 1, got {shown(config[field])} ({source}): pooled index keys are not counted here"
            )
    return ModelDims(
        name=name,
        source=source,
        max_context=values.pop("max_position_embeddings"),
        architecture=architecture,
        indexer_layers=indexer_layers(config, source=source, architecture=architecture),
        draft_layers_in_checkpoint=natural_integer(config, "num_nextn_predict_layers", source),
        expert_bytes=expert_bytes,
        dense_bytes=dense_bytes,
        **values,
        **counts,
    )


def indexer_layers(config: Mapping[str, object], *, source: str = "config", architecture: str = "") -> tuple[int, ...]:
    """Indices of the layers that own an indexer, ascending.

    Args:
        config: fields of a `config.json`.
        source: where they come from.
        architecture: the checkpoint's, where a wrapper around these fields names it.

    Raises:
        ValueError: a field is not of its kind, or names something that sglang and transformers read differently.

    Source: transformers 5.24 `GlmMoeDsaConfig.__post_init__`; sglang 0.5.23 `dsa_layer_skips_topk`.
    """
    num_layers = positive_integer(config, "num_hidden_layers", source, most=MOST_LAYERS)
    types, field, words = config.get("indexer_types"), "indexer_types", ("full", "shared")
    if types is None:
        types, field = config.get("index_topk_pattern"), "index_topk_pattern"
        # transformers' GLM config makes indexer_types of a pattern, of a list as it is; sglang looks for letters.
        is_glm = (architecture or first_architecture(config, source)) in ("", GLM)
        words = words if is_glm and isinstance(types, list | tuple) else ("F", "S")
    if types is None:
        freq = positive_integer(config, "index_topk_freq", source, default=1)
        offset = positive_integer(config, "index_skip_topk_offset", source, default=2)
        return tuple(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % freq == 0)
    if not isinstance(types, str | list | tuple):
        raise ValueError(f"{field} must be a list or a string of F and S, got {shown(types)} ({source})")
    unknown = sorted({shown(entry) for entry in types if entry not in words})
    if unknown:
        raise ValueError(
            f"{field} must hold {words[0]!r} and {words[1]!r} alone, got {', '.join(unknown[:3])} ({source})"
        )
    if types and types[0] != words[0]:
        raise ValueError(f"{field} must begin with a full indexer, got {types[0]!r} ({source})")
    return tuple(layer for layer in range(num_layers) if layer >= len(types) or types[layer] == words[0])


def _config_name(config: Mapping[str, object], path: Path) -> str:
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) else path.parent.name or str(path)
