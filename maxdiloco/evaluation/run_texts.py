"""The data of a run: the sources and texts that its keys name, as data/ takes them.

# R replicas  B sequences per replica  L tokens
"""

import hashlib
import json
import os
import shlex
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from maxdiloco.cluster import coordination
from maxdiloco.cluster.agree import from_first_process, in_any_process
from maxdiloco.data import kinds, mixture, order, packing, pipeline, shards
from maxdiloco.data.documents import LineIndex
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.prepared.prepare import Work, plan_of, prepare, size_of
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import Request
from maxdiloco.data.tokenizer import KEYS
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.flags import base_yml, checks
from maxdiloco.flags.config import Config
from maxdiloco.metrics import line_files
from maxdiloco.storage import shared_folder, store
from maxdiloco.storage.run_folder import RunFolder, absolute

# Times eval_fraction: our choice; a source without enough sequences for its share has more.
_LARGE = 2
FOLDER = "prepared"
_KEY = f"maxdiloco/{FOLDER}"
_LARGE_TEXT = 1e9  # bytes; above it the program for this is named. Our choice: some minutes.
_PATIENCE_S = 7 * 24 * 3600.0  # of the other processes; a lost one ends them before
# A network file system may cache for up to a minute that a name is absent. Our choice.
_WAIT_S = 90.0


def trained(cfg: Config) -> dict[str, kinds.Source]:
    """The sources that are trained on, by their names in a mixture; one alone has the name ""."""
    if not cfg.dataset_mixture:
        return {"": of_path(cfg, cfg.dataset_path)}
    return {
        entry["name"]: kinds.Source(
            entry.get("dataset_type", cfg.dataset_type),
            entry["path"],
            entry.get("text_column", cfg.text_column),
        )
        for entry in map(dict, cfg.dataset_mixture)
    }


def of_path(cfg: Config, path: str) -> kinds.Source:
    """A path of dataset_path or eval_dataset_path."""
    return kinds.Source(cfg.dataset_type, path, cfg.text_column)


def key_of(name: str) -> str:
    """The key of a source of `trained`, for messages."""
    return f"dataset_mixture, source {name}" if name else "dataset_path"


def tokenise(
    cfg: Config,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    *,
    splits: Collection[str] = ("train", "eval"),
) -> dict[kinds.Source, str]:
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
    if not store.is_local(folder):
        raise ConfigError(
            f"{key}={source.path} has to be tokenised first, and base_output_directory={folder} is "
            f"no folder for it. Run `{command}`, then give FOLDER in place of the path."
        )
    text, named = kinds.open_source(source, key), f"{key}={source.path}"
    work = Work(text, tokenizer, named, allowed=cfg.max_corrupted_records)
    plan = json.dumps(list(plan_of(work).values()))
    name = hashlib.sha256(plan.encode()).hexdigest()[:16]
    out = os.fspath(absolute(folder) / FOLDER / name)
    if (size := size_of(text)) > _LARGE_TEXT and not shards.is_folder(out):
        say(
            f"note: {named} has {size / 1e9:,.1f} GB to tokenise before the first step. "
            f"`{command}` does that on any machine, once for all runs."
        )
    prepare(work, out, say, waits=True)
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


def open_dataset(
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    split: str,
    path: str = "",
    index: LineIndex | None = None,
    prepared: Mapping[kinds.Source, str] = MappingProxyType({}),
) -> TrainingData:
    """The data of a split, train or eval. index: of text.Request. prepared: what was tokenised.

    The eval split is a Dataset: path, of eval_dataset_path, or what is held out of the training.
    Raises DataError for a source that is missing, empty or unreadable.
    """
    if cfg.dataset_type == "synthetic":
        windows = SyntheticWindows(
            cfg.data_shuffle_seed, split, cfg.vocab_size, cfg.max_target_length
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    if split == "eval" and not path and not cfg.eval_fraction:
        raise DataError(
            "eval_fraction=0 holds nothing out. Set eval_fraction or eval_dataset_path."
        )
    held_out = Fraction(0)
    if cfg.holds_out() and not path:
        held_out = Fraction(str(cfg.eval_fraction))  # as it is written: 1/20 for 0.05
    sources = {"": of_path(cfg, path)} if path else trained(cfg)
    requests = {
        name: Request(
            source._replace(path=prepared.get(source, source.path)),
            "eval_dataset_path" if path else "dataset_path",
            tokenizer,
            length=cfg.max_target_length,
            packing=cfg.grain_packing_type if cfg.packing else packing.DOCUMENTS_APART,
            held_out=held_out,
            allowed=cfg.max_corrupted_records,
            # Sources of one size differ in order: each has a seed of its own.
            seed=order.seed_of(name, cfg.data_shuffle_seed),
            shuffled=cfg.enable_data_shuffling,
            split=split,
            index=index,
        )
        for name, source in sources.items()
    }
    if path or not cfg.dataset_mixture:
        return pipeline.open_dataset(requests[""])
    weights = None  # the order in the list says which replica reads what
    if not cfg.dataset_per_replica:
        entries = map(dict, cfg.dataset_mixture)
        weights = {entry["name"]: Fraction(entry.get("weight", "1")) for entry in entries}
        requests = dict(sorted(requests.items()))
    return mixture.open_mixture(requests, seed=cfg.data_shuffle_seed, weights=weights)


def open_evaluated(cfg: Config, tokenizer: Tokenizer, **options: Any) -> dict[str, Dataset]:
    """{name: data set} of eval_dataset_path, that of eval/loss first; otherwise as open_dataset."""
    texts = {}
    for name, path in cfg.eval_paths().items():
        try:
            texts[name] = open_dataset(cfg, tokenizer, split="eval", path=path, **options)
        except DataError as error:
            if not name:
                raise
            raise DataError(f"{checks.key_of_eval(name)}: {error}") from error
    return texts


def agree(texts: Mapping[str, Dataset]) -> None:
    """Raise DataError unless all processes evaluate on the same texts. All processes call it."""
    if texts:
        agreed("".join(text.contents for text in texts.values()), "the texts to evaluate on")


def agreed(data: str, key: str, what: str = "text") -> str:
    """The contents of data that key names. Raises DataError unless all processes have the same."""
    shared_folder.meet()  # the first process may still wait for the lock of the run's folder
    checksum = zlib.crc32(data.encode()) >> 1  # fits a signed 32-bit integer
    if in_any_process(from_first_process(checksum) != checksum):
        why = "; the built-in text differs with the version of Python" if what == "text" else ""
        who = f"process {jax.process_index()} and others have different {what}"
        raise DataError(f"{key}: {who}. Give every host the same files{why}.")
    return data


def open_data(
    cfg: Config,
    tokenizer: Tokenizer,
    shape: tuple[int, int, int],
    folder: RunFolder,
    say: Callable[[str], None],
) -> tuple[TrainingData, dict[str, Dataset], LineIndex]:
    """The training text, those to evaluate on if the run does, and the index of all.

    Before the run's folder is made: data that are refused must not create one; save_index comes
    after. shape: R, B, L of a step. Sources without known token counts are tokenised first. Raises
    DataError for data that are missing, unreadable or too short for a step.
    """
    prepared = tokenise(cfg, tokenizer, say)
    index = LineIndex(cfg.text_column, report=say)
    if any(source.kind == "text" for source in trained(cfg).values()):
        load_index(index, folder.line_index)
    options = dict(index=index, prepared=prepared)
    train = open_dataset(cfg, tokenizer, split="train", **options)
    train.check_size(train.first_position(*shape[:2]))
    held_out = open_evaluated(cfg, tokenizer, **options) if cfg.eval_interval != -1 else {}
    return train, held_out, index


def lines(
    cfg: Config, text: TrainingData, held_out: Mapping[str, Dataset], shape: tuple[int, int, int]
) -> list[str]:
    """What is read, what lies in the folder beside it, and what is held out, for the user."""
    out = text.summary(text.first_position(*shape[:2]))
    if text.computed:
        return out
    for name, source in trained(cfg).items():
        out += kinds.left_out_lines(source, key_of(name))
    for name, dataset in held_out.items():
        out.append(
            f"held out{f' as {name}' if name else ''}: {dataset.num_windows:,} sequences, of which "
            f"an evaluation reads {'all' if cfg.eval_steps == -1 else f'{cfg.eval_steps} batches'}"
        )
    for name, path in cfg.eval_paths().items():
        if held_out and not path:
            out += _large_shares(cfg, text, held_out[name])
    if cfg.holds_out() and not held_out and cfg.eval_fraction:
        out.append(
            f"held out: eval_fraction={cfg.eval_fraction}, and never evaluated (eval_interval=-1); "
            "eval_fraction=0 trains on all of the text"
        )
    return out


def _large_shares(cfg: Config, text: TrainingData, held: Dataset) -> Iterator[str]:
    """A warning for each source of which far more is held out than eval_fraction says."""
    pairs, fraction = [(text, held.windows)], cfg.eval_fraction
    if cfg.dataset_mixture:
        pairs = zip(text.sources, held.windows.sources, strict=True)
    for source, windows in pairs:
        sequences = windows.num_windows + source.num_windows
        share = windows.num_windows / sequences
        if share > _LARGE * fraction:
            yield (
                f"warning: {share:.0%} of {source.name} is held out, not eval_fraction={fraction}: "
                f"it has {sequences} sequences and one is the least. Give more text, or set "
                "eval_dataset_path."
            )


def load_index(index: LineIndex, path: epath.Path) -> None:
    """Take over the index of an earlier start; a failure costs time and is reported in a line."""
    with line_files.noted(path, index.report, "read", ": .jsonl files are read"):
        index.load(path)


def save_index(index: LineIndex, path: epath.Path) -> None:
    """Process 0 keeps the index for the next start; a failure is reported in a line."""
    so = ": the next start reads .jsonl files through again"
    if jax.process_index() != 0:
        return
    with line_files.noted(path, index.report, so=so):
        index.save(path)
