"""`attend_sparse` on Hopper: FlashMLA.

    packed rows    `flash_mla_with_kvcache`, walking what plan_rows says; past one launch's rows, where that pays, the
                   rows are dequantised once and attended to as bf16
    bf16 rows      `flash_mla_sparse_fwd`, which honours a length per row

FlashMLA takes 64 or 128 heads: fewer are padded here. It marks an empty row by an lse of +inf; -inf leaves this module.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from nsa_dcp_kernels.dequantisation import dequantised_bytes
from nsa_dcp_kernels.kv_format import KV_LORA_RANK, LATENT_BYTES, LATENT_DIM
from nsa_dcp_kernels.schedule import SparsePlan, count_parts, plan_rows
from nsa_dcp_kernels.schedule_reference import BLOCK

_INSTALL = "pip install 'nsa-dcp[cuda]', or from a checkout: pip install '.[cuda]'"
_PAGE_SIZE = 64
# Indices per row that the bf16 kernel takes a multiple of.
_BF16_WIDTH = 128
# Rows of 64 heads, times dcp_size, below which a plan costs more than it saves (docs/performance/kernels.md).
_PLANNED_ROWS = 32
# FlashMLA's scratch for packed rows is (rows + parts) * heads * 2 KiB; at 2 * parts rows a launch, 50 MiB on 132 SMs.


@functools.cache
def load_flash_mla() -> Any:
    """Import FlashMLA.

    Raises:
        RuntimeError: it is missing, does not load, or is the unrelated PyPI upload of that name.
    """
    try:
        import flash_mla
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"sparse attention on a GPU needs sgl-flash-mla, found no {error.name}: {_INSTALL}"
        ) from error
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"sgl-flash-mla does not load under torch {torch.__version__} ({error}), needed torch >= 2.10: "
            "pip install --force-reinstall 'sgl-flash-mla==1.0.0'"
        ) from error
    if not hasattr(flash_mla, "has_legacy") or not flash_mla.has_legacy():
        raise RuntimeError(
            "the installed flash_mla has no kernels for Hopper, needed sgl-flash-mla 1.0.0: "
            f"pip uninstall flash-mla && {_INSTALL}"
        )
    return flash_mla


@functools.cache
def count_sms(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU.

    Raises:
        RuntimeError: it is another GPU.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        raise RuntimeError(
            f"sparse attention needs a Hopper GPU (compute capability 9.0), found {torch.cuda.get_device_name(device)} "
            f"({capability[0]}.{capability[1]}): choose one with CUDA_VISIBLE_DEVICES, or run on the CPU"
        )
    return torch.cuda.get_device_properties(device).multi_processor_count


def pad_heads(num_heads: int) -> int:
    """The head count that FlashMLA runs `num_heads` as.

    Raises:
        NotImplementedError: more than 128.
    """
    if num_heads > 128:
        raise NotImplementedError(f"FlashMLA attends with 1 to 128 heads a rank, got {num_heads}: use a larger tp size")
    return 64 if num_heads <= 64 else 128


def attend_sparse(
    q: torch.Tensor, kv_rows: torch.Tensor, topk_rows: torch.Tensor, topk_length: torch.Tensor | None, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the public function, on a GPU: rows are compacted first, as holes may stand anywhere."""
    from nsa_dcp_kernels._triton.localize import localize_topk

    rows, length = localize_topk(topk_rows, 1, 0, limit=topk_length)
    return attend_compact(q, kv_rows, rows, length, sm_scale, {}, None)


def attend_compact(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    rows: torch.Tensor,
    length: torch.Tensor,
    sm_scale: float,
    plans: dict[int, list[SparsePlan]],
    dcp_size: int | None,
    raw_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to rows whose valid entries stand first.

    Args:
        q, kv_rows, sm_scale: as in the public function.
        rows: [T, K] int32, -1 behind the valid entries.
        length: [T] int32.
        plans: what was planned for these rows before, by padded head count. Filled in.
        dcp_size: ranks that the rows' selections are spread over, None where that is not known.
        raw_lse: leave the lse of an empty row at FlashMLA's +inf, which saves a launch.
    """
    num_tokens, num_heads, _ = q.shape
    heads = pad_heads(num_heads)
    num_sms = count_sms(q.device)
    if not num_tokens or not num_heads or not rows.shape[1] or not kv_rows.shape[0]:
        out = q.new_zeros(num_tokens, num_heads, KV_LORA_RANK)
        return out, q.new_full((num_tokens, num_heads), float("-inf"), dtype=torch.float32)
    load_flash_mla()
    q = _padded_queries(q, heads)
    if kv_rows.dtype == torch.uint8 and dequantised_bytes(num_tokens, kv_rows.shape[0], dcp_size):
        from nsa_dcp_kernels._triton.latent_dequant import dequantise_latent

        kv_rows = dequantise_latent(kv_rows)
    if kv_rows.dtype == torch.uint8:
        if rows.shape[1] % BLOCK:
            rows = F.pad(rows, (0, -rows.shape[1] % BLOCK), value=-1)
        if planning_pays(num_tokens, heads, dcp_size):
            if heads not in plans:
                plans[heads] = plan_rows(rows.contiguous(), length, count_parts(num_sms, heads))
            out, lse = _attend_packed(q, kv_rows, plans[heads], sm_scale)
        else:
            out, lse = _attend_unplanned(q, kv_rows, rows.contiguous(), sm_scale)
    else:
        out, lse = _attend_bf16(q, kv_rows, rows, length, sm_scale)
    if not raw_lse:
        lse = lse.nan_to_num_(nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))
    # Without the padding, and without copying: what merges the parts reads them by their strides.
    return out[:, :num_heads], lse[:, :num_heads]


def _padded_queries(q: torch.Tensor, heads: int) -> torch.Tensor:
    if q.shape[1] != heads:
        # A head's result depends on its own query alone, and those of the padding are dropped: whatever is there.
        padded = q.new_empty(q.shape[0], heads, q.shape[2])
        padded[:, : q.shape[1]] = q
        return padded
    # The kernels read rows through TMA: dense values, 16-byte strides, a start that is a multiple of 16 bytes.
    strided_for_tma = q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    return q if strided_for_tma and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)


def planning_pays(num_tokens: int, heads: int, dcp_size: int | None) -> bool:
    """Whether a plan may save more than it costs, from what is known without the rows' lengths.

    Few rows that hold (nearly) all of a selection leave nothing to skip, and FlashMLA splits them over its parts by
    itself.

    Args:
        num_tokens: rows of the launch.
        heads: 64 or 128.
        dcp_size: ranks that the rows' selections are spread over, None where that is not known.
    """
    return dcp_size is None or dcp_size > 2 or num_tokens * heads * dcp_size >= _PLANNED_ROWS * 64


def _attend_bf16(
    q: torch.Tensor, kv_rows: torch.Tensor, rows: torch.Tensor, length: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if rows.shape[1] % _BF16_WIDTH:
        rows = F.pad(rows, (0, -rows.shape[1] % _BF16_WIDTH), value=-1)
    out, _, lse = load_flash_mla().flash_mla_sparse_fwd(
        q, kv_rows.unsqueeze(1), rows.unsqueeze(1), sm_scale, topk_length=length, use_legacy=True
    )
    return out, lse


def _attend_packed(
    q: torch.Tensor, kv_rows: torch.Tensor, plans: list[SparsePlan], sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scheduled = schedule_is_understood(q.device, q.shape[1])
    outs, lses = [], []
    for part, plan in zip(q.split([len(plan.rows) for plan in plans]), plans):
        out, lse = launch_packed(part, kv_rows, plan.rows, sm_scale, hold_schedule(plan if scheduled else None))
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


# FlashMLA's own schedules. They depend on nothing but the shapes that they are looked up by.
_own_schedules: dict[tuple, object] = {}


def _attend_unplanned(
    q: torch.Tensor, kv_rows: torch.Tensor, rows: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """With FlashMLA's own schedule, made by the first launch of these shapes outside a graph.

    One made while a graph is captured stays in the graph: its memory is the graph's.
    """
    key = (q.device, *q.shape[:2], rows.shape[1], as_pages(kv_rows).shape[1])
    if key in _own_schedules:
        return launch_packed(q, kv_rows, rows, sm_scale, _own_schedules[key])
    meta = hold_schedule(None)
    attended = launch_packed(q, kv_rows, rows, sm_scale, meta)
    if not torch.cuda.is_current_stream_capturing():
        # A warm-up of few rows is one for the graphs of many, too.
        schedule_is_understood(q.device, q.shape[1])
        # Other streams will read it without an event to wait for.
        torch.cuda.current_stream(q.device).synchronize()
        _own_schedules[key] = meta
    return attended


def launch_packed(
    q: torch.Tensor, kv_rows: torch.Tensor, rows: torch.Tensor, sm_scale: float, meta: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """One FlashMLA launch over packed rows.

    Args:
        q: [T, 64 or 128, 576] bfloat16.
        kv_rows: [R, 656] uint8.
        rows: [T, K] int32, K a multiple of 64, -1 for none.
        meta: FlashMLA's schedule holder. A new one is filled in with its own schedule, which walks everything.

    Returns:
        out: [T, H, 512]; lse: [T, H] float32, +inf for an empty row.
    """
    out, lse = load_flash_mla().flash_mla_with_kvcache(
        q.unsqueeze(1),
        as_pages(kv_rows),
        None,
        None,
        KV_LORA_RANK,
        meta,
        softmax_scale=sm_scale,
        is_fp8_kvcache=True,
        indices=rows.unsqueeze(1),
        use_legacy=True,
        kv_format="V32",
    )
    return out.squeeze(1), lse.squeeze(2)


def hold_schedule(plan: SparsePlan | None) -> Any:
    """FlashMLA's schedule holder with a plan's schedule, or without one."""
    meta, _ = load_flash_mla().get_mla_metadata()
    if plan is not None:
        meta.tile_scheduler_metadata, meta.num_splits = plan.schedule, plan.num_splits
    return meta


def as_pages(kv_rows: torch.Tensor) -> torch.Tensor:
    """[R, 656] uint8 -> FlashMLA's [pages, page, 1, 656]. A row's index is the same whatever the page size."""
    num_rows = kv_rows.shape[0]
    page = _PAGE_SIZE if num_rows % _PAGE_SIZE == 0 else 1
    strides = (page * LATENT_BYTES, LATENT_BYTES, LATENT_BYTES, 1)
    return kv_rows.contiguous().view(torch.float8_e4m3fn).as_strided((num_rows // page, page, 1, LATENT_BYTES), strides)


@functools.cache
def schedule_is_understood(device: torch.device, heads: int) -> bool:
    """Whether the installed FlashMLA does what a plan says: a small batch, planned and with FlashMLA's own schedule.

    Once per process, device and head count. A FlashMLA whose schedule changed must not give wrong answers: with a
    warning, its own schedule is used from then on.

    Raises:
        RuntimeError: called first while a CUDA graph is captured, where results cannot be compared.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attend_sparse must run once before a CUDA graph is captured: run the step, then capture it")
    parts = count_parts(count_sms(device), heads)
    generator = torch.Generator().manual_seed(0)
    width, num_rows = 4 * BLOCK, 4 * BLOCK
    # Rows that share parts, rows that parts share, a full one and empty ones.
    lengths = torch.tensor([0, 1, 64, 65, 200, 256, 130, 0] * (2 * parts // 8), dtype=torch.int32)
    rows = torch.randint(0, num_rows, (len(lengths), width), generator=generator, dtype=torch.int32)
    rows = torch.where(torch.arange(width) < lengths.unsqueeze(1), rows, -1).to(device)
    q = torch.randn(len(lengths), heads, LATENT_DIM, generator=generator).to(device, torch.bfloat16)
    from nsa_dcp_kernels._triton.kv_pack import pack_latent

    latent = torch.randn(num_rows, LATENT_DIM, generator=generator).to(device)
    kv_rows = pack_latent(latent[:, :KV_LORA_RANK], latent[:, KV_LORA_RANK:])
    for held in (max(1, parts // 4), len(lengths)):
        (plan,) = plan_rows(rows[:held].contiguous(), lengths[:held].to(device), parts)
        own = hold_schedule(None)
        stock = launch_packed(q[:held], kv_rows, plan.rows, 0.05, own)
        # First by reading its own schedule as ours would be read: one that it does not follow may read anywhere.
        understood = own.tile_scheduler_metadata.shape == (parts, 8) and walks_every_block(
            own.tile_scheduler_metadata.tolist(), own.num_splits.tolist(), held, width // BLOCK
        )
        if understood:
            planned = launch_packed(q[:held], kv_rows, plan.rows, 0.05, hold_schedule(plan))
            understood = all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in zip(planned, stock))
        if not understood:
            warnings.warn(
                "this FlashMLA does not follow the schedules made here; its own is used, which walks padded indices",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
    return True


def walks_every_block(schedule: list[list[int]], num_splits: list[int], num_rows: int, row_blocks: int) -> bool:
    """Whether a schedule, read as plan_rows writes one, walks each block of each row once and numbers the pieces."""
    walked: list[list[int]] = [[] for _ in range(num_rows)]
    pieces: list[list[int]] = [[] for _ in range(num_rows)]
    for first, last, begin, end, first_split, first_is_split, last_is_split, _ in schedule:
        if not (0 <= first <= num_rows and last < num_rows and 0 <= begin <= row_blocks and 0 <= end <= row_blocks):
            return False
        for row in range(first, last + 1):
            is_split = first_is_split if row == first else last_is_split if row == last else 0
            walked[row].extend(range(begin if row == first else 0, end if row == last else row_blocks))
            pieces[row].append(num_splits[row] + (first_split if row == first else 0) if is_split else -1)
    for row in range(num_rows):
        numbers = list(range(num_splits[row], num_splits[row + 1]))
        if walked[row] != list(range(row_blocks)) or pieces[row] != (numbers if len(numbers) > 1 else [-1]):
            return False
    return True
