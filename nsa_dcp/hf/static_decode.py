"""Decode steps of a fixed shape, in buffers that are allocated once, so that a CUDA graph can replay them.

A smaller batch is padded: a padding row has a context of 0 tokens, selects nothing, and its latent and index key are
written nowhere (slot -1). Every rank issues the same collectives for every batch.
"""

import torch

from nsa_dcp.hf.engine import Engine
from nsa_dcp.hf.step import Extend, Step, build_step
from nsa_dcp.layout import pages_for


class StaticDecode:
    """One decode step's buffers; `replay` on a GPU, `step` run eagerly elsewhere: the same tensors either way."""

    def __init__(self, engine: Engine, max_batch: int, max_context_len: int) -> None:
        """Allocate; on a GPU, run the step once and capture it with its collectives.

        Args:
            engine: whose decode steps these are. Its caches are written by nothing but real rows.
            max_batch: requests at most.
            max_context_len: longest context at most, the step's new token included.
        """
        dcp_size, device = engine.ranks.config.dcp_size, engine.device
        num_pages = pages_for(max_context_len, dcp_size)
        self.engine, self.max_batch, self.max_context_len = engine, max_batch, max_context_len

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.buffers = Step(
            input_ids=zeros(max_batch, dtype=torch.int64),
            positions=zeros(max_batch, dtype=torch.int64),
            slots=zeros(max_batch) - 1,
            row_request=torch.arange(max_batch, dtype=torch.int32, device=device),
            context_lens=zeros(max_batch),
            page_table=zeros(max_batch, num_pages),
            index_pages=zeros(max_batch, num_pages if engine.ranks.config.shards_index_keys else num_pages * dcp_size),
            max_context_len=max_context_len,
            last_rows=torch.arange(max_batch, device=device),
        )
        self.graph = self._capture() if device.type == "cuda" else None

    def fits(self, extends: list[Extend]) -> bool:
        """Whether a step is a decode step that fits the buffers."""
        return (
            len(extends) <= self.max_batch
            and all(len(extend.token_ids) == 1 for extend in extends)
            and all(extend.end <= self.max_context_len for extend in extends)
        )

    @torch.inference_mode()
    def forward(self, extends: list[Extend]) -> torch.Tensor:
        """Run one decode step.

        Args:
            extends: as for `Engine.forward`.

        Returns:
            [B, vocab] logits. Overwritten by the next call.

        Raises:
            ValueError: the step does not fit the buffers.
        """
        if not self.fits(extends):
            raise ValueError(
                f"extends must be at most {self.max_batch} single tokens in contexts of at most "
                f"{self.max_context_len}, got {[(len(extend.token_ids), extend.end) for extend in extends]}"
            )
        self._fill(build_step(extends, self.engine.ranks, self.engine.allocator.num_pages, self.engine.device))
        if self.graph is None:
            return self.engine.run(self.buffers)[: len(extends)]
        self.graph.replay()
        return self.logits[: len(extends)]

    def _fill(self, step: Step) -> None:
        batch, buffers = len(step.slots), self.buffers
        for buffer, padding, values in (
            (buffers.input_ids, 0, step.input_ids),
            (buffers.positions, 0, step.positions),
            (buffers.slots, -1, step.slots),
            (buffers.context_lens, 0, step.context_lens),
        ):
            buffer[:batch] = values
            buffer[batch:] = padding
        for buffer, values in ((buffers.page_table, step.page_table), (buffers.index_pages, step.index_pages)):
            buffer.zero_()
            buffer[:batch, : values.shape[1]] = values

    @torch.inference_mode()
    def _capture(self) -> torch.cuda.CUDAGraph:
        # Eagerly first: kernels are compiled, communicators opened and FlashMLA's schedule checked outside the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.engine.run(self.buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.engine.run(self.buffers)
        return graph
