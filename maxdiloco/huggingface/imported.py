"""Import a Hugging Face model as a checkpoint from which a run can start.

DST/checkpoints/0/   the parameters, in the dtypes of the files
DST/model.yml        the keys of the group model
DST/start.yml        the keys with which train continues the model
DST/tokenizer/       the tokenizer for the run, as transformers' AutoTokenizer makes it
DST/huggingface/     config.json, the tokenizer's files and the licence, for an export
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from maxdiloco.checkpoint import metadata, write
from maxdiloco.checkpoint.arrays import PartedLeaf, Writer
from maxdiloco.config import config
from maxdiloco.config.keys import AXES, Config
from maxdiloco.config.values import as_json
from maxdiloco.data.tokenizer_base import ByteTokenizer, Tokenizer
from maxdiloco.engine.trainer import OUTER_PARAMS
from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.huggingface import (
    auto_tokenizer,
    config_json,
    folders,
    safetensors_files,
    sidecar_files,
    tensors,
)
from maxdiloco.huggingface.config_json import HfConfig
from maxdiloco.huggingface.folders import Folder
from maxdiloco.huggingface.safetensors_files import StoredTensor
from maxdiloco.huggingface.tensors import Part
from maxdiloco.models.config import from_keys
from maxdiloco.output import progress
from maxdiloco.run import tokenizer as run_tokenizer

CARRIED = "huggingface"  # folder in DST with the files for an export
# Keys of base.yml that the command line of an import accepts.
MAY_SET = ("max_target_length", "add_bos", "add_eos")
_ABOUT_START = "Continue to train the imported model. key=value on the command line has precedence."
_MOST_NAMES = 8  # most names of tensors in a message

Say = Callable[[str], None]


def import_model(
    source: Folder, target: pathlib.Path, vocab_multiple: int, keys: Sequence[str], say: Say
) -> None:
    """Import the model in a folder.

    Args:
      source: the folder of the model, local or in a bucket.
      target: the folder to make.
      vocab_multiple: multiple to which the rows of the embedding are rounded up. 1: no row is
        added, and a tokenizer with more tokens than the model has rows is refused.
      keys: arguments key=value with keys of MAY_SET.
      say: receives lines for the user.

    Raises:
      ConfigError: a key is wrong, or maxdiloco cannot compute the model.
      CheckpointError: a file cannot be read, or the target cannot be written.
      DataError: the tokenizer cannot be used.
    """
    folders.refuse_existing(target)
    safetensors_files.package()
    model = config_json.read(source)
    stored = safetensors_files.tensors_of(source).items()
    found = {name.replace(model.family.wrapper, "", 1): tensor for name, tensor in stored}
    model = _with_own_head(model, found, say)
    found_tokenizer = auto_tokenizer.read(source)
    of_text = _tokenizer_keys(found_tokenizer, target)
    given = model.keys | of_text | {"model_name": str(target / "model.yml")}
    cfg, tokenizer = _config(given, found_tokenizer, source, vocab_multiple, keys)
    # More than the number of tensors in the files, so that missing tensors are listed by name.
    most = len(found) + config_json.MAX_LAYERS
    parts = tensors.model_parts(from_keys(cfg), model.family, most)
    dtypes = _checked(parts, found, model)
    if (more := cfg.vocab_size - model.keys["vocab_size"]) > 0:
        say(f"note: the tokenizer has more tokens than the model: it adds {more} rows of zeros.")
    for name in model.unknown:
        say(f"note: {name} of config.json is not known here and has no effect.")
    if others := sum(_is_of_other_part(name, model) for name in found):
        say(f"note: {model.family.left_out_part} is left out, {others} tensors of the files.")
    with folders.atomic_folder(target) as folder:
        for_export = pathlib.Path(folder) / CARRIED
        sidecar_files.copy(source, for_export)
        whole = json.dumps(model.whole, indent=2, ensure_ascii=False)
        (for_export / "config.json").write_text(f"{whole}\n")
        of_model = {key: vars(cfg)[key] for key in model.keys}
        _write_yml(folder / "model.yml", f"Imported from {source}", of_model)
        start = {"model_name": cfg.model_name, "load_parameters_path": str(target)}
        start |= {key: vars(cfg)[key] for key in of_text}
        _write_yml(folder / "start.yml", _ABOUT_START, start)
        if found_tokenizer is not None:
            tokenizer.save(folder / run_tokenizer.FOLDER)
        _write_checkpoint(folder, parts, found, dtypes, cfg, tokenizer, say)
    for line in _notes(found_tokenizer, tokenizer, source):
        say(f"note: {line}")
    say(
        f"{target}: {model.family.model_type}, {len({part.name for part in parts})} tensors, "
        f"{sum(math.prod(part.part_shape) for part in parts):,} parameters. Train it with\n"
        f"python -m maxdiloco.train {target / 'start.yml'} dataset_path=TEXT"
    )


def _config(
    stored: dict[str, Any],
    found: auto_tokenizer.TransformersTokenizer | None,
    source: Folder,
    vocab_multiple: int,
    keys: Sequence[str],
) -> tuple[Config, Tokenizer]:
    """Return the config of a run that starts from the import, and its tokenizer.

    Raises:
      DataError: the tokenizer has more tokens than the model, and vocab_multiple=1.
      ConfigError: a value is not valid for any model here.
    """
    rows = stored["vocab_size"]
    try:
        cfg = config.with_changes(stored, keys, {}, may_change=MAY_SET)
    except ConfigError as error:
        file, message = source / config_json.FILE, config_json.with_hf_key(str(error))
        raise ConfigError(f"{file}: {message}") from error
    if found is None:
        tokenizer, tokens = ByteTokenizer(), rows
    else:
        tokenizer, tokens = found.tokenizer, found.tokenizer.vocab_size
        if (tokenizer.bos is not None, tokenizer.eos is not None) != (cfg.add_bos, cfg.add_eos):
            tokenizer = tokenizer.with_added_tokens(
                bos=cfg.add_bos, eos=cfg.add_eos, where=f"SRC={source}"
            )
    if tokens > rows and vocab_multiple == 1:
        raise DataError(
            f"vocab_size={rows} of SRC={source} is too small for its tokenizer, which has {tokens} "
            "tokens. Give vocab_multiple=128, which adds rows of zeros for them, or the tokenizer "
            "that belongs to the model."
        )
    tokens = max(tokens, rows)
    padded = -(-tokens // vocab_multiple) * vocab_multiple
    sizes = {"vocab_size": tokens, "padded_vocab_size": "auto" if padded == tokens else padded}
    return config.from_dict(cfg.as_dict() | sizes), tokenizer


def _tokenizer_keys(
    found: auto_tokenizer.TransformersTokenizer | None, target: pathlib.Path
) -> dict[str, Any]:
    """Return the keys of a run for the tokenizer of the model."""
    if found is None:
        return {"dataset_type": "synthetic"}  # its tokens are not text
    return {
        "tokenizer_type": found.tokenizer.kind,
        "tokenizer_path": str(target / run_tokenizer.FOLDER),
        "add_bos": found.tokenizer.bos is not None,
        "add_eos": found.tokenizer.eos is not None,
    }


def _notes(
    found: auto_tokenizer.TransformersTokenizer | None, tokenizer: Tokenizer, source: Folder
) -> Iterator[str]:
    """Yield notes for the user about the tokens that start and end a document."""
    if found is None:
        yield f"{source} has no tokenizer. Set tokenizer_type and tokenizer_path to train."
        return
    if found.left_out:
        yield (
            f"transformers adds the tokens {', '.join(map(str, found.left_out))} to a text, too. "
            "Here at most one token is added before a text and one after it."
        )
    if tokenizer.eos is None and found.tokenizer.named_eos is not None:
        yield (
            f"documents end without the EOS token {found.tokenizer.named_eos}, as transformers' "
            "tokenizer makes them. Import with add_eos=true to train with it."
        )
    if not tokenizer.ends:
        yield "the model names no EOS token, so maxdiloco.generate stops at max_new_tokens."


def _with_own_head(model: HfConfig, found: dict[str, StoredTensor], say: Say) -> HfConfig:
    """Untie the model if its config.json ties the head but the files have a different head.

    transformers 5 ties the head and the embedding only if they are equal. Raises CheckpointError if
    a file cannot be read.
    """
    table, head = (model.family.tensors[leaf].name for leaf in tensors.OF_VOCABULARY)
    both = table in found and head in found
    tied = model.keys["logits_via_embedding"]
    if not tied or not both or safetensors_files.equal(found[table], found[head]):
        return model
    say(
        f"note: {head} differs from {table}, although config.json sets tie_word_embeddings: both "
        "are kept and the model is not tied, as in transformers 5 and later."
    )
    return config_json.with_untied_head(model)


def _checked(
    parts: Sequence[Part], found: dict[str, StoredTensor], model: HfConfig
) -> dict[str, np.dtype]:
    """Return {leaf: dtype}. Raises CheckpointError if tensors do not match the model."""
    expected = dict.fromkeys(part.name for part in parts)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of model_type={model.family.model_type} are missing in the "
            f"files: {_listed(missing)}. Download the model again."
        )
    known = {*expected, "lm_head.weight"} if model.keys["logits_via_embedding"] else {*expected}
    extra = [
        name
        for name in found
        if name not in known and not name.endswith("rotary_emb.inv_freq")
        if not _is_of_other_part(name, model)
    ]
    if extra:
        raise CheckpointError(
            f"{len(extra)} tensors of the files do not belong to model_type="
            f"{model.family.model_type} with this config.json: {_listed(extra)}. An import would "
            "lose them. Give the config.json that belongs to the files."
        )
    dtypes: dict[str, np.dtype] = {}
    for part in parts:
        stored, shape, leaf = found[part.name], part.shape, part.leaf.path
        if leaf in tensors.OF_VOCABULARY:  # the embedding here may have more rows
            shape = (model.keys["vocab_size"], *shape[1:])
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.name} has shape {list(stored.shape)} in {stored.file.name}: expected "
                f"{list(shape)} by config.json. Give the config.json that belongs to the files."
            )
        dtype = safetensors_files.numpy_dtype(stored)
        dtypes[leaf] = np.promote_types(dtypes.get(leaf, dtype), dtype)
    return dtypes


def _is_of_other_part(name: str, model: HfConfig) -> bool:
    layers = model.keys["base_num_decoder_layers"]
    return name.startswith(tuple(start.format(layers=layers) for start in model.family.left_out))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _write_yml(path: epath.Path, about: str, values: dict[str, Any]) -> None:
    """Write lines `key: value`, with the value as JSON, which YAML reads unambiguously."""
    lines = [f"# {about}"]
    for key, value in values.items():
        lines.append(f"{key}: {json.dumps(as_json(value), ensure_ascii=False)}")
    path.write_text("\n".join(lines) + "\n")


def _write_checkpoint(
    folder: epath.Path,
    parts: Sequence[Part],
    found: dict[str, StoredTensor],
    dtypes: dict[str, np.dtype],
    cfg: Config,
    tokenizer: Tokenizer,
    say: Say,
) -> None:
    leaves = {
        part.leaf.path: PartedLeaf(part.leaf.shape, dtypes[part.leaf.path], len(part.index))
        for part in parts
    }
    tree = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    note = metadata.note_of(0, {OUTER_PARAMS: tree}, _meta(cfg, tokenizer.fingerprint))
    target = folder / "checkpoints" / "0"
    target.parent.mkdir()
    # No items, since Orbax merges the parts of several processes, and here is only one process.
    save = write.Save(target, (), run_tokenizer.travelling_files(tokenizer), note)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    write.prepare(save, nbytes=nbytes)
    writer = Writer(save.folder / OUTER_PARAMS, leaves)
    with progress("imported", nbytes, say) as advance:
        for part in parts:
            advance(_write_part(writer, part, found[part.name]))
    writer.commit()
    write.commit(save, None)


def _write_part(writer: Writer, part: Part, stored: StoredTensor) -> int:
    """Write a part and return its size in bytes. Rows that the files lack are zeros."""
    values = safetensors_files.read(stored)
    if missing := part.shape[0] - values.shape[0]:
        values = np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)])
    values = tensors.to_part(values, part)
    writer.write(part.leaf.path, part.index, values)
    return values.nbytes


def _meta(cfg: Config, fingerprint: str) -> dict[str, Any]:
    """Return the entries of a checkpoint's metadata that evaluate and generate read."""
    return {
        "config": cfg.as_dict(),
        "tokenizer": fingerprint,
        "num_replicas": 1,
        "mesh": dict.fromkeys(AXES, 1),
        "position": {"base": 0, "s0": 1, "M": 1, "B": cfg.per_device_batch_size},
        "contents": "",  # no text was read, so load_full_state_path is refused
        "imported": True,
    }
