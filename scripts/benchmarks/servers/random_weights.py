"""An sglang plugin for benchmarks: `--load-format dummy` fills in weights of the size that trained ones have.

sglang's own dummy weights, norms included, are within 1e-3 of zero: index scores then nearly tie, selections gather at
one place of a context, and all tokens go to the same experts. The same values come out on every rank, so that what is
replicated stays replicated. Source: sglang 0.5.23, `srt/model_loader/weight_utils.py`, initialize_dummy_weights.
"""

import logging
import multiprocessing
import zlib

import torch

INITIALISED = "nsa-dcp benchmark: random weights filled in"
_TARGET = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: replace the initialiser in the processes that load a model."""
    # The launcher loads none; resolving the hook's target there would import the models for nothing.
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, fill_weights, HookType.REPLACE)


@torch.no_grad()
def fill_weights(model: torch.nn.Module, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
    """Draw every parameter: norms are ones, biases zeros, matrices normal with variance 1 / inputs.

    Args:
        model: its floating-point parameters are overwritten, on their device.
        low, high: of sglang's signature; not used.
        seed: with a parameter's name, of its values.
    """
    count = 0
    for name, parameter in model.named_parameters():
        if not torch.is_floating_point(parameter):
            continue
        values = parameter.data
        if name.endswith("bias"):
            values.zero_()
        elif values.ndim < 2:
            values.fill_(1.0)
        else:
            generator = torch.Generator(device=values.device).manual_seed(seed + zlib.crc32(name.encode()))
            spread = 1.0 if "embed_tokens" in name else values.shape[-1] ** -0.5
            if torch.finfo(values.dtype).bits < 16:
                drawn = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
                values.copy_(drawn.normal_(0.0, spread, generator=generator))
            else:
                values.normal_(0.0, spread, generator=generator)
        count += values.numel()
    logging.getLogger("sglang").warning("%s: %d", INITIALISED, count)
