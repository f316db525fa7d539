"""Opening a checkpoint directory, or saying in one sentence why it cannot be opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_dcp.config import ModelShape
from nsa_dcp.hf.checkpoint_files import StoredTensor, list_some, read_stored_tensors
from nsa_dcp.hf.generation_defaults import read_eos_ids
from nsa_dcp.hf.model_config import build_unloaded_model, read_model_config
from nsa_dcp.hf.tiny import KV_HEAD_NAMES, NAMES, write_tiny_checkpoint
from nsa_dcp.hf.weight_checks import check_finite, check_names_and_shapes, check_not_quantised
from nsa_dcp.kv_heads.config import KvHeadShape
from nsa_dcp.planning.config_fields import read_json_object

COMPUTE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# transformers would load the model that an adapter was made for, from wherever that is.
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that holds its model's weights, as far as headers tell; their values are not read yet.

    shape: the model's. eos_ids: ids that end a generation. vocab_size: tokens. context_length: positions that the model
    was made for. tensors, loaded: what its files hold, and the names of what will be loaded.
    """

    shape: ModelShape | KvHeadShape
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    tensors: dict[str, StoredTensor]
    loaded: list[str]

    def check_values(self, dtype: str) -> None:
        """Read every weight once. ValueError: one is not finite as `dtype`, a key of COMPUTE_DTYPES."""
        check_finite(self.tensors, self.loaded, _loaded_dtype(dtype))


def resolve_checkpoint(model: str, seed: int) -> Path:
    """Turn what `--model` names into a checkpoint directory.

    Args:
        model: a directory, or one of `tiny.NAMES`.
        seed: of a tiny model's weights.

    Returns:
        The directory.

    Raises:
        ValueError: it is missing, or not a directory.
    """
    names = (*NAMES, *KV_HEAD_NAMES)
    if model in names:
        return write_tiny_checkpoint(model, seed)
    directory = Path(model)
    if not directory.is_dir():
        raise ValueError(f"model must be a checkpoint directory or one of {', '.join(names)}, got {model!r}")
    return directory


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read everything about a checkpoint that can be known before its weights are read.

    Args:
        directory: from `resolve_checkpoint`.

    Raises:
        ValueError: a file is missing or damaged, or does not hold what the others promise.
        NotImplementedError: the architecture, its row format or its RoPE is not served.
    """
    from nsa_dcp.hf.families.choice import model_shape

    if not (directory / "config.json").exists():
        raise ValueError(f"model must be a checkpoint directory with config.json, got none in {directory}")
    if (directory / _ADAPTER).exists():
        raise ValueError(f"model must be a whole checkpoint, got {_ADAPTER} in {directory}: merge the adapter first")
    fields = read_json_object(directory / "config.json", "config.json")
    check_not_quantised(fields, directory)
    config = read_model_config(fields, directory)
    tensors = read_stored_tensors(directory)
    if config.num_hidden_layers > len(tensors):
        raise ValueError(
            f"num_hidden_layers must be at most the {len(tensors)} tensors of the checkpoint, got "
            f"{config.num_hidden_layers} ({directory})"
        )
    model = build_unloaded_model(config, directory)
    return Checkpoint(
        shape=model_shape(model),
        eos_ids=read_eos_ids(directory),
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        tensors=tensors,
        loaded=check_names_and_shapes(model, tensors, directory),
    )


def load_model(directory: Path, dtype: str, device: torch.device) -> nn.Module:
    """Load a checkpoint in evaluation mode.

    Args:
        directory: from `resolve_checkpoint`.
        dtype: "float64", "float32" or "bfloat16": weights and activations.
        device: where.

    Raises:
        ValueError: transformers would start some of its weights at random.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # The eager experts read which of them are hit back to the host, which no graph can capture.
    on_gpu = "grouped_mm" if dtype == "bfloat16" else "batched_mm"
    experts = on_gpu if device.type == "cuda" else "eager"
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=_loaded_dtype(dtype),
        local_files_only=True,
        experts_implementation=experts,
        output_loading_info=True,
    )
    # `open_checkpoint` has compared the names; this is the library's own word on what it did.
    if unset := sorted(report["missing_keys"] | {entry[0] for entry in report["mismatched_keys"]}):
        raise ValueError(
            f"checkpoint must hold every tensor of its model, got none of {list_some(unset)} ({directory})"
        )
    if dtype == "float64":
        model = model.double()
    return model.to(device).eval().requires_grad_(False)


def _loaded_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "float64" else COMPUTE_DTYPES[dtype]


def load_tokenizer(directory: Path) -> Any:
    """Load a checkpoint's tokenizer.

    Raises:
        ValueError: the directory has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # Whatever a damaged file meets inside the library.
        reason = " ".join(str(error).split())
        raise ValueError(
            "prompts must be lists of token ids for a checkpoint without a tokenizer, got strings "
            f"({directory}: {reason})"
        ) from None
