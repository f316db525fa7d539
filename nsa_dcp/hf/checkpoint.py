"""Opening a checkpoint directory, or saying in one sentence why it cannot be opened."""

import json
import struct
from pathlib import Path

import torch
from torch import nn

from nsa_dcp.config import ARCHITECTURES, ModelShape
from nsa_dcp.hf.tiny import NAMES, write_tiny_checkpoint

COMPUTE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def resolve_checkpoint(model: str, seed: int) -> Path:
    """Turn what `--model` names into a checkpoint directory that is whole.

    Args:
        model: a directory, "tiny-glm-dsa" or "tiny-deepseek-v32".
        seed: of a tiny model's weights.

    Returns:
        The directory.

    Raises:
        ValueError: it is missing, is not a checkpoint, or is truncated.
    """
    if model in NAMES:
        return write_tiny_checkpoint(model, seed)
    directory = Path(model)
    if not directory.is_dir():
        raise ValueError(f"model must be a checkpoint directory or one of {', '.join(NAMES)}, got {model!r}")
    _read_json(directory / "config.json")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index} must map weights to file names, got another weight_map")
        files = sorted(set(weight_map.values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model must hold *.safetensors weights, got none in {directory}")
    for name in files:
        _check_safetensors(directory / name)
    return directory


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"model must be a checkpoint directory with {path.name}, got none in {path.parent}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got a file that is not ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _check_safetensors(path: Path) -> None:
    """Compare a file's size with what its header promises: a broken download is told before memory is spent on it."""
    if not path.exists():
        raise ValueError(f"checkpoint file {path} must exist, since the index names it, got none")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if header_bytes + 8 > size:
            raise ValueError(f"checkpoint file {path} must be whole, got {size} bytes, less than its header")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + header_bytes + max(ends, default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            raise ValueError(f"checkpoint file {path} must be in safetensors format, got another") from None
    if size != expected:
        raise ValueError(f"checkpoint file {path} must hold {expected} bytes, got {size}: it is truncated or damaged")


def read_shape(directory: Path) -> tuple[ModelShape, frozenset[int], int]:
    """Read what a launcher needs to know before any rank starts.

    Returns:
        The model's shape, the ids that end a generation, and the vocabulary size.

    Raises:
        NotImplementedError: the architecture, or its row format, is not served.
    """
    from nsa_dcp.hf.engine import model_shape

    architecture = (_read_json(directory / "config.json").get("architectures") or ["(none named)"])[0]
    if architecture not in ARCHITECTURES:
        # transformers may not even know it; the refusal must not depend on that.
        raise NotImplementedError(
            f"architecture {architecture} is not supported: nsa-dcp serves DeepSeek Sparse Attention models, "
            f"{' and '.join(ARCHITECTURES)}"
        )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    eos = config.eos_token_id
    eos_ids = frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)
    return model_shape(config), eos_ids, config.vocab_size


def read_context_length(directory: Path) -> int | None:
    """Read the most positions that a checkpoint's model was made for; None where it does not say."""
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(directory, local_files_only=True), "max_position_embeddings", None)


def load_model(directory: Path, dtype: str, device: torch.device) -> nn.Module:
    """Load a checkpoint in evaluation mode.

    Args:
        directory: from `resolve_checkpoint`.
        dtype: "float64", "float32" or "bf16": weights and activations.
        device: where.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # The eager experts read which of them are hit back to the host, which no graph can capture.
    on_gpu = "grouped_mm" if dtype == "bf16" else "batched_mm"
    experts = on_gpu if device.type == "cuda" else "eager"
    loaded = "float32" if dtype == "float64" else dtype
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=COMPUTE_DTYPES[loaded], local_files_only=True, experts_implementation=experts
    )
    if dtype == "float64":
        model = model.double()
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(directory: Path) -> object:
    """Load a checkpoint's tokenizer.

    Raises:
        ValueError: the directory has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            "prompts must be lists of token ids for a checkpoint without a tokenizer, got strings "
            f"({directory}: {error})"
        ) from None
