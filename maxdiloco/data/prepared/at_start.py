"""Sources that a run tokenises at its first start, for later ones: in base_output_directory."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxdiloco.data import kinds, shards
from maxdiloco.data.kinds import Source
from maxdiloco.data.prepared.prepare import Work, plan_of, prepare, size_of
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.processes import coordination
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import absolute

FOLDER = "prepared"
_KEY = f"maxdiloco/{FOLDER}"
_LARGE = 1e9  # bytes; above it the program for this is named. Our choice: some minutes.
_PATIENCE_S = 7 * 24 * 3600.0  # of the other processes; a lost one ends them before
# A network file system may cache for up to a minute that a name is absent. Our choice.
_WAIT_S = 90.0


def prepare_sources(
    keys: Mapping[Source, str],
    tokenizer: Tokenizer,
    *,
    folder: str,
    flags: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[Source, str]:
    """The folder of shards of each source that has no known token counts.

    keys: of the sources. folder: base_output_directory. flags: that name the tokenizer, and
    max_corrupted_records. Process 0 tokenises; the others wait. Raises DataError for text that is
    missing, unreadable or damaged, ConfigError where folder is none.
    """
    if jax.process_index() != 0:
        return _of_first_process(list(keys))
    folders = {}
    for source, key in keys.items():
        if kinds.needs_tokenising(source, key, of_bytes=tokenizer.kind == "byte"):
            command = _command(source, flags)
            if not object_store.is_local(folder):
                raise ConfigError(
                    f"{key}={source.path} has to be tokenised first, and base_output_directory="
                    f"{folder} is no folder for it. Run `{command}`, then give FOLDER in place of "
                    "the path."
                )
            text, named = kinds.open_source(source, key), f"{key}={source.path}"
            work = Work(text, tokenizer, named, allowed=flags["max_corrupted_records"])
            plan = json.dumps(list(plan_of(work).values()))
            name = hashlib.sha256(plan.encode()).hexdigest()[:16]
            out = folders[source] = os.fspath(absolute(folder) / FOLDER / name)
            if (size := size_of(text)) > _LARGE and not shards.is_folder(out):
                say(
                    f"note: {named} has {size / 1e9:,.1f} GB to tokenise before the first step. "
                    f"`{command}` does that on any machine, once for all runs."
                )
            prepare(work, out, say)
    if jax.process_count() > 1:
        coordination.put(_KEY, json.dumps([folders.get(source) for source in keys]))
    return folders


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


def _command(source, flags):
    keys = {"dataset_type": source.kind, "text_column": source.column, **flags}
    words = [f"python -m maxdiloco.prepare {shlex.quote(source.path)} out=FOLDER"]
    for key, value in keys.items():
        shown = str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
        words.append(f"{key}={shown}")
    return " ".join(words)
