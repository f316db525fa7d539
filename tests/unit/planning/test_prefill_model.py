"""The predicted layer of a prefill chunk: what was measured comes back, bytes are the benchmark's, by rows is a sum."""

import pytest

from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.steps.prefill_model import mean_received, predict_chunk
from scripts.benchmarks.prefill_chunk.cases import PrefillCase, received_bytes, sum_layers

GLM = preset_dims("glm-5.2")


@pytest.mark.parametrize(
    ("dcp_size", "prefix", "by_queries", "cp_dcp"),
    [(8, 0, 6.60, 0.54), (8, 131072, 7.35, 1.74), (4, 32768, 6.85, 1.53), (2, 524288, 18.5, 15.1)],
)
def test_what_was_measured_comes_back(dcp_size, prefix, by_queries, cp_dcp):
    """Layers of docs/performance/prefill.md, milliseconds."""
    layer = predict_chunk(GLM, dcp_size, 8192, prefix)
    assert layer["tp_dcp"] / 1e3 == pytest.approx(by_queries, rel=0.005)
    assert layer["cp_dcp"] / 1e3 == pytest.approx(cp_dcp, rel=0.01)


def test_by_rows_is_cp_dcps_kernels_two_transpositions_and_its_own_bytes():
    layer = predict_chunk(GLM, 8, 8192, 32768, link_gbs=200.0)
    transposed = 2 * 1024 * 64 * (576 + 512) * 2 / 1670e3
    assert layer["tp_dcp_rows"] == pytest.approx(730 + transposed + 148.292e6 / 200e3, rel=1e-4)
    assert layer["cp_dcp"] == pytest.approx(730 + mean_received(GLM, 8, 8192, 32768)["cp_dcp"] / 200e3)


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
@pytest.mark.parametrize("chunk", [256, 8192])
@pytest.mark.parametrize("prefix", [0, 100_000, 1040384])
def test_bytes_are_those_of_the_benchmark(dcp_size, chunk, prefix):
    received = received_bytes(PrefillCase("glm-5.2", dcp_size, chunk, prefix), GLM)
    for mode, mean in mean_received(GLM, dcp_size, chunk, prefix).items():
        assert mean == pytest.approx(sum_layers(received[mode], GLM)["mean"]), mode


def test_kernels_are_linear_in_rows_and_between_prefixes():
    first, second, between = (predict_chunk(GLM, 8, 4096, prefix, 1e12) for prefix in (32768, 131072, 81920))
    for mode in ("tp_dcp", "cp_dcp"):
        assert between[mode] == pytest.approx((first[mode] + second[mode]) / 2)
        assert predict_chunk(GLM, 8, 8192, 81920, 1e12)[mode] == pytest.approx(2 * between[mode])


@pytest.mark.parametrize(
    ("model", "dcp_size", "chunk", "prefix", "message"),
    [
        ("deepseek-v3.2", 8, 8192, 0, r"glm-5.2 and one of 2, 4, 8, whose kernels were measured, got deepseek-v3.2"),
        ("glm-5.2", 3, 8192, 0, r"whose kernels were measured, got glm-5.2 and 3"),
        ("glm-5.2", 8, 0, 5, r"must make 1 to 1048576 tokens, got 0 after 5"),
        ("glm-5.2", 8, 1, -1, r"got 1 after -1"),
        ("glm-5.2", 8, 1, 1048576, r"got 1 after 1048576"),
    ],
)
def test_what_was_never_measured_is_refused(model, dcp_size, chunk, prefix, message):
    with pytest.raises(ValueError, match=message):
        predict_chunk(preset_dims(model), dcp_size, chunk, prefix)
