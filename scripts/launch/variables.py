"""Variables of the launch scripts: names, patterns of their values, and the flags they stand for.

If MaxText's DiLoCo scripts (src/maxtext/trainers/diloco/scripts) have a variable, their name is
accepted too.
"""

import pathlib
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from maxdiloco.config import config
from maxdiloco.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Variable -> the flag it stands for. An argument key=value wins over its variable.
KEYS = {
    "MODEL_NAME": "model_name",
    "STEPS": "steps",
    "DATASET_PATH": "dataset_path",
    "PER_DEVICE_BATCH_SIZE": "per_device_batch_size",
    "MAX_TARGET_LENGTH": "max_target_length",
    "CHECKPOINT_PERIOD": "checkpoint_period",
    "LOAD_FULL_STATE_PATH": "load_full_state_path",
    "ENABLE_STREAMING_DILOCO": "enable_streaming_diloco",
    "DILOCO_SYNC_PERIOD": "diloco_sync_period",
    "DILOCO_OUTER_LR": "diloco_outer_lr",
    "DILOCO_OUTER_MOMENTUM": "diloco_outer_momentum",
    "DILOCO_NUM_FRAGMENTS": "num_diloco_fragments",
    "DILOCO_USE_SEQUENTIAL_LAYERS": "use_sequential_layers",
    "DILOCO_NUM_COMM_OVERLAP_STEPS": "num_communication_overlapping_steps",
    "DILOCO_COMM_OVERLAP_ALPHA": "communication_overlapping_alpha",
}


class Variable(NamedTuple):
    """One variable of a launch script.

    Attributes:
      name: its name in the environment.
      pattern: regular expression of its values.
      what: description of the value, for messages.
      example: a valid value.
      default: None if the variable must be set.
      also: other accepted names.
    """

    name: str
    pattern: str
    what: str
    example: str
    default: str | None = None
    also: tuple[str, ...] = ()

    def read(self, environ: Mapping[str, str], faults: list[str]) -> str:
        """Return the value, or "" after adding a line to faults."""
        given = {name: environ[name] for name in (self.name, *self.also) if environ.get(name)}
        if len(set(given.values())) > 1:
            pairs = " and ".join(f"{name}={value}" for name, value in given.items())
            faults.append(f"{pairs} both set {self.what}. Unset all but one.")
            return ""
        if not given:
            if self.default is None:
                names = " or ".join((self.name, *self.also))
                faults.append(
                    f"{names} is not set: expected {self.what}. Set it, for example "
                    f"{self.name}={self.example}."
                )
            return self.default or ""
        name, value = next(iter(given.items()))
        if not re.fullmatch(self.pattern, value):
            faults.append(
                f"{name}={value}: expected {self.what}, for example {name}={self.example}."
            )
            return ""
        return value


NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
NAME_WORDS = "lower case letters, digits and -, at most 40, a letter first"
COUNT = r"[1-9][0-9]{0,5}"
IN_BUCKET = r"://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9](/[^\s]*)?"

NUM_SLICES = Variable("NUM_SLICES", COUNT, "the number of slices, a whole number from 1", "2")
IMAGE = Variable(
    "IMAGE", r"[a-z0-9][-\w./:@]*", "an image that the cluster can pull, built from the Dockerfile",
    "us-docker.pkg.dev/my-project/images/maxdiloco:1", also=("DOCKER_IMAGE", "MY_IMAGE"),
)  # fmt: skip
OUTPUT = Variable(
    # Only gs://: a pod of GKE has no credentials of other clouds.
    "OUTPUT", rf"gs{IN_BUCKET}", "a folder on gs://, as a pod's disk goes with the pod",
    "gs://my-bucket/runs", also=("BASE_OUTPUT_DIRECTORY",),
)  # fmt: skip
RESERVATION = Variable(
    "RESERVATION", r"[\w./-]+", "the name of a reservation, or NONE", "my-reservation", "NONE"
)
MAX_RESTARTS = Variable(
    "MAX_RESTARTS", r"[0-9]{1,6}", "how often the run may start again, a whole number", "50", "50"
)
GRACE_SECONDS = Variable(
    "GRACE_SECONDS", COUNT, "the seconds from SIGTERM to the saved state", "180", "180"
)
FLAGS_FILE = Variable(
    "XLA_FLAGS_FILE", r"[^\s]+",
    "a file of compiler flags like scripts/launch/xla_flags.env, or none", "none",
    str(ROOT / "scripts/launch/xla_flags.env"),
)  # fmt: skip


def plain(value: str) -> str:
    """Escape a text for Kubernetes, which reads $(NAME) as a variable and $$ as $."""
    return value.replace("$", "$$")


def read(table: Collection[Variable], environ: Mapping[str, str], faults: list[str]):
    """Return {name: value} of a table's variables; adds a line to faults for each fault."""
    return {variable.name: variable.read(environ, faults) for variable in table}


def run_name(arguments: list[str], environ: Mapping[str, str], faults: list[str]) -> str:
    """Return the run's name: the first argument, which is removed, or a variable."""
    if arguments and "=" not in arguments[0] and not arguments[0].endswith((".yml", ".yaml")):
        return arguments.pop(0)
    names = ("RUN_NAME", "RUNNAME", "WORKLOAD_NAME", "XPK_WORKLOAD")
    given = [environ[name] for name in names if environ.get(name)]
    if not given:
        faults.append(
            f"the run has no name: a restart finds its checkpoints by it. Give the name as the "
            f"first argument, or set {names[0]}."
        )
        return ""
    return given[0]


def workload(
    run: str,
    environ: Mapping[str, str],
    faults: list[str],
    *,
    pattern: str = NAME,
    words: str = NAME_WORDS,
) -> str:
    """Return the name of the workload on the cluster, by default the run's name."""
    variable = Variable(
        "WORKLOAD_NAME", pattern, f"a name for the workload on the cluster ({words}); the run's "
        "name is the default", "my-run", also=("XPK_WORKLOAD",),
    )  # fmt: skip
    names = (variable.name, *variable.also)
    if run and not any(environ.get(name) for name in names):
        environ = {variable.name: run}
    return variable.read(environ, faults) if run else ""


def flags(
    arguments: list[str],
    environ: Mapping[str, str],
    fixed: Mapping[str, str],
    num_slices: str,
    faults: list[str],
    *,
    in_pods: bool,
) -> list[str]:
    """Return the training flags, checked as `maxdiloco.train` does.

    Args:
      arguments: the yml file, if any, and key=value.
      environ: the environment, with variables of KEYS.
      fixed: keys that the script sets; giving one of them is a fault.
      num_slices: the number of slices, which must equal the product of the dcn sizes.
      faults: receives a line for each fault.
      in_pods: whether the run starts in pods. Then the yml file is in the image's configs/, and the
        variables M_... of this machine are ignored. Otherwise both are this machine's.
    """
    file, path = [], []
    if arguments and "=" not in arguments[0] and arguments[0].endswith((".yml", ".yaml")):
        file, path = _file(arguments.pop(0), faults, in_pods=in_pods)
    given = {argument.partition("=")[0] for argument in arguments}
    for key in sorted(given & fixed.keys()):
        faults.append(f"{key} is set by this script, to {fixed[key]}. Leave {key}= out.")
    for name in environ:
        if name.startswith("DILOCO_") and name not in KEYS:
            known = ", ".join(known for known in KEYS if known.startswith("DILOCO_"))
            faults.append(
                f"{name}={environ[name]}: expected one of {known}. Unset it, and give other flags "
                "as key=value."
            )
    meant = {key: name for name, key in KEYS.items() if environ.get(name) and key not in given}
    stated = [f"{key}={environ[name]}" for key, name in meant.items()] + arguments
    for flag in stated:
        if "\n" in flag:
            key = flag.partition("=")[0]
            faults.append(f"{key} has a line break, which a command cannot carry. Write one line.")
    checked = {"num_slices": num_slices} | fixed  # a faulty value is empty here
    added = [f"{key}={value}" for key, value in checked.items() if value and key not in given]
    environ = {} if in_pods else environ
    _check([*path, *stated, *added], environ, meant | {"num_slices": "NUM_SLICES"}, faults)
    return [*file, *stated, *(f"{key}={value}" for key, value in fixed.items())]


def _file(name: str, faults: list[str], *, in_pods: bool) -> tuple[list[str], list[str]]:
    """Return the yml file's path for the run and its path on this machine; both may be empty."""
    if not in_pods:
        found = pathlib.Path(name).resolve()
    elif name.startswith("configs/"):
        found = ROOT / name
    else:
        faults.append(f"{name} is not in the image, which holds configs/. Put the file there.")
        return [], []
    if not found.is_file():
        faults.append(f"{name} does not exist. Name a file, or leave it out.")
        return [], []
    return [name if in_pods else str(found)], [str(found)]


def _check(
    argv: list[str], environ: Mapping[str, str], meant: Mapping[str, str], faults: list[str]
) -> None:
    """Add the trainer's error to faults. meant: {key: the variable that sets it}."""
    try:
        config.load(argv, environ)
    except ConfigError as error:
        of = [name for key, name in meant.items() if re.search(rf"\b{key}=", str(error))]
        faults.append(f"{error}" + "".join(f" {name} sets it." for name in of))
