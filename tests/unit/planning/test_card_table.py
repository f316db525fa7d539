"""`nsa-dcp plan` with a model alone: the usual cards, a row each, with what was assumed said."""

import argparse
import json

import pytest

from nsa_dcp.planning import capacity
from nsa_dcp.planning.budget import GIB
from nsa_dcp.planning.capacity_cli import add_plan_parser
from nsa_dcp.planning.card_table import plan_cards
from nsa_dcp.planning.checkpoints import CARDS, CHECKPOINTS, weights_gib
from nsa_dcp.planning.dimensions import PRESETS, preset_dims


@pytest.fixture
def run(capsys):
    """Run `plan` as typed; returns (exit status, stdout, stderr)."""

    def _run(*argv):
        parser = argparse.ArgumentParser(prog="nsa-dcp")
        add_plan_parser(parser.add_subparsers(required=True))
        args = parser.parse_args(["plan", *(str(word) for word in argv)])
        status = args.run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return _run


def test_a_preset_alone_is_answered_for_every_card_and_checkpoint(run):
    for preset in PRESETS:
        status, out, err = run("--preset", preset)
        assert (status, err) == (0, "")
        for card in CARDS:
            shown = [line for line in out.splitlines() if f"  {card.name}  " in line]
            assert len(shown) == len(CHECKPOINTS[preset])
        assert "assumed" in out and "--weights-gib" in out and "--mem-fraction-static 0.85" in out


def test_weights_are_those_of_the_published_sizes():
    """GLM-5 is published as 744 billion weights, DeepSeek-V3 as 671 billion; in FP8 a weight is a byte."""
    for preset, billions in (("glm-5.2", 744), ("deepseek-v3.2", 671)):
        (whole,) = [one for one in CHECKPOINTS[preset] if one.name == "FP8"]
        counted = weights_gib(preset_dims(preset), whole.expert_bytes, 1) * GIB / 1e9
        assert counted == pytest.approx(billions, rel=0.01)


def test_dcp_adds_the_query_projection_that_is_replicated():
    model = preset_dims("glm-5.2")
    query = 78 * (2048 * 64 * (192 + 64) + 2 * 512 * 64 * 192)
    for size in (1, 2, 4, 8):
        added = (weights_gib(model, 0.5, 8, size) - weights_gib(model, 0.5, 8)) * GIB
        assert added == pytest.approx(query * (size - 1) / 8)


def test_a_row_is_the_plan_of_its_card():
    model = preset_dims("glm-5.2")
    (row,) = [row for row in plan_cards(model) if (row.card, row.checkpoint) == ("H200 141", "W4AFP8")]
    for size, tokens in row.tokens.items():
        weights = weights_gib(model, 0.5 + 2 / 128, 8, size)
        alone = capacity.plan(
            model, gpu_memory_gib=139, mem_fraction_static=0.85, weights_gib=weights, dcp_sizes=(size,)
        ).rows[0]
        assert tokens == alone.tokens_per_node
    assert list(row.tokens) == [1, 2, 4, 8]
    assert row.tokens[8] > row.tokens[4] > row.tokens[2] > row.tokens[1] > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_each_row_shows_what_the_other_choice_of_index_keys_would_hold(run, preset):
    model = preset_dims(preset)
    replicated, sharded = (plan_cards(model, index_keys=choice) for choice in ("replicated", "sharded"))
    for one, other in zip(replicated, sharded, strict=True):
        assert (one.tokens, one.other_tokens) == (other.other_tokens, other.tokens)
        assert one.tokens[1] == other.tokens[1]
        assert one.tokens[8] < other.tokens[8] or not other.tokens[8]
    held = max(row.tokens[8] for row in sharded)
    assert (
        f"{held:,}" in run("--preset", preset)[1]
        and f"{held:,}" in run("--preset", preset, "--index-keys", "sharded")[1]
    )


def test_weights_that_leave_no_room_are_a_row_and_not_an_error(run):
    status, out, _ = run("--preset", "deepseek-v3.2", "--json")
    rows = {row["card"]: row for row in json.loads(out)["cards"]}
    assert status == 0
    assert set(rows["H100 80"]["tokens"].values()) == {0} and rows["H200 141"]["tokens"]["8"] > 0
    status, out, _ = run("--preset", "deepseek-v3.2")
    assert "no room" in next(line for line in out.splitlines() if "H100 80" in line)


@pytest.mark.parametrize("fraction", ["0.5", "0.6", "0.603", "0.606", "0.61"])
def test_weights_that_leave_almost_no_room_are_a_row_too(run, fraction):
    status, out, err = run("--preset", "glm-5.2", "--mem-fraction-static", fraction, "--weights-gib", "47")
    assert (status, err) == (0, "") and "H100 80" in out


def test_what_does_not_fit_beside_the_pools_is_marked(run):
    marked = run("--preset", "glm-5.2", "--mem-fraction-static", "0.97")[1]
    assert " !" in marked and "too much; lower --mem-fraction-static" in marked
    assert "!" not in run("--preset", "glm-5.2")[1]
    crowded = run("--preset", "glm-5.2", "--max-running-requests", "4096")[1]
    assert "up to 4096 requests" in crowded and " !" in crowded


def test_given_weights_are_taken_as_they_are(run):
    status, out, _ = run("--preset", "glm-5.2", "--weights-gib", "50", "--dcp-size", "8", "--kv-cache-dtype", "bf16")
    assert status == 0 and "as given" in out and "assumed: counted" not in out and "bfloat16" in out
    plain = run("--preset", "glm-5.2", "--weights-gib", "50", "--dcp-size", "8", "--json")[1]
    (card,) = [row for row in json.loads(plain)["cards"] if row["card"] == "H20 96"]
    alone = capacity.plan(
        preset_dims("glm-5.2"), gpu_memory_gib=94, mem_fraction_static=0.85, weights_gib=50, dcp_sizes=(8,)
    ).rows[0]
    assert card["tokens"] == {"8": alone.tokens_per_node} and card["weights_gib"] == 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pp-size", "2"), "gpu_memory_gib must be given with pp_size"),
        (("--attn-dp-size", "2"), "gpu_memory_gib must be given with attn_dp_size"),
        (("--plot", "x.png"), "gpu_memory_gib must be given with plot"),
        (("--draft-layers", "1"), "gpu_memory_gib must be given with draft_layers"),
        (("--gpus-per-node", "16"), "gpu_memory_gib must be given with gpus_per_node"),
        (("--weights-gib", "200"), "must exceed weights_gib"),
        (("--weights-gib", "-1"), "weights_gib must be 0 or more"),
        (("--mem-fraction-static", "1.5"), "mem_fraction_static must be at most 1"),
        (("--dcp-size", "3"), "dcp_size must divide"),
        (("--dcp-size", "0"), "dcp_size must be a positive integer"),
        (("--tp-size", "0"), "tp_size must be a positive integer"),
        (("--max-running-requests", "0"), "max_running_requests must be a positive integer"),
    ],
)
def test_what_the_table_cannot_answer_is_one_sentence(run, words, message):
    status, out, err = run("--preset", "glm-5.2", *words)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_a_config_needs_its_weights(run, tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= {"index_topk": 2048, "index_head_dim": 128, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = run("--config", tmp_path)
    assert status == 2 and "gpu_memory_gib must be given for a config" in err
    status, out, _ = run("--config", tmp_path, "--weights-gib", "10")
    assert status == 0 and "H20 96" in out
