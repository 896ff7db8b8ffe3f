"""scripts/launch/train.sbatch with stand-ins for Slurm's programs and for the trainer."""

import os
import subprocess
import time

import launch_tools as tools
import pytest

# A trainer that writes down what it is told and ends with its own word of CODES.
TRAINER = """#!/bin/bash
note=$FOLDER/process.$JAX_PROCESS_ID
echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PARTITION_INDEX $XLA_FLAGS" >"$note"
printf '%s|' "$@" >>"$note"
if [ "$CODES" = wait ]; then trap 'kill $!; exit 143' TERM; echo >>"$note"; sleep 100 & wait; fi
codes=($CODES)
exit "${codes[JAX_PROCESS_ID]}"
"""
# srun: each task as a process; SIGTERM is passed on; the highest exit code. scontrol: `a,b` is two
# nodes. All note in `asked` what was asked of them.
ASKED = '#!/bin/bash\necho "${0##*/} ${*:1:6}" >>"$FOLDER/asked"\n'
SLURM = {
    "scontrol": 'if [ "$1" = show ]; then tr , "\\n" <<<"$3"; fi\n',
    "squeue": 'echo "$STATE"\n',
    "srun": """highest=0
while [[ $1 == --* ]]; do if [[ $1 == --ntasks=* ]]; then count=${1#*=}; fi; shift; done
for ((i = 0; i < count; i++)); do SLURM_PROCID=$i "$@" & tasks+=("$!"); done
trap 'kill "${tasks[@]}"' TERM
for task in "${tasks[@]}"; do
  wait "$task"; code=$?
  while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done  # the trap had interrupted it
  if ((code > highest)); then highest=$code; fi
done
exit "$highest"
""",
}


@pytest.fixture
def batch(tmp_path):
    """Runs the batch script for processes that end with these codes."""
    programs = {"python": TRAINER} | {name: ASKED + text for name, text in SLURM.items()}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b",
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "STATE": "RUNNING",
    }  # fmt: skip

    def run(codes, *flags, program=subprocess.run, **variables):
        script = str(tools.ROOT / "scripts/launch/train.sbatch")
        settings = [str(tmp_path / "python"), "2", "8476", "3"]
        settings += [str(tools.ROOT / "scripts/launch/xla_flags.env")]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        there = environ | {"CODES": codes} | variables
        return program(["bash", script, *settings, *flags], env=there, **pipes)

    return run


def requeues(folder):
    return (folder / "asked").read_text().count("scontrol requeue 7\n")


def test_each_process_knows_its_number_its_slice_and_the_first_node(batch, tmp_path):
    """Two partitions of two nodes: Slurm's own numbers start at 0 in each."""
    both = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "east1,east2"}
    both |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "west1,west2"}
    done = batch("0 0 0 0", "a b", "steps=$(touch x)", **both)
    assert done.returncode == 0, done.stderr
    for process, partition in enumerate("0011"):
        told, flags = (tmp_path / f"process.{process}").read_text().splitlines()
        assert told.split()[:3] == ["east1:8476", "4", partition]
        assert "--xla_gpu_enable_latency_hiding_scheduler=true" in told
        assert flags == "-m|maxdiloco.train|a b|steps=$(touch x)|"
    asked = (tmp_path / "asked").read_text()
    for group in "01":
        options = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0"
        assert f"srun {options} --het-group={group} bash\n" in asked


def test_sigterm_reaches_the_processes_and_the_run_is_requeued(batch, tmp_path):
    with batch("wait", program=subprocess.Popen) as process:
        for note in (tmp_path / "process.0", tmp_path / "process.1"):
            while not (note.exists() and note.read_text().endswith("|\n")):
                time.sleep(0.01)
        process.terminate()
        said, _ = process.communicate()
    assert process.returncode == 143
    assert "exit code 143: requeued" in said
    assert requeues(tmp_path) == 1


BOTH = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"}
BOTH |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "b"}


@pytest.mark.parametrize(
    ("codes", "variables", "code", "requeued"),
    [
        *((codes, {}, max(map(int, codes.split())), True)
          for codes in ("5 137", "143 143", "75 75", "0 5", "134 5")),
        # It is done, or would end so again.
        ("0 0", {}, 0, False),
        ("130 130", {}, 130, False),
        *((f"{code} {code}", {}, code, False) for code in (1, 2, 3, 4)),
        # A final code in one partition counts before others.
        ("5 3", BOTH, 3, False),
        ("3 5", BOTH, 3, False),
        # After the last restart, or after scancel.
        ("5 5", {"SLURM_RESTART_COUNT": "3"}, 5, False),
        ("5 5", {"STATE": "COMPLETING"}, 5, False),
    ],
)  # fmt: skip
def test_a_run_that_may_resume_is_requeued(batch, tmp_path, codes, variables, code, requeued):
    done = batch(codes, **variables)
    assert done.returncode == code
    assert requeues(tmp_path) == requeued
