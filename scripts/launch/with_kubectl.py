"""A run on Kubernetes with JobSet: TPU slices of GKE, or nodes with GPUs."""

import json
import pathlib
import re
from collections.abc import Mapping

import compiler_flags
import variables
from variables import Variable

from maxdiloco.errors import ConfigError, DataError, NumericsError

HERE = pathlib.Path(__file__).parent
CHIPS_PER_HOST = 4  # of every TPU host here, as xpk's table of machine types has them

# Kind of TPU -> (GKE's name of it, cores of a chip that the type counts). Names and hosts are
# from xpk (src/xpk/core/system_characteristics.py).
TPUS = {
    "v4": ("tpu-v4-podslice", 2),
    "v5e": ("tpu-v5-lite-podslice", 1),
    "v5litepod": ("tpu-v5-lite-podslice", 1),
    "v5p": ("tpu-v5p-slice", 2),
    "v6e": ("tpu-v6e-slice", 1),
    "tpu7x": ("tpu7x", 2),
}
FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
    512: "8x8x8",
}  # fmt: skip

COMMON = (
    variables.NUM_SLICES,
    variables.IMAGE,
    variables.OUTPUT,
    Variable("NAMESPACE", variables.NAME, "a namespace of the cluster", "default", "default"),
    Variable(
        "SERVICE_ACCOUNT", r"[a-z0-9][-.a-z0-9]*",
        "a service account of the namespace that may write to the bucket", "default", "default",
    ),
    Variable("QUEUE", r"[a-z0-9][-.a-z0-9]*", "a local queue of Kueue", "multislice-queue", ""),
    Variable(
        "TEXT_CLAIM", r"[a-z0-9][-.a-z0-9]*",
        "a PersistentVolumeClaim with the text, which pods see at /text", "my-text", "",
    ),
    Variable("SHM_GB", variables.COUNT, "gigabytes of shared memory in a pod", "16", "16"),
    variables.RESERVATION,
    variables.MAX_RESTARTS,
    variables.GRACE_SECONDS,
    variables.FLAGS_FILE,
)  # fmt: skip
TPU = Variable(
    "TPU_TYPE", rf"({'|'.join(TPUS)})-[1-9][0-9]*", "a type of TPU slice", "v5e-16",
    also=("DEVICE_TYPE",),
)  # fmt: skip
GPU = (
    Variable(
        "GPU_TYPE", r"[a-z0-9][-.a-z0-9]*", "the label cloud.google.com/gke-accelerator of the "
        "nodes", "nvidia-h100-80gb",
    ),
    Variable("GPUS_PER_NODE", variables.COUNT, "the GPUs of a node", "8", "8"),
    Variable("NODES_PER_SLICE", variables.COUNT, "the nodes of a slice", "1", "1"),
)  # fmt: skip


def launch(arguments: list[str], environ: Mapping[str, str], faults: list[str]):
    """(the command of kubectl, the manifest). Faults are lines in faults."""
    run = variables.run_name(arguments, environ, faults)
    workload = variables.workload(run, environ, faults)
    on_gpus = bool(environ.get("GPU_TYPE"))
    if on_gpus and (environ.get("TPU_TYPE") or environ.get("DEVICE_TYPE")):
        faults.append("TPU_TYPE and GPU_TYPE are both set: a run has one kind. Unset one.")
    of = variables.read((*COMMON, *(GPU if on_gpus else (TPU,))), environ, faults)
    hardware = "gpu" if on_gpus else "tpu"
    fixed = {"hardware": hardware, "base_output_directory": of["OUTPUT"], "run_name": run}
    flags = variables.flags(arguments, environ, fixed, of["NUM_SLICES"], faults, in_pods=True)
    compiler = compiler_flags.read(of["XLA_FLAGS_FILE"], hardware, faults)
    selector, hosts = nodes(of, hardware, faults)
    if faults:
        return ["kubectl"], ""
    if of["RESERVATION"] != "NONE":
        selector["cloud.google.com/reservation-name"] = of["RESERVATION"].rpartition("/")[2]
    final = (1, ConfigError.exit_code, DataError.exit_code, NumericsError.exit_code)
    values = {
        "WORKLOAD": workload,
        "LABELS": {"kueue.x-k8s.io/queue-name": of["QUEUE"]} if of["QUEUE"] else {},
        "MAX_RESTARTS": int(of["MAX_RESTARTS"]),
        "NUM_SLICES": int(of["NUM_SLICES"]),
        "HOSTS": hosts,
        "FINAL_CODES": list(final),
        "GRACE_SECONDS": int(of["GRACE_SECONDS"]),
        "SERVICE_ACCOUNT": of["SERVICE_ACCOUNT"],
        "NODE_SELECTOR": selector,
        "IMAGE": of["IMAGE"],
        "FLAGS": [variables.plain(flag) for flag in flags],
    } | _volumes(of["SHM_GB"], of["TEXT_CLAIM"])
    if on_gpus:
        processes = str(int(of["NUM_SLICES"]) * hosts)
        values |= {"GPUS": int(of["GPUS_PER_NODE"]), "PROCESSES": processes}
        values |= {"NODES_PER_SLICE": str(hosts), "XLA_FLAGS": compiler}
    else:
        values |= {"CHIPS": CHIPS_PER_HOST, "LIBTPU_INIT_ARGS": compiler}
    manifest = fill((HERE / f"{hardware}_jobset.yaml").read_text(encoding="utf-8"), values)
    return ["kubectl", "create", f"--namespace={of['NAMESPACE']}", "-f", "-"], manifest


def fill(template: str, values: Mapping[str, object]) -> str:
    """The template with JSON, which YAML reads, for each {{NAME}}; comment lines go.

    Raises KeyError for a name without a value, ValueError for a value without a name.
    """
    lines = [line for line in template.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines) + "\n"
    if unused := sorted(set(values) - set(re.findall(r"\{\{(\w+)\}\}", text))):
        raise ValueError(f"{unused} are nowhere in the template")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: json.dumps(values[match[1]]), text)


def _volumes(shm_gb: str, claim: str) -> dict[str, list[object]]:
    """Shared memory, and the text of a claim if there is one."""
    memory = {"medium": "Memory", "sizeLimit": f"{shm_gb}G"}
    volumes: list[object] = [{"name": "shm", "emptyDir": memory}]
    mounts: list[object] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if claim:
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": "text", "persistentVolumeClaim": source})
        mounts.append({"name": "text", "mountPath": "/text", "readOnly": True})
    return {"VOLUMES": volumes, "MOUNTS": mounts}


def nodes(of: Mapping[str, str], hardware: str, faults: list[str]) -> tuple[dict[str, str], int]:
    """(labels of the nodes, how many make a slice)."""
    if hardware == "gpu":
        selector = {"cloud.google.com/gke-accelerator": of["GPU_TYPE"]}
        return selector, int(of["NODES_PER_SLICE"] or 1)
    kind, _, size = of["TPU_TYPE"].partition("-")
    if not size:
        return {}, 0
    accelerator, cores = TPUS[kind]
    chips = int(size) // cores
    topology = (FLAT if cores == 1 else CUBES).get(chips if int(size) % cores == 0 else 0)
    if topology is None:
        sizes = [str(n * cores) for n in (FLAT if cores == 1 else CUBES)]
        faults.append(
            f"TPU_TYPE={of['TPU_TYPE']} has no topology here. Use {kind}- and one of "
            f"{', '.join(sizes)}."
        )
        return {}, 0
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    return selector, chips // CHIPS_PER_HOST
