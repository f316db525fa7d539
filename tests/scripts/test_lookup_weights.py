"""The checkpoint of the one-GPU servers: its answers are no ties, and depend on all of its attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scripts.served_checks import ask_servers, write_checkpoint
from scripts.served_checks.checkpoints import lookup_weights, quantised_weights

LENGTHS = (1, 2, 9, 65, 300)
STEPS = 8


@pytest.fixture(scope="module", params=["glm", "deepseek", "glm-moe", "deepseek-moe", "glm-fp8", "glm-w4afp8"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint.write_checkpoint(folder, request.param)
    if request.param in write_checkpoint.QUANTISED:
        dequantise(folder)
    return folder


def dequantise(folder):
    """Leave what rounding left of the weights, in bfloat16, and the name of the format in the config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rounds_inputs_for"] = config.pop("quantization_config")["quant_method"]
    path.write_text(json.dumps(config))
    tensors = quantised_weights.dequantise(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def round_inputs(model, form):
    """Round what quantised projections take to FP8, as servers do: by groups of 128 values, for int4 experts by one
    scale. What experts have between their projections is not rounded."""
    quantised = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b", "gate_proj", "up_proj", "down_proj")
    rounded = set()

    def hook(fixed):
        def before(module, inputs):
            groups = inputs[0].float().unflatten(-1, (-1, 128))
            scale = fixed or groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
            values = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            return (values.flatten(-2).to(inputs[0].dtype), *inputs[1:])

        return before

    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in quantised or kind == "experts":
            fixed = quantised_weights.INPUT_SCALES["gate_proj"] if (kind, form) == ("experts", "w4afp8") else None
            module.register_forward_pre_hook(hook(fixed))
            rounded.add(kind)
    assert rounded >= {*quantised, "experts"} - {"kv_a_proj_with_mqa"}


def answer(checkpoint, dtype, hide=lambda positions: positions < 0):
    """Generate greedily after each prompt, with some positions of it hidden; return the best two of every step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    if form := getattr(model.config, "rounds_inputs_for", None):
        round_inputs(model, form)
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
    assert 0 < rounding < 0.15
    assert (best[:, 0] - best[:, 1]).min() > 3 * rounding


def test_losing_some_tokens_of_the_context_changes_answers(checkpoint):
    exact, _ = answer(checkpoint, torch.float32)
    # What one rank of eight would hold.
    lossy, _ = answer(checkpoint, torch.float32, hide=lambda positions: positions % 8 == 5)
    changed = {length for (length, token), (_, other) in zip(exact, lossy) if token != other}
    assert changed == {length for length in LENGTHS if length >= 65}
