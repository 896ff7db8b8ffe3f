"""Runs a launch script with stand-ins for the cluster's programs on PATH."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# Writes down how it was called and what it was told, and says so.
STAND_IN = """#!{python}
import json, pathlib, sys
text = "" if sys.stdin.isatty() else sys.stdin.read()
pathlib.Path(__file__ + ".json").write_text(json.dumps([sys.argv[1:], text]))
print("done")
"""

XPK = {
    "CLUSTER": "c", "PROJECT": "my-project", "ZONE": "us-west4-a", "TPU_TYPE": "v5litepod-16",
    "NUM_SLICES": "2", "IMAGE": "i", "OUTPUT": "gs://bucket/runs",
}  # fmt: skip
TPU = {"TPU_TYPE": "v5e-16", "NUM_SLICES": "2", "IMAGE": "i", "OUTPUT": "gs://bucket/runs"}
GPU = {
    "GPU_TYPE": "nvidia-h100-80gb", "GPUS_PER_NODE": "8", "NODES_PER_SLICE": "2",
    "NUM_SLICES": "2", "IMAGE": "i", "OUTPUT": "gs://bucket/runs",
}  # fmt: skip
SLURM = {"NUM_SLICES": "2", "GPUS_PER_NODE": "8", "OUTPUT": "/shared/runs"}
SCRIPTS = {  # script -> (the program it calls, variables of a run)
    "xpk_run": ("xpk", XPK),
    "jobset_run": ("kubectl", TPU),
    "slurm_run": ("sbatch", SLURM),
}


def run(script, arguments, folder, **environment):
    """A finished launch script. The cluster's programs are stand-ins in folder, and no others."""
    for name in ("xpk", "kubectl", "sbatch"):
        program = folder / name
        program.write_text(STAND_IN.format(python=sys.executable))
        program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "MAXDILOCO_VENV": sys.prefix}
    command = ["/bin/bash", str(ROOT / f"scripts/{script}.sh"), *arguments]
    options = dict(env=path | environment, cwd=folder, stdin=subprocess.DEVNULL, timeout=120)
    return subprocess.run(command, capture_output=True, text=True, **options)


def called(folder, program):
    """(arguments, standard input) of the stand-in, or None."""
    path = folder / f"{program}.json"
    return json.loads(path.read_text()) if path.exists() else None


def launch(script, arguments, folder, **environment):
    """What the cluster's program was called with: (arguments, standard input)."""
    done = run(script, arguments, folder, **environment)
    assert done.returncode == 0, done.stderr
    return called(folder, SCRIPTS[script][0])
