"""CP-DCP ranks on a CPU: sglang's own contexts, strategies, metadata and pools, one rank after the other.

No test of its own. The tests of CP-DCP import it, and take its fixture into their namespace.
"""

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.sglang.served_parts import make_layer, make_pool, make_weight_updater

LAYER, NUM_LAYERS, HEADS, TOPK, SM_SCALE = 1, 4, 8, 64, 0.1


class RelayedGroup:
    """Collectives among ranks that run one after the other, in rounds.

    Each rank's n-th call is matched with the others' n-th. What a rank has not sent yet is taken to be what this rank
    sends, so after as many rounds as there are calls in a row, and one more, every result is right. `sent` has the
    bytes that each rank sent to its group, by call, in the last round.
    """

    def __init__(self, world_size):
        self.world_size, self.kept, self.sent, self.rounds = world_size, {}, {}, 0

    def rank(self, rank):
        """This round's group object of one rank."""
        calls = itertools.count()
        self.sent[rank] = []

        def exchange(values, kind):
            call = next(calls)
            self.kept[rank, call] = values.clone()
            self.sent[rank].append((kind, values.nbytes))
            parts = [self.kept.get((peer, call), values) for peer in range(self.world_size)]
            # Before the last round a peer may have gone another way.
            return [part if part.shape == values.shape and part.dtype == values.dtype else values for part in parts]

        def all_gather_into_tensor(output, values):
            output.copy_(torch.cat(exchange(values, "all_gather")).view(output.shape))

        def all_gather(values, dim=-1):
            return torch.cat(exchange(values, "all_gather"), dim=dim)

        def broadcast(values, src=0):
            values.copy_(exchange(values, "broadcast")[src])

        def all_to_all_single(output, values):
            chunks = [part.chunk(self.world_size)[rank] for part in exchange(values, "all_to_all")]
            output.copy_(torch.cat(chunks))

        def reduce_scatter_along_dim(values, dim=0):
            return sum(exchange(values, "reduce_scatter")).chunk(self.world_size, dim=dim)[rank].contiguous()

        return SimpleNamespace(
            world_size=self.world_size,
            rank_in_group=rank,
            ranks=list(range(self.world_size)),
            all_gather_into_tensor=all_gather_into_tensor,
            all_gather=all_gather,
            broadcast=broadcast,
            all_to_all_single=all_to_all_single,
            reduce_scatter_along_dim=reduce_scatter_along_dim,
            all_gather_object=lambda mine: [mine] * self.world_size,
        )


@pytest.fixture
def make_cp_runner(model_path, on_hopper, registered, monkeypatch):
    """A function that publishes one rank's configuration, and returns a runner with its pool and allocator."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.layers.cp import base as cp_base
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    from nsa_dcp_kernels import pack_latent

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    # sglang plans its own top-k for every forward, on a GPU.
    monkeypatch.setattr(DeepseekSparseAttnBackend, "_build_topk_v2_plan", lambda *_: None)
    # Importing it is an error: with our backends it plans nothing of FlashMLA.
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_mla_interface", None)
    quantised = []

    def quantise(k_nope, k_rope):
        # The Triton interpreter takes a minute for what test_pool.py shows to be this.
        quantised.append(len(k_nope))
        packed = pack_latent(k_nope.reshape(-1, 512), k_rope.reshape(-1, 64)).unsqueeze(1)
        return packed[..., :528].contiguous(), packed[..., 528:].contiguous()

    monkeypatch.setattr(memory_pool, "quantize_k_cache_separate", quantise)
    path = model_path(num_attention_heads=HEADS, num_key_value_heads=HEADS, index_topk=TOPK)

    def build(group, strategy="interleave", kv_format="fp8", comm_backend="a2a", rows=640, **more):
        cp_size, dtype = group.world_size, torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16
        server_args = ServerArgs(
            model_path=path,
            device="cpu",
            tp_size=cp_size,
            dcp_size=cp_size,
            attn_cp_size=cp_size,
            enable_prefill_cp=True,
            cp_strategy=strategy,
            page_size=64,
            attention_backend="nsa",
            kv_cache_dtype="fp8_e4m3" if kv_format == "fp8" else "bfloat16",
            dcp_comm_backend=comm_backend,
            **more,
        )
        reset_context()
        publish(server_args, role="test", ranks=SpawnRanks(world_rank=group.rank_in_group, dp_rank=None))
        alone = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[group.rank_in_group])
        get_parallel().override_permanently(dcp_group=group, tp_group=group, attn_cp_group=group, attn_tp_group=alone)
        cp_base._STRATEGY = None
        pool = make_pool(rows, NUM_LAYERS, kv_format)
        for buffer in pool.kv_buffer:
            buffer.view(torch.uint8).fill_(0xFF)
        allocator = PagedTokenToKVPoolAllocator(
            rows * cp_size, page_size=64 * cp_size, dtype=dtype, device="cpu", kvcache=pool, need_sort=False
        )
        runner = SimpleNamespace(
            server_args=server_args,
            device="cpu",
            page_size=64,
            is_draft_worker=False,
            max_running_requests=16,
            prefill_attention_backend_str="nsa",
            decode_attention_backend_str="nsa",
            token_to_kv_pool_allocator=allocator,
            model_config=model_config_of(server_args),
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(17, 65540, device="meta"), size=16),
            hisparse_coordinator=None,
            kv_cache_dtype=dtype,
            weight_updater=make_weight_updater(lambda: runner.model),
        )
        return runner

    build.quantised = quantised
    yield build
    cp_base._STRATEGY = None
    reset_context()


@pytest.fixture
def make_cp_backend(make_cp_runner):
    """A function that builds the CP-DCP backend of one rank, in a published context of its own."""
    from sglang.srt.layers.cp.base import get_cp_strategy

    from nsa_dcp.sglang_plugin import patches
    from nsa_dcp.sglang_plugin.attention.cp_backend import CpDcpSparseAttnBackend

    def build(group, strategy="interleave", kv_format="fp8", comm_backend="a2a", buffer_pages=64):
        runner = make_cp_runner(group, strategy, kv_format, comm_backend)
        if strategy == "zigzag":
            patches.patch_zigzag_strategy(get_cp_strategy())
        return CpDcpSparseAttnBackend(runner, group, comm_backend, buffer_pages)

    build.quantised = make_cp_runner.quantised
    return build


@dataclasses.dataclass
class CpBatch:
    """An extend batch on pools of `cp_size` ranks: where its tokens lie, what they are, and what they select.

    Latents are such that FP8 holds them exactly, and there are some at every slot; those of no request are NaN.
    """

    cp_size: int
    prefixes: list
    extends: list
    shared_pages: int = 0
    mode: str = "EXTEND"
    rows: int = 640

    def __post_init__(self):
        generator = torch.Generator().manual_seed(sum(self.extends) + 7 * self.cp_size)
        widened = 64 * self.cp_size
        self.lengths = [prefix + extend for prefix, extend in zip(self.prefixes, self.extends)]
        free = (torch.randperm(self.rows // 64, generator=generator) + 1).tolist()
        shared = [free.pop() for _ in range(self.shared_pages)]
        self.slots = []
        for length in self.lengths:
            count = -(-length // widened)
            pages = torch.tensor(shared[:count] + [free.pop() for _ in range(count - len(shared[:count]))])
            positions = torch.arange(length)
            self.slots.append(pages[positions // widened] * widened + positions % widened)
        self.num_slots = (self.rows + 64) * self.cp_size
        codes = torch.randint(-8, 9, (self.num_slots, 512), generator=generator).float()
        codes[:, ::128] = 448.0
        rope = torch.randn(self.num_slots, 64, generator=generator)
        latents = torch.cat([codes / 4, rope], dim=-1).to(torch.bfloat16)
        self.latents = torch.full_like(latents, float("nan"))
        used = torch.cat(self.slots)
        self.latents[used] = latents[used]
        self.q = torch.randn(sum(self.extends), HEADS, 576, generator=generator).to(torch.bfloat16)
        # What makes the latents exact is the same in all of them, and must not outweigh the rest.
        self.q[..., :512:128] = 0
        self.chunk = torch.cat([slots[prefix:] for slots, prefix in zip(self.slots, self.prefixes)])
        self.selection = torch.cat(
            [
                self._select(slots, position, generator)
                for slots, prefix in zip(self.slots, self.prefixes)
                for position in range(prefix, len(slots))
            ]
        )
        # One token that attends to nothing.
        self.selection[-1] = -1

    @staticmethod
    def _select(slots, position, generator):
        chosen = torch.randint(0, position + 1, (1, TOPK), generator=generator)
        chosen[:, 0] = position
        return slots[chosen].to(torch.int32).masked_fill(torch.rand(1, TOPK, generator=generator) < 0.3, -1)

    def make_forward(self):
        """What sglang's runner hands the backend."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lengths, extends = torch.tensor(self.lengths), torch.tensor(self.extends, dtype=torch.int32)
        return SimpleNamespace(
            forward_mode=ForwardMode[self.mode],
            batch_size=len(self.lengths),
            input_ids=torch.zeros(sum(self.extends), dtype=torch.int64),
            seq_lens=lengths.to(torch.int32),
            seq_lens_cpu=lengths,
            seq_lens_sum=sum(self.lengths),
            extend_seq_lens=extends,
            extend_seq_lens_cpu=list(self.extends),
            extend_prefix_lens_cpu=list(self.prefixes),
            req_pool_indices=torch.arange(len(self.lengths)) + 1,
            out_cache_loc=self.chunk,
            attn_cp_metadata=None,
            global_num_tokens_cpu=None,
            spec_info=None,
        )

    def req_to_token(self):
        """[requests + 1, context] int32; what no token was allocated is a slot of another request."""
        table = torch.full((len(self.slots) + 1, max(self.lengths) + 200), int(self.slots[-1][-1]), dtype=torch.int32)
        for request, slots in enumerate(self.slots):
            table[request + 1, : len(slots)] = slots
        return table

    def expected(self):
        """[T, H, 512] float32: attention over all tokens, in one piece."""
        from nsa_dcp_kernels import attend_sparse

        return attend_sparse(self.q.float(), self.latents.float(), self.selection, None, SM_SCALE)[0]


def layer(heads=HEADS, layer_id=LAYER):
    return make_layer(layer_id, heads, SM_SCALE)


def run_rank(backend, batch, layers=(LAYER,)):
    """One rank's prefill as the runner and the model do it.

    Returns the batch's rows that are this rank's, and their [rows, H, 512] in each layer.
    """
    from sglang.srt.layers.attention.dsa_backend import prepare_kv_for_attention
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.utils import is_cp_active, prepare_cp_forward

    backend.req_to_token_pool.req_to_token = batch.req_to_token()
    prefix = torch.cat([slots[:length] for slots, length in zip(batch.slots, batch.prefixes)])
    latents = batch.latents[prefix].unsqueeze(1)
    for layer_id in layers if len(prefix) else ():
        backend.token_to_kv_pool.set_mla_kv_buffer(layer(1, layer_id), prefix, latents[..., :512], latents[..., 512:])
    forward = batch.make_forward()
    spread = is_cp_active(forward)
    if spread:
        prepare_cp_forward(forward)
    backend.init_forward_metadata(forward)
    strategy = get_cp_strategy()
    rows = strategy.local_q_indices(len(batch.q), forward) if spread else torch.arange(len(batch.q))

    def share(values):
        if not spread:
            return values
        local = strategy.shard_hidden_states(values, forward)
        # Padding rows hold anything.
        local[len(rows) :] = float("nan")
        return local

    q, chunk = share(batch.q), share(batch.latents[batch.chunk].unsqueeze(1))
    selection = batch.selection[rows]
    outs = []
    for layer_id in layers:
        attention = layer(q.shape[1], layer_id)
        k_nope, k_rope = prepare_kv_for_attention(
            SimpleNamespace(attn_mqa=attention),
            forward,
            chunk[..., :512],
            chunk[..., 512:],
            defer_materialization=False,
        )
        out = backend.forward_extend(
            q[..., :512].clone(),
            k_nope,
            k_nope,
            attention,
            forward,
            q_rope=q[..., 512:].clone(),
            k_rope=k_rope,
            topk_indices=selection,
        )
        # What the model does with the result.
        outs.append(out.view(-1, q.shape[1], 512))
        assert not outs[-1][len(rows) :].any()
    return rows, [out[: len(rows)] for out in outs]


def run_ranks(make_cp_backend, batch, strategy, layers=(LAYER,), rounds=None, **settings):
    """All ranks, in as many rounds as there are collectives in a row, and one more. Returns results and the group."""
    relayed = RelayedGroup(batch.cp_size)
    while rounds is None or relayed.rounds < rounds:
        relayed.rounds += 1
        results = [
            run_rank(make_cp_backend(relayed.rank(rank), strategy, **settings), batch, layers)
            for rank in range(batch.cp_size)
        ]
        rounds = rounds or len(relayed.sent[0]) + 1
    return results, relayed
