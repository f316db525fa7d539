"""As ask_servers.py, with 96 requests at once: enough rows a step that ranks split the selecting of decode.

    python -m scripts.served_checks.ask_crowd MODEL OUT --config tp1-dcp1 --config tp8-dcp8 --config tp2-dcp2-r288

A config is as there, and may end with `rN`: N requests instead, a multiple of 16. A rank's share of 288 over two ranks
is more rows than a Hopper GPU has SMs, and is selected in pieces. With `nextn` a request is three rows of a step: of
`nextn-r32` 96 at once, which are split.

Most contexts are longer than a selection. Afterwards the same prompts are asked in halves: 48 are fewer rows than are
split, as are those of 16 with `nextn`, so that the same server answers without splitting. A report also has the sizes
of the decode steps that the server logged; one without a step of 64 rows says nothing about split rows, and is a
failure. Compare with compare_answers.py, and with measure_rounding.py where near ties part.
"""

import json
import re
from pathlib import Path

from scripts.served_checks import ask_servers as serve
from scripts.served_checks.servers.server_config import DRAFT_TOKENS, parse_sizes, server_command
from scripts.served_checks.servers.server_process import Server

REQUESTS, SPLIT_ROWS = 96, 64
# Of the same prompts, which are cached from the second on: then steps are full from the first token.
NEW_TOKENS = (16, 32)
# Scenes of the same prompts and lengths of answers.
ALL_AT_ONCE, IN_HALVES = f"{NEW_TOKENS[-1]} new tokens", f"{NEW_TOKENS[-1]} new tokens, in halves"
LENGTHS = (5, 700, 2047, 2049, 2300, 2600, 3000, 3300)
# Of all ranks together, a request: more than it needs. Too long a prompt is refused for the model's context.
POOL_TOKENS = 4096


def count_requests(config: str) -> int:
    """Requests to ask at once. ValueError: they are not whole rounds of LENGTHS in both halves."""
    found = [int(option[1:]) for option in config.split("-")[2:] if re.fullmatch(r"r\d+", option)]
    requests = found[0] if found else REQUESTS
    if not requests or requests % (2 * len(LENGTHS)):
        raise ValueError(f"requests must be a positive multiple of {2 * len(LENGTHS)}, got {requests} in {config!r}")
    return requests


def rows_of_request(config: str) -> int:
    """Query rows that a request has in a decode step, or in the step that verifies its draft."""
    return DRAFT_TOKENS if "nextn" in config.split("-") else 1


def crowd_command(model: Path, config: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return ask_servers' command and environment for a config, with room for all requests at once."""
    command, environment = server_command(model, config, port)
    requests, (_, dcp_size) = count_requests(config), parse_sizes(config)
    changed = {
        "--max-running-requests": str(requests),
        "--cuda-graph-max-bs-decode": str(requests),
        "--decode-log-interval": "1",
        "--max-total-tokens": str(POOL_TOKENS * requests // dcp_size),
    }
    for flag, value in changed.items():
        if flag in command:
            command[command.index(flag) + 1] = value
        else:
            command += [flag, value]
    return command, environment


def ask_crowd(server: Server, num_requests: int = REQUESTS) -> dict[str, list[dict]]:
    """Ask everything at once; return the answers by scene."""
    scenes = {"first": [serve.ask(server, "9 tokens", serve.prompt(9, 0), serve.FIRST_REQUEST_TIMEOUT_S)]}
    lengths = [LENGTHS[n % len(LENGTHS)] for n in range(num_requests)]
    requests = {f"{n}: {length} tokens": serve.prompt(length, 100 + n) for n, length in enumerate(lengths)}
    for new_tokens in NEW_TOKENS:
        scenes[f"{new_tokens} new tokens"] = serve.ask_at_once(server, requests, new_tokens)
    names = list(requests)
    scenes[IN_HALVES] = []
    for half in (names[: num_requests // 2], names[num_requests // 2 :]):
        asked = {name: requests[name] for name in half}
        scenes[IN_HALVES] += serve.ask_at_once(server, asked, NEW_TOKENS[-1])
    return scenes


def decode_sizes(log: str) -> dict[int, int]:
    """Return how many decode steps the log has, by the number of requests in them."""
    sizes: dict[int, int] = {}
    for found in re.findall(r"Decode batch.*?#running-req: (\d+)", log):
        sizes[int(found)] = sizes.get(int(found), 0) + 1
    return dict(sorted(sizes.items()))


def run(model: Path, config: str, out: Path, port: int) -> str:
    """Start a config's server, ask, and write its report; return what to print.

    Raises:
        RuntimeError: it did not start or answer, or never decoded enough requests at once.
    """

    def ask_all(server: Server) -> dict:
        return {"scenes": ask_crowd(server, count_requests(config)), "misuse": serve.misuse(server, times=16)}

    command, environment = crowd_command(model, config, port)
    report, log = serve.run_server(model, config, out, port, command, environment, ask_all)
    sizes = report["decode_sizes"] = decode_sizes(log)
    if max(sizes, default=0) * rows_of_request(config) < SPLIT_ROWS:
        raise RuntimeError(f"no decode step of {SPLIT_ROWS} rows or more: {sizes} requests")
    (out / f"{config}.json").write_text(json.dumps(report, indent=1))
    return f"done in {report['seconds']:.0f} s, decode steps by size {sizes}"


if __name__ == "__main__":
    serve.run_configs(run, __doc__)
