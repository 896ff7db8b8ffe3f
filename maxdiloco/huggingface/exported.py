"""A checkpoint as a Hugging Face model: safetensors, two config files, those of the tokenizer."""

import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

from maxdiloco.checkpoint import by_part, read, theta
from maxdiloco.checkpoint.read import Restored
from maxdiloco.errors import ConfigError
from maxdiloco.evaluation import stored
from maxdiloco.flags.config import Config
from maxdiloco.huggingface import (
    config_json,
    folders,
    layout,
    safetensors_files,
    tensors,
    tokenizer_out,
)
from maxdiloco.huggingface.imported import CARRIED
from maxdiloco.huggingface.layout import Layout
from maxdiloco.huggingface.progress import Progress
from maxdiloco.huggingface.safetensors_files import Written
from maxdiloco.huggingface.tensors import EMBEDDING, HEAD

Say = Callable[[str], None]

STORED = "stored"  # as a dtype: the one that the checkpoint has
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Options(NamedTuple):
    """parameters: outer, mean or replica_0 ...; dtype: stored, float32 or bfloat16.

    like: folder of a Hugging Face model or of an import, or empty.
    """

    parameters: str
    dtype: str
    max_shard_bytes: int
    like: str


class _Model(NamedTuple):
    """What is written beside the tensors. cfg: of the model that the files hold.

    untied: whether the files have the one table of the checkpoint twice: scaled as the embedding,
    and as the head.
    """

    family: Any
    config: dict[str, Any]
    carried: pathlib.Path | None
    cfg: Config
    untied: bool = False


class _Target(NamedTuple):
    """A tensor that a part of a leaf is written to. part: as the leaf has it."""

    name: str
    part: tensors.Part
    scale: float | None = None


def export_model(folder: epath.Path, target: pathlib.Path, options: Options, say: Say) -> None:
    """Export a run's newest undamaged checkpoint, or one checkpoint. folder: of find.locate.

    Raises ConfigError, CheckpointError, DataError.
    """
    folders.refuse_existing(target)
    check_dtype(options.dtype)
    safetensors_files.package()
    found = read.restore_from(folder, lambda meta: {}, key="RUN")
    cfg = stored.config_of(found.meta)
    model = _model(cfg, found, options.like, say)
    if (padding := cfg.padded_vocab_size - cfg.vocab_size) > 0:
        say(f"the last {padding} of {cfg.padded_vocab_size} rows for tokens are padding, left out")
    plan = layout.of_model(model.cfg, model.family)
    there = [path for path in plan.leaves if not (model.untied and path == HEAD)]
    readers = _readers(found, options.parameters, there)
    dtypes = {path: _DTYPES.get(options.dtype, readers[0].dtype(path)) for path in there}
    dtypes |= {part.leaf: _DTYPES["float32"] for part in plan.parts if part.tensor.float32}
    dtypes.setdefault(HEAD, dtypes[EMBEDDING])
    with folders.appearing(target) as there:
        place = pathlib.Path(there)
        _write_tensors(place, plan, readers, dtypes, model, options.max_shard_bytes, say)
        tokenizer_out.write(place, cfg, found.path, model.carried)
        hf = model.config | {"dtype": dtypes["embedding"].name}
        hf.pop("torch_dtype", None)
        (place / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    say(
        f"{target}: {model.family.model_type}, {options.parameters} parameters of step "
        f"{found.step} of {found.path.parent.parent}, {len(plan.by_tensor())} tensors, "
        f"{size / 1e6:,.1f} MB"
    )


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for what is no dtype of an export."""
    if dtype not in (STORED, *_DTYPES):
        raise ConfigError(f"dtype={dtype} is none of {STORED}, {', '.join(_DTYPES)}. Use one.")


def _model(cfg: Config, found: Restored, like: str, say: Say) -> _Model:
    """As `like` says, as the import says that the run began with, or as the config says."""
    carried = _carried(cfg, found, like)
    if carried is None:
        family, as_exported = config_json.family_for(cfg)
        config = config_json.config_of(as_exported, family) | tokenizer_out.ends(cfg, found.path)
        untied = as_exported.logits_via_embedding != cfg.logits_via_embedding
        if untied:
            say(
                f"the tied embedding is scaled by {math.sqrt(cfg.base_emb_dim):.6g} where it is "
                f"looked up, which {family.model_type} does not do: the files hold it scaled, and "
                "as a head of its own"
            )
        return _Model(family, config, None, as_exported, untied)
    there = config_json.read(carried)
    rows = there.keys["vocab_size"]
    text = there.text | {"vocab_size": max(rows, cfg.vocab_size)}
    if wrong := config_json.misfits(cfg, text, there.family):
        raise ConfigError(
            f"{config_json.differing(wrong)} of {carried / 'config.json'}, which this export would "
            "be like. Give like= the folder of a model with the same keys."
        )
    if tokenizer_out.is_of_run(carried, cfg, found.path):
        say(f"config.json, generation_config.json and the tokenizer are those of {carried}")
    else:
        text |= tokenizer_out.ends(cfg, found.path)
        say(f"config.json is that of {carried}; the tokenizer is the run's, which is another")
    if rows < cfg.vocab_size:
        say(f"vocab_size is {cfg.vocab_size}, the run's, which has {rows} in that config.json")
    return _Model(there.family, text | there.family.of_exports, carried, cfg)


def _carried(cfg: Config, found: Restored, like: str) -> pathlib.Path | None:
    """The folder with a config.json that the export is to be like."""
    if like:
        folder = pathlib.Path(like).expanduser()
        return folder / CARRIED if (folder / CARRIED).is_dir() else folder
    begins = [found.path.parent.parent]
    if cfg.load_parameters_path:
        begins.append(epath.Path(cfg.load_parameters_path))
    paths = [pathlib.Path(begin) / CARRIED for begin in begins]
    return next((path for path in paths if (path / "config.json").is_file()), None)


def _readers(found: Restored, parameters: str, names: Sequence[str]) -> list[by_part.Reader]:
    """One reader, or for a mean one a replica. Raises ConfigError for other parameters."""
    item, entries = theta.source(found.meta, parameters)
    return [by_part.Reader(found.path, item, names, entry) for entry in entries or [None]]


def _write_tensors(
    folder: pathlib.Path,
    plan: Layout,
    readers: Sequence[by_part.Reader],
    dtypes: Mapping[str, np.dtype],
    model: _Model,
    max_shard_bytes: int,
    say: Say,
) -> None:
    def shape(part):
        is_table = part.leaf in tensors.OF_VOCABULARY
        return (model.cfg.vocab_size, *part.shape[1:]) if is_table else part.shape

    written = {part.name: Written(shape(part), dtypes[part.leaf]) for part in plan.in_files()}
    writer = safetensors_files.Writer(folder, written, max_shard_bytes)
    targets = _targets(plan, model)
    leaves = dict.fromkeys(leaf for leaf, _ in targets)
    sizes = (math.prod(plan.leaves[x].shape) * readers[0].dtype(x).itemsize for x in leaves)
    done = Progress("exported", sum(sizes), say)
    for leaf in leaves:
        num_indexed = plan.num_indexed(leaf)
        for box in readers[0].boxes(leaf, num_indexed):
            done.more(_write_box(writer, readers, leaf, box, num_indexed, targets))
    done.last("the files are forced to the disk")


def _targets(plan: Layout, model: _Model) -> Mapping[tuple[str, tensors.Shape], list[_Target]]:
    """Of each leaf that is read and each index of its leading dims."""
    found: dict[tuple[str, tensors.Shape], list[_Target]] = {}
    for part in plan.parts:
        if model.untied and part.leaf == HEAD:
            continue
        found[part.leaf, part.index] = [_Target(part.name, part)]
    if model.untied:
        table = found[EMBEDDING, ()][0]
        head = next(part.name for part in plan.parts if part.leaf == HEAD)
        scaled = table._replace(scale=math.sqrt(model.cfg.base_emb_dim))
        found[EMBEDDING, ()] = [scaled, table._replace(name=head)]
    return found


def _write_box(writer, readers, leaf, box, num_indexed, targets):
    """Returns the bytes read, of one replica."""
    values = _mean(readers, leaf, box)
    for i in np.ndindex(values.shape[:num_indexed]):
        index = tuple(start.start + j for start, j in zip(box, i, strict=False))
        for target in targets[leaf, index]:
            piece = values[i]
            if target.scale is not None:
                piece = piece * np.asarray(target.scale, piece.dtype)
            writer.put(target.name, target.part, box[num_indexed:], piece)
    return values.nbytes


def _mean(readers, leaf, box):
    if len(readers) == 1:
        return readers[0].read(leaf, box)
    shape = [s.stop - s.start for s in box]
    total = np.zeros(shape, np.float32)  # float32: sums of R bfloat16 values drift
    for reader in readers:
        total += reader.read(leaf, box)
    return (total / np.float32(len(readers))).astype(readers[0].dtype(leaf))
