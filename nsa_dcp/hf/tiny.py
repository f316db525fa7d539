"""Tiny models with seeded random weights, written as ordinary checkpoints; the DSA models have real head dimensions.

They exist so that the algorithm can be run and checked anywhere: 512/64 latent and 128 index dimensions, index sharing
between GLM's layers, dense and MoE layers, a byte-pair tokenizer. 8 heads can be split over 1, 2, 4 and 8 ranks; other
counts can be asked for.
"""

import importlib.resources
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    # With 8 heads one key in 256 has no head that answers it and scores exactly 0: ties, which a library's top-k
    # settles in an order of its own.
    "index_n_heads": 16,
    "index_topk": 64,
    "max_position_embeddings": 16384,
    "initializer_range": 0.04,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
# GLM: layers 1 and 3 reuse the selection of layers 0 and 2. DeepSeek-V3.2: every layer owns an indexer.
_MODELS: dict[str, dict[str, Any]] = {
    "tiny-glm-dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "qk_nope_head_dim": 96,
        "v_head_dim": 128,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "tiny-deepseek-v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}
# Two KV heads of 16 query heads: DCP of 2 gains from 4 ranks on, of 4 from 8.
_KV_HEADS = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
_KV_HEAD_MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "tiny-qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "tiny-llama": {"architectures": ["LlamaForCausalLM"]},
    "tiny-glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "tiny-minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
NAMES = tuple(_MODELS)
KV_HEAD_NAMES = tuple(_KV_HEAD_MODELS)


def default_cache_dir() -> Path:
    """Where tiny checkpoints are kept: `nsa-dcp` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsa-dcp"


def write_tiny_checkpoint(name: str, seed: int, cache_dir: Path | None = None, **overrides: object) -> Path:
    """Write a tiny checkpoint, unless it is there already.

    Args:
        name: one of NAMES or KV_HEAD_NAMES.
        seed: of the random weights.
        cache_dir: parent directory; by default `default_cache_dir()`.
        overrides: fields of the model's config that are to differ.

    Returns:
        A directory with config.json, model.safetensors and the tokenizer's files.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in (*NAMES, *KV_HEAD_NAMES):
        raise ValueError(f"name must be one of {', '.join((*NAMES, *KV_HEAD_NAMES))}, got {name!r}")
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    label = "".join(f"-{key}{value}" for key, value in sorted(overrides.items()))
    directory = (cache_dir or default_cache_dir()) / f"{name}-seed{seed}{label}"
    if (directory / "model.safetensors").exists():
        return directory
    own: dict[str, Any] = {**_COMMON, **_MODELS[name]} if name in _MODELS else {**_KV_HEADS, **_KV_HEAD_MODELS[name]}
    fields: dict[str, Any] = {**own, **overrides}
    architecture = getattr(transformers, fields["architectures"][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(architecture.config_class(**fields))
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, so that a checkpoint is never seen half written.
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        disable_progress_bar()
        model.save_pretrained(partial)
        _tokenizer().save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(directory)
    except OSError:
        # Another process may have been first.
        if not (directory / "model.safetensors").exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    with importlib.resources.as_file(importlib.resources.files("nsa_dcp.hf") / "tiny_tokenizer.json") as path:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"})
    return tokenizer
