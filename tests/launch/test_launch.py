"""The launch scripts: what is refused before anything is created, what is called, and the flags of
scripts/launch/xla_flags.env, which the compilers know.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import launch_tools as tools
import pytest

from maxdiloco import errors


@pytest.mark.parametrize("script", tools.SCRIPTS)
def test_the_program_is_called_once_with_what_a_dry_run_prints(script, tmp_path):
    """The control of every refusal below: these variables are enough. One that is not there is
    named."""
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
    assert done.returncode == 2
    assert re.search(rf"{program} is not on PATH\. (Install|Run)", done.stderr)


FAULTS = [
    ("CLUSTER", "My_Cluster", r"CLUSTER=My_Cluster is not the GKE cluster's name \(lower case"),
    ("PROJECT", "p", r"PROJECT=p is not the Google Cloud project's ID.*PROJECT=my-project"),
    ("ZONE", "us", r"ZONE=us is not the cluster's zone or region.*ZONE=us-west4-a"),
    ("TPU_TYPE", "v5e16", r"TPU_TYPE=v5e16 is not a type of TPU slice"),
    ("NUM_SLICES", "two", r"NUM_SLICES=two is not the number of slices.*NUM_SLICES=2"),
    ("IMAGE", "an image", r"IMAGE=an image is not an image that the cluster can pull"),
    ("OUTPUT", "runs", r"OUTPUT=runs is not a folder on gs://, as a pod's disk goes"),
    ("PRIORITY", "urgent", r"PRIORITY=urgent is not one of very-low, low, medium"),
    ("MAX_RESTARTS", "-1", r"MAX_RESTARTS=-1 is not how often the run may start again"),
    ("GRACE_SECONDS", "3m", r"GRACE_SECONDS=3m is not the seconds from SIGTERM to the saved"),
    ("RESERVATION", "a b", r"RESERVATION=a b is not the name of a reservation, or NONE"),
    ("STORAGE", "a b", r"STORAGE=a b is not the name of an xpk storage"),
    ("WORKLOAD_NAME", "First", r"WORKLOAD_NAME=First is not a name for the workload"),
    ("DILOCO_FRAGMENTS", "4", r"DILOCO_FRAGMENTS=4 is no variable .* knows DILOCO_SYNC_PERIOD"),
    ("STEPS", "x", r"steps=x .*is not a whole number\. .* STEPS gives it\."),
    ("XLA_FLAGS_FILE", "/none", r"XLA_FLAGS_FILE=/none does not exist\. Name a file, or set it"),
]


def test_every_fault_is_told_in_one_line_each_and_nothing_is_created(tmp_path):
    wrong = tools.XPK | {name: value for name, value, _ in FAULTS}
    done = tools.run("xpk_run", ["first"], tmp_path, **wrong)
    assert done.returncode == 2
    assert tools.called(tmp_path, "xpk") is None
    lines = done.stderr.splitlines()
    assert len(lines) == len(FAULTS), done.stderr
    for _, _, message in FAULTS:
        (line,) = [line for line in lines if re.search(message, line)]
        assert line.startswith("xpk_run: ")


@pytest.mark.parametrize(
    ("script", "arguments", "changes", "message"),
    [
        ("xpk_run", [], {}, r"the run has no name: .*Give the name as the first argument, or set"),
        ("xpk_run", ["a"], {"MAXDILOCO_VENV": "/no"}, r"/bin/python does not exist\. Make it with"),
        ("xpk_run", ["a"], {"ZONE": ""}, r"ZONE is not set: it is .*Set it, as in ZONE=us-west4"),
        ("xpk_run", ["a"], {"CLUSTER": ""}, r"CLUSTER or CLUSTER_NAME is not set: it is"),
        ("xpk_run", ["a"], {"PROJECT_ID": "other-one"}, r"PROJECT=my-project and PROJECT_ID=other"),
        ("xpk_run", ["a", "run_name=b"], {}, r"run_name is set by this script, to a\. Leave"),
        ("xpk_run", ["a", "dataset_path=hf://b/t"], {}, r"dataset_path=hf://b/t is an address"),
        ("xpk_run", ["a", "stepz=3"], {}, r"stepz"),
        ("xpk_run", ["a", "dataset_path=/b\nc"], {}, r"dataset_path has a line break, which a com"),
        ("xpk_run", ["a", "dcn_diloco_parallelism=4"], {}, r"num_slices=2 does not fit .* 4 = 4"),
        ("xpk_run", ["a", "my.yml"], {}, r"my\.yml is not in the image, which holds configs/"),
        ("xpk_run", ["a", "configs/none.yml"], {}, r"configs/none\.yml does not exist\. Name a"),
        ("jobset_run", ["a"], {"GPU_TYPE": "h"}, r"TPU_TYPE and GPU_TYPE are both set.*Unset one"),
        ("jobset_run", ["a"], {"TPU_TYPE": "v5e-12"}, r"v5e-12 has no topology.* Use v5e- and"),
        ("jobset_run", ["a"], {"TPU_TYPE": "v5p-9"}, r"v5p-9 has no topology here\. .* 8, 16, 32"),
        ("slurm_run", ["a"], {"PARTITIONS": "x y z"}, r"3 partitions, which 2 slices cannot share"),
        ("slurm_run", ["a"], {"OUTPUT": "runs"}, r"OUTPUT=runs is not a folder that all nodes see"),
        ("slurm_run", ["a"], {"OUTPUT": "hdfs://b/a"}, r"or gs://, s3:// or az://bucket/fold"),
        ("slurm_run", ["a"], {"TIME": "soon"}, r"TIME=soon is not a time limit as sbatch takes it"),
    ],
)  # fmt: skip
def test_a_launch_that_cannot_work_is_refused(script, arguments, changes, message, tmp_path):
    program, variables = tools.SCRIPTS[script]
    done = tools.run(script, arguments, tmp_path, **variables | changes)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    assert re.search(message, line)
    assert tools.called(tmp_path, program) is None


def test_the_variables_of_maxtexts_diloco_scripts_are_taken(tmp_path):
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


def test_xpk_gets_the_training_command_whole(tmp_path):
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
def test_slurm_takes_a_folder_in_a_bucket(tmp_path, output):
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


def test_on_slurm_the_environment_of_the_trainer_counts_and_in_pods_it_does_not(tmp_path):
    """sbatch hands the environment on; a pod has its own."""
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
    """A line that is no flag is named."""
    for hardware, name in compiler_flags.OF.items():
        faults = []
        found = compiler_flags.read(str(FILE), hardware, faults)
        code = f'{name}=; . {FILE}; echo "${name}"'
        sourced = subprocess.run(["bash", "-euc", code], capture_output=True, text=True)
        assert (found, faults) == (sourced.stdout.strip(), []) and found.startswith("--")
    (tmp_path / "f").write_text('# a\nXLA_FLAGS+=" --a=b"\nXLA_FLAGS=--c=d\n')
    assert compiler_flags.read(str(tmp_path / "f"), "gpu", faults) == "--a=b"
    (fault,) = faults
    assert re.search(r"line 3 is no flag: XLA_FLAGS=--c=d\. Write it as", fault)
    assert compiler_flags.read("none", "gpu", []) == ""


def test_the_pinned_jaxlib_knows_the_flags_of_gpus(compiler_flags):
    """XLA reads all of XLA_FLAGS on any platform, and refuses what it does not know."""
    code = "import jax; print(jax.devices()[0].platform)"
    known = python(code, XLA_FLAGS=compiler_flags.read(str(FILE), "gpu", []))
    assert known.stdout == "cpu\n", known.stderr
    assert "Unknown flag" in python(code, XLA_FLAGS="--xla_gpu_no_such_flag=1").stderr


@pytest.mark.tpu_aot
def test_the_pinned_libtpu_knows_the_flags_of_tpus(compiler_flags):
    code = "from maxdiloco.aot import topology; print(len(topology.devices('v5e-4', 2)))"
    known = python(code, LIBTPU_INIT_ARGS=compiler_flags.read(str(FILE), "tpu", []))
    assert known.stdout == "8\n", known.stderr
    unknown = python(code, LIBTPU_INIT_ARGS="--megascale_no_such_flag=1")
    assert "Unknown command line flag" in unknown.stderr
