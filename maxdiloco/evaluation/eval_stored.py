"""The evaluation of a stored checkpoint, with the numbers that its run would have logged.

    # R replicas  B sequences per replica
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from maxdiloco.data import run_tokenizer
from maxdiloco.data.prepared.at_start import prepare_sources
from maxdiloco.evaluation import eval_texts, stored
from maxdiloco.evaluation.held_out import Evaluation, Totals, sequences, token_bytes
from maxdiloco.flags import base_yml
from maxdiloco.flags.config import Config, changed
from maxdiloco.metrics.compiles import CompileLog
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.processes import output

_GROUP_MESH = "mesh"
# Keys of the run that an evaluation may set anew, besides those of the mesh.
_MAY_CHANGE = (
    "hardware", "base_output_directory", "dataset_path", "eval_dataset_path", "eval_sets",
    "text_column", "eval_steps", "eval_per_device_batch_size", "dtype", "attention", "remat_policy",
    "matmul_precision", "logical_axis_rules", "show_memory", "jax_cache_dir",
    "jax_distributed_initialization_timeout", "peer_timeout_seconds", "peer_port",
)  # fmt: skip


class Result(NamedTuple):
    """What was evaluated. texts: {name: sums}. num_sequences: limit of each text; -1: all of it."""

    step: int
    path: epath.Path
    mesh: dict[str, int]
    parameters: str
    num_sequences: int
    texts: dict[str, Totals]


def may_change() -> tuple[str, ...]:
    """The keys that the command line of an evaluation takes."""
    mesh = [key.name for key in base_yml.declared().values() if key.group.startswith(_GROUP_MESH)]
    return (*_MAY_CHANGE, *mesh)


def configure(meta: dict[str, Any], argv: list[str], environ: Mapping[str, str]) -> Config:
    """The config of the run that wrote a checkpoint, with the keys of a command line.

    Raises ConfigError for a key that the run decides, or a value that cannot work.
    """
    neutral = {
        "num_diloco_replicas": -1,  # the mesh of the evaluation need not divide them
        "eval_interval": 1,  # checks what an evaluation needs
    }
    return changed(meta["config"] | neutral, argv, environ, may_change=may_change())


def evaluate(
    folder: epath.Path,
    *,
    key: str,
    argv: list[str],
    environ: Mapping[str, str],
    parameters: str,
    say: Callable[[str], None],
) -> Result:
    """Evaluate the newest undamaged checkpoint of a run, or one checkpoint, on each of its texts.

    Reads the same sequences as the run, on whatever mesh: eval_steps counts batches of the run's
    size. folder, key: of stored.load. argv, environ: see `configure`. say: prints a line.
    All processes call it. Raises ConfigError, CheckpointError, DataError.
    """
    found = stored.load(
        folder,
        key=key,
        configure=lambda meta: configure(meta, argv, environ),
        mesh_of=mesh_lib.build,
        parameters=parameters,
    )
    say(f"step {found.step} of {found.path.parent.parent}, parameters: {parameters}")
    say(mesh_lib.describe(found.mesh, found.cfg))
    with run_tokenizer.config_with(found.cfg, found.path) as cfg:
        return _evaluate(found, cfg, parameters, say)


def _evaluate(found: stored.Stored, cfg: Config, parameters: str, say: Callable) -> Result:
    """cfg: with a tokenizer that is there."""
    mesh, model = found.mesh, found.model
    prepared = prepare_sources(cfg, say, splits=("eval",))
    texts = eval_texts.open_texts(cfg, prepared=prepared)
    eval_texts.agree(texts)
    of_run = _rows_of_run(found.meta)
    evaluation = Evaluation(
        model,
        mesh,
        model.spec.rules,
        rows=_rows(cfg, found.meta, mesh.size // mesh.shape["context"]),
        length=cfg.max_target_length,
        num_sequences=sequences(cfg, of_run),
        token_bytes=token_bytes(cfg),
        on_compile=CompileLog(say, show_memory=cfg.show_memory),
    )
    return Result(
        step=found.step,
        path=found.path,
        mesh=dict(mesh.shape),
        parameters=parameters,
        num_sequences=sequences(cfg, of_run),
        texts={name: evaluation(found.params, text) for name, text in texts.items()},
    )


def _rows_of_run(meta: dict[str, Any]) -> int:
    """Sequences of an evaluation batch of the run, see assemble.eval_rows."""
    per_device = meta["config"].get("eval_per_device_batch_size", -1)
    if per_device != -1:
        return per_device * _devices_of_run(meta)
    M, B = meta["position"]["M"], meta["position"]["B"]
    return M * B // meta["config"]["gradient_accumulation_steps"]


def _devices_of_run(meta: dict[str, Any]) -> int:
    """Those that share sequences count as one."""
    return math.prod(size for axis, size in meta["mesh"].items() if axis != "context")


def _rows(cfg: Config, meta: dict[str, Any], num_devices: int) -> int:
    """Sequences of a batch here: as many a device as the run had, unless the config says more."""
    if cfg.eval_per_device_batch_size != -1:
        return cfg.eval_per_device_batch_size * num_devices
    return _rows_of_run(meta) // _devices_of_run(meta) * num_devices


def table(result: Result) -> list[str]:
    """The lines of a table, one for each text."""
    rows = [("text", "tokens", "bytes", "loss", "perplexity", "bits/byte")]
    for name, totals in result.texts.items():
        rows.append(
            (
                name or "(held out)",
                f"{totals.tokens:,}",
                f"{totals.num_bytes:,}" if totals.num_bytes else "-",
                f"{totals.loss:.6f}",
                f"{totals.perplexity:.4f}",
                f"{totals.bits_per_byte:.6f}" if totals.num_bytes else "-",
            )
        )
    return output.aligned(rows)


def as_json(result: Result) -> dict[str, Any]:
    """The result for a file; null where a number is not finite. The held-out text has name ""."""
    texts = [
        {
            "name": name,
            "cross_entropy": _finite(totals.cross_entropy),
            "tokens": totals.tokens,
            "bytes": totals.num_bytes,
            "loss": _finite(totals.loss),
            "perplexity": _finite(totals.perplexity),
            "bits_per_byte": _finite(totals.bits_per_byte),
        }
        for name, totals in result.texts.items()
    ]
    return {
        "checkpoint": str(result.path),
        "step": result.step,
        "parameters": result.parameters,
        "mesh": result.mesh,
        "num_sequences": result.num_sequences,
        "texts": texts,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
