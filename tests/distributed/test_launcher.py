"""A failed or refused run says why, at once, and leaves no process behind."""

import ipaddress
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.config import DcpConfig
from nsa_dcp.hf.ranks import join_groups
from nsa_dcp.launcher import RankError, run_ranks

ROOT = Path(__file__).parents[2]
# Collectives wait ten minutes for a rank; a call that waits for that does not return within a test's time.
AT_ONCE = pytest.mark.timeout(500)
# For a wait that is in vain: long enough for ranks to find each other on a busy machine.
RUNS_OUT_S = 20.0


def record_process(rank, directory):
    """Say which process this rank is, and which one it was forked from."""
    unfinished = directory / f"{rank}.unfinished"
    unfinished.write_text(f"{os.getpid()} {os.getppid()}")
    unfinished.rename(directory / f"{rank}.process")


def recorded_processes(directory):
    return [tuple(map(int, path.read_text().split())) for path in sorted(directory.glob("*.process"))]


def is_running(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def assert_all_end(process_ids):
    """They end by themselves, soon or, on a busy machine, later: looked at a few thousand times."""
    for _ in range(6000):
        if not any(map(is_running, process_ids)):
            return
        time.sleep(0.05)
    assert [process_id for process_id in process_ids if is_running(process_id)] == []


def assert_no_rank_left(directory, world_size):
    """The call that started them has returned, so they are gone already, not about to go."""
    processes = recorded_processes(directory)
    assert len(processes) == world_size
    assert [process_id for process_id, _ in processes if is_running(process_id)] == []
    assert multiprocessing.active_children() == []


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order_and_messages_while_ranks_run(world_size, tmp_path):
    messages = []
    results = run_ranks(answer, world_size, (tmp_path, "x"), on_message=messages.append)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    for rank, tensor, gathered in results:
        assert tensor.tolist() == [float(rank)] * 1000
        assert gathered == ([None] if world_size == 1 else list(range(world_size)))
    for rank in range(world_size):
        assert [text for sender, text in messages if sender == rank] == ["x1", "x2"]
    assert_no_rank_left(tmp_path, world_size)


def answer(rank, send, directory, text):
    record_process(rank, directory)
    send((rank, text + "1"))
    # The higher a rank, the earlier it answers.
    time.sleep(0.02 * (4 - rank))
    send((rank, text + "2"))
    gathered = [None]
    if torch.distributed.is_initialized():
        gathered = comm.all_gather(torch.tensor(rank), torch.distributed.group.WORLD).tolist()
    # A tensor outlives the process that made it.
    return rank, torch.full((1000,), float(rank)), gathered


# --- refusals -------------------------------------------------------------------------------------------------------


@AT_ONCE
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param("ValueError", ValueError, id="ValueError"),
        pytest.param("NotImplementedError", NotImplementedError, id="NotImplementedError"),
        pytest.param("JSONDecodeError", ValueError, id="a-subclass-that-takes-other-arguments"),
    ],
)
@pytest.mark.parametrize("refusing_rank", [0, 2])
def test_a_refusal_is_raised_again_though_other_ranks_wait_for_the_rank(error, expected, refusing_rank, tmp_path):
    message = "Expecting value" if error == "JSONDecodeError" else "heads must fit, got 7"
    with pytest.raises(expected, match=message):
        run_ranks(refuse, 3, (tmp_path, error, refusing_rank), on_message=lambda _message: time.sleep(0.5))
    assert_no_rank_left(tmp_path, 3)


def refuse(rank, send, directory, error, refusing_rank):
    record_process(rank, directory)
    comm.barrier()
    if rank == refusing_rank:
        send("keeps the caller busy while the others fail in turn")
        if error == "JSONDecodeError":
            json.loads("not json")
        raise {"ValueError": ValueError, "NotImplementedError": NotImplementedError}[error]("heads must fit, got 7")
    comm.barrier()


@AT_ONCE
def test_a_refusal_before_ranks_meet_is_raised_too(tmp_path):
    with pytest.raises(ValueError, match=r"^before$"):
        run_ranks(refuse_alone, 1, (tmp_path,))
    assert_no_rank_left(tmp_path, 1)


def refuse_alone(rank, _send, directory):
    record_process(rank, directory)
    raise ValueError("before")


# --- failures -------------------------------------------------------------------------------------------------------


@AT_ONCE
@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_a_failure_names_the_rank_and_its_error_while_others_hang_in_a_collective(failing_rank, tmp_path):
    """Also where the others' collectives fail in turn before anybody looks."""
    with pytest.raises(RankError, match=rf"^rank {failing_rank} failed:\n(?s:.*)RuntimeError: out of pages") as raised:
        run_ranks(fail, 3, (tmp_path, failing_rank), on_message=lambda _message: time.sleep(1.0))
    # Where it failed, too.
    assert "in fail" in str(raised.value)
    assert_no_rank_left(tmp_path, 3)


def fail(rank, send, directory, failing_rank):
    record_process(rank, directory)
    comm.barrier()
    if rank == 1:
        send("keeps the caller busy")
    comm.barrier()
    if rank == failing_rank:
        raise RuntimeError("out of pages")
    comm.barrier()


@AT_ONCE
@pytest.mark.parametrize("killed_rank", [0, 2])
@pytest.mark.parametrize("others", ["in-a-collective", "at-work"])
def test_a_killed_rank_is_named_with_its_signal(killed_rank, others, tmp_path):
    with pytest.raises(RankError, match=rf"^rank {killed_rank} died with exit status -{signal.SIGKILL:d}"):
        run_ranks(be_killed, 3, (tmp_path, killed_rank, others))
    assert_no_rank_left(tmp_path, 3)


def be_killed(rank, _send, directory, killed_rank, others):
    record_process(rank, directory)
    comm.barrier()
    if rank == killed_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if others == "in-a-collective":
        comm.barrier()
    while True:
        time.sleep(0.01)


@AT_ONCE
def test_a_rank_that_leaves_without_a_word_is_named(tmp_path):
    with pytest.raises(RankError, match=r"^rank 1 died with exit status 7"):
        run_ranks(leave, 2, (tmp_path,))
    assert_no_rank_left(tmp_path, 2)


def leave(rank, _send, directory):
    record_process(rank, directory)
    comm.barrier()
    if rank == 1:
        os._exit(7)
    while True:
        time.sleep(0.01)


@AT_ONCE
def test_a_collective_that_a_rank_never_joins_ends_after_the_timeout(tmp_path):
    """The rank that does not come neither fails nor dies."""
    with pytest.raises(RankError, match=r"^rank 1 failed:\n(?s:.*)([Tt]imed out|[Tt]imeout)"):
        run_ranks(wait_in_vain, 2, (tmp_path,), timeout_s=RUNS_OUT_S)
    assert_no_rank_left(tmp_path, 2)


def wait_in_vain(rank, _send, directory):
    record_process(rank, directory)
    comm.barrier()
    if rank == 0:
        while True:
            time.sleep(0.01)
    comm.barrier()


@AT_ONCE
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 2), (4, 2)], ids=["one-group", "two-groups"])
def test_a_group_of_the_engine_waits_no_longer_than_the_timeout(tp_size, dcp_size, tmp_path):
    """Also where every rank outside the group is through."""
    with pytest.raises(RankError, match=r"^rank 1 failed:\n(?s:.*)([Tt]imed out|[Tt]imeout)"):
        run_ranks(wait_in_vain_in_a_group, tp_size, (tmp_path, DcpConfig(tp_size, dcp_size)), timeout_s=RUNS_OUT_S)
    assert_no_rank_left(tmp_path, tp_size)


def wait_in_vain_in_a_group(rank, _send, directory, config):
    record_process(rank, directory)
    ranks = join_groups(config, rank, timeout_s=RUNS_OUT_S)
    comm.barrier()
    if rank == 0:
        while True:
            time.sleep(0.01)
    comm.all_reduce(torch.ones(1), ranks.dcp_group)


@AT_ONCE
def test_a_result_that_cannot_be_sent_is_a_failure(tmp_path):
    with pytest.raises(RankError, match=r"^rank [01] failed:\n(?s:.*)pickle"):
        run_ranks(return_a_lambda, 2, (tmp_path,))
    assert_no_rank_left(tmp_path, 2)


def return_a_lambda(rank, _send, directory):
    record_process(rank, directory)
    comm.barrier()
    return lambda: rank


@AT_ONCE
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_caller_takes_its_ranks_along(error, tmp_path):
    def interrupt(_message):
        raise error("stop")

    with pytest.raises(error, match=r"^stop$"):
        run_ranks(wait_for_interruption, 2, (tmp_path,), on_message=interrupt)
    assert_no_rank_left(tmp_path, 2)


def wait_for_interruption(rank, send, directory):
    record_process(rank, directory)
    comm.barrier()
    send("now")
    comm.barrier()
    while True:
        time.sleep(0.01)


@AT_ONCE
def test_ranks_end_with_a_killed_parent(tmp_path):
    """It has no chance to end them: they notice by themselves, and so does the process they were forked from."""
    script = (
        "import sys; from pathlib import Path; from nsa_dcp.launcher import run_ranks; "
        "from tests.distributed.test_launcher import run_on; run_ranks(run_on, 3, (Path(sys.argv[1]),))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    try:
        while len(recorded_processes(tmp_path)) < 3:
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert_all_end([process_id for pair in recorded_processes(tmp_path) for process_id in pair])


def run_on(rank, _send, directory):
    """One rank is at work, one asleep, one waits in a collective."""
    comm.barrier()
    record_process(rank, directory)
    if rank == 1:
        time.sleep(3600)
    if rank == 2:
        comm.barrier()
    while True:
        torch.randn(10).sum()


def test_ranks_listen_on_the_loopback_interface_alone(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for listeners, variables in run_ranks(find_listeners, 2):
        assert listeners and all(address.is_loopback for address in listeners)
        # What the host's name points to may be the loopback address as well, on this machine.
        assert all(value.startswith("lo") for value in variables)


def find_listeners(rank, send):
    comm.barrier()
    held = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            held.add(os.readlink(descriptor))
        except OSError:
            continue
    listeners = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
            listeners.append(ipaddress.ip_address(bytes.fromhex(fields[1].partition(":")[0])[::-1]))
    return listeners, [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
