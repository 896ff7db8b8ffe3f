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
from maxdiloco.huggingface import beside_weights, config_json, folders, safetensors_files, tensors
from maxdiloco.huggingface.family import Family
from maxdiloco.huggingface.folders import Progress
from maxdiloco.huggingface.imported import CARRIED
from maxdiloco.huggingface.safetensors_files import Written
from maxdiloco.huggingface.tensors import EMBEDDING, HEAD, Layout, Part

Say = Callable[[str], None]
_Targets = list[tuple[Part, float | None]]  # parts that take the same values, each with a factor

STORED = "stored"  # as a dtype: the one that the checkpoint has
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class _Model(NamedTuple):
    """What is written beside the tensors. cfg: of the model that the files hold.

    untied: whether the files have the one table of the checkpoint twice: scaled as the embedding,
    and as the head.
    """

    family: Family
    config: dict[str, Any]
    carried: pathlib.Path | None
    cfg: Config
    untied: bool = False


def export_model(
    folder: epath.Path,
    target: pathlib.Path,
    *,
    parameters: str,
    dtype: str,
    max_shard_bytes: int,
    like: str,
    say: Say,
) -> None:
    """Export a run's newest undamaged checkpoint, or one checkpoint. folder: of find.locate.

    parameters: outer, mean or replica_0 ...; dtype: one that check_dtype admits. like: folder of a
    Hugging Face model or of an import, or empty. Raises ConfigError, CheckpointError, DataError.
    """
    folders.refuse_existing(target)
    safetensors_files.package()
    found = read.restore_from(folder, lambda meta: {}, key="RUN")
    cfg = stored.config_of(found.meta)
    model = _model(cfg, found, like, say)
    if (padding := cfg.padded_vocab_size - cfg.vocab_size) > 0:
        say(f"the last {padding} of {cfg.padded_vocab_size} rows for tokens are padding, left out")
    plan = tensors.of_model(model.cfg, model.family)
    there = [path for path in plan.leaves if not (model.untied and path == HEAD)]
    readers = _readers(found, parameters, there)
    dtypes = {path: _DTYPES.get(dtype, readers[0].dtype(path)) for path in there}
    dtypes |= {part.leaf: _DTYPES["float32"] for part in plan.parts if part.tensor.float32}
    dtypes.setdefault(HEAD, dtypes[EMBEDDING])
    with folders.appearing(target) as there:
        place = pathlib.Path(there)
        _write_tensors(place, plan, readers, dtypes, model, max_shard_bytes, say)
        beside_weights.write(place, cfg, found.path, model.carried)
        hf = model.config | {"dtype": dtypes["embedding"].name}
        hf.pop("torch_dtype", None)
        (place / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    say(
        f"{target}: {model.family.model_type}, {parameters} parameters of step "
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
        config = config_json.config_of(as_exported, family) | beside_weights.ends(cfg, found.path)
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
    if beside_weights.is_of_run(carried, cfg, found.path):
        say(f"config.json, generation_config.json and the tokenizer are those of {carried}")
    else:
        text |= beside_weights.ends(cfg, found.path)
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
    written = {}
    for part in plan.in_files():
        rows = [model.cfg.vocab_size] if part.leaf in tensors.OF_VOCABULARY else part.shape[:1]
        written[part.name] = Written((*rows, *part.shape[1:]), dtypes[part.leaf])
    writer = safetensors_files.Writer(folder, written, max_shard_bytes)
    targets = _targets(plan, model)
    sizes = (math.prod(plan.leaves[x].shape) * readers[0].dtype(x).itemsize for x in targets)
    done = Progress("exported", sum(sizes), say)
    for leaf, of_leaf in targets.items():
        for box in readers[0].boxes(leaf, plan.num_indexed(leaf)):
            done.more(_write_box(writer, _mean(readers, leaf, box), box, of_leaf))
    done.last("the files are forced to the disk")


def _targets(plan: Layout, model: _Model) -> Mapping[str, Mapping[tuple[int, ...], _Targets]]:
    """Of each leaf that is read, and each index of its leading dims: what is written from there.

    An untied model's embedding is written twice, scaled, and as the head.
    """
    found: dict[str, dict[tuple[int, ...], _Targets]] = {}
    for part in plan.parts:
        found.setdefault(part.leaf, {})[part.index] = [(part, None)]
    if model.untied:
        ((table, _),), ((head, _),) = found[EMBEDDING][()], found.pop(HEAD)[()]
        scale = math.sqrt(model.cfg.base_emb_dim)
        found[EMBEDDING] = {(): [(table, scale), (table._replace(name=head.name), None)]}
    return found


def _write_box(writer, values, box, of_leaf):
    """Returns its bytes. No array of it is left: memory holds one box."""
    num_indexed = len(next(iter(of_leaf)))
    for i in np.ndindex(values.shape[:num_indexed]):
        index = tuple(start.start + j for start, j in zip(box, i, strict=False))
        for part, scale in of_leaf[index]:
            piece = values[i] if scale is None else values[i] * np.asarray(scale, values.dtype)
            writer.put(part, box[num_indexed:], piece)
    return values.nbytes


def _mean(readers, leaf, box):
    """A box of a leaf, of several readers its mean."""
    if len(readers) == 1:
        return readers[0].read(leaf, box)
    shape = [s.stop - s.start for s in box]
    total = np.zeros(shape, np.float32)  # float32: sums of R bfloat16 values drift
    for reader in readers:
        total += reader.read(leaf, box)
    return (total / np.float32(len(readers))).astype(readers[0].dtype(leaf))
