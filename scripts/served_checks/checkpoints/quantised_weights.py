"""Tensors as published quantised checkpoints hold them: block-FP8 and W4AFP8, as sglang 0.5.23 loads them.

Block-FP8 (`quant_method: fp8`, `weight_block_size: [128, 128]`): a projection's `weight` is [N, K] float8_e4m3fn, and
its `weight_scale_inv` [ceil(N / 128), ceil(K / 128)] float32, by which the block is multiplied. DeepSeek's scales are
powers of two (`scale_fmt: ue8m0`). Embedding, output head, norms, router and the indexer's head weights are as ever.

W4AFP8 (`quant_method: w4afp8`): as that, but the routed experts' weights are int4, two a byte along K, the even column
in the low half: [N, K / 2] int8, and their `weight_scale_inv` is [N, K / 128]. Each routed projection also has one
scale by which its input is divided before it is rounded to FP8; w1, w2 and w3 are gate, down and up there.

Scales that are nearly the same everywhere would hide one that is taken for another block, so neighbouring blocks'
scales differ by up to 16 here. Powers of two: nothing is rounded differently for it.
"""

import re

import torch

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FORMATS = ("fp8", "fp8-ue8m0", "w4afp8")
# What an expert's inputs are divided by, so that they fit FP8: inputs up to 14, and between the projections up to 1.75.
INPUT_SCALES = {"gate_proj": 2.0**-5, "up_proj": 2.0**-5, "down_proj": 2.0**-8}
_PUBLISHED_SHARDS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$|\.indexer\.(wq_b|wk)\.weight$")
_ROUTED = re.compile(r"(.*\.mlp\.experts\.\d+\.)(gate_proj|up_proj|down_proj)\.weight$")


def quantization_config(form: str) -> dict[str, object]:
    """`quantization_config` of config.json. ValueError: `form` is none of FORMATS."""
    if form not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {form!r}")
    found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    if form == "fp8-ue8m0":
        found["scale_fmt"] = "ue8m0"
    if form == "w4afp8":
        found |= {"quant_method": "w4afp8", "group_size": BLOCK}
    return found


def quantise(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Replace the projections' weights by their quantised ones and the scales.

    Args:
        tensors: of a checkpoint, by name.
        form: one of FORMATS.
    """
    quantization_config(form)
    found = {}
    for name, tensor in tensors.items():
        routed = _ROUTED.match(name)
        if form == "w4afp8" and routed:
            packed, scales = to_int4(tensor)
            shard = _PUBLISHED_SHARDS[routed[2]]
            found |= {name: packed, f"{name}_scale_inv": scales}
            found[f"{routed[1]}{shard}.input_scale"] = torch.tensor([INPUT_SCALES[routed[2]]], dtype=torch.bfloat16)
        elif _is_quantised(name):
            weight, scales = to_block_fp8(tensor, powers_of_two=form == "fp8-ue8m0")
            found |= {name: weight, f"{name}_scale_inv": scales}
        else:
            found[name] = tensor
    return found


def dequantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint that `quantise` stored, in bfloat16: what rounding left, without input scales."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale_inv", ".input_scale")):
            continue
        if tensor.dtype == FP8:
            tensor = from_block_fp8(tensor, tensors[f"{name}_scale_inv"]).to(torch.bfloat16)
        elif tensor.dtype == torch.int8:
            tensor = from_int4(tensor, tensors[f"{name}_scale_inv"]).to(torch.bfloat16)
        found[name] = tensor
    return found


def to_block_fp8(weight: torch.Tensor, powers_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> [N, K] float8_e4m3fn, and [ceil(N / 128), ceil(K / 128)] float32 that multiplies it."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX
    if powers_of_two:
        scales = scales.log2().ceil().exp2()
    row, column = torch.meshgrid(*map(torch.arange, scales.shape), indexing="ij")
    scales = scales * 2.0 ** ((3 * row + 2 * column) % 5)
    stored = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return stored.to(FP8).contiguous(), scales


def from_block_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 of what `to_block_fp8` returned."""
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> [N, K / 2] int8 of two int4 each, and [N, K / 128] float32 that multiplies a row's groups of 128.

    ValueError: K is no multiple of 128.
    """
    if weight.shape[1] % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got {weight.shape[1]}")
    groups = weight.float().unflatten(1, (-1, BLOCK))
    # Kernels keep these scales in bfloat16.
    scales = (groups.abs().amax(dim=2).clamp(min=1e-12) / 7).to(torch.bfloat16).float()
    values = (groups / scales.unsqueeze(2)).round().clamp(-8, 7).flatten(1).to(torch.int8)
    return (values[:, 1::2] << 4) | (values[:, 0::2] & 0x0F), scales


def from_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 of what `to_int4` returned."""
    low, high = (packed << 4) >> 4, packed >> 4
    values = torch.stack((low, high), dim=2).flatten(1).float()
    return values * scales.repeat_interleave(BLOCK, 1)


def _is_quantised(name: str) -> bool:
    return _PROJECTION.search(name) is not None and ".weights_proj." not in name and ".eh_proj." not in name
