"""SIGTERM on the way a cluster sends it: saved, exit code 143, requeued, and to the end."""

import os
import pathlib
import signal
import socket
import sys

import process_tools as tools
import pytest

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
STEPS = 400  # far more than run before the signal comes
KEYS = {
    "steps": STEPS, "ici_fsdp_parallelism": 1, "log_period": 5, "checkpoint_period": 1000,
    "enable_streaming_diloco": "true", "num_diloco_fragments": 2, "diloco_sync_period": 6,
    "num_communication_overlapping_steps": 2, "diloco_exchange_dtype": "float4_e3m0",
}  # fmt: skip


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The stand-ins for Slurm's programs, and the variables of a job."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    import slurm_stand_in

    return slurm_stand_in, slurm_stand_in.install(tmp_path)


@pytest.mark.full
def test_a_preempted_job_saves_is_requeued_and_goes_on_with_the_same_command(
    slurm, tmp_path, programs
):
    """scripts/launch/train.sbatch, two lives of two processes of this machine. That the end is that
    of an undisturbed run, to the bit: test_link_faults.py."""
    stand_in, environ = slurm
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    settings = [sys.executable, "1", port, "3", "none"]
    keys = tools.flags(KEYS | {"run_name": "run", "base_output_directory": tmp_path})
    command = ["bash", str(tools.ROOT / "scripts/launch/train.sbatch"), *settings, *keys]
    environ = environ | {"PYTHONPATH": str(tools.ROOT)}
    environ |= {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.1"}
    first = again = tools.Process(command, tmp_path / "first.log", environ)
    try:
        first.wait_for("step 5/400")
        os.kill(first.popen.pid, signal.SIGTERM)
        assert first.end() == 143, first.text()
        assert "train.sbatch: exit code 143: requeued, restart 1 of 3." in first.text()
        assert stand_in.requeues(tmp_path) == 1
        (stopped,) = tools.steps(tmp_path / "run")
        assert 5 <= stopped < STEPS
        again = tools.Process(command, tmp_path / "again.log", environ)
        assert again.end() == 0, again.text()
    finally:
        first.kill()
        again.kill()
    assert "step 5/400" not in again.text(), "it has not begun anew"
    assert tools.steps(tmp_path / "run")[-1] == STEPS
    assert stand_in.requeues(tmp_path) == 1
