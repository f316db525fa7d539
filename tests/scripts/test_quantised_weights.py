"""Quantised tensors are what the formats say, and lose no more than their values' width makes them lose."""

import pytest
import torch

from scripts.served_checks.checkpoints import quantised_weights as quantised


def normal(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


@pytest.mark.parametrize("shape", [(128, 128), (576, 1024), (1, 256), (300, 130)])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_a_block_keeps_three_bits_of_mantissa(shape, powers_of_two):
    weight = normal(*shape)
    stored, scales = quantised.to_block_fp8(weight, powers_of_two)
    assert (stored.dtype, stored.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    # Half of the last of four bits; below FP8's normal numbers, half of the smallest step.
    allowed = torch.maximum(weight.abs() / 16, quantised.from_block_fp8(torch.ones(shape), scales) * 2.0**-10)
    assert ((quantised.from_block_fp8(stored, scales) - weight).abs() <= allowed * 1.001).all()
    assert not powers_of_two or (scales.log2() == scales.log2().round()).all()


def test_neighbouring_blocks_have_different_scales():
    _, scales = quantised.to_block_fp8(torch.ones(1024, 1024), powers_of_two=True)
    assert (scales[1:] != scales[:-1]).all() and (scales[:, 1:] != scales[:, :-1]).all()


@pytest.mark.parametrize("shape", [(1, 128), (64, 512)])
def test_int4_keeps_half_a_step_of_each_group(shape):
    weight = normal(*shape)
    packed, scales = quantised.to_int4(weight)
    assert (packed.dtype, packed.shape, scales.shape) == (
        torch.int8,
        (shape[0], shape[1] // 2),
        (shape[0], shape[1] // 128),
    )
    step = scales.repeat_interleave(128, 1)
    assert ((quantised.from_int4(packed, scales) - weight).abs() <= 0.51 * step).all()


def test_the_even_column_is_in_the_low_half_of_a_byte():
    weight = torch.zeros(1, 128)
    weight[0, :4] = torch.tensor([7.0, -7.0, 1.0, -1.0])
    packed, scales = quantised.to_int4(weight)
    assert scales.item() == 1.0
    assert packed.view(torch.uint8)[0, :3].tolist() == [0x97, 0xF1, 0x00]


def test_a_ragged_group_and_an_unknown_format_are_refused():
    with pytest.raises(ValueError, match="multiple of 128, got 130"):
        quantised.to_int4(normal(2, 130))
    with pytest.raises(ValueError, match="format must be one of fp8, fp8-ue8m0, w4afp8, got 'int4'"):
        quantised.quantise({}, "int4")


NAMES = {
    "model.embed_tokens.weight": False,
    "lm_head.weight": False,
    "model.layers.0.input_layernorm.weight": False,
    "model.layers.0.self_attn.q_a_layernorm.weight": False,
    "model.layers.0.self_attn.q_b_proj.weight": True,
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": True,
    "model.layers.0.self_attn.indexer.wk.weight": True,
    "model.layers.0.self_attn.indexer.wq_b.weight": True,
    "model.layers.0.self_attn.indexer.weights_proj.weight": False,
    "model.layers.1.mlp.gate.weight": False,
    "model.layers.1.mlp.shared_experts.up_proj.weight": True,
    "model.layers.1.mlp.experts.3.down_proj.weight": True,
    "model.layers.4.eh_proj.weight": False,
}


@pytest.mark.parametrize("form", quantised.FORMATS)
def test_projections_are_quantised_and_nothing_else(form):
    tensors = {name: normal(128, 256).to(torch.bfloat16) for name in NAMES}
    stored = quantised.quantise(tensors, form)
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert scaled == {name for name, found in NAMES.items() if found}
    int4 = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    assert int4 == ({"model.layers.1.mlp.experts.3.down_proj.weight"} if form == "w4afp8" else set())
    inputs = {name for name in stored if name.endswith("input_scale")}
    assert inputs == ({"model.layers.1.mlp.experts.3.w2.input_scale"} if form == "w4afp8" else set())
    found = quantised.dequantise(stored)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        error = (tensor.float() - tensors[name].float()).abs().max()
        assert (error == 0) if not NAMES[name] else (0 < error < 0.4), name
