"""A run on TPU slices of a GKE cluster made by xpk (https://github.com/AI-Hypercomputer/xpk)."""

import shlex
from collections.abc import Mapping

import compiler_flags
import variables
from variables import Variable

from maxdiloco.errors import LostPeerError, SaveError

TABLE = (
    Variable(
        "CLUSTER", variables.NAME, f"the GKE cluster's name ({variables.NAME_WORDS})",
        "my-cluster", also=("CLUSTER_NAME",),
    ),
    Variable(
        "PROJECT", r"([a-z][-.a-z0-9]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
        "the Google Cloud project's ID", "my-project", also=("PROJECT_ID",),
    ),
    Variable(
        "ZONE", r"[a-z]+-[a-z]+[0-9]+(-[a-z])?", "the cluster's zone or region", "us-west4-a"
    ),
    Variable(
        "TPU_TYPE", r"(v4|v5p|v5litepod|v5e|v6e|tpu7x)-([1-9][0-9]*|[0-9]+x[0-9]+(x[0-9]+)?)",
        "a type of TPU slice that xpk knows", "v5litepod-16", also=("DEVICE_TYPE",),
    ),
    variables.NUM_SLICES,
    variables.IMAGE,
    variables.OUTPUT,
    Variable("STORAGE", r"[\w.-]+", "the name of an xpk storage", "my-text", ""),
    variables.RESERVATION,
    Variable(
        "PRIORITY", "very-low|low|medium|high|very-high",
        "one of very-low, low, medium, high, very-high", "medium", "medium",
    ),
    variables.MAX_RESTARTS,
    variables.GRACE_SECONDS,
    variables.FLAGS_FILE,
)  # fmt: skip


def launch(arguments: list[str], environ: Mapping[str, str], faults: list[str]):
    """(the command of xpk,). Faults are lines in faults."""
    run = variables.run_name(arguments, environ, faults)
    workload = variables.workload(run, environ, faults)
    of = variables.read(TABLE, environ, faults)
    fixed = {"hardware": "tpu", "base_output_directory": of["OUTPUT"], "run_name": run}
    flags = variables.flags(arguments, environ, fixed, of["NUM_SLICES"], faults, in_pods=True)
    # exec: SIGTERM has to reach Python, which saves the state and exits with 143.
    command = variables.plain(shlex.join(["exec", "python", "-m", "maxdiloco.train", *flags]))
    # xpk adds 42 and 127 to 255 to these.
    codes = f"{LostPeerError.exit_code},{SaveError.exit_code}"
    made = ["xpk", "workload", "create"]
    made += [f"--cluster={of['CLUSTER']}", f"--project={of['PROJECT']}", f"--zone={of['ZONE']}"]
    made += [f"--workload={workload}", f"--tpu-type={_xpk_name(of['TPU_TYPE'])}"]
    made += [f"--num-slices={of['NUM_SLICES']}", f"--docker-image={of['IMAGE']}"]
    made += [f"--priority={of['PRIORITY']}", f"--max-restarts={of['MAX_RESTARTS']}"]
    made += [f"--restart-on-exit-codes={codes}"]
    made += [f"--termination-grace-period-seconds={of['GRACE_SECONDS']}"]
    if of["RESERVATION"] != "NONE":
        made += [f"--reservation={of['RESERVATION']}"]
    if of["STORAGE"]:
        made += [f"--storage={of['STORAGE']}"]
    compiler = compiler_flags.read(of["XLA_FLAGS_FILE"], "tpu", faults)
    if compiler:
        made += [f"--env=LIBTPU_INIT_ARGS={compiler}"]
    return [*made, f"--command={command}"], ""


def _xpk_name(tpu_type: str) -> str:
    return tpu_type.replace("v5e-", "v5litepod-")
