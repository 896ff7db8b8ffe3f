"""Runs of the trainer's command line, in this process or as one that can be killed, and what
they leave: rows of metrics.jsonl and checkpoints.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxdiloco import generate, train
from maxdiloco.metrics import line_files

ROOT = pathlib.Path(__file__).parent.parent.parent
WAIT_S = 300  # far above what a start takes on a busy machine

# Two replicas on two devices, rounds of four steps, a schedule that does not depend on the length.
FLAGS = (
    "hardware=cpu dcn_diloco_parallelism=2 ici_fsdp_parallelism=1 dataset_type=synthetic "
    "vocab_size=32 base_emb_dim=16 base_num_decoder_layers=2 base_mlp_dim=32 "
    "base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 max_target_length=16 "
    "per_device_batch_size=2 remat_policy=none learning_rate=1e-2 diloco_sync_period=4 "
    "learning_rate_schedule_steps=100 log_period=1 checkpoint_period=5 async_checkpointing=false "
    "enable_tensorboard=false"
)
# A pipe holds the output of 30 steps: a child that nobody reads cannot reach the last one. And 62
# is no multiple of the period, so the replicas differ in the end.
STEPS = 62
TINY = dict(flag.split("=") for flag in FLAGS.split()) | {"steps": STEPS}


def arguments(folder, name, **keys):
    """The command line of a run: TINY with other values for some keys."""
    values = TINY | {"base_output_directory": folder, "run_name": name} | keys
    return [f"{key}={value}" for key, value in values.items()]


def run(folder, name, **keys):
    """Train in this process; the exit code."""
    return train.main(arguments(folder, name, **keys))


def printed(capfd, program, argv):
    """What a program prints that ends with 0."""
    capfd.readouterr()
    assert program([str(argument) for argument in argv]) == 0
    return capfd.readouterr().out


def told(capfd, folder, name, **keys):
    """What a run prints that ends with 0."""
    return printed(capfd, train.main, arguments(folder, name, **keys))


def generated(capfd, *argv):
    """The text of generate."""
    return printed(capfd, generate.main, argv)


def refused(capfd, program, argv):
    """The exit code of a program that refuses its arguments, and its one line of error."""
    capfd.readouterr()
    code = program([str(argument) for argument in argv])
    line = capfd.readouterr().err.strip()
    assert "\n" not in line and "Traceback" not in line
    return code, line


def refused_run(capfd, folder, name, **keys):
    """The exit code and the one line of a run that is refused."""
    return refused(capfd, train.main, arguments(folder, name, **keys))


class Child(subprocess.Popen):
    """A run in a process of its own, which waits when its output is not read."""

    def __init__(self, folder, name, **keys):
        self.text = ""
        super().__init__(
            [sys.executable, "-m", "maxdiloco.train", *arguments(folder, name, **keys)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            # As many devices as the tests' process has, so that both share compiled programs.
            env=os.environ | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())},
            text=True,
            pipesize=4096,
        )

    def __exit__(self, *exception):
        self.kill()
        super().__exit__(*exception)

    def until(self, words):
        """Read the output as far as the line with these words."""
        for line in self.stdout:
            self.text += line
            if words in line:
                return
        raise AssertionError(f"ended without {words!r}:\n{self.text}")

    def end(self):
        """Read to the end; the exit code, negative for a signal that killed it."""
        if not self.stdout.closed:
            self.text += self.stdout.read()
        return self.wait(WAIT_S)


def killed(folder, name, words, **keys):
    """Kill a run when it has printed the words; what it printed."""
    with Child(folder, name, **keys) as child:
        child.until(words)
        child.kill()
        assert child.end() == -signal.SIGKILL
    return child.text


def rows(run_folder):
    """The rows of metrics.jsonl without what depends on the clock."""
    lines = line_files.read(run_folder / "metrics.jsonl").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("perf/")}
        for line in lines
    ]


def logged_steps(run_folder):
    """The step of each row."""
    return [row["step"] for row in rows(run_folder)]


def saved_steps(run_folder):
    """The steps that have a checkpoint, oldest first."""
    return sorted(int(p.name) for p in (run_folder / "checkpoints").iterdir() if p.name.isdigit())


def meta(run_folder, step):
    """What a checkpoint says besides its arrays."""
    folder = run_folder / "checkpoints" / str(step) / "meta"
    return ocp.JsonCheckpointHandler().restore(folder)["meta"]


def arrays(run_folder, step):
    """{item and leaf: array} of all items of a checkpoint, on no mesh."""
    found = {}
    for item in sorted((run_folder / "checkpoints" / str(step)).iterdir()):
        if item.name in ("meta", "tokenizer") or not item.is_dir():
            continue
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.metadata(item).item_metadata.tree
            plan = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            read = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=plan))
        for path, leaf in jax.tree_util.tree_leaves_with_path(read):
            found[item.name + jax.tree_util.keystr(path)] = leaf
    return found


def item(found, name):
    """The leaves of one item of `arrays`, by their paths."""
    return {path.removeprefix(name): x for path, x in found.items() if path.startswith(name)}


def assert_equal_bits(found, wanted):
    """Two results of `arrays` or `item`: the same leaves with the same bits."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_equal_runs(run_folder, other, *, steps):
    """Every step once in both, with the same metrics, and the same last checkpoint, to the bit."""
    assert logged_steps(run_folder) == list(range(1, steps + 1))
    assert rows(run_folder) == rows(other)
    assert_equal_bits(arrays(run_folder, steps), arrays(other, steps))
