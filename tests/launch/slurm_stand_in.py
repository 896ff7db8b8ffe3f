"""srun, scontrol and squeue as scripts/launch/train.sbatch calls them, on this machine.

FOLDER: notes what was asked in `asked`. STATE: what squeue says of the job.
"""

import os
import pathlib
import signal
import subprocess
import sys


def srun(arguments):
    """Each task as a process; SIGTERM is passed on; the highest exit code."""
    cut = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
    options = dict(word[2:].partition("=")[::2] for word in arguments[:cut])
    tasks = [
        subprocess.Popen(arguments[cut:], env=os.environ | {"SLURM_PROCID": str(rank)})
        for rank in range(int(options["ntasks"]))
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(arguments):
    """Names of nodes: `a,b` is two of them. A requeue is noted."""
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2].replace(",", "\n"))
    return 0


def squeue(arguments):
    print(os.environ["STATE"])
    return 0


def main(program, *arguments):
    name = pathlib.Path(program).name
    with open(pathlib.Path(os.environ["FOLDER"]) / "asked", "a") as asked:
        asked.write(" ".join([name, *arguments[:6]]).partition("\n")[0] + "\n")
    return {"srun": srun, "scontrol": scontrol, "squeue": squeue}[name](list(arguments))


def install(folder):
    """The programs in a folder; the variables for a script that calls them."""
    for name in ("srun", "scontrol", "squeue"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$0" "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    return job | {"PATH": path, "FOLDER": str(folder), "STATE": "RUNNING"}


def requeues(folder):
    """How often the script has asked for a requeue."""
    return (folder / "asked").read_text().count("scontrol requeue 7\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
