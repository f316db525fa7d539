"""A checkpoint's config as transformers reads it, and its model without memory: what can be known before weights are.

A config that transformers cannot build a model from, or whose model cannot run a step, is refused here in a sentence.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_dcp.config import ARCHITECTURES
from nsa_dcp.planning.config_fields import MOST_LAYERS, first_architecture, positive_integer, printable, shown
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_ARCHITECTURES, refuse_windows

# The kernels' tables are as wide as a selection; the published models select 2,048.
_MOST_SELECTED = 65_536
# A prime, so that no wrong grouping of experts divides it.
_TRIED_TOKENS = 13


def read_model_config(fields: dict[str, object], directory: Path) -> Any:
    """Read a checkpoint's config.

    Args:
        fields: of its `config.json`.
        directory: where it lies.

    Returns:
        transformers' config of one of ARCHITECTURES or KV_HEAD_ARCHITECTURES.

    Raises:
        ValueError: a field is not what the architecture's config takes.
        NotImplementedError: the architecture, or a RoPE whose frequencies depend on the length, is not served.
    """
    architecture = printable(first_architecture(fields, str(directory))) or "(none named)"
    if architecture not in (*ARCHITECTURES, *KV_HEAD_ARCHITECTURES):
        # transformers may not even know it; the refusal must not depend on that.
        raise NotImplementedError(
            f"architecture {architecture} is not supported: nsa-dcp serves DeepSeek Sparse Attention models, "
            f"{' and '.join(ARCHITECTURES)}; `generate` runs models with KV heads too, "
            f"{', '.join(KV_HEAD_ARCHITECTURES)}"
        )
    if architecture in KV_HEAD_ARCHITECTURES:
        refuse_windows(fields, str(directory))
    import transformers

    config_class = getattr(transformers, architecture).config_class
    if fields.get("model_type") != config_class.model_type:
        raise ValueError(
            f"model_type must be {config_class.model_type}, that of {architecture}, got "
            f"{shown(fields.get('model_type'))} ({directory})"
        )
    positive_integer(fields, "num_hidden_layers", str(directory), default=1, most=MOST_LAYERS)
    positive_integer(fields, "index_topk", str(directory), default=1, most=_MOST_SELECTED)
    _check_numbers(fields, "", directory)
    try:
        config = config_class.from_pretrained(directory, local_files_only=True)
        varying = _rope_depends_on_length(config)
    except Exception as error:  # Whatever a field of the wrong kind meets inside the library.
        raise ValueError(f"config.json must be one that transformers reads, got {_line(error)} ({directory})") from None
    if varying:
        raise NotImplementedError(
            f"rope_type {config.rope_parameters['rope_type']} is not supported: its frequencies depend on a sequence's "
            f"length, which differs between the chunks of a prompt ({directory})"
        )
    return config


def build_unloaded_model(config: Any, directory: Path) -> nn.Module:
    """Build a config's model on device meta, and run a step of it there.

    Args:
        config: from `read_model_config`.
        directory: where it lies.

    Returns:
        The model. Its parameters have shapes and take no memory.

    Raises:
        ValueError: there is no such model, or it could not run.
    """
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config).eval()
            # Eager experts read back which of them are hit; these are as wide as the batch and ask for nothing.
            model.set_experts_implementation("batched_mm")
            _try_step(model)
    except Exception as error:  # Whatever a size that does not fit meets inside the libraries.
        raise ValueError(f"config.json must describe a model that runs, got {_line(error)} ({directory})") from None
    return model


@torch.inference_mode()
def _try_step(model: Any) -> None:
    from transformers import DynamicCache

    ids = torch.zeros(1, _TRIED_TOKENS, dtype=torch.int64)
    try:
        logits = model(input_ids=ids, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1).logits
    except NotImplementedError:
        return  # An operation without a kernel for device meta says nothing about the config.
    if logits.shape[-1] != model.config.vocab_size:
        raise ValueError(f"logits of {logits.shape[-1]} tokens")


def _rope_depends_on_length(config: Any) -> bool:
    """Ask transformers for the frequencies of a short and of a long sequence."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return False
    longest = 4 * max(config.max_position_embeddings, config.rope_parameters.get("original_max_position_embeddings", 0))
    short, long = (ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length) for length in (1, longest))
    return not torch.equal(short[0], long[0]) or short[1] != long[1]


def _check_numbers(value: object, name: str, directory: Path) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{printable(name)} must be a finite number, got {value} ({directory})")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        _check_numbers(part, f"{name}.{key}" if name else str(key), directory)


def _line(error: Exception) -> str:
    """An error as part of a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
