"""What one rank does in a decode step, from a trace that ask_servers.py or benchmarks/servers took.

    python -m scripts.benchmarks.servers.summarise_trace TRACE.json.gz ... [--steps 8] [--top 12]

For each file, one a rank: launches, host waits, time by class of kernel with the communication that other kernels do
not hide, time by kernel. A collective's time includes waiting for the other ranks. Ranks that share a GPU take turns:
then the times of kernels that talk to other ranks mean nothing, and only launches and waits are those of real ranks.
"""

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path

from scripts.benchmarks.servers.kernel_classes import format_classes

HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def summarise_trace(events: list[dict], steps: int, top: int) -> list[str]:
    """Markdown of one trace.

    Args:
        events: the traceEvents of a Chrome trace by torch.profiler.
        steps: decode steps that it holds.
        top: kernels to list, by time.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    runtime = Counter(event["name"] for event in complete if event.get("cat") == "cuda_runtime")
    to_host = sum("DtoH" in event["name"] for event in complete if event.get("cat") == "gpu_memcpy")
    time, count = Counter(), Counter()
    for kernel in kernels:
        name = kernel["name"].replace("void ", "").split("<")[0].split("(")[0]
        time[name] += kernel["dur"]
        count[name] += 1
    waits = {name: runtime[name] / steps for name in HOST_WAITS if runtime[name]}
    lines = [
        f"{len(kernels) / steps:.1f} kernels a step, {runtime['cudaGraphLaunch'] / steps:.2f} graph launches, "
        f"{to_host / steps:.2f} copies to the host, host waits: "
        + (", ".join(f"{name} {number:.2f}" for name, number in waits.items()) or "none"),
        "",
        *format_classes(kernels, steps),
        "",
        "| Kernel | launches a step | us a step |",
        "|---|---:|---:|",
    ]
    return lines + [
        f"| `{name}` | {count[name] / steps:.1f} | {us / steps:.1f} |" for name, us in time.most_common(top)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=12)
    arguments = parser.parse_args()
    for path in arguments.traces:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        print(
            "\n".join(
                [
                    f"### {path.parent.name}/{path.name}",
                    "",
                    *summarise_trace(events, arguments.steps, arguments.top),
                    "",
                ]
            )
        )


if __name__ == "__main__":
    main()
