"""Start a run on a cluster: check every variable, then call xpk, kubectl or sbatch once.

    python scripts/launch/launch.py SCRIPT xpk|jobset|slurm [RUN_NAME] [file.yml] [key=value ...]

scripts/xpk_run.sh, jobset_run.sh and slurm_run.sh call it and describe the variables.
"""

import os
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import with_kubectl
import with_sbatch
import with_xpk


class Launch(NamedTuple):
    """A command and the text of its standard input."""

    command: list[str]
    text: str = ""


TARGETS = {
    "xpk": with_xpk.launch,
    "jobset": with_kubectl.launch,
    "slurm": with_sbatch.launch,
}
INSTALL = {
    "xpk": "Install it with 'pip install xpk'.",
    "kubectl": "Install it, and point it at the cluster.",
    "sbatch": "Run this script on a login node of the Slurm cluster.",
}


def main(script: str, target: str, arguments: list[str]) -> int:
    """Launch the run, or only print the command with DRY_RUN; returns the exit code."""
    faults: list[str] = []
    launch = Launch(*TARGETS[target](list(arguments), os.environ, faults))
    dry = bool(os.environ.get("DRY_RUN"))
    program = launch.command[0]
    if not dry and not shutil.which(program):
        faults.append(f"{program} is not on PATH. {INSTALL[program]}")
    for fault in faults:
        print(f"{script}: {fault}", file=sys.stderr)
    if faults:
        return 2
    if dry:
        comment = "# " if launch.text else ""
        print(comment + shlex.join(launch.command))
        print(launch.text, end="")
        return 0
    # Without a text the command keeps this script's input: xpk may ask.
    return subprocess.run(launch.command, input=launch.text or None, text=True).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
