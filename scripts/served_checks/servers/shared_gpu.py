"""An sglang plugin for ask_servers.py: all ranks run on the first visible GPU.

sglang 0.5.23 gives each rank a GPU of its own and takes no --gpu-id-step below 1. Every process that starts ranks
passes their GPU through one function, which is replaced here.
"""

import contextlib
from collections.abc import Iterator

# For sglang's group of entry points, `sglang.srt.plugins`.
PLUGIN = {"shared_gpu": "scripts.served_checks.servers.shared_gpu:register"}
TARGET = "sglang.srt.utils.common.maybe_reindex_device_id"
# NCCL from 2.30 on lets ranks share a GPU. With more than a few channels their kernels starve each other.
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_P2P_NCHANNELS": "2",
    "NCCL_NVLS_ENABLE": "0",
    # Each rank sees the memory that the others take.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


@contextlib.contextmanager
def use_first_gpu(gpu_id: int) -> Iterator[int]:
    """Stands for sglang's function of that signature."""
    yield 0


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, use_first_gpu, HookType.REPLACE)
