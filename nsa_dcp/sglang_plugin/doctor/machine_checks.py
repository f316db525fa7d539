"""Doctor's checks of a machine: Python, GPU, NVLink, wheels, sglang, and whether the plugin takes hold.

Nothing is imported here: versions come from package metadata, and importing is tried in processes of its own (`probe`).
Checks that wait for something are generators: each finding is given out when it is known, in a fixed order.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_dcp.sglang_plugin.compat import SGLANG_VERSION
from nsa_dcp.sglang_plugin.doctor.probe import Ask, BoundedProcess, Unanswered

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
ENTRY_POINT_GROUP, ENTRY_POINT = "sglang.srt.plugins", "nsa_dcp"
_COMPUTE_CAPABILITY = "9.0"
_SMI_TIMEOUT_S, _SMI_POLL_S = 60, 0.02
_FLASH_MLA = "1.0.0"
_INSTALL_WHEELS = "pip install 'nsa-dcp[cuda]', or from a checkout: pip install '.[cuda]'"
_INSTALL_PLUGIN = "in sglang's environment: pip install nsa-dcp, or from a checkout: pip install '.[sglang]'"
# sgl-deep-gemm is compiled against one torch release.
_DEEP_GEMM_TORCH = {"0.1.4.post1": "2.11", "0.2.3.post2": "2.14"}
_UNRELATED = {"flash-mla": "sgl-flash-mla", "deep-gemm": "sgl-deep-gemm"}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Check:
    """One finding: `found` is what is there, `fix` the command or change that helps, empty when none is needed."""

    name: str
    status: str
    found: str
    fix: str = ""


def check_packages() -> list[Check]:
    """Versions of Python and of the packages, from metadata alone."""
    checks = [
        Check("python", OK, sys.version.split()[0])
        if sys.version_info >= (3, 11)
        else Check("python", FAILED, sys.version.split()[0], "use Python 3.11 or newer")
    ]
    torch = installed_version("torch")
    checks.append(_present("torch", torch, _INSTALL_WHEELS))
    checks.append(_present("triton", installed_version("triton"), "pip install triton"))
    flash_mla = installed_version("sgl-flash-mla")
    if flash_mla in (None, _FLASH_MLA):
        checks.append(_present("sgl-flash-mla", flash_mla, f"pip install sgl-flash-mla=={_FLASH_MLA}"))
    else:
        checks.append(
            Check(
                "sgl-flash-mla",
                WARNING,
                f"{flash_mla}, not the {_FLASH_MLA} that this release was run with",
                f"pip install sgl-flash-mla=={_FLASH_MLA}",
            )
        )
    checks.append(_deep_gemm(installed_version("sgl-deep-gemm"), torch))
    checks.append(
        _present("apache-tvm-ffi", installed_version("apache-tvm-ffi"), "pip install 'apache-tvm-ffi>=0.1.11'")
    )
    for unrelated, wanted in _UNRELATED.items():
        found = installed_version(unrelated)
        if found is not None:
            checks.append(
                Check(
                    unrelated,
                    FAILED,
                    f"{found}: an unrelated project that shadows {wanted}",
                    f"pip uninstall {unrelated} && pip install --force-reinstall {wanted}",
                )
            )
    sglang = installed_version("sglang")
    if sglang is not None and sglang.partition("+")[0] == SGLANG_VERSION:
        checks.append(Check("sglang", OK, sglang))
    else:
        checks.append(Check("sglang", FAILED, sglang or "not installed", f"pip install sglang=={SGLANG_VERSION}"))
    checks.append(check_entry_point())
    return checks


def check_entry_point() -> Check:
    """Whether sglang will find the plugin, by metadata and by the whitelist in SGLANG_PLUGINS."""
    found = [entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry.name == ENTRY_POINT]
    if not found:
        return Check("plugin entry point", FAILED, "not registered", _INSTALL_PLUGIN)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        return Check("plugin entry point", FAILED, f"excluded by SGLANG_PLUGINS={allowed}", f"add {ENTRY_POINT} to it")
    return Check("plugin entry point", OK, found[0].value)


def run_bounded(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command; TimeoutExpired when it has not ended in time, even when it cannot be killed."""
    deadline = time.monotonic() + timeout_s
    with BoundedProcess(command) as process:
        while (status := process.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(command, timeout_s)
            time.sleep(_SMI_POLL_S)
        return subprocess.CompletedProcess(command, status, process.stdout(), process.stderr())


def check_gpus(run: Run = run_bounded) -> Iterator[Check]:
    """GPUs and their links, as nvidia-smi tells them."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = run(query, timeout_s=_SMI_TIMEOUT_S)
    except FileNotFoundError:
        yield Check("gpu", FAILED, "no nvidia-smi on this machine", "run doctor on the GPU node")
        return
    except subprocess.TimeoutExpired:
        said = f"nvidia-smi did not answer within {_SMI_TIMEOUT_S} s"
        yield Check("gpu", FAILED, said, "look at dmesg for a fallen GPU")
        return
    if answer.returncode != 0 or not answer.stdout.strip():
        said = (answer.stderr.strip() or answer.stdout.strip() or "no GPU").splitlines()[-1]
        yield Check("gpu", FAILED, f"nvidia-smi: {said}", "check the driver and the container's GPU access")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.strip().splitlines()]
    if any(len(row) != 4 for row in rows):
        yield Check("gpu", FAILED, f"nvidia-smi answered {rows[0]}", "update the NVIDIA driver")
        return
    names = sorted({row[0] for row in rows})
    found = f"{len(rows)} x {', '.join(names)}, {rows[0][2]} MiB each, driver {rows[0][3]}"
    other = sorted({row[1] for row in rows if row[1] != _COMPUTE_CAPABILITY})
    if other:
        found += f", compute capability {', '.join(other)}"
        yield Check("gpu", FAILED, found, "run on H100, H200 or H20 (compute capability 9.0)")
    elif len(names) > 1:
        yield Check("gpu", WARNING, found, "give the server GPUs of one kind: the slowest and smallest sets the pool")
    else:
        yield Check("gpu", OK, found)
    yield _check_nvlink(len(rows), run)


def check_imports(ask: Ask) -> Iterator[Check]:
    """What came of importing what a server imports. `ask` waits for the answer to a step of `probe`."""
    yield _check_import("torch", "pip install --force-reinstall torch", ask)
    yield _check_cuda(ask)
    for module, fix in (
        ("triton", "pip install --force-reinstall triton"),
        ("flash_mla", f"pip install --force-reinstall sgl-flash-mla=={_FLASH_MLA}"),
        ("deep_gemm", "pip install --force-reinstall sgl-deep-gemm, in the version built for the installed torch"),
        ("sglang", f"pip install --force-reinstall sglang=={SGLANG_VERSION}"),
    ):
        yield _check_import(module, fix, ask)


def check_plugin(ask: Ask) -> Check:
    """Whether the plugin took hold when it was loaded as a server loads it."""
    answer = ask("plugin")
    if isinstance(answer, Unanswered):
        return Check("plugin", FAILED, answer.reason, answer.fix or "fix the imports above, then run doctor again")
    if answer["missing"]:
        return Check(
            "plugin",
            FAILED,
            f"did not take hold: {', '.join(answer['missing'])}",
            "see the server's log for the exception that sglang swallowed while loading plugins",
        )
    return Check("plugin", OK, "backend factories, hooks and every symbol are in place")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_import(module: str, fix: str, ask: Ask) -> Check:
    answer = ask(f"import:{module}")
    if isinstance(answer, Unanswered):
        return Check(f"import {module}", FAILED, answer.reason, answer.fix or fix)
    return Check(f"import {module}", OK, " ".join(filter(None, (answer["version"], answer["file"]))))


def _check_cuda(ask: Ask) -> Check:
    answer = ask("cuda")
    if isinstance(answer, Unanswered):
        fix = answer.fix or "check the driver and the container's GPU access"
        return Check("torch and CUDA", FAILED, answer.reason, fix)
    if not answer["devices"]:
        return Check(
            "torch and CUDA",
            FAILED,
            f"torch {answer['version']} (CUDA {answer['cuda']}) sees no GPU",
            "install a CUDA build of torch that the driver supports",
        )
    devices = answer["devices"]
    found = (
        f"torch {answer['version']}, CUDA {answer['cuda']}, NCCL {answer['nccl']}, {len(devices)} GPU(s), "
        f"{devices[0]['sms']} SMs"
    )
    return Check("torch and CUDA", OK, found)


def _check_nvlink(num_gpus: int, run: Run) -> Check:
    if num_gpus == 1:
        return Check("nvlink", SKIPPED, "one GPU: nothing to link")
    try:
        answer = run(["nvidia-smi", "topo", "-m"], timeout_s=_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check("nvlink", WARNING, f"nvidia-smi topo did not answer within {_SMI_TIMEOUT_S} s", "look at dmesg")
    links = parse_topology(answer.stdout)
    if not links:
        return Check("nvlink", WARNING, "nvidia-smi topo -m gave no matrix", "check the driver")
    slow = sorted(pair for pair, link in links.items() if not link.startswith("NV"))
    if slow:
        pairs = ", ".join(f"GPU{a}-GPU{b} {links[a, b]}" for a, b in slow[:4])
        return Check(
            "nvlink",
            WARNING,
            f"{len(slow)} of {len(links)} pairs have no NVLink: {pairs}",
            "keep a DCP group on GPUs that NVLink joins: its collectives run in every layer",
        )
    return Check("nvlink", OK, f"all {len(links)} pairs: {', '.join(sorted(set(links.values())))}")


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Links between GPUs from `nvidia-smi topo -m`: {(0, 1): "NV18", ...}, each pair once."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines() if line.strip()]
    if not lines:
        return {}
    columns = [int(name[3:]) for name in lines[0] if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for words in lines[1:]:
        if not re.fullmatch(r"GPU\d+", words[0]):
            continue
        row = int(words[0][3:])
        for column, link in zip(columns, words[1:]):
            if row < column:
                links[row, column] = link
    return links


def _present(name: str, version: str | None, fix: str) -> Check:
    return Check(name, FAILED, "not installed", fix) if version is None else Check(name, OK, version)


def _deep_gemm(version: str | None, torch: str | None) -> Check:
    if version is None:
        return Check("sgl-deep-gemm", FAILED, "not installed", _INSTALL_WHEELS)
    built_for = _DEEP_GEMM_TORCH.get(version)
    if torch is None or built_for is None or torch.startswith(f"{built_for}."):
        return Check("sgl-deep-gemm", OK, version)
    match = [wheel for wheel, release in _DEEP_GEMM_TORCH.items() if torch.startswith(f"{release}.")]
    fix = f"pip install sgl-deep-gemm=={match[0]}" if match else f"install torch {built_for}"
    return Check("sgl-deep-gemm", WARNING, f"{version} was built for torch {built_for}, found torch {torch}", fix)
