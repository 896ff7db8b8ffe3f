"""One row: a run of maxdiloco.train in a process of its own, and the results in its folder."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.learning.modes import BY_NAME, Scale
from benchmarks.learning.plan import Row
from benchmarks.link.rows import ROOT, RowError, commit
from maxdiloco.errors import NumericsError

TAIL = 12  # lines of a log


def keys_of(row: Row, scale: Scale, user_keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the trainer's keys of a row. Every row also has user_keys, of the command line.

    Every mode reads the same number of tokens a step: the batch is divided among the replicas.
    """
    mode = BY_NAME[row.mode]
    keys = dict(scale.keys) | dict(mode.keys)
    replicas = keys["num_diloco_replicas"] if keys["enable_diloco"] else 1
    each, rest = divmod(scale.batch, replicas)
    if rest:
        raise ValueError(f"{row.mode}: {replicas} replicas do not divide a batch of {scale.batch}")
    if not keys["enable_diloco"]:
        keys["num_diloco_replicas"] = "auto"
    else:
        keys["diloco_outer_lr"] = row.outer_lr
    return (
        keys
        | {
            "per_device_batch_size": each,
            "opt_type": mode.inner,
            "learning_rate": row.inner_lr,
            "init_weights_seed": row.seed,
            "data_shuffle_seed": row.seed,
            "steps": scale.steps,
            "log_period": max(1, scale.steps // 50),
            "eval_interval": max(1, scale.steps // scale.evaluations),
        }
        | dict(user_keys)
    )


class Run:
    """A row that is being run. Raises RowError from `result` when the trainer fails."""

    def __init__(
        self,
        row: Row,
        scale: Scale,
        user_keys: Mapping[str, str],
        folder: pathlib.Path,
        *,
        cpus: Sequence[int],
        cache: pathlib.Path,
    ):
        self.row, self._folder, self._scale = row, folder, scale
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        keys = keys_of(row, scale, user_keys) | {
            "run_name": "run",
            "base_output_directory": folder,
            "jax_cache_dir": cache,
        }
        command = [sys.executable, "-m", "benchmarks.learning.process", ",".join(map(str, cpus))]
        command += [f"{name}={value}" for name, value in keys.items()]
        self._began = time.monotonic()
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends the run
            )

    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()

    def result(self) -> dict[str, Any]:
        """The figures of a run that is over. loss: None when it diverged."""
        code = self._process.returncode
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        if code not in (0, NumericsError.exit_code):
            tail = "\n  ".join(lines[-TAIL:])
            raise RowError(f"{self.row.name()}: exit code {code}. End of its log:\n  {tail}")
        rows = [
            json.loads(line)
            for line in (self._folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        curve = [[row["step"], row["eval/loss"]] for row in rows if "eval/loss" in row]
        whole = code == 0 and bool(curve) and curve[-1][0] == self._scale.steps
        finite = whole and math.isfinite(curve[-1][1])
        return {
            "loss": curve[-1][1] if finite else None,
            "curve": curve,
            "train_loss": rows[-1]["learning/loss"] if finite else None,
            "seconds": time.monotonic() - self._began,
            "commit": commit(),
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
