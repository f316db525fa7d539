"""One rank of the embedded engine: a transformers model whose attention runs under DCP, and greedy generation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_dcp import comm
from nsa_dcp.cache import PageAllocator
from nsa_dcp.config import CacheConfig
from nsa_dcp.hf.families.choice import model_shape, take_over_attention
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Extend, Step, build_step
from nsa_dcp.layout import pages_for


@dataclass
class Request:
    """A prompt being served.

    prompt_ids: [n] int64. pages: widened pages, reserved for all it may generate.
    cached: tokens that are in the caches. number: its place among the prompts.
    """

    prompt_ids: torch.Tensor
    pages: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    cached: int = 0
    finished: bool = False
    number: int = 0

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are still to be cached."""
        return self.cached < len(self.prompt_ids)

    def next_tokens(self, limit: int) -> torch.Tensor:
        """The next tokens to cache: at most `limit` of the prompt, or the last one generated."""
        if self.in_prefill:
            return self.prompt_ids[self.cached : self.cached + limit]
        return torch.tensor(self.output_ids[-1:])


class Engine:
    """A model under DCP, as one rank runs it. Every rank makes the same calls in the same order."""

    def __init__(self, model: Any, ranks: Ranks, cache_config: CacheConfig) -> None:
        """Take a loaded model over: its attention is replaced, its caches allocated.

        Args:
            model: a transformers model of a served architecture, in evaluation mode.
            ranks: this rank's place.
            cache_config: what to cache and how much.

        Raises:
            ValueError, NotImplementedError: the model cannot be served this way; see config.py. Or the caches are too
                large.
        """
        shape = model_shape(model)
        shape.check_split(ranks.config)
        self.model, self.ranks, self.cache_config = model, ranks, cache_config
        self.device = model.device
        try:
            self.attention = take_over_attention(model, shape, ranks, cache_config)
        except (OverflowError, MemoryError, TypeError) as error:  # torch has one of each for too much
            raise _too_large(cache_config, error) from None
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            raise _too_large(cache_config, error) from None
        dcp_size = ranks.config.dcp_size
        self.allocator = PageAllocator(cache_config.rows(dcp_size), dcp_size)

    @torch.inference_mode()
    def forward(self, extends: list[Extend]) -> torch.Tensor:
        """Run one step.

        Args:
            extends: new tokens per request, none of them empty; the same on every rank.

        Returns:
            [B, vocab], logits after each request's last new token, equal on every rank.
        """
        if not extends:
            return torch.empty(0, self.model.config.vocab_size, dtype=self.model.dtype, device=self.device)
        return self.run(build_step(extends, self.ranks, self.allocator.num_pages, self.device))

    def run(self, step: Step) -> torch.Tensor:
        """Run a step that was built already. Returns: as `forward`."""
        hidden = self.model.model(
            inputs_embeds=self.model.model.embed_tokens(step.input_ids).unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            **self.attention.arguments(step),
        ).last_hidden_state[0]
        if step.cp:
            hidden = step.cp.gather_tokens(hidden, self.ranks.tp_group)
        return self.model.lm_head(hidden[step.last_rows])

    def admit(self, request: Request, max_new_tokens: int) -> bool:
        """Reserve the pages of a prompt and all it may generate.

        Returns:
            False where the free pages do not suffice now.

        Raises:
            ValueError: the whole pool could not hold it.
        """
        # The last generated token is never cached.
        tokens = len(request.prompt_ids) + max(0, max_new_tokens - 1)
        count = pages_for(tokens, self.ranks.config.dcp_size)
        if count > self.allocator.num_pages - 1:
            pool = (self.allocator.num_pages - 1) * self.allocator.page_slots
            raise ValueError(
                f"prompt must fit the pool of {pool} tokens, got {len(request.prompt_ids)} tokens and up to "
                f"{max_new_tokens} new ones; raise --max-total-tokens or --dcp-size"
            )
        if count > self.allocator.num_free:
            return False
        request.pages = self.allocator.allocate(count)
        return True

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        chunked_prefill_size: int,
        eos_ids: frozenset[int] = frozenset(),
        on_progress: Callable[[int, int, int], None] | None = None,
        on_logits: Callable[[Request, torch.Tensor], None] | None = None,
        run_decode: Callable[[list[Extend]], torch.Tensor] | None = None,
    ) -> list[list[int]]:
        """Generate greedily.

        Args:
            prompts: token ids of each prompt, none of them empty.
            max_new_tokens: per prompt.
            chunked_prefill_size: new tokens of all requests in one prefill step.
            eos_ids: ids that end a request; they are part of its output.
            on_progress: called after every step with prompt tokens cached, prompt tokens in all, tokens generated.
            on_logits: called with a request and the [vocab] logits that its next token is taken from.
            run_decode: runs decode steps in place of `forward`.

        Returns:
            The generated ids of each prompt.

        Raises:
            ValueError: a prompt does not fit the pool.
        """
        requests = [Request(torch.tensor(prompt), number=number) for number, prompt in enumerate(prompts)]
        waiting = list(requests) if max_new_tokens else []
        running: list[Request] = []
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        while waiting or running:
            while waiting and self.admit(waiting[0], max_new_tokens):
                running.append(waiting.pop(0))
            batch = self._next_batch(running, chunked_prefill_size)
            extends = [Extend(tokens, request.cached, request.pages) for request, tokens in batch]
            is_decode = not any(request.in_prefill for request, _ in batch)
            logits = (run_decode if run_decode and is_decode else self.forward)(extends)
            chosen = comm.broadcast(logits.argmax(-1), self.ranks.tp_group).tolist()
            for (request, tokens), row, token in zip(batch, logits, chosen):
                request.cached += len(tokens)
                if request.in_prefill:
                    continue
                if on_logits:
                    on_logits(request, row)
                request.output_ids.append(token)
                if token in eos_ids or len(request.output_ids) == max_new_tokens:
                    request.finished = True
                    self.allocator.release(request.pages)
            running = [request for request in running if not request.finished]
            if on_progress:
                done = sum(min(request.cached, len(request.prompt_ids)) for request in requests)
                on_progress(done, prompt_tokens, sum(len(request.output_ids) for request in requests))
        return [request.output_ids for request in requests]

    @staticmethod
    def _next_batch(running: list[Request], budget: int) -> list[tuple[Request, torch.Tensor]]:
        """Prompts first, as many tokens as the budget admits; when none is left, a decode step of all requests."""
        batch = []
        for request in running:
            if request.in_prefill and budget:
                tokens = request.next_tokens(budget)
                batch.append((request, tokens))
                budget -= len(tokens)
        return batch or [(request, request.next_tokens(1)) for request in running]

    def usage(self) -> dict[str, int]:
        """Measure what this rank's caches hold, by looking at them. The family's rows and bytes."""
        return self.attention.usage()


def _too_large(cache_config: CacheConfig, error: Exception) -> ValueError:
    return ValueError(
        f"max_total_tokens must leave the caches within memory, got {cache_config.max_total_tokens} "
        f"({str(error).splitlines()[0]})"
    )
