"""The sources that a run's keys name; those without token counts are tokenised at its first start.

Into base_output_directory, for later starts too.
"""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Collection

import jax

from maxdiloco.data import kinds, shards
from maxdiloco.data.kinds import Source
from maxdiloco.data.prepared.prepare import Work, plan_of, prepare, size_of
from maxdiloco.data.tokenizer import KEYS
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.flags import base_yml, checks
from maxdiloco.flags.config import Config
from maxdiloco.processes import coordination
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import absolute

FOLDER = "prepared"
_KEY = f"maxdiloco/{FOLDER}"
_LARGE = 1e9  # bytes; above it the program for this is named. Our choice: some minutes.
_PATIENCE_S = 7 * 24 * 3600.0  # of the other processes; a lost one ends them before
# A network file system may cache for up to a minute that a name is absent. Our choice.
_WAIT_S = 90.0


def trained(cfg: Config) -> dict[str, Source]:
    """The sources that are trained on, by their names in a mixture; one alone has the name ""."""
    if not cfg.dataset_mixture:
        return {"": of_path(cfg, cfg.dataset_path)}
    return {
        entry["name"]: Source(
            entry.get("dataset_type", cfg.dataset_type),
            entry["path"],
            entry.get("text_column", cfg.text_column),
        )
        for entry in map(dict, cfg.dataset_mixture)
    }


def of_path(cfg: Config, path: str) -> Source:
    """A path of dataset_path or eval_dataset_path."""
    return Source(cfg.dataset_type, path, cfg.text_column)


def key_of(name: str) -> str:
    """The key of a source of `trained`, for messages."""
    return f"dataset_mixture, source {name}" if name else "dataset_path"


def tokenise(
    cfg: Config,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    *,
    splits: Collection[str] = ("train", "eval"),
) -> dict[Source, str]:
    """The folder of shards of each source of splits that has no known token counts.

    Process 0 tokenises; the others wait. Raises DataError for text that is missing, unreadable or
    damaged, ConfigError where base_output_directory is no folder.
    """
    keys, folders = {}, {}
    evaluates = "eval" in splits and cfg.eval_interval != -1
    if "train" in splits or (evaluates and cfg.holds_out()):
        keys = {source: key_of(name) for name, source in trained(cfg).items()}
    if evaluates:
        paths = cfg.eval_paths().items()
        keys |= {of_path(cfg, path): checks.key_of_eval(name) for name, path in paths if path}
    if jax.process_index() != 0:
        return _of_first_process(list(keys))
    for source, key in keys.items():
        if kinds.needs_tokenising(source, key, of_bytes=tokenizer.kind == "byte"):
            folders[source] = _tokenised(cfg, source, key, tokenizer, say)
    if jax.process_count() > 1:
        coordination.put(_KEY, json.dumps([folders.get(source) for source in keys]))
    return folders


def _tokenised(cfg, source, key, tokenizer, say):
    names = (*KEYS, "max_corrupted_records")
    values = {"dataset_type": source.kind, "text_column": source.column}
    values |= {name: vars(cfg)[name] for name in names}
    words = [f"{name}={shlex.quote(base_yml.show(value))}" for name, value in values.items()]
    place = f"python -m maxdiloco.prepare {shlex.quote(source.path)} out=FOLDER"
    command, folder = " ".join([place, *words]), cfg.base_output_directory
    if not object_store.is_local(folder):
        raise ConfigError(
            f"{key}={source.path} has to be tokenised first, and base_output_directory={folder} is "
            f"no folder for it. Run `{command}`, then give FOLDER in place of the path."
        )
    text, named = kinds.open_source(source, key), f"{key}={source.path}"
    work = Work(text, tokenizer, named, allowed=cfg.max_corrupted_records)
    plan = json.dumps(list(plan_of(work).values()))
    name = hashlib.sha256(plan.encode()).hexdigest()[:16]
    out = os.fspath(absolute(folder) / FOLDER / name)
    if (size := size_of(text)) > _LARGE and not shards.is_folder(out):
        say(
            f"note: {named} has {size / 1e9:,.1f} GB to tokenise before the first step. "
            f"`{command}` does that on any machine, once for all runs."
        )
    prepare(work, out, say)
    return out


def _of_first_process(sources):
    named = coordination.value_of(0, _KEY, "its text as tokens", timeout_s=_PATIENCE_S)
    pairs = zip(sources, json.loads(named), strict=True)
    folders = {source: folder for source, folder in pairs if folder}
    deadline = time.monotonic() + _WAIT_S
    for source, folder in folders.items():
        while not shards.is_folder(folder):
            if time.monotonic() > deadline:
                raise DataError(
                    f"dataset_path={source.path}: process 0 has tokenised it into {folder}, which "
                    f"process {jax.process_index()} does not see. Use a base_output_directory that "
                    "all machines share."
                )
            time.sleep(1)
    return folders
