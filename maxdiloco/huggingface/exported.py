"""Export a checkpoint as a Hugging Face model: weights, config files and tokenizer files."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from maxdiloco.checkpoint import arrays, metadata, parameter_sets, read
from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface import (
    auto_tokenizer,
    config_json,
    folders,
    safetensors_files,
    sidecar_files,
    tensors,
)
from maxdiloco.huggingface.folders import Folder
from maxdiloco.huggingface.imported import CARRIED, Say
from maxdiloco.huggingface.tensors import EMBEDDING, HEAD, OF_VOCABULARY, Family, Part
from maxdiloco.models.config import from_keys
from maxdiloco.output import progress
from maxdiloco.run import settings
from maxdiloco.run import tokenizer as run_tokenizer

# The values of dtype, in addition to "stored", which keeps the dtype of the checkpoint.
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def export_model(
    run: str,
    target: Folder,
    *,
    parameters: str,
    dtype: str,
    max_shard_size: str,
    like: str,
    step: int,
    base_output_directory: str,
    say: Say,
) -> None:
    """Export the newest undamaged checkpoint of a run, or a given one.

    Args:
      run: name or folder of a run, or the folder of a checkpoint.
      target: the folder to make.
      parameters: outer, mean or replica_N.
      dtype: stored, float32 or bfloat16.
      max_shard_size: largest size of a file, such as 5GB.
      like: a folder with the config.json to use. Empty: the config.json of the import with which
        the run began, if it began with one.
      step: step of the checkpoint. -1: the newest checkpoint.
      base_output_directory: folder of the runs.
      say: receives lines for the user.

    Raises:
      ConfigError: an argument is wrong, or Hugging Face has no such model.
      CheckpointError: the checkpoint cannot be read, or the target cannot be written.
      DataError: the tokenizer cannot be read.
    """
    max_bytes = safetensors_files.nbytes_of(max_shard_size)
    if dtype not in ("stored", *_DTYPES):
        raise ConfigError(f"dtype={dtype}: expected stored, {' or '.join(_DTYPES)}.")
    where = dict(base_output_directory=base_output_directory, step=step)
    folder = read.locate(run, **where)
    folders.refuse_existing(target)
    safetensors_files.package()
    found = read.restore_from(folder, lambda meta: {}, key="RUN", needs=metadata.OF_MODEL)
    cfg, tokenizer = config.from_checkpoint(found.meta["config"]), None
    if cfg.dataset_type != "synthetic":  # tokens of synthetic data are not text
        tokenizer = run_tokenizer.of_checkpoint(settings.read_tokenizer(cfg), found.path)
    carried = _carried(cfg.load_parameters_path, found.path, like)
    same = carried is not None and auto_tokenizer.is_of_model(carried, tokenizer)
    if carried:
        family, hf = _like(carried, cfg, say)
        source = carried if same else "the run"
        say(
            f"config.json is from {carried}; generation_config.json and tokenizer are from {source}"
        )
    else:
        family, hf = config_json.family_for(vars(cfg))
    if not same:
        hf |= sidecar_files.special_ids(tokenizer)
    parts, scales = _parts(cfg, family, hf, say)
    rows = cfg.vocab_size if cfg.padded_vocab_size == "auto" else cfg.padded_vocab_size
    if (padding := rows - cfg.vocab_size) > 0:
        say(f"the last {padding} of {rows} rows for tokens are padding and are left out")
    leaves = list(dict.fromkeys(part.leaf.path for part in parts))
    item, replicas = parameter_sets.item_of(found.meta, parameters)
    readers = [arrays.Reader(found.path, item, leaves, replica) for replica in replicas or [None]]
    dtypes = {path: _DTYPES.get(dtype, readers[0].dtype(path)) for path in leaves}
    dtypes |= {part.leaf.path: _DTYPES["float32"] for part in parts if part.tensor.float32}
    with folders.atomic_folder(target) as draft:
        place, written = pathlib.Path(draft), {}
        for part in parts:
            rows = [cfg.vocab_size] if part.leaf.path in OF_VOCABULARY else part.shape[:1]
            written[part.name] = ((*rows, *part.shape[1:]), dtypes[part.leaf.path])
        files = safetensors_files.begin(place, written, max_bytes)
        _write_tensors(files, parts, scales, readers, say)
        if carried:
            sidecar_files.copy(carried, place, tokenizer=same)
        if not same:
            sidecar_files.write(place, tokenizer, cfg.max_target_length)
        hf["dtype"] = dtypes[EMBEDDING].name
        hf.pop("torch_dtype", None)
        (place / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        size = sum(os.path.getsize(path) for path in place.glob("*.safetensors"))
    say(
        f"{target}: {family.model_type}, {parameters} parameters of step {found.step} of "
        f"{found.path.parent.parent}, {len(written)} tensors, {size / 1e6:,.1f} MB"
    )


def _carried(import_path: str, checkpoint: epath.Path, like: str) -> Folder | None:
    """Return the folder with the config.json for the export, or None.

    It is `like`, or the import that wrote the checkpoint, or the import that its run loaded.
    """
    if like:
        folder = folders.folder_at(like, "like")
        return folder / CARRIED if (folder / CARRIED).is_dir() else folder
    begins = [os.fspath(checkpoint.parent.parent), *([import_path] if import_path else [])]
    paths = [folders.folder_at(begin, "load_parameters_path") / CARRIED for begin in begins]
    return next((path for path in paths if (path / "config.json").is_file()), None)


def _like(carried: Folder, cfg: config.Config, say: Say) -> tuple[Family, dict[str, Any]]:
    """Return the family and the config.json of a folder, with the vocabulary size of the run."""
    model = config_json.read(carried)
    rows = model.keys["vocab_size"]
    text = model.text | {"vocab_size": max(rows, cfg.vocab_size)}
    if wrong := config_json.differences(vars(cfg), text, model.family):
        raise ConfigError(
            f"like={carried}: its config.json differs from the run: "
            f"{config_json.format_differences(wrong)}. Give the folder of a model with the same "
            f"keys."
        )
    if rows < cfg.vocab_size:
        say(f"vocab_size is the run's {cfg.vocab_size}; it is {rows} in that config.json")
    return model.family, text | model.family.of_exports


def _parts(
    cfg: config.Config, family: Family, hf: Mapping[str, Any], say: Say
) -> tuple[list[Part], dict[str, float]]:
    """Return the parts in the order of the files, and {name of a tensor: factor to scale it}.

    The embedding comes first, then the layers, then the rest. If the family does not scale the
    embedding but the model does, a tied embedding is written twice: scaled, and as the head.
    """

    def place(part):
        if part.leaf.layers is None:
            return (0 if part.leaf.path == EMBEDDING else 2, 0)
        return (1, part.leaf.layers[part.index[0]])

    of_run = from_keys(cfg)
    tied = of_run.tied_head and hf.get("tie_word_embeddings", True)
    model = dataclasses.replace(of_run, tied_head=tied)
    parts = sorted(tensors.model_parts(model, family), key=place)
    if tied == of_run.tied_head:
        return parts, {}
    scale = math.sqrt(cfg.base_emb_dim)
    say(
        f"the tied embedding is scaled by {scale:.6g} where it is looked up, which "
        f"{family.model_type} does not do: the files hold it scaled, and as a head of its own"
    )
    table = parts[0]
    parts = [table._replace(name=p.name) if p.leaf.path == HEAD else p for p in parts]
    return parts, {table.name: scale}


def _write_tensors(
    files: safetensors_files.Files,
    parts: Sequence[Part],
    scales: Mapping[str, float],
    readers: Sequence[arrays.Reader],
    say: Say,
) -> None:
    """Write all tensors. Each leaf is read once, box by box, with one box in memory at a time."""
    targets: dict[tuple[tensors.Leaf, tensors.Shape], list[Part]] = {}
    for part in parts:
        targets.setdefault((part.leaf, part.index), []).append(part)
    of_leaves = {part.leaf: len(part.index) for part in parts}
    sizes = (math.prod(x.shape) * readers[0].dtype(x.path).itemsize for x in of_leaves)

    def write(leaf, num_indexed, box):
        values = _mean(readers, leaf.path, box)
        for i in np.ndindex(values.shape[:num_indexed]):
            index = tuple(start.start + j for start, j in zip(box, i, strict=False))
            for part in targets[leaf, index]:
                scale = scales.get(part.name)
                piece = values[i] if scale is None else values[i] * np.asarray(scale, values.dtype)
                tensors.put(files[part.name](), part, box[num_indexed:], piece)
        return values.nbytes

    with progress("exported", sum(sizes), say) as advance:
        for leaf, num_indexed in of_leaves.items():
            for box in readers[0].boxes(leaf.path, num_indexed):
                advance(write(leaf, num_indexed, box))


def _mean(readers, leaf, box):
    """Read a box of a leaf, or its mean over several readers."""
    if len(readers) == 1:
        return readers[0].read(leaf, box)
    shape = [s.stop - s.start for s in box]
    total = np.zeros(shape, np.float32)  # float32: sums of R bfloat16 values drift
    for reader in readers:
        total += reader.read(leaf, box)
    return (total / np.float32(len(readers))).astype(readers[0].dtype(leaf))
