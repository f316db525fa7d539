"""What a step's exchanges are predicted to take: through NCCL, and over peer memory."""

from dataclasses import replace

import pytest

from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.steps.step_inputs import measured_inputs
from nsa_dcp.planning.steps.step_model import DecodeSetup, predict_step

GLM = preset_dims("glm-5.2")
SETUP = DecodeSetup()


def step(mode, batch=128, setup=SETUP):
    return predict_step(GLM, setup, measured_inputs(GLM), mode, batch, 32768)


def test_over_peer_memory_one_kernel_stands_for_packing_exchanging_and_merging():
    """The measured table, for the two ranks and 64 heads that it was measured with."""
    two = DecodeSetup(tp_size=2, dcp_size=2, wire="peer")
    for rows, us in [(1, 4.5), (16, 6.8), (64, 13.4), (256, 36.3)]:
        terms = step("tp_dcp", batch=rows, setup=two)
        assert terms["exchange"] == pytest.approx(78 * us)
        assert terms["combine"] == terms["arrange_heads"] == 0
        # Queries are gathered: their projection is not replicated.
        assert terms["gather_q"] > 0
    nccl = step("tp_dcp", batch=64, setup=replace(two, wire="nccl"))
    assert nccl["exchange"] + nccl["combine"] > step("tp_dcp", batch=64, setup=two)["exchange"]
    assert step("tp", setup=two) == step("tp", setup=replace(two, wire="nccl"))
    gathered_again = step("cp_dcp", setup=replace(SETUP, wire="peer", cp_decode_attn_tp=False))
    assert gathered_again["exchange"] > step("cp_dcp", setup=replace(SETUP, wire="peer"))["exchange"]


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (replace(SETUP, wire="infiniband"), "wire must be one of nccl, peer, got 'infiniband'"),
        (replace(SETUP, wire="peer", replicate_q_proj=True), "replicate_q_proj must be off with wire peer"),
    ],
    ids=["unknown", "replicated"],
)
def test_wires_that_no_server_has_are_refused(setup, message):
    with pytest.raises(ValueError, match=message):
        step("tp_dcp", setup=setup)
