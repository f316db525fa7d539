"""Which stored forms of the attention weights go with DCP. Part of `validation.find_problems`.

TP-DCP takes all: a rank projects with its own weights, and sglang gathers the query projection only in the two forms
that it knows (bfloat16, and FP8 in blocks of 128), else the queries. CP-DCP takes all too, but for the decode slice
(`--enable-cp-decode-attn-tp`): sglang cuts `weight` and its scales as if they were stored row by row, [N, K].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from nsa_dcp.sglang_plugin.admission.advice import advise, drop
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings

UNQUANTISED = ""
BLOCK_FP8 = "fp8 in blocks of 128 x 128"
HUMMING = "humming"
# What the decode slice cuts.
SLICED_PROJECTIONS = ("q_b_proj", "o_proj")
_SLICEABLE = (UNQUANTISED, BLOCK_FP8)
_LEFT_OUT_FIELDS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")


def read_quantization(config: Mapping[str, object], folder: Path) -> object:
    """What a checkpoint says about its quantisation, where sglang looks for it; None: nothing.

    Args:
        config: the content of config.json.
        folder: of the checkpoint. It may be a name on a hub, which has no such folder.

    ValueError: hf_quant_config.json is no JSON.
    """
    for field in ("quantization_config", "compression_config"):
        if config.get(field) is not None:
            return config[field]
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"hf_quant_config must be JSON, got {str(path)!r}: {error}") from error


def projection_format(quantization: object, num_layers: int) -> str | None:
    """How a checkpoint stores the projections that the decode slice cuts.

    Args:
        quantization: `quantization_config` of config.json, or the content of hf_quant_config.json; None: it has none.
        num_layers: of the model.

    Returns:
        UNQUANTISED, BLOCK_FP8, or the method's name; None for a checkpoint that is not quantised.

    ValueError: it is no JSON object.
    """
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config must be a JSON object, got {type(quantization).__name__}")
    config = quantization
    while isinstance(config.get("quantization"), Mapping):
        config = config["quantization"]
    if _leaves_out_projections(config, num_layers):
        return UNQUANTISED
    method = config.get("quant_method")
    if config.get("quant_algo") == "MIXED_PRECISION" and "quantized_layers" not in config:
        # Older W4AFP8 checkpoints say no more than this.
        method = "w4afp8"
    if method == "w4afp8" or (method == "fp8" and config.get("weight_block_size") == [128, 128]):
        return BLOCK_FP8
    return str(config.get("quant_algo") or method or "an unnamed quantisation")


def find_weight_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    """Return why a command's weights cannot be sliced; empty when they can, or are not."""
    if not (settings.enable_prefill_cp and settings.enable_cp_decode_attn_tp):
        return []
    served = _served_format(settings, model)
    if served in _SLICEABLE:
        return []
    if served == HUMMING:
        shown, reason = "--quantization humming", "sglang would cut weights that are packed for humming's kernels"
    else:
        shown, reason = f"{served} weights", "sglang would cut them as if they and their scales were stored row by row"
    return [
        Problem(
            f"--enable-cp-decode-attn-tp with {shown}",
            reason,
            advise(
                drop("--enable-cp-decode-attn-tp"),
                because="every rank then projects all heads, and the tokens are the same",
            ),
        )
    ]


def _served_format(settings: ServerSettings, model: ModelFacts) -> str:
    if settings.quantization == HUMMING:
        return HUMMING
    if model.projection_format is not None:
        return model.projection_format
    if settings.quantization in (None, "unquant"):
        return UNQUANTISED
    # Older checkpoints of this form do not say so.
    if settings.quantization == "w4afp8":
        return BLOCK_FP8
    # The weights are quantised as they are loaded.
    return settings.quantization


def _leaves_out_projections(config: Mapping, num_layers: int) -> bool:
    patterns = []
    for field in _LEFT_OUT_FIELDS:
        found = config.get(field)
        patterns += [pattern for pattern in found if isinstance(pattern, str)] if isinstance(found, list) else []
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(num_layers) for name in SLICED_PROJECTIONS]
    return bool(patterns and names) and all(any(_covers(pattern, name) for pattern in patterns) for name in names)


def _covers(pattern: str, name: str) -> bool:
    """Whether a module is left out: by name or part of it, by wildcards, or by `re:` and an expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    pattern = pattern.rstrip(".")
    if any(mark in pattern for mark in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
