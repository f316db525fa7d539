"""The checkpoint of the one-GPU servers: its answers are no ties, and depend on all of its attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.served_checks import ask_servers, lookup_weights, write_checkpoint

LENGTHS = (1, 2, 9, 65, 300)
STEPS = 8


@pytest.fixture(scope="module", params=["glm", "deepseek", "glm-moe", "deepseek-moe"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint.write_checkpoint(folder, request.param)
    return folder


def answer(checkpoint, dtype, hide=lambda positions: positions < 0):
    """Generate greedily after each prompt, with some positions of it hidden; return the best two of every step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    answers, best = [], []
    for length in LENGTHS:
        ids = torch.tensor([ask_servers.prompt(length, 4)])
        seen = (~hide(torch.arange(length))).long().unsqueeze(0)
        cache = None
        for _ in range(STEPS):
            with torch.no_grad():
                step = model(ids, cache=cache, attention_mask=seen, use_cache=True)
            cache = step.cache
            two = step.logits[0, -1].float().log_softmax(-1).topk(2)
            best.append(two.values)
            ids = two.indices[:1].unsqueeze(0)
            seen = torch.cat((seen, torch.ones(1, 1, dtype=torch.long)), dim=1)
            answers.append((length, two.indices[0].item()))
    return answers, torch.stack(best)


def test_the_prompts_are_of_the_model_s_vocabulary():
    assert (write_checkpoint.COMMON["vocab_size"], lookup_weights.BOS) == (ask_servers.VOCAB, ask_servers.BOS)


def test_no_answer_is_a_close_call_and_bfloat16_gives_the_same(checkpoint):
    exact, best = answer(checkpoint, torch.float32)
    rounded, rounded_best = answer(checkpoint, torch.bfloat16)
    assert rounded == exact
    rounding = (rounded_best[:, 0] - best[:, 0]).abs().max()
    assert 0 < rounding < 0.1
    assert (best[:, 0] - best[:, 1]).min() > 3 * rounding


def test_losing_some_tokens_of_the_context_changes_answers(checkpoint):
    exact, _ = answer(checkpoint, torch.float32)
    # What one rank of eight would hold.
    lossy, _ = answer(checkpoint, torch.float32, hide=lambda positions: positions % 8 == 5)
    changed = {length for (length, token), (_, other) in zip(exact, lossy) if token != other}
    assert changed == {length for length in LENGTHS if length >= 65}
