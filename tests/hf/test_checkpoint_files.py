"""The files of a checkpoint: how they may be cut up, what is damaged, and what transformers leaves unread."""

import json
import struct
from pathlib import Path

import pytest
import torch
from checkpoint_edits import check_refused, write_json
from safetensors.torch import load_file, save_file

from nsa_dcp.hf.checkpoint import load_model, open_checkpoint

INDEX = "model.safetensors.index.json"


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Cut the one file of weights into shards with an index, as published checkpoints are; returns the weight map."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for part in range(count):
        name = f"model-{part + 1:05}-of-{count:05}.safetensors"
        held = {key: weights[key] for key in sorted(weights)[part::count]}
        save_file(held, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(held, name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_with_an_index_are_served(copy, generate):
    directory = copy()
    whole = load_model(directory, "float32", torch.device("cpu")).state_dict()
    shard(directory)
    assert generate(directory)[2]
    cut = load_model(directory, "float32", torch.device("cpu")).state_dict()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_shards_without_an_index_are_refused(copy, generate):
    directory = copy()
    shard(directory)
    (directory / INDEX).unlink()
    check_refused(generate(directory), f"or {INDEX} beside its shards, got model-00001-of-00003.safetensors")


def test_an_index_that_names_what_is_not_there_is_refused(copy, generate):
    directory = copy()
    weight_map = shard(directory)
    write_index(directory, {**weight_map, "lm_head.weight": "model-00004-of-00004.safetensors"})
    check_refused(generate(directory), "model-00004-of-00004.safetensors must exist, since the index names it")
    write_index(directory, {**weight_map, "model.layers.7.x": "model-00002-of-00003.safetensors"})
    check_refused(generate(directory), f"must hold what {INDEX} says, got none of model.layers.7.x")
    other = {"model-00001-of-00003.safetensors": "model-00002-of-00003.safetensors"}
    write_index(directory, {name: other.get(file, file) for name, file in weight_map.items()})
    check_refused(generate(directory), "model-00002-of-00003.safetensors must hold what", "more")
    for broken in ([], {"a": 1}, {"a": ""}, "x", None):
        write_index(directory, broken)
        check_refused(generate(directory), f"{INDEX} must map weights to file names")
    (directory / INDEX).write_text("[")
    check_refused(generate(directory), f"{INDEX} must be JSON")
    write_index(directory, {})
    check_refused(generate(directory), f"or {INDEX} beside its shards, got model-00001")


def test_a_tensor_in_two_shards_is_refused(copy, generate):
    directory = copy()
    shard(directory)
    path = directory / "model-00002-of-00003.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.zeros(1024, 256)}, path, {"format": "pt"})
    check_refused(generate(directory), "must each hold tensors of their own, got lm_head.weight in model-00002")


def test_the_one_file_is_what_counts_beside_an_index_of_others(copy, generate):
    """transformers reads it and not the shards."""
    directory = copy()
    whole = (directory / "model.safetensors").read_bytes()
    shard(directory)
    (directory / "model.safetensors").write_bytes(whole)
    assert generate(directory)[2]
    (directory / "model.safetensors").write_bytes(whole[:-4])
    check_refused(generate(directory), "model.safetensors must hold", "it is truncated or damaged")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_weights_of_another_format_are_refused_by_their_name(name, copy, generate):
    directory = copy()
    (directory / "model.safetensors").rename(directory / name)
    check_refused(generate(directory), f"must hold *.safetensors weights, got {name}, which must be converted to")


def test_no_weights_are_refused(copy, generate):
    directory = copy()
    (directory / "model.safetensors").unlink()
    check_refused(generate(directory), "model must hold *.safetensors weights, got none in")


def damage_offsets(content: bytes) -> bytes:
    """Two tensors that claim the same bytes."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode().ljust(length)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


DAMAGE = {
    "empty": lambda content: b"",
    "cut in the length": lambda content: content[:5],
    "cut in the header": lambda content: content[:100],
    "cut in the values": lambda content: content[:-1],
    "too long": lambda content: content + b"\0",
    "a page of HTML": lambda content: b"<!DOCTYPE html><html><body>Not found</body></html>",
    "a pointer of Git LFS": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "no JSON": lambda content: struct.pack("<Q", 4) + b"[[[[",
    "an unknown dtype": lambda content: content.replace(b'"F32"', b'"Q32"', 1),
    "shared bytes": damage_offsets,
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "a shard"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_named(damage, sharded, copy, generate):
    directory = copy()
    if sharded:
        shard(directory)
    path = directory / ("model-00002-of-00003.safetensors" if sharded else "model.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    check_refused(generate(directory), f"checkpoint file {path} must ")


def test_an_adapter_is_refused(copy, generate):
    directory = copy()
    (directory / "adapter_config.json").write_text("{}")
    check_refused(generate(directory), "model must be a whole checkpoint, got adapter_config.json")


IGNORED = {
    "the published draft layer": ("tiny-glm-dsa", "model.layers.78.mlp.up_proj.weight", {}),
    "DeepSeek's": ("tiny-deepseek-v32", "model.layers.61.eh_proj.weight_scale_inv", {}),
    "a draft layer of the config": ("tiny-glm-dsa", "model.layers.4.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    "two of them": ("tiny-deepseek-v32", "model.layers.5.eh_proj.weight", {"num_nextn_predict_layers": 2}),
    "an old buffer": ("tiny-glm-dsa", "model.layers.1.self_attn.rotary_emb.inv_freq", {}),
}


@pytest.mark.parametrize("name, tensor, fields", IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_tensors_that_transformers_leaves_unread_are_left_unread(name, tensor, fields, value, copy, generate):
    assert generate(copy(lambda weights: weights.update({tensor: torch.full((3,), value)}), name, **fields))[2]


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_of_two_tied_tensors_suffices(absent, copy, generate):
    directory = copy(lambda weights: weights.pop(absent), tie_word_embeddings=True)
    assert generate(directory)[2]
    model = load_model(directory, "float32", torch.device("cpu"))
    present = {"lm_head.weight", "model.embed_tokens.weight"}.difference([absent]).pop()
    expected = load_file(directory / "model.safetensors")[present]
    assert torch.equal(model.lm_head.weight, expected) and torch.equal(model.model.embed_tokens.weight, expected)
    write_json(directory / "config.json", tie_word_embeddings=False)
    check_refused(generate(directory), f"got none of {absent}")


def test_experts_may_lie_merged(copy, generate):
    def merge(weights):
        for layer in (2, 3):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([weights.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
                for part in ("gate", "up", "down")
            )
            weights[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
            weights[f"{prefix}.down_proj"] = down

    apart = load_model(copy(), "float32", torch.device("cpu")).state_dict()
    directory = copy(merge, into="merged")
    assert generate(directory)[2]
    merged = load_model(directory, "float32", torch.device("cpu")).state_dict()
    assert all(torch.equal(apart[name], merged[name]) for name in apart)


def test_a_rank_does_not_take_weights_that_transformers_started_at_random(copy):
    """Its own word counts too, whatever was found before."""
    directory = copy(lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"must hold every tensor of its model, got none of model\.norm\.weight"):
        load_model(directory, "float32", torch.device("cpu"))


def test_deepseeks_layers_select_as_its_model_does_whatever_indexer_types_says(copy):
    directory = copy(name="tiny-deepseek-v32", indexer_types=["full", "shared", "full", "shared"])
    assert open_checkpoint(directory).shape.indexer_layers == (0, 1, 2, 3)
