"""What every test gets: a seed, poisoned `torch.empty`, and skips that say what is needed."""

import functools
import importlib.metadata
import importlib.util
import os
import random
import signal
import socket
from collections.abc import Iterator

import pytest
import torch

from nsa_dcp.testing.poisoned_memory import poisoned_allocations

# Triton decides between compiling and interpreting when it is imported, so before any test imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what it runs in the background with interrupts ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SGLANG_VERSION = "0.5.23"

# Every suite's drawn tests, so that none can forget it: how long an example takes says nothing about the code.
if importlib.util.find_spec("hypothesis"):
    import hypothesis

    hypothesis.settings.register_profile(
        "untimed",
        deadline=None,
        # A drawn test may take a fixture that no example changes: a checkpoint, captured output.
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers():
            reason = _missing(marker)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _poison_uninitialised_memory() -> Iterator[None]:
    with poisoned_allocations():
        yield


def _missing(marker: pytest.Mark) -> str | None:
    """Return what a marked test needs and this machine lacks."""
    if marker.name == "gpu" and not _has_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if marker.name == "multi_gpu" and not _has_ranks(marker.args[0]):
        return f"needs {marker.args[0]} GPUs, or one GPU, NCCL >= 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
    if marker.name == "sglang" and not _has_sglang():
        return f"needs sglang {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}"
    return None


@functools.cache
def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _has_ranks(count: int) -> bool:
    if torch.cuda.device_count() >= count:
        return True
    # torch tells the NCCL that it was built with, not the one that was loaded.
    return torch.cuda.is_available() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@functools.cache
def _has_sglang() -> bool:
    """Importable and of that version; a copy of the package without its metadata is of no known version."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("sglang") is not None and version == SGLANG_VERSION


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
