"""What is asked of which server: pools of equal bytes, the command line, the cases that a pool holds."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nsa_dcp.planning.capacity import bytes_per_token, plan
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp_kernels.kv_format import PAGE_SIZE
from scripts.served_checks.servers.server_config import server_command

CHUNKED_PREFILL_SIZE = 8192
# Steps between two lines of the server's log; a line is one sample of the step time.
LOG_INTERVAL = 10
# Tokens that a request may generate while the step is timed; it is aborted once there are enough samples.
NEW_TOKENS = 400
FIRST_TOKEN = 3
# Overrides what ask_servers chooses for tiny models on one GPU.
_DROPPED = ("--enable-fp32-lm-head", "--enforce-disable-flashinfer-allreduce-fusion")


@dataclass(frozen=True, order=True)
class ServerCase:
    """Decode steps of a batch.

    context: tokens of each request when it starts to decode. concurrency: requests.
    largest: as many requests as the pool admits; the number differs between configs.
    """

    context: int
    concurrency: int
    largest: bool = False

    @property
    def name(self) -> str:
        return f"{self.context}x{self.concurrency}{' (largest)' if self.largest else ''}"


def pool_rows(dims: ModelDims, tp_size: int, dcp_size: int, pool_gib: float) -> int:
    """Rows of a rank's pool whose latents and index keys take `pool_gib`: --max-total-tokens; dcp_size tokens a row.

    The bytes are equal for every dcp_size: a rank keeps 1/dcp_size of the latents and all of the index keys.
    """
    planned = plan(
        dims,
        gpu_memory_gib=pool_gib,
        kv_cache_dtypes=("fp8_e4m3",),
        tp_size=tp_size,
        gpus_per_node=tp_size,
        dcp_sizes=(dcp_size,),
        page_size=PAGE_SIZE,
    )
    return planned.rows[0].tokens_per_gpu


def token_bytes(dims: ModelDims, dcp_size: int) -> float:
    """Bytes that one token costs each rank."""
    return bytes_per_token(dims, "fp8_e4m3", dcp_size).total


def bench_command(
    model: Path, config: str, port: int, rows: int, batches: Sequence[int], extra: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line of a config's server, and what it adds to the environment.

    Args:
        model: a folder with a config.json; weights are random.
        config: as that of ask_servers, and: `shared`, ranks share a GPU; `nocar`, no custom all-reduce; `fuse`, a fused
            all-reduce and norm of FlashInfer's, which is compiled at the first start.
        port: to listen on.
        rows: of each rank's pool.
        batches: batch sizes to capture graphs for.
        extra: more words at the end.
    """
    options = config.split("-")[2:]
    known = config if "shared" in options else f"{config}-gpus"
    command, environment = server_command(model, known, port)
    command = [word for word in command if word not in _DROPPED]
    most = max(batches)
    flags = [
        f"--load-format dummy --mem-fraction-static 0.75 --max-total-tokens {rows}",
        f"--max-running-requests {most} --chunked-prefill-size {CHUNKED_PREFILL_SIZE}",
        f"--cuda-graph-max-bs-decode {most} --cuda-graph-bs-decode {' '.join(map(str, sorted(set(batches))))}",
        # Fused, the router is compiled at the start.
        f"--decode-log-interval {LOG_INTERVAL} --disable-shared-experts-fusion",
    ]
    if "nocar" in options:
        flags.append("--disable-custom-all-reduce")
    if "fuse" not in options:
        flags.append("--enforce-disable-flashinfer-allreduce-fusion")
    command += " ".join(flags).split() + list(extra)
    if "SGLANG_PLUGINS" in environment:
        environment["SGLANG_PLUGINS"] = "random_weights,shared_gpu" if "shared" in options else "random_weights"
    return command, environment


def slots_needed(context: int, new_tokens: int, dcp_size: int) -> int:
    """Slots that a request may take: whole pages of the widened pool."""
    page = PAGE_SIZE * dcp_size
    return -(-(context + new_tokens) // page) * page


def choose_cases(
    contexts: Sequence[int], concurrencies: Sequence[int], capacity: int, dcp_size: int, most: int
) -> tuple[list[ServerCase], list[dict[str, object]]]:
    """Cases that the pool holds, and (case, reason) of the others; the largest batch of each context is added.

    Args:
        contexts, concurrencies: of the grid; contexts ascending keep the prefix cache useful.
        capacity: slots of the pool, all ranks together.
        dcp_size: ranks that share a request.
        most: largest batch to ask for.
    """
    chosen, skipped = [], []
    for context in contexts:
        needed = slots_needed(context, NEW_TOKENS, dcp_size)
        held = capacity // needed
        fitting = min(most, held)
        for concurrency in sorted(set(concurrencies)):
            case = ServerCase(context, concurrency, concurrency == held)
            if concurrency <= fitting:
                chosen.append(case)
            else:
                reason = f"{concurrency * needed} slots needed, the pool has {capacity}"
                skipped.append({"context": context, "concurrency": concurrency, "reason": reason})
        if fitting and fitting not in concurrencies:
            chosen.append(ServerCase(context, fitting, fitting == held))
    return chosen, skipped


class Prompts:
    """Distinct prompts; a shorter one of the same number is the beginning of a longer one, so that it stays cached."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._drawn: dict[str, tuple[Random, list[int]]] = {}

    def take(self, number: int | str, length: int) -> list[int]:
        """The first `length` token ids of a prompt, no special ones."""
        seed = zlib.crc32(f"prompt {number}".encode())
        generator, ids = self._drawn.setdefault(str(number), (Random(seed), []))
        if len(ids) < length:
            ids += generator.choices(range(FIRST_TOKEN, self.vocab_size), k=length - len(ids))
        return ids[:length]
