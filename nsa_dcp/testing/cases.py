"""Inputs that a careless implementation gets wrong: poisoned, empty, tied, saturating, and of odd sizes."""

import math

import torch

DCP_SIZES = (1, 2, 3, 4, 8)
INTERLEAVE_SIZES = (1, 2, 64)
ODD_SIZES = (1, 63, 65, 100)
# Left to show that an entry was never written, or read where it must not be.
POISON_INT = torch.iinfo(torch.int32).max
POISON_BYTE = 0xFF  # NaN as float8_e4m3, and in runs of two and four as bfloat16 and float32


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with what reads as NaN (bytes) or is out of range everywhere (integers); return the tensor."""
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    if tensor.dtype == torch.uint8:
        return tensor.fill_(POISON_BYTE)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(min(POISON_INT, torch.iinfo(tensor.dtype).max))


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return a new poisoned tensor."""
    return poison_(torch.zeros(shape, dtype=dtype, device=device))


def draw_selection(num_tokens: int, width: int, num_slots: int, seed: int = 0, *, holes: bool = True) -> torch.Tensor:
    """Draw distinct slots per token, in no order.

    Args:
        num_tokens: T. Row 0 is full, row 1 holds nothing, the others hold any number.
        width: K.
        num_slots: slots are below it; the last one is selected by row 0.
        seed: of the draw.
        holes: -1 anywhere in a row, not only at its end.

    Returns:
        [T, K] int32.
    """
    generator = torch.Generator().manual_seed(seed)
    selection = torch.full((num_tokens, width), -1, dtype=torch.int32)
    for token in range(num_tokens):
        most = min(width, num_slots)
        count = {0: most, 1: 0}.get(token, int(torch.randint(0, most + 1, (), generator=generator)))
        slots = torch.randperm(num_slots, generator=generator)[:count].to(torch.int32)
        if token == 0 and count and num_slots - 1 not in slots:
            slots[0] = num_slots - 1
        columns = torch.randperm(width, generator=generator)[:count] if holes else torch.arange(count)
        selection[token, columns] = slots
    return selection


def draw_partials(
    num_partials: int, num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw partial results of which a third are empty, in every way that kernels spell "empty", NaN underneath.

    Row (token 0, head 0) is empty everywhere; row (token 0, last head) is held by the last partial alone.

    Returns:
        out: [N, T, H, D] of `dtype`, NaN where empty.
        lse: [N, T, H] float32 (float64 with float64), natural log; -inf, +inf or NaN where empty.
    """
    generator = torch.Generator().manual_seed(seed)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.randn(num_partials, num_tokens, num_heads, dim, generator=generator, dtype=acc).to(dtype)
    lse = 4 * torch.randn(num_partials, num_tokens, num_heads, generator=generator, dtype=acc)
    empty = torch.rand(lse.shape, generator=generator) < 1 / 3
    if lse.numel():
        empty[:, 0, -1] = True
        empty[-1, 0, -1] = False
        if num_heads > 1:
            empty[:, 0, 0] = True
    spelling = torch.tensor([-math.inf, math.inf, math.nan], dtype=acc)
    spelled = spelling[torch.randint(0, 3, lse.shape, generator=generator)]
    return out.masked_fill(empty.unsqueeze(-1), math.nan), torch.where(empty, spelled, lse)


def draw_latents(
    num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw latents whose tiles of 128 include zeros, subnormal scales, a lone outlier, huge and tiny values.

    Returns:
        k_nope: [T, 512], k_rope: [T, 64], both of `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.randn(num_tokens, 4, 128, generator=generator)
    kinds = [
        torch.zeros(128),
        torch.full((128,), 1e-40),
        torch.cat([torch.tensor([-1000.0]), torch.full((127,), 1e-3)]),
        torch.full((128,), 3e38),
        torch.linspace(-448, 448, 128),
        2.0**-126 * torch.linspace(-448, 448, 128),
    ]
    for index, tile in enumerate(kinds):
        token, place = divmod(index * 3, 4)
        if token < num_tokens:
            tiles[token, place] = tile
    rope = torch.randn(num_tokens, 64, generator=generator)
    return tiles.reshape(num_tokens, 512).to(dtype), rope.to(dtype)


def exact_latents(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw latents that quantise without rounding: float8 values times a power of two per tile of 128, peak 448.

    What rounds nowhere has the same bytes on a GPU, in the reference, and in Triton's interpreter, which does not round
    to nearest even.

    Returns:
        k_nope: [T, 512], k_rope: [T, 64], float32; every value is exact in bfloat16 too.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 127, (num_tokens, 4, 128), generator=generator, dtype=torch.uint8)
    bits[..., 0] = 126  # 448
    sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.uint8) << 7
    values = (bits | sign).view(torch.float8_e4m3fn).float()
    power = torch.randint(-20, 20, (num_tokens, 4, 1), generator=generator).float()
    tiles = values * torch.exp2(power)
    if num_tokens:
        tiles[0, 0] = 0.0
    rope = torch.randint(-256, 257, (num_tokens, 64), generator=generator).float()
    return tiles.reshape(num_tokens, 512), rope
