"""TP-DCP prefill by rows on whole models: equal to the unmodified model in every schedule, and the bytes that each rank
receives equal to those that the way is chosen by.

Real ranks. Schedules: chunks; and steps as a server mixes them, prompts of any length behind cached prefixes beside
decode tokens, in changing order, on pages that requests share.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from nsa_dcp import comm
from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf import engine as engine_module
from nsa_dcp.hf.engine import Engine
from nsa_dcp.hf.step import Extend, build_step
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.recorded_generation import make_engine

GLM, DEEPSEEK = "tiny-glm-dsa", "tiny-deepseek-v32"
NEW_TOKENS = 2
PAGE = 64
CONFIGS = {
    "dcp1": DcpConfig(),
    "dcp2": DcpConfig(tp_size=2, dcp_size=2),
    "dcp3": DcpConfig(tp_size=3, dcp_size=3),
    "dcp4": DcpConfig(tp_size=4, dcp_size=4),
    "dcp8": DcpConfig(tp_size=8, dcp_size=8),
    "tp4-dcp2": DcpConfig(tp_size=4, dcp_size=2),
}
# Compute dtype of each cache: with a rounding one float64, so that no sum's order moves a byte.
COMPUTE = {"float32": "float32", "bfloat16": "float64", "fp8_e4m3": "float64"}


@dataclass(frozen=True)
class Run:
    """A run. schedule: tokens of a chunk (5: of short prompts); "mixed"; "shared", mixed and on a page in common."""

    way: str
    schedule: int | str


RUNS = (
    # Short prompts: fewer rows than 8 ranks.
    Run("rows", 5),
    # Ragged shares, several requests in a chunk, prefixes on and off page edges.
    Run("rows", 100),
    Run("rows", "shared"),
    # Both ways on one cache, in turn.
    Run("auto", "mixed"),
)
SHORT = slice(1, 3)


def make_prompts(dcp_size: int) -> list[list[int]]:
    """Around pages and widened pages; the last starts with the first one's first widened page."""
    generator = torch.Generator().manual_seed(11)
    page = PAGE * dcp_size
    lens = (page + 9, 1, 7, 71, 21)
    prompts = [torch.randint(3, 1024, (n,), generator=generator).tolist() for n in lens]
    prompts[4] = prompts[0][:page] + prompts[4]
    return prompts


# --- what every rank runs -------------------------------------------------------------------------------------------


class Received:
    """Bytes that this rank received from others since it was last asked, by the collective that brought them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        gather, exchange, scatter = comm._all_gather_single, dist.all_to_all_single, comm._reduce_scatter_single

        def counted_gather(output, local, group=None):
            self.bytes["gathered"] += output.nbytes - local.nbytes
            return gather(output, local, group=group)

        def counted_exchange(output, sent, received_counts=None, sent_counts=None, group=None):
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            own = output.shape[0] // size if received_counts is None else received_counts[rank]
            row_bytes = output[0].nbytes if len(output) else 0
            self.bytes["exchanged"] += output.nbytes - own * row_bytes
            return exchange(output, sent, received_counts, sent_counts, group=group)

        def counted_scatter(output, given, group=None):
            # Every other rank's part of the sum passes by once.
            self.bytes["reduced"] += given.nbytes - output.nbytes
            return scatter(output, given, group=group)

        monkeypatch.setattr(comm, "_all_gather_single", counted_gather)
        monkeypatch.setattr(dist, "all_to_all_single", counted_exchange)
        monkeypatch.setattr(comm, "_reduce_scatter_single", counted_scatter)

    def take(self) -> dict[str, int]:
        taken, self.bytes = +self.bytes, Counter()
        return dict(taken)


def run_all(rank: int, _send, directory, config: DcpConfig, kv_cache_dtype: str, runs: tuple[Run, ...]) -> list[dict]:
    """Every run on this rank: outputs, logits, and of each step its sizes, its way and the bytes received."""
    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        received = Received(monkeypatch) if config.tp_size > 1 else None
        for run in runs:
            engine = make_engine(
                rank,
                directory,
                COMPUTE[kv_cache_dtype],
                dataclasses.replace(config, prefill=run.way),
                CacheConfig(kv_cache_dtype, 16 * PAGE * config.dcp_size),
            )
            # "auto": by the rows of a step alone, so that both ways take turns.
            engine.attention.prefill_rule = dataclasses.replace(
                engine.attention.prefill_rule, least_rows=25 * config.dcp_size, page_weight=(0, 1)
            )
            results.append(run_prompts(engine, run, received, monkeypatch))
    return results


def prompts_of(run: Run, dcp_size: int) -> list[list[int]]:
    return make_prompts(dcp_size)[SHORT if run.schedule == 5 else slice(None)]


def run_prompts(engine: Engine, run: Run, received: Received | None, monkeypatch: pytest.MonkeyPatch) -> dict:
    prompts = prompts_of(run, engine.ranks.config.dcp_size)
    logits: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(prompts))}
    steps: list[dict] = []

    def record_step(extends: list[Extend], *args):
        step = build_step(extends, *args)
        distinct = {page for extend in extends for page in extend.pages[: -(-extend.end // page_slots)]}
        steps.append({"lens": [len(e.token_ids) for e in extends], "ends": [e.end for e in extends]})
        steps[-1].update(pages=len(distinct), by_rows=step.rows is not None)
        return step

    def run_step(step):
        if received:
            received.take()
        result = honest_run(step)
        steps[-1]["received"] = received.take() if received else {}
        return result

    page_slots, honest_run = PAGE * engine.ranks.config.dcp_size, engine.run
    monkeypatch.setattr(engine_module, "build_step", record_step)
    engine.run = run_step
    if isinstance(run.schedule, int):
        outputs = engine.generate(
            prompts, NEW_TOKENS, run.schedule, on_logits=lambda request, row: logits[request.number].append(row)
        )
    else:
        outputs = run_mixed(engine, prompts, lambda number, row: logits[number].append(row), run.schedule == "shared")
    return {
        "outputs": outputs,
        "logits": [torch.stack(rows) for rows in logits.values()],
        "steps": steps,
        "expected": [expect_bytes(engine, step) for step in steps],
    }


def run_mixed(engine: Engine, prompts: list[list[int]], keep: Callable, shared: bool) -> list[list[int]]:
    """Every step gives each request some of its prompt or its decode token, in any order, and leaves some out."""
    generator = torch.Generator().manual_seed(5)
    page = PAGE * engine.ranks.config.dcp_size
    most = max(41, page // 2)
    outputs: list[list[int]] = [[] for _ in prompts]
    cached, pages = [0] * len(prompts), []
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS) // page)
        common = pages[0][:1] if shared and pages and prompt[:page] == prompts[0][:page] else []
        pages.append(common + engine.allocator.allocate(count - len(common)))
        cached[len(pages) - 1] = page * len(common)
    while any(len(output) < NEW_TOKENS for output in outputs):
        batch = []
        for number, prompt in enumerate(prompts):
            borrows = number and pages[number][0] == pages[0][0]
            if len(outputs[number]) == NEW_TOKENS or (borrows and cached[0] < page):
                continue  # done, or what it shares is not there yet
            take = int(torch.randint(-9, most, (), generator=generator).clamp(min=0))
            tokens = (prompt + outputs[number])[cached[number] : max(len(prompt), cached[number] + 1)][:take]
            if tokens:
                batch.append((number, torch.tensor(tokens)))
        batch = [batch[place] for place in torch.randperm(len(batch), generator=generator).tolist()]
        if not batch:
            continue
        result = engine.forward([Extend(tokens, cached[number], pages[number]) for number, tokens in batch])
        for (number, tokens), row in zip(batch, result):
            cached[number] += len(tokens)
            if cached[number] >= len(prompts[number]):
                keep(number, row)
                outputs[number].append(int(row.argmax()))
    return outputs


def expect_bytes(engine: Engine, step: dict) -> dict[str, int]:
    """What a step's layers bring this rank, by the formulas that the way is chosen by. Partials of `a2a`."""
    sizes, ranks = engine.attention.prefill_rule.sizes, engine.ranks
    rows = sum(step["lens"])
    own = len(range(ranks.dcp_rank, rows, ranks.config.dcp_size))
    if step["by_rows"]:
        message = sizes.received_by_rows(rows, own, step["pages"])
        totals = {
            "gathered": sizes.layers * message["pages"],
            "exchanged": sizes.layers * (message["queries"] + message["results"]),
        }
    else:
        message = sizes.received_by_queries(rows)
        totals = {
            "gathered": sizes.layers * message["queries"] + sizes.selecting_layers * message["selections"],
            "exchanged": sizes.layers * message["partials"],
        }
    return {name: count for name, count in totals.items() if count}


# --- what is compared -----------------------------------------------------------------------------------------------


CASES = [(GLM, split, "fp8_e4m3") for split in CONFIGS] + [(GLM, split, "float32") for split in CONFIGS]
CASES += [(DEEPSEEK, "dcp4", "fp8_e4m3"), (DEEPSEEK, "dcp2", "float32"), (DEEPSEEK, "tp4-dcp2", "bfloat16")]
CASES += [(GLM, "dcp2", "bfloat16")]


@pytest.mark.parametrize(("name", "split", "kv_cache_dtype"), CASES)
def test_by_rows_equals_the_unmodified_model(name, split, kv_cache_dtype, tiny_checkpoint, unmodified):
    """Tokens equal, logits within 1e-4 of the largest; all ranks agree; each step's bytes as its way is chosen by."""
    config = CONFIGS[split]
    overrides = {"num_attention_heads": 6, "num_key_value_heads": 6} if config.tp_size == 3 else {}
    directory = tiny_checkpoint(name, **overrides)
    by_rank = run_ranks(run_all, config.tp_size, (directory, config, kv_cache_dtype, RUNS))
    for number, run in enumerate(RUNS):
        results = [rank[number] for rank in by_rank]
        prompts = prompts_of(run, config.dcp_size)
        for prompt, output, logits in zip(prompts, results[0]["outputs"], results[0]["logits"], strict=True):
            wanted = unmodified(directory, COMPUTE[kv_cache_dtype], tuple(prompt), NEW_TOKENS, kv_cache_dtype)
            want_output, want_logits = wanted
            label = f"{run}, prompt of {len(prompt)}"
            assert output == want_output, label
            assert (logits - want_logits).abs().max() <= 1e-4 * want_logits.abs().max(), label
        for result in results:
            assert result["outputs"] == results[0]["outputs"], run
            # The way of every step is the same on every rank, and so are its rows and pages.
            ways = [{**step, "received": None} for step in result["steps"]]
            assert ways == [{**step, "received": None} for step in results[0]["steps"]], run
            for step, expected in zip(result["steps"], result["expected"]):
                assert step["received"] == expected, (run, step)
        check_ways(run, results[0]["steps"], config)


def check_ways(run: Run, steps: list[dict], config: DcpConfig) -> None:
    """Prompts went the way that the run is there to show; decode steps always by queries."""
    prefills = [step for step in steps if max(step["lens"]) > 1]
    assert not any(step["by_rows"] for step in steps if max(step["lens"]) == 1)
    by_rows = [step["by_rows"] for step in prefills]
    if run.way != "auto":
        assert by_rows == [run.way == "rows"] * len(prefills)
    elif config.dcp_size > 1:
        assert len(set(by_rows)) == 2, "both ways on one cache"
    if run.schedule == 5 and config.dcp_size == 8:
        assert max(sum(step["lens"]) for step in prefills) < 8, "some ranks have no row"
    if run.schedule in ("mixed", "shared"):
        decodes = [end - length for step in prefills for length, end in zip(step["lens"], step["ends"]) if length == 1]
        assert decodes, "prompt and decode rows in one step"
    if run.schedule == "shared":
        used = [sum(-(-end // (PAGE * config.dcp_size)) for end in step["ends"]) for step in steps]
        assert any(step["pages"] < total for step, total in zip(steps, used)), "a page that two requests share"


@pytest.mark.parametrize("wrong", ["results as they arrive", "the next rank's rows"])
def test_rows_in_wrong_places_would_be_noticed(wrong, tiny_checkpoint, unmodified):
    directory = tiny_checkpoint(GLM)
    (first, *_) = run_ranks(run_wrongly, 2, (directory, wrong))
    want = [unmodified(directory, "float32", tuple(p), NEW_TOKENS, "float32")[1][0] for p in make_prompts(2)]
    differences = {
        way: max(((got - expected).abs().max() / expected.abs().max()).item() for got, expected in zip(logits, want))
        for way, logits in first.items()
    }
    assert differences["queries"] < 1e-4 < 1e-2 < differences["rows"]


def run_wrongly(rank: int, _send, directory, wrong: str) -> dict[str, list[torch.Tensor]]:
    """The logits of each prompt's first token, by way."""
    from nsa_dcp.tp_dcp import RowShares

    def unordered(self, out, group):
        return comm.exchange_rows_for_heads(out, self.counts, group)

    def shifted(self, q, group):
        return comm.exchange_heads_for_rows(q[self.by_owner].roll(1, 0), self.counts, group)

    first: dict[str, list[torch.Tensor]] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if wrong == "results as they arrive":
            monkeypatch.setattr(RowShares, "return_heads", unordered)
        else:
            monkeypatch.setattr(RowShares, "take_rows", shifted)
        for way in ("rows", "queries"):
            config = DcpConfig(tp_size=2, dcp_size=2, prefill=way)
            engine = make_engine(rank, directory, "float32", config, CacheConfig("float32", 4096))
            kept: dict[int, torch.Tensor] = {}
            keep = functools.partial(lambda to, request, row: to.update({request.number: row}), kept)
            engine.generate(make_prompts(2), 1, 100, on_logits=keep)
            first[way] = [kept[number] for number in sorted(kept)]
    return first
