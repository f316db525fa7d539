"""The dimensions that decide what the cache of a model with KV heads (GQA, MHA) holds, from a config or a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa_dcp.planning.config_fields import first_architecture, positive_integer, read_json_object

# Every layer attends to the whole context, with one head dimension for K and V.
KV_HEAD_ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
)
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


@dataclass(frozen=True)
class KvHeadDims:
    """A model's dimensions, named as in the config.

    Args:
        name: what the tables call it.
        source: where the numbers come from: a path, or the public source of a preset.
        max_context: longest context the checkpoint was made for, in tokens.
    """

    name: str
    source: str
    architecture: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_context: int


def _published(
    name: str, architecture: str, layers: int, heads: int, kv_heads: int, context: int, source: str
) -> KvHeadDims:
    return KvHeadDims(name, source, architecture, layers, heads, kv_heads, 128, context)


_QWEN3, _QWEN3_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_OF_QWEN = "its model card; layers and heads also in the training scripts of THUDM/slime"
_PRESETS = {
    dims.name: dims
    for dims in (
        _published("qwen3-235b-a22b", _QWEN3_MOE, 94, 64, 4, 40_960, _OF_QWEN),
        _published("qwen3-30b-a3b", _QWEN3_MOE, 48, 32, 4, 40_960, _OF_QWEN),
        _published("qwen3-32b", _QWEN3, 64, 64, 8, 40_960, _OF_QWEN),
        _published("llama-3.3-70b", "LlamaForCausalLM", 80, 64, 8, 131_072, "its model card"),
        _published("glm-4.6", "Glm4MoeForCausalLM", 92, 96, 8, 202_752, "its model card"),
        _published("minimax-m2", "MiniMaxM2ForCausalLM", 62, 48, 8, 196_608, "MiniMaxAI/MiniMax-M2, config.json"),
    )
}
KV_HEAD_PRESETS = tuple(_PRESETS)


def kv_head_preset(name: str) -> KvHeadDims:
    """Dimensions of a published model, one of KV_HEAD_PRESETS. ValueError: the name is unknown."""
    if name not in _PRESETS:
        raise ValueError(f"preset must be one of {', '.join(KV_HEAD_PRESETS)}, got {name!r}")
    return _PRESETS[name]


def read_kv_head_config(path: str | Path) -> KvHeadDims | None:
    """Read a checkpoint's `config.json`, or the one in a directory; None where it is of another family, or not there.

    Raises:
        ValueError: the file is no JSON object, or a field is missing or unusable; the message names it.
        NotImplementedError: layers see a window of the context, or K and V differ in size.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return None
    config = read_json_object(path)
    if first_architecture(config, str(path)) not in KV_HEAD_ARCHITECTURES:
        return None
    model_type = config.get("model_type")
    name = model_type if isinstance(model_type, str) else path.parent.name or str(path)
    return kv_head_dims_from_config(config, name=name, source=str(path))


def kv_head_dims_from_config(config: Mapping[str, object], *, name: str, source: str) -> KvHeadDims:
    """Dimensions from the fields of a `config.json`; errors as `read_kv_head_config`."""
    missing = [field for field in _REQUIRED if config.get(field) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)}, got a config without ({source})")
    values = {field: positive_integer(config, field, source) for field in _REQUIRED}
    refuse_windows(config, source)
    heads = values["num_attention_heads"]
    if config.get("head_dim") is None:
        hidden_size = positive_integer(config, "hidden_size", source)
        if hidden_size % heads:
            raise ValueError(f"hidden_size must be a multiple of num_attention_heads {heads}, got {hidden_size}")
        head_dim = hidden_size // heads
    else:
        head_dim = positive_integer(config, "head_dim", source)
    value_dim = positive_integer(config, "v_head_dim", source, default=head_dim)
    if value_dim != head_dim:
        raise NotImplementedError(f"v_head_dim must be head_dim {head_dim}, got {value_dim} ({source})")
    if heads % values["num_key_value_heads"]:
        raise ValueError(
            f"num_key_value_heads must divide num_attention_heads {heads}, got {values['num_key_value_heads']} "
            f"({source})"
        )
    return KvHeadDims(
        name=name,
        source=source,
        architecture=first_architecture(config, source),
        head_dim=head_dim,
        max_context=values.pop("max_position_embeddings"),
        **values,
    )


def refuse_windows(config: Mapping[str, object], source: str) -> None:
    """NotImplementedError: some layer sees a window of its context, or something else than its context."""
    types = config.get("layer_types")
    others = sorted({str(kind) for kind in types if kind != "full_attention"}) if isinstance(types, list) else []
    if others:
        raise NotImplementedError(f"layer_types must hold full_attention alone, got {', '.join(others)} ({source})")
    uses = config.get("use_sliding_window", True)
    if config.get("sliding_window") is not None and uses:
        raise NotImplementedError(
            f"sliding_window must be null, got {config['sliding_window']!r} ({source}): a window's tokens would lie on "
            "few of the ranks, and sglang never widens such a pool"
        )
