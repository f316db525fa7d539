"""Compare, on the GPU, the bytes that sglang's cache writer packs with ours, and read an all-zero tile of both back.

python -m scripts.served_checks.compare_quantiser
"""

import sys

import torch
from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

from nsa_dcp_kernels import pack_latent, unpack_latent

NUM_TOKENS = 100_000


def pack_with_sglang(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """[T, 512] and [T, 64] bfloat16 -> [T, 656] uint8, by sglang's kernel."""
    nope_bytes, rope_bytes = quantize_k_cache_separate(k_nope.unsqueeze(1), k_rope.unsqueeze(1))
    return torch.cat([nope_bytes[:, 0], rope_bytes[:, 0]], dim=-1)


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    spread = torch.exp2(torch.randint(-12, 12, (NUM_TOKENS, 4, 1), generator=generator, device="cuda"))
    k_nope = torch.randn(NUM_TOKENS, 4, 128, generator=generator, device="cuda") * spread
    k_nope = k_nope.reshape(NUM_TOKENS, 512).to(torch.bfloat16)
    k_rope = torch.randn(NUM_TOKENS, 64, generator=generator, device="cuda").to(torch.bfloat16)
    different = int((pack_with_sglang(k_nope, k_rope) != pack_latent(k_nope, k_rope)).sum())
    print(f"{different} of {NUM_TOKENS * 656} bytes differ")
    k_nope[:, 128:256] = 0
    readable = {}
    for name, pack in (("sglang", pack_with_sglang), ("nsa-dcp", pack_latent)):
        tile = unpack_latent(pack(k_nope, k_rope))[:, 128:256]
        readable[name] = bool((tile == 0).all())
        print(f"an all-zero tile of {name}'s is read back as zeros: {readable[name]}")
    sys.exit(different > 0 or not readable["nsa-dcp"])


if __name__ == "__main__":
    main()
