"""The launch scripts: refusals before anything is created, the commands of the cluster's programs,
and the flags of scripts/launch/xla_flags.env.
"""

import os
import shlex
import shutil
import subprocess
import sys

import launch_tools as tools
import pytest
from run import names_key

from maxdiloco import errors


@pytest.mark.parametrize("script", tools.SCRIPTS)
def test_the_program_is_called_once_with_what_a_dry_run_prints(script, tmp_path):
    """The control of every refusal below: these variables suffice. An absent program is named."""
    program, variables = tools.SCRIPTS[script]
    arguments = ["first", "model_name=tiny", "mlp_activations=[silu, linear]"]
    dry = tools.run(script, arguments, tmp_path, **variables, DRY_RUN="1")
    assert dry.returncode == 0, dry.stderr
    assert tools.called(tmp_path, program) is None, "a dry run creates nothing"
    done = tools.run(script, arguments, tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    command, text = tools.called(tmp_path, program)
    line, _, manifest = dry.stdout.partition("\n")
    assert shlex.split(line.removeprefix("# ")) == [program, *command]
    assert manifest == text
    (tmp_path / "bin").mkdir()  # on PATH alone: the program may be installed
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    nowhere = {"PATH": str(tmp_path / "bin")}
    done = tools.run(script, ["a"], tmp_path, **variables | nowhere)
    assert done.returncode == 2 and names_key(done.stderr, program)


# Variables with wrong values, and the name that the error has.
WRONG = {
    "CLUSTER": ("My_Cluster", "CLUSTER"),
    "PROJECT": ("p", "PROJECT"),
    "ZONE": ("us", "ZONE"),
    "TPU_TYPE": ("v5e16", "TPU_TYPE"),
    "NUM_SLICES": ("two", "NUM_SLICES"),
    "IMAGE": ("an image", "IMAGE"),
    "OUTPUT": ("runs", "OUTPUT"),
    "PRIORITY": ("urgent", "PRIORITY"),
    "MAX_RESTARTS": ("-1", "MAX_RESTARTS"),
    "GRACE_SECONDS": ("3m", "GRACE_SECONDS"),
    "RESERVATION": ("a b", "RESERVATION"),
    "STORAGE": ("a b", "STORAGE"),
    "WORKLOAD_NAME": ("First", "WORKLOAD_NAME"),
    "DILOCO_FRAGMENTS": ("4", "DILOCO_FRAGMENTS"),
    "STEPS": ("x", "steps"),
    "XLA_FLAGS_FILE": ("/none", "XLA_FLAGS_FILE"),
}


def test_each_wrong_variable_is_named_and_nothing_is_created(tmp_path):
    wrong = tools.XPK | {variable: value for variable, (value, _) in WRONG.items()}
    done = tools.run("xpk_run", ["first"], tmp_path, **wrong)
    assert done.returncode == 2
    assert tools.called(tmp_path, "xpk") is None
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG), done.stderr
    for value, name in WRONG.values():
        start = f"xpk_run: {name}={value}"
        assert [line for line in lines if line.startswith((f"{start}:", f"{start} "))], name


# A script, its arguments, changes to its variables, and the name that the error has.
REFUSED = [
    ("xpk_run", [], {}, "RUN_NAME"),
    ("xpk_run", ["a"], {"MAXDILOCO_VENV": "/no"}, "/no/bin/python"),
    ("xpk_run", ["a"], {"ZONE": ""}, "ZONE"),
    ("xpk_run", ["a"], {"CLUSTER": ""}, "CLUSTER_NAME"),
    ("xpk_run", ["a"], {"PROJECT_ID": "other-one"}, "PROJECT_ID"),
    ("xpk_run", ["a", "run_name=b"], {}, "run_name"),
    ("xpk_run", ["a", "dataset_path=hf://b/t"], {}, "dataset_path"),
    ("xpk_run", ["a", "stepz=3"], {}, "stepz"),
    ("xpk_run", ["a", "dataset_path=/b\nc"], {}, "dataset_path"),
    ("xpk_run", ["a", "dcn_diloco_parallelism=4"], {}, "num_slices"),
    ("xpk_run", ["a", "my.yml"], {}, "my.yml"),
    ("xpk_run", ["a", "configs/none.yml"], {}, "configs/none.yml"),
    ("jobset_run", ["a"], {"GPU_TYPE": "h"}, "GPU_TYPE"),
    ("jobset_run", ["a"], {"TPU_TYPE": "v5e-12"}, "v5e-12"),
    ("jobset_run", ["a"], {"TPU_TYPE": "v5p-9"}, "v5p-9"),
    ("slurm_run", ["a"], {"PARTITIONS": "x y z"}, "PARTITIONS"),
    ("slurm_run", ["a"], {"OUTPUT": "runs"}, "OUTPUT"),
    ("slurm_run", ["a"], {"OUTPUT": "hdfs://b/a"}, "OUTPUT"),
    ("slurm_run", ["a"], {"TIME": "soon"}, "TIME"),
]


@pytest.mark.parametrize(("script", "arguments", "changes", "name"), REFUSED)
def test_a_refused_launch_names_what_is_wrong(script, arguments, changes, name, tmp_path):
    program, variables = tools.SCRIPTS[script]
    done = tools.run(script, arguments, tmp_path, **variables | changes)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: ") and names_key(line, name)
    assert tools.called(tmp_path, program) is None


def test_the_variables_of_maxtexts_diloco_scripts_are_accepted(tmp_path):
    """Names and values of src/maxtext/trainers/diloco/scripts/run_spmd_streaming_diloco.sh, but for
    the model, and a data set on gs://."""
    variables = {
        "CLUSTER_NAME": "mlperf-v5p", "PROJECT_ID": "my-project", "ZONE": "europe-west4-b",
        "DEVICE_TYPE": "v5p-16", "NUM_SLICES": "2", "RUNNAME": "dlco-smk-01",
        "XPK_WORKLOAD": "dlco-resm-01", "DOCKER_IMAGE": "gcr.io/p/i:1", "RESERVATION": "cloudtpu-2",
        "BASE_OUTPUT_DIRECTORY": "gs://my-bucket/logs", "DATASET_PATH": "/text", "STEPS": "20",
        "MODEL_NAME": "tiny", "PER_DEVICE_BATCH_SIZE": "2", "MAX_TARGET_LENGTH": "512",
        "CHECKPOINT_PERIOD": "10", "ENABLE_STREAMING_DILOCO": "true", "DILOCO_SYNC_PERIOD": "8",
        "DILOCO_NUM_FRAGMENTS": "4", "DILOCO_NUM_COMM_OVERLAP_STEPS": "1",
        "DILOCO_COMM_OVERLAP_ALPHA": "0.5", "DILOCO_OUTER_LR": "0.3",
        "DILOCO_OUTER_MOMENTUM": "0.9", "DILOCO_USE_SEQUENTIAL_LAYERS": "false",
    }  # fmt: skip
    command, _ = tools.launch("xpk_run", ["steps=40"], tmp_path, **variables)
    expected = "--cluster=mlperf-v5p --project=my-project --zone=europe-west4-b --num-slices=2 "
    expected += "--workload=dlco-resm-01 --tpu-type=v5p-16 --docker-image=gcr.io/p/i:1 "
    expected += "--reservation=cloudtpu-2"
    assert set(expected.split()) <= set(command)
    (line,) = [word for word in command if word.startswith("--command=")]
    assert shlex.split(line.removeprefix("--command="))[4:] == [
        "model_name=tiny", "dataset_path=/text", "per_device_batch_size=2",
        "max_target_length=512", "checkpoint_period=10", "enable_streaming_diloco=true",
        "diloco_sync_period=8", "diloco_outer_lr=0.3", "diloco_outer_momentum=0.9",
        "num_diloco_fragments=4", "use_sequential_layers=false",
        "num_communication_overlapping_steps=1", "communication_overlapping_alpha=0.5",
        "steps=40", "hardware=tpu", "base_output_directory=gs://my-bucket/logs",
        "run_name=dlco-smk-01",
    ]  # fmt: skip


def test_xpk_receives_the_whole_training_command(tmp_path):
    """xpk hands --command to a shell in the pod: what arrives there is what was written. Before,
    Kubernetes makes $$ a $."""
    arguments = ["first", "configs/quickstart.yml", "mlp_activations=[silu, linear]"]
    arguments += ["sample_prompt=$(touch x) $$ `y` 'z'"]
    command, _ = tools.launch("xpk_run", arguments, tmp_path, **tools.XPK, STORAGE="my-text")
    assert command[:2] == ["workload", "create"]
    assert "--storage=my-text" in command
    codes = f"{errors.LostPeerError.exit_code},{errors.SaveError.exit_code}"
    assert f"--restart-on-exit-codes={codes}" in command
    (line,) = [word for word in command if word.startswith("--command=")]
    assert line.startswith("--command=exec python "), "SIGTERM has to reach Python itself"
    spoken = line.replace("--command=exec python", "printf '%s|'").replace("$$", "$")
    in_pod = subprocess.run(["bash", "-c", spoken], capture_output=True, text=True, cwd=tmp_path)
    assert in_pod.stdout == "|".join(
        ["-m", "maxdiloco.train", *arguments[1:], "hardware=tpu"]
        + ["base_output_directory=gs://bucket/runs", "run_name=first", ""]
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("output", ["gs://bucket/runs", "s3://bucket/runs", "az://container/runs"])
def test_slurm_accepts_a_folder_in_a_bucket(tmp_path, output):
    command, _ = tools.launch("slurm_run", ["a"], tmp_path, **tools.SLURM | {"OUTPUT": output})
    assert f"base_output_directory={output}" in command


def test_slurm_gets_a_component_for_each_partition(tmp_path):
    variables = tools.SLURM | {"PARTITIONS": "east west", "NUM_SLICES": "4", "TIME": "1-00:00:00"}
    variables |= {"NODES_PER_SLICE": "3"}
    command, _ = tools.launch("slurm_run", ["first", "steps=3"], tmp_path, **variables)
    component = ["--job-name=first", "--nodes=6", "--ntasks-per-node=1", "--signal=TERM@180"]
    component += ["--gpus-per-node=8", "--partition={}", "--time=1-00:00:00"]
    script = command.index(str(tools.ROOT / "scripts/launch/train.sbatch"))
    east, west = [[word.format(name) for word in component] for name in ("east", "west")]
    assert command[:script] == [*east, ":", *west]
    assert command[script + 2 : script + 5] == ["3", "8476", "50"]
    assert command[script + 6 :] == [
        "steps=3", "hardware=gpu", "base_output_directory=/shared/runs", "run_name=first"
    ]  # fmt: skip


def test_the_environment_counts_on_slurm_and_not_in_pods(tmp_path):
    """sbatch passes the environment on; a pod has its own."""
    wrong = {"M_STEPS": "x", "DRY_RUN": "1"}
    done = tools.run("slurm_run", ["a"], tmp_path, **tools.SLURM, **wrong)
    assert (done.returncode, "steps=x" in done.stderr) == (2, True)
    assert tools.run("xpk_run", ["a"], tmp_path, **tools.XPK, **wrong).returncode == 0


# -- xla_flags.env ------------------------------------------------------------------------------

FILE = tools.ROOT / "scripts/launch/xla_flags.env"


@pytest.fixture
def compiler_flags(monkeypatch):
    monkeypatch.syspath_prepend(str(tools.ROOT / "scripts/launch"))
    import compiler_flags

    return compiler_flags


def python(code, **environ):
    environ = os.environ | {"PYTHONPATH": str(tools.ROOT), "JAX_PLATFORMS": "cpu"} | environ
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )


def test_bash_and_the_launch_scripts_read_the_same_flags(compiler_flags, tmp_path):
    """A line without a flag is named."""
    for hardware, name in compiler_flags.OF.items():
        faults = []
        found = compiler_flags.read(str(FILE), hardware, faults)
        code = f'{name}=; . {FILE}; echo "${name}"'
        sourced = subprocess.run(["bash", "-euc", code], capture_output=True, text=True)
        assert (found, faults) == (sourced.stdout.strip(), []) and found.startswith("--")
    (tmp_path / "f").write_text('# a\nXLA_FLAGS+=" --a=b"\nXLA_FLAGS=--c=d\n')
    assert compiler_flags.read(str(tmp_path / "f"), "gpu", faults) == "--a=b"
    (fault,) = faults
    assert "line 3" in fault and "XLA_FLAGS=--c=d" in fault
    assert compiler_flags.read("none", "gpu", []) == ""


def test_the_pinned_jaxlib_knows_the_flags_of_gpus(compiler_flags):
    """XLA reads all of XLA_FLAGS on any platform, and refuses what it does not know."""
    code = "import jax; print(jax.devices()[0].platform)"
    known = python(code, XLA_FLAGS=compiler_flags.read(str(FILE), "gpu", []))
    assert known.stdout == "cpu\n", known.stderr
    assert "Unknown flag" in python(code, XLA_FLAGS="--xla_gpu_no_such_flag=1").stderr


@pytest.mark.tpu_aot
def test_the_pinned_libtpu_knows_the_flags_of_tpus(compiler_flags):
    code = "from maxdiloco.planning import topology; print(len(topology.devices('v5e-4', 2)))"
    known = python(code, LIBTPU_INIT_ARGS=compiler_flags.read(str(FILE), "tpu", []))
    assert known.stdout == "8\n", known.stderr
    unknown = python(code, LIBTPU_INIT_ARGS="--megascale_no_such_flag=1")
    assert "Unknown command line flag" in unknown.stderr
