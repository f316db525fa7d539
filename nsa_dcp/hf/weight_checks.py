"""Whether a checkpoint holds its model's weights: all of them, of their shapes, unquantised and finite.

transformers starts missing weights at random and drops the ones that it does not know, scales among them, with a
warning; and no library looks at the values. Each is a refusal here, before a rank starts. What a model expects, what it
ties and what it ignores is transformers' own knowledge: the names come from a model without memory (device meta).
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_dcp.hf.checkpoint_files import StoredTensor, list_some
from nsa_dcp.planning.config_fields import printable, read_json_object, shown

_PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
# What the tensors are called that stand beside quantised weights, in every common format.
_QUANTISED_NAMES = re.compile(r"scale|qweight|qzeros|g_idx|packed|zero_point|absmax|quant_map|quant_state|\.SCB$")
_ADVICE = "use a bf16 release of the model, or write one with its weights dequantised; servers take quantised ones"


def check_not_quantised(config: dict[str, object], directory: Path) -> None:
    """Refuse a checkpoint that says that its weights are quantised.

    Args:
        config: fields of its `config.json`.
        directory: where it lies; ModelOpt says it in a file of its own.

    Raises:
        ValueError: it says so.
    """
    for field in ("quantization_config", "compression_config"):
        if config.get(field) is not None:
            raise ValueError(_describe_quantised(f"{field} {_name_method(config[field])}", directory))
    path = directory / "hf_quant_config.json"
    if path.exists():
        declared = read_json_object(path, path.name).get("quantization")
        if not isinstance(declared, dict) or declared.get("quant_algo") is not None:
            raise ValueError(_describe_quantised(f"{path.name} {_name_method(declared)}", directory))


def check_names_and_shapes(model: nn.Module, tensors: dict[str, StoredTensor], directory: Path) -> list[str]:
    """Compare what a checkpoint holds with what its model expects.

    Args:
        model: a transformers model on device meta.
        tensors: from `read_stored_tensors`.
        directory: where they lie.

    Returns:
        The names of the tensors that will be loaded.

    Raises:
        ValueError: one is quantised, missing, of another shape, or not the model's.
    """
    expected = _expected_shapes(model, tensors)
    missing, unexpected = _adjust(model, expected.keys() - tensors.keys(), tensors.keys() - expected.keys())
    ignored = tensors.keys() - expected.keys() - unexpected
    loaded = [name for name in tensors if name not in ignored]
    stored = sorted(name for name in loaded if tensors[name].dtype not in _PLAIN_DTYPES)
    scales = sorted(name for name in unexpected if _QUANTISED_NAMES.search(".".join(name.split(".")[-3:])))
    if stored:
        raise ValueError(_describe_quantised(f"{list_some(stored)} stored as {tensors[stored[0]].dtype}", directory))
    if scales:
        raise ValueError(_describe_quantised(list_some(scales), directory))
    kind = type(model).__name__
    if missing:
        raise ValueError(f"checkpoint must hold every tensor of {kind}, got none of {list_some(missing)} ({directory})")
    for name in sorted(expected.keys() & tensors.keys()):
        if expected[name] != tensors[name].shape:
            raise ValueError(
                f"{name} must have shape {list(expected[name])}, as config.json says, got {list(tensors[name].shape)} "
                f"({directory})"
            )
    if unexpected:
        raise ValueError(
            f"checkpoint must hold the tensors of {kind} alone, got {list_some(sorted(unexpected))} too ({directory})"
        )
    return loaded


def check_finite(tensors: dict[str, StoredTensor], loaded: list[str], dtype: torch.dtype) -> None:
    """Read every weight once, one tensor at a time, and refuse values that are not finite.

    Args:
        tensors: from `read_stored_tensors`.
        loaded: names from `check_names_and_shapes`.
        dtype: what they will be loaded as; a value that it cannot hold becomes infinite.

    Raises:
        ValueError: a tensor has NaN or an infinity.
    """
    from safetensors import safe_open

    bad = []
    for path in sorted({tensors[name].file for name in loaded}):
        with safe_open(path, "pt") as file:
            for name in loaded:
                if tensors[name].file == path and not _is_finite(file.get_tensor(name), dtype):
                    bad.append(name)
    if bad:
        name = str(dtype).removeprefix("torch.")
        where = tensors[bad[0]].file
        raise ValueError(f"weights must be finite as {name}, got NaN or infinity in {list_some(sorted(bad))} ({where})")


def _is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    if not tensor.numel():
        return True
    # Both are NaN where there is one.
    return bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())


def _expected_shapes(model: nn.Module, tensors: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are on disk, where experts lie one by one unless the checkpoint has them merged."""
    from transformers.core_model_loading import revert_weight_conversion

    whole = model.state_dict()
    apart = {name: weight for name, weight in whole.items() if name not in tensors}
    expected = {name: tuple(weight.shape) for name, weight in whole.items() if name in tensors}
    # A config may promise more experts than could be counted out.
    most = max((weight.shape[0] for name, weight in apart.items() if ".experts." in name), default=0)
    if most > len(tensors):
        raise ValueError(f"n_routed_experts must be at most the {len(tensors)} tensors of the checkpoint, got {most}")
    return expected | {name: tuple(part.shape) for name, part in revert_weight_conversion(model, apart).items()}


def _adjust(model: Any, missing: set[str], unexpected: set[str]) -> tuple[list[str], set[str]]:
    """Take out what the model ties to a tensor that is there, and what transformers knows to ignore."""
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
    # The rules are the model's `_keys_to_ignore_on_load_*` and old checkpoints' buffers; no public call applies them.
    model._adjust_missing_and_unexpected_keys(info)
    for one, other in model.all_tied_weights_keys.items():
        tied = {one, other}
        if not tied <= info.missing_keys:
            info.missing_keys -= tied
    # Layers of multi-token prediction stand behind the others, as many as the config says.
    first = model.config.num_hidden_layers
    drafts = range(first, first + _draft_layers(model))
    ignored = {name for name in info.unexpected_keys if _layer_of(name) in drafts}
    return sorted(info.missing_keys), info.unexpected_keys - ignored


def _draft_layers(model: nn.Module) -> int:
    count = getattr(model.config, "num_nextn_predict_layers", None)
    return count if isinstance(count, int) else 0


def _layer_of(name: str) -> int | None:
    found = re.match(r"model\.layers\.(\d{1,6})\.", name)
    return int(found[1]) if found else None


def _name_method(declared: object) -> str:
    if not isinstance(declared, dict):
        return shown(declared)
    names = [declared[key] for key in ("quant_method", "quant_algo", "format", "fmt") if declared.get(key)]
    return " ".join(printable(name) if isinstance(name, str) else shown(name) for name in names) or "without a method"


def _describe_quantised(found: str, directory: Path) -> str:
    return f"checkpoint must hold weights that are not quantised, got {found} ({directory}): {_ADVICE}"
