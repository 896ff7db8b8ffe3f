"""Sources that a run tokenises at its first start, for later ones: in base_output_directory."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Collection, Mapping

import jax

from maxdiloco.data import mixture, shards, tokenizer
from maxdiloco.data.prepared.prepare import PART_BYTES, Work, part_bytes_of, prepare
from maxdiloco.data.sources import opening
from maxdiloco.data.split import Source, needs_tokenising, source_of
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.flags import eval_paths
from maxdiloco.flags.config import Config
from maxdiloco.processes import coordination
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import absolute

FOLDER = "prepared"
_LARGE = 1e9  # bytes; above it the program for this is named. Our choice: some minutes.
_PATIENCE_S = 7 * 24 * 3600.0  # of the other processes; a lost one ends them before
# A network file system may cache for up to a minute that a name is absent. Our choice.
_WAIT_S = 90.0
# Keys that say how text becomes tokens.
_KEYS = (
    "dataset_type", "tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "text_column",
    "max_corrupted_records",
)  # fmt: skip


def prepare_sources(
    cfg: Config, say: Callable[[str], None], *, splits: Collection[str] = ("train", "eval")
) -> dict[Source, str]:
    """{split.source_of: folder of shards} of the sources that have no known token counts.

    splits: that are read; eval only where the run evaluates. say: called with lines for the user.
    Process 0 tokenises; the others wait for it.
    Raises DataError for text that is missing, unreadable or damaged, ConfigError where
    base_output_directory is no folder.
    """
    sources = _sources(cfg, splits)
    if jax.process_index() != 0:
        return _of_first_process(list(sources))
    folders = {}
    for number, (source, (of_source, key)) in enumerate(sources.items()):
        folder, path = "", source[1]
        if needs_tokenising(of_source, path, key):
            folder = folders[source] = _prepare(of_source, path, key, say)
        if jax.process_count() > 1:
            coordination.put(_name(number), folder or "-")  # no empty values there
    return folders


def _sources(cfg: Config, splits: Collection[str]) -> dict[Source, tuple[Config, str]]:
    """{split.source_of: the config that it is read with, its key} of all that are read."""
    if cfg.eval_interval == -1:
        splits = [split for split in splits if split != "eval"]
    chosen = []
    if "train" in splits or ("eval" in splits and eval_paths.holds_out(cfg)):
        trained = mixture.source_configs(cfg).items()
        chosen += [(key, of_source.dataset_path, of_source) for key, of_source in trained]
    if "eval" in splits:
        texts = eval_paths.named(cfg).items()
        chosen += [(eval_paths.key_of(name), path, cfg) for name, path in texts if path]
    return {source_of(read_with, path): (read_with, key) for key, path, read_with in chosen}


def _of_first_process(sources: list[Source]) -> dict[Source, str]:
    named = {
        source: coordination.value_of(
            0, _name(number), f"{source[1]} as tokens", timeout_s=_PATIENCE_S
        )
        for number, source in enumerate(sources)
    }
    folders = {source: folder for source, folder in named.items() if folder != "-"}
    deadline = time.monotonic() + _WAIT_S
    for (_, path, _), folder in folders.items():
        while not shards.is_folder(folder):
            if time.monotonic() > deadline:
                raise DataError(
                    f"dataset_path={path}: process 0 has tokenised it into {folder}, which process "
                    f"{jax.process_index()} does not see. Use a base_output_directory that all "
                    "machines share."
                )
            time.sleep(1)
    return folders


def _name(number):
    return f"maxdiloco/{FOLDER}/{number}"


def _prepare(cfg, path, key, say):
    if not object_store.is_local(cfg.base_output_directory):
        raise ConfigError(
            f"{key}={path} has to be tokenised first, and base_output_directory="
            f"{cfg.base_output_directory} is no folder for it. Run `{_command(cfg, path)}`, then "
            "give FOLDER in place of the path."
        )
    source = opening.open_source(cfg.dataset_type, path, key, cfg.text_column)
    tokens = tokenizer.build(cfg)
    # A source may have been prepared in parts of PART_BYTES whatever its size: that is the data of
    # the runs beside it.
    for part_bytes in (PART_BYTES, part_bytes_of(source)):
        plan = [source.stamps(), cfg.text_column, tokens.fingerprint(), part_bytes]
        name = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
        out = os.fspath(absolute(cfg.base_output_directory) / FOLDER / name)
        if shards.is_folder(out):
            break
    work = Work(
        source,
        tokens,
        f"{key}={path}",
        allowed=cfg.max_corrupted_records,
        part_bytes=part_bytes,
    )
    size = sum(span.size for span in source.spans(PART_BYTES))
    if size > _LARGE and not shards.is_folder(out):
        say(
            f"note: {key}={path} has {size / 1e9:,.1f} GB to tokenise before the first step. "
            f"`{_command(cfg, path)}` does that on any machine, once for all runs."
        )
    prepare(work, out, say)
    return out


def _command(cfg: Config, path: str) -> str:
    values: Mapping[str, object] = vars(cfg)
    keys = " ".join(f"{name}={_shown(values[name])}" for name in _KEYS if name in values)
    return f"python -m maxdiloco.prepare {shlex.quote(path)} out=FOLDER {keys}"


def _shown(value):
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
