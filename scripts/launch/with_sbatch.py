"""A run under Slurm: scripts/launch/train.sbatch, in one partition or in several."""

import pathlib
import sys
from collections.abc import Mapping

import compiler_flags
import variables
from variables import Variable

HERE = pathlib.Path(__file__).resolve().parent
WORD = r"[\w.-]+"

TABLE = (
    variables.NUM_SLICES,
    Variable("GPUS_PER_NODE", r"[0-9]{1,3}", "the GPUs of a node; 0: train on CPUs", "8"),
    variables.OUTPUT._replace(
        # The nodes have the credentials of the environment: sbatch and srun hand it on.
        pattern=rf"/[^\s]*|(gs|s3|az){variables.IN_BUCKET}",
        what="a folder that all nodes see, its whole path, or gs://, s3:// or az://bucket/folder",
        example="/shared/runs",
    ),
    Variable(
        "PARTITIONS", rf"{WORD}( {WORD})*", "partitions, with a blank between", '"east west"', ""
    ),
    Variable("NODES_PER_SLICE", variables.COUNT, "the nodes of a slice", "1", "1"),
    Variable("ACCOUNT", WORD, "an account of Slurm", "my-account", ""),
    Variable(
        "TIME", r"[0-9]+|([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}",
        "a time limit as sbatch takes it", "1-00:00:00", "",
    ),
    Variable("PORT", r"[1-9][0-9]{3,4}", "a port that is free on the first node", "8476", "8476"),
    variables.MAX_RESTARTS,
    variables.GRACE_SECONDS,
    variables.FLAGS_FILE,
)  # fmt: skip


def launch(arguments: list[str], environ: Mapping[str, str], faults: list[str]):
    """(the command of sbatch, nothing). Faults are lines in faults."""
    run = variables.run_name(arguments, environ, faults)
    job = variables.workload(run, environ, faults, pattern=WORD, words="letters, digits, - _ and .")
    of = variables.read(TABLE, environ, faults)
    partitions = of["PARTITIONS"].split(" ")
    slices = int(of["NUM_SLICES"] or 0)
    if slices % len(partitions):
        faults.append(
            f"PARTITIONS={of['PARTITIONS']} has {len(partitions)} partitions, which "
            f"{slices} slices cannot share equally. Set NUM_SLICES to a multiple of "
            f"{len(partitions)}."
        )
    hardware = "cpu" if of["GPUS_PER_NODE"] == "0" else "gpu"
    fixed = {"hardware": hardware, "base_output_directory": of["OUTPUT"], "run_name": run}
    flags = variables.flags(arguments, environ, fixed, of["NUM_SLICES"], faults, in_pods=False)
    compiler_flags.read(of["XLA_FLAGS_FILE"], "gpu", faults)
    if faults:
        return ["sbatch"], ""
    nodes = slices // len(partitions) * int(of["NODES_PER_SLICE"])
    options: list[str] = []
    for partition in partitions:
        options += [":"] if options else []
        options += [f"--job-name={job}", f"--nodes={nodes}", "--ntasks-per-node=1"]
        options += [f"--signal=TERM@{of['GRACE_SECONDS']}"]  # to the processes, not the script
        options += [f"--gpus-per-node={of['GPUS_PER_NODE']}"] if hardware == "gpu" else []
        options += [f"--partition={partition}"] if partition else []
        options += [f"--{key.lower()}={of[key]}" for key in ("ACCOUNT", "TIME") if of[key]]
    script = [str(HERE / "train.sbatch"), sys.executable, of["NODES_PER_SLICE"], of["PORT"]]
    return ["sbatch", *options, *script, of["MAX_RESTARTS"], of["XLA_FLAGS_FILE"], *flags], ""
