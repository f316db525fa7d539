"""sglang's own decode slice and gathered query projection, of block-FP8 and W4AFP8 weights: scales stay with their
blocks."""

from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.sglang_plugin.startup.weight_layout import check_sliced_weights, is_row_major
from scripts.served_checks.checkpoints.quantised_weights import from_block_fp8, to_block_fp8

pytestmark = pytest.mark.sglang

RANKS, HEADS, QK_DIM, V_DIM, Q_RANK, HIDDEN = 4, 8, 256, 256, 512, 384
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMS = {"fp8": BLOCKS, "ue8m0": BLOCKS | {"scale_fmt": "ue8m0"}, "w4afp8": {"quant_method": "w4afp8"}}


def stored(rows, columns, seed):
    """A weight whose blocks differ in size, and its scales."""
    generator = torch.Generator().manual_seed(seed)
    return to_block_fp8(torch.randn(rows, columns, generator=generator), powers_of_two=False)


@pytest.fixture(params=FORMS)
def quant_config(request, publish_rank):
    from sglang.srt.layers.quantization import get_quantization_config

    publish_rank(RANKS, 0, attn_cp_size=RANKS, enable_prefill_cp=True, cp_strategy="interleave")
    config = FORMS[request.param]
    return get_quantization_config(config["quant_method"]).from_config(config)


@pytest.fixture
def make_projection(quant_config):
    """A function that loads sglang's linear layer, whole, from a stored weight."""
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear

    def build(kind, rows, columns, seed):
        linear = {"q_b_proj": ColumnParallelLinear, "o_proj": RowParallelLinear}[kind]
        # Under context parallelism an attention-TP group is one rank, which holds all of it.
        layer = linear(columns, rows, bias=False, quant_config=quant_config, prefix=kind, parallel_group="attn_tp")
        weight, scales = stored(rows, columns, seed)
        layer.weight.weight_loader(layer.weight, weight)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    return build


def dequantised(layer):
    return from_block_fp8(layer.weight.data, layer.weight_scale_inv.data)


def group_of(shards, own):
    """A group whose ranks hold one shard each, and all gather at once."""

    def all_gather(values, dim):
        name = "weight" if values.dtype == torch.float8_e4m3fn else "weight_scale_inv"
        assert torch.equal(values.float(), getattr(own, name).data.float())
        return torch.cat([getattr(shard, name).data for shard in shards], dim=dim)

    return SimpleNamespace(all_gather=all_gather)


@pytest.mark.parametrize("kind", ["q_b_proj", "o_proj"])
def test_a_slice_is_the_slice_of_the_weight_and_the_whole_comes_back(make_projection, monkeypatch, kind):
    from sglang.srt.layers.cp import cp_decode_attn_tp

    monkeypatch.setattr(cp_decode_attn_tp.CpDecodeAttnTpContext, "set_decode_attn_tp", lambda *_: None)
    shape = (HEADS * QK_DIM, Q_RANK) if kind == "q_b_proj" else (HIDDEN, HEADS * V_DIM)
    layer = make_projection(kind, *shape, seed=1)
    whole = dequantised(layer)
    for rank in range(RANKS):
        context = cp_decode_attn_tp.CpDecodeAttnTpContext()
        context.decode_tp_rank, context.decode_tp_size, context.use_decode_attn_tp = rank, RANKS, True
        # Twice: the second time the slices are those that were kept.
        for _ in range(2):
            with context.maybe_use_decode_attn_tp(None, [layer]):
                assert torch.equal(dequantised(layer), whole.chunk(RANKS, dim=0 if kind == "q_b_proj" else 1)[rank])
                assert layer.weight.is_contiguous() and layer.weight_scale_inv.is_contiguous()
            assert torch.equal(dequantised(layer), whole)


def test_the_gathered_query_projection_is_all_ranks_in_order(make_projection):
    from sglang.srt.model_executor.model_runner import _gather_block_fp8_linear, _is_block_fp8

    shards = [make_projection("q_b_proj", HEADS * QK_DIM // RANKS, Q_RANK, seed) for seed in range(RANKS)]
    assert all(_is_block_fp8(shard) for shard in shards)

    for shard in shards:
        gathered = _gather_block_fp8_linear(shard, group_of(shards, shard))
        assert torch.equal(dequantised(gathered), torch.cat([dequantised(each) for each in shards]))
        assert gathered.quant_method is shard.quant_method


@pytest.fixture
def attention(make_projection):
    """Stands for an attention layer: `check_sliced_weights` looks at two of its projections."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layer = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
    torch.nn.Module.__init__(layer)
    layer.q_b_proj = make_projection("q_b_proj", HEADS * QK_DIM, Q_RANK, seed=1)
    layer.o_proj = make_projection("o_proj", HIDDEN, HEADS * V_DIM, seed=2)
    return layer


def test_a_server_with_the_slice_starts_with_these_weights(attention):
    check_sliced_weights(torch.nn.ModuleList([attention]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_server_with_the_slice_starts_with_weights_that_are_not_quantised(publish_rank, dtype):
    """As in a bfloat16 checkpoint: sglang's layers then lack what FP8 notes on them."""
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    publish_rank(RANKS, 0, attn_cp_size=RANKS, enable_prefill_cp=True, cp_strategy="interleave")
    layer = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
    torch.nn.Module.__init__(layer)
    plain = {"bias": False, "params_dtype": dtype, "parallel_group": "attn_tp"}
    layer.q_b_proj = ColumnParallelLinear(Q_RANK, HEADS * QK_DIM, prefix="q_b_proj", **plain)
    layer.o_proj = RowParallelLinear(HEADS * V_DIM, HIDDEN, prefix="o_proj", **plain)
    check_sliced_weights(torch.nn.ModuleList([layer]))
    layer.o_proj.weight = torch.nn.Parameter(layer.o_proj.weight.data.t(), requires_grad=False)
    with pytest.raises(RuntimeError, match="nsa-dcp needs o_proj in bfloat16"):
        check_sliced_weights(torch.nn.ModuleList([layer]))


def _transpose(layer):
    layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)


def _scale_by_row(layer):
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(len(layer.weight), 1), requires_grad=False)


def _pack(layer):
    layer.weight = torch.nn.Parameter(layer.weight.data.view(torch.int32), requires_grad=False)


@pytest.mark.parametrize(
    "spoil",
    [
        _transpose,
        _scale_by_row,
        _pack,
        lambda layer: layer.register_parameter("weight", None),
        lambda layer: setattr(layer.quant_method, "use_marlin", True),
        lambda layer: setattr(layer.quant_method, "weight_block_size", [32, 32]),
        lambda layer: setattr(layer, "quant_method", SimpleNamespace()),
    ],
)
@pytest.mark.parametrize("name", ["q_b_proj", "o_proj"])
def test_a_server_does_not_slice_weights_that_are_stored_otherwise(attention, spoil, name):
    spoil(getattr(attention, name))
    assert not is_row_major(getattr(attention, name))
    with pytest.raises(RuntimeError, match=f"nsa-dcp needs {name} in bfloat16 or in FP8 blocks"):
        check_sliced_weights(torch.nn.ModuleList([attention]))
