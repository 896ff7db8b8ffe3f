"""Load the parameters of a stored checkpoint onto any mesh, and evaluate them."""

import math
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from etils import epath
from jax.sharding import Mesh

from maxdiloco import output, ownership
from maxdiloco.checkpoint import metadata, parameter_sets
from maxdiloco.config import config
from maxdiloco.config.keys import EVALUATION_KEYS
from maxdiloco.config.values import show
from maxdiloco.data.tokenizer_base import ByteTokenizer
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.metrics.compile_log import CompileLog
from maxdiloco.models.model import Model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import data as run_data
from maxdiloco.run import model as run_model
from maxdiloco.run import settings
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.evaluation import Evaluation, Totals
from maxdiloco.storage.store import is_local

# The mesh need not divide the replicas. Setting the interval has the config checked for evaluation.
_NEUTRAL = MappingProxyType({"num_diloco_replicas": "auto", "eval_interval": 1})


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read.

    Attributes:
      path: path of the checkpoint.
      meta: metadata of the checkpoint on its run.
      cfg: see `load`.
    """

    step: int
    path: epath.Path
    meta: dict[str, Any]
    cfg: config.Config
    mesh: Mesh
    model: Model
    params: Any


def load(
    folder: epath.Path,
    configure: Callable[[dict[str, Any]], tuple[config.Config, Mesh]],
    parameters: str = "outer",
) -> LoadedCheckpoint:
    """Read the newest undamaged checkpoint of a run, or one checkpoint. All processes call it.

    Args:
      folder: folder of the run or the checkpoint, from read.locate.
      configure: returns the config and the mesh for the model, given the checkpoint's metadata.
      parameters: see parameter_sets.item_of.

    Raises:
      ConfigError: as `configure`, or the model cannot be built.
      CheckpointError: no checkpoint can be read.
    """
    built: list[Any] = []

    def abstract_of(meta):
        cfg, mesh = configure(meta)
        model = run_model.build(settings.read_model(cfg, mesh), mesh)
        built[:] = cfg, mesh, model
        return run_model.parameters(model, mesh)

    params, found = parameter_sets.restore_parameters(
        folder, abstract_of, key="RUN", parameters=parameters, needs=metadata.OF_MODEL
    )
    return LoadedCheckpoint(found.step, found.path, found.meta, *built, params)


def configure(meta: dict[str, Any], argv: list[str], environ: Mapping[str, str]) -> config.Config:
    """Return the config of a run, changed by the keys of a command line. Raises ConfigError."""
    keys, run, may = meta["config"] | _NEUTRAL, _config_of_run(meta), EVALUATION_KEYS
    if meta.get("imported") and run.dataset_type != "synthetic":  # it has a tokenizer
        may = (*may, "dataset_type")  # an imported model has no text
    cfg = config.with_changes(keys, argv, environ, may_change=may)
    if cfg.dataset_type == "synthetic" != run.dataset_type:
        raise ConfigError(
            "dataset_type=synthetic has random numbers for tokens, but this model has a tokenizer. "
            "Use dataset_type=text, or another kind of text."
        )
    return cfg


def _config_of_run(meta: dict[str, Any]) -> config.Config:
    """Return the config of the run that wrote a checkpoint. Raises ConfigError."""
    return config.from_checkpoint(meta["config"] | _NEUTRAL)


def evaluate(
    folder: epath.Path,
    configure: Callable[[dict[str, Any]], config.Config],
    parameters: str,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Totals]]:
    """Evaluate the newest undamaged checkpoint of a run, or one checkpoint, on each of its texts.

    Reads the same sequences as the run on any mesh, because eval_steps counts batches of the run's
    size. All processes call it.

    Args:
      folder: see `load`.
      configure: returns the config, given the checkpoint's metadata.
      parameters: see `load`.
      say: logs a line.

    Returns:
      A description of the evaluated parameters, for as_json, and {name of a text: sums}.

    Raises:
      ConfigError: as `load`.
      CheckpointError: as `load`.
      DataError: a text cannot be read.
    """

    def on_devices(meta):
        cfg = configure(meta)
        return cfg, mesh_lib.build(settings.read_mesh(cfg))

    found = load(folder, on_devices, parameters)
    say(f"step {found.step} of {found.path.parent.parent}, parameters: {parameters}")
    for line in _text_of_others(found):
        say(line)
    say(mesh_lib.describe(found.mesh, settings.read_mesh(found.cfg)))
    position, run = found.meta["position"], _config_of_run(found.meta)
    rows_of_run = position["M"] * position["B"] // run.gradient_accumulation_steps
    if found.meta["config"].get("islands_global_batch_size") is not None:
        rows_of_run = run.per_device_batch_size * _batch_devices(found.meta["mesh"])
    # As many replicas share a device here as in the run.
    of_device = rows_of_run // _batch_devices(found.meta["mesh"]) // run.per_device_batch_size
    rows = of_device * found.cfg.per_device_batch_size * _batch_devices(found.mesh.shape)
    if not rows:
        raise CheckpointError(
            f"position of checkpoint {found.path} has {rows_of_run} sequences for mesh "
            f"{found.meta['mesh']}: fewer than its devices. Use another checkpoint."
        )
    num_sequences = max(-1, found.cfg.eval_steps * rows_of_run)
    cfg, data = found.cfg, settings.read_data(found.cfg)
    tokenizer = ByteTokenizer()
    if cfg.dataset_type != "synthetic":  # its tokens are not text
        tokenizer = run_tokenizer.of_checkpoint(data.tokenizer, found.path)
    texts = _texts(data, tokenizer, found.meta["contents"], say)
    evaluation = Evaluation(
        found.model,
        found.mesh,
        rows=rows,
        length=cfg.max_target_length,
        num_sequences=num_sequences,
        token_bytes=run_model.token_bytes(data.tokenizer, tokenizer),
        on_compile=CompileLog(say, show_memory=cfg.show_memory),
    )
    totals = {name: evaluation(found.params, text) for name, text in texts.items()}
    return {
        "checkpoint": str(found.path),
        "step": found.step,
        "parameters": parameters,
        "mesh": dict(found.mesh.shape),
        "num_sequences": num_sequences,
    }, totals


def _text_of_others(found: LoadedCheckpoint) -> list[str]:
    """Return a log line on text paths that come only from the checkpoint of another user."""
    file = found.path / metadata.FILE
    if not is_local(file) or ownership.is_own(status := os.stat(file)):
        return []
    keys, stored = found.cfg.as_dict(), found.meta["config"]
    named = [
        f"{name}={show(keys[name])}"
        for name in ("dataset_path", "dataset_mixture", "eval_dataset_path")
        if keys[name] and keys[name] == stored.get(name)
    ]
    if not named or found.cfg.dataset_type == "synthetic":
        return []
    return [
        f"note: the checkpoint, which belongs to user {status.st_uid}, names the text: "
        f"{', '.join(named)}."
    ]


def _texts(data, tokenizer, of_run, say):
    """Open the texts to evaluate on. of_run: fingerprint of the run's training data, or ""."""
    prepared = run_data.prepare_sources(data, tokenizer, say, splits=("eval",))
    texts = run_data.open_evaluated(data, tokenizer, prepared=prepared)
    run_data.require_same_texts(texts)
    if data.holds_out and of_run:  # unknown for an imported model
        train = run_data.open_dataset(data, tokenizer, split="train", prepared=prepared)
        if train.contents != of_run:
            say(
                f"warning: the run did not train on {train.name}, so its held-out part may contain "
                "training text of the run"
            )
    return texts


def _batch_devices(mesh: Mapping[str, int]) -> int:
    """Return the number of devices along batch axes. Devices that share sequences count as one."""
    return math.prod(size for axis, size in mesh.items() if axis != "context")


def table(texts: Mapping[str, Totals]) -> list[str]:
    """Return the lines of a table with a row for each text."""
    rows = [("text", "tokens", "bytes", "loss", "perplexity", "bits/byte")]
    for name, totals in texts.items():
        rates, num_bytes = totals.rates(), f"{totals.num_bytes:,}"
        loss, perplexity = f"{rates['loss']:.6f}", f"{rates['perplexity']:.4f}"
        of_byte = f"{rates['bits_per_byte']:.6f}"
        if not totals.num_bytes:
            num_bytes = of_byte = "-"
        tokens = f"{totals.tokens:,}"
        rows.append((name or "(held out)", tokens, num_bytes, loss, perplexity, of_byte))
    return output.aligned(rows)


def as_json(evaluated: Mapping[str, Any], texts: Mapping[str, Totals]) -> dict[str, Any]:
    """Convert the results of `evaluate` for a JSON file. Numbers that are not finite are null."""
    rows = []
    for name, totals in texts.items():
        sums, rates = ("cross_entropy", "tokens", "bytes"), totals.rates()
        numbers = dict(zip(sums, totals, strict=True)) | rates
        finite = {key: x if math.isfinite(x) else None for key, x in numbers.items()}
        rows.append({"name": name} | finite)
    return {**evaluated, "texts": rows}
