"""Read the files of a training run: rows of metrics, checkpoints and their arrays."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxdiloco.metrics import line_files


def metrics_rows(run_folder):
    """Return the rows of metrics.jsonl without `perf/`, which depends on the clock."""
    lines = line_files.read(run_folder / "metrics.jsonl").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("perf/")}
        for line in lines
    ]


def logged_steps(run_folder):
    """Return the step of each row."""
    return [row["step"] for row in metrics_rows(run_folder)]


def saved_steps(run_folder):
    """Return the steps that have a checkpoint, oldest first."""
    return sorted(int(p.name) for p in (run_folder / "checkpoints").iterdir() if p.name.isdigit())


def checkpoint_meta(run_folder, step):
    """Return the metadata of a checkpoint: its config, its position in the data and others."""
    folder = run_folder / "checkpoints" / str(step) / "meta"
    return ocp.JsonCheckpointHandler().restore(folder)["meta"]


def checkpoint_arrays(run_folder, step):
    """Return {item and leaf: array} of all items of a checkpoint, without a mesh."""
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


def item_arrays(arrays, name):
    """Return the leaves of one item of `checkpoint_arrays`, by their paths."""
    return {path.removeprefix(name): x for path, x in arrays.items() if path.startswith(name)}


def assert_equal_bits(found, expected):
    """Compare two results of `checkpoint_arrays` or `item_arrays`, bit for bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_equal_runs(run_folder, other, *, steps):
    """Compare two runs: every step once in both, equal metrics, and equal last checkpoints."""
    assert logged_steps(run_folder) == list(range(1, steps + 1))
    assert metrics_rows(run_folder) == metrics_rows(other)
    assert_equal_bits(checkpoint_arrays(run_folder, steps), checkpoint_arrays(other, steps))
