"""Where a kernel runs: on the GPU where there is one, in Triton's interpreter elsewhere."""

import pytest
import torch

ON_GPU = pytest.mark.gpu


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return _launchable(request.param)


# The interpreter truncates where a GPU rounds to bfloat16 and float16, so arithmetic is compared in float32 there.
@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreter-float32"),
        pytest.param(("cuda", torch.float32), id="gpu-float32", marks=ON_GPU),
        pytest.param(("cuda", torch.bfloat16), id="gpu-bfloat16", marks=ON_GPU),
        pytest.param(("cuda", torch.float16), id="gpu-float16", marks=ON_GPU),
    ]
)
def device_dtype(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    device, dtype = request.param
    return _launchable(device), dtype


def _launchable(device: str) -> str:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU: the compiled kernel is tested there")
    return device
