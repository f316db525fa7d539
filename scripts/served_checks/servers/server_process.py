"""A server as a process: its plugins, its start and end, what it is asked, and the host that it runs on."""

import datetime
import http.client
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What asking a server may raise.
ASKING_ERRORS = (RuntimeError, OSError, ValueError, http.client.HTTPException)
PACKAGES = (
    "sglang torch triton transformers sglang-kernel sgl-flash-mla sgl-deep-gemm flashinfer-python nvidia-nccl-cu13"
)


def write_entry_points(folder: Path, **more: str) -> Path:
    """Write what pip would install to make plugins known, for a tree that is on PYTHONPATH; return the folder.

    Args:
        folder: made if it is not there; what an earlier call wrote is replaced.
        more: plugins beside nsa-dcp's own, name to target.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dist_info = folder / "nsa_dcp-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-dcp\nVersion: 0\n")
    plugins = project["entry-points"]["sglang.srt.plugins"] | more
    lines = [f"{name} = {target}" for name, target in plugins.items()]
    (dist_info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    return folder


def python_path(site: Path) -> str:
    """PYTHONPATH of a server: a folder that `write_entry_points` returned, this tree, and what is set already."""
    path = [str(site), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, path))


def describe_host() -> dict[str, object]:
    """Versions, GPUs and their links, revision, and the environment that decides how ranks communicate."""
    versions = {}
    for name in PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "versions": versions,
        "gpus": _output_of(query).splitlines(),
        "links": _output_of("nvidia-smi topo -m"),
        "revision": _output_of(f"git -C {ROOT} rev-parse HEAD").strip(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "SGLANG_", "TORCH_SYMM"))
        },
    }


def _output_of(command: str) -> str:
    try:
        return subprocess.run(command.split(), capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Server:
    """A server process and its children. Used as a context: whatever happens inside, all of them are ended."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        ids = [self.process.pid, *self.children()]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process_id in ids:
                try:
                    os.kill(process_id, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + 15
            while any(is_running(process_id) for process_id in ids) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.2)

    def children(self) -> list[int]:
        """Process ids of everything that the server started, by their session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and int(stat.parent.name) != self.process.pid:
                found.append(int(stat.parent.name))
        return found

    def wait_until_ready(self, timeout_s: float) -> float:
        """Wait for the server to answer; return the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                self.get("/model_info", timeout_s=5)
            except (OSError, http.client.HTTPException):
                time.sleep(1)
            else:
                return time.monotonic() - started
        raise TimeoutError(f"the server did not answer within {timeout_s} s:\n{self.tail()}")

    def get(self, path: str, timeout_s: float) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return json.load(response)

    def post(self, body: object, timeout_s: float, path: str = "/generate") -> tuple[int, object]:
        """POST; return the status and the decoded answer (its text where it is no JSON)."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read().decode()
                return response.status, json.loads(text) if text.startswith(("{", "[")) else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()[:300]

    def generate(self, ids: list[list[int]], new_tokens: int, timeout_s: float) -> list[dict]:
        """Ask for a batch in one request, greedily; return the answers' meta_info. RuntimeError: it was refused."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        status, answer = self.post({"input_ids": ids, "sampling_params": sampling}, timeout_s)
        if status != 200:
            raise RuntimeError(f"status {status}: {answer}")
        return [one["meta_info"] for one in answer]

    def trace_steps(self, folder: Path, num_steps: int, num_ranks: int, timeout_s: float) -> list[str]:
        """Trace the next steps of every rank into a folder; return the files that are there in time."""
        body = {"output_dir": str(folder), "num_steps": num_steps, "activities": ["CPU", "GPU"], "with_stack": False}
        self.post(body, 30, "/start_profile")
        deadline = time.monotonic() + timeout_s
        while len(list(folder.glob("*.json.gz"))) < num_ranks and time.monotonic() < deadline:
            time.sleep(0.5)
        # The last bytes of the slowest rank's file.
        time.sleep(3)
        return sorted(str(path) for path in folder.glob("*.json.gz"))

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def is_running(process_id: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
