"""Open the data of a run: translate its keys to the sources and texts of data/.

# R replicas  B sequences per replica  L tokens
"""

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax

from maxdiloco.cluster import coordination
from maxdiloco.cluster.agree import from_first_process, in_any_process
from maxdiloco.config.values import show
from maxdiloco.data import corpus, mixture, order, packing, pipeline, registry, shards
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.prepared.prepare import Work, plan_of, prepare, size_of
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.tokenizer import KEYS
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.data.windows import Request
from maxdiloco.errors import DataError
from maxdiloco.run.settings import DataSettings
from maxdiloco.storage import shared_folder
from maxdiloco.storage.run_folder import absolute

# A held-out part above this multiple of eval_fraction is reported. It occurs in sources with few
# sequences.
_LARGE = 2
CACHE = "prepared"  # below base_output_directory
_BARRIER = "maxdiloco/prepared"
_LARGE_TEXT = 1e9  # bytes, some minutes of tokenising; above it the log names the prepare command
_SMALL_TEXT = 1 << 20  # bytes, tokenised in less than a second; a first start does so twice
_PREPARE_S = 7 * 24 * 3600.0  # longest wait for processes that prepare; it ends if one is lost

# The object that prepares a source, the folder of the result, and the key that names its parent.
Unprepared = tuple[Work, str, str]


def training_sources(settings: DataSettings) -> dict[str, registry.Source]:
    """Return the training sources by their names in a mixture. A single source has the name ""."""
    if not settings.dataset_mixture:
        return {"": source_at(settings, settings.dataset_path)}
    return {
        entry["name"]: registry.Source(
            entry.get("dataset_type", settings.dataset_type),
            entry["path"],
            entry.get("text_column", settings.text_column),
        )
        for entry in map(dict, settings.dataset_mixture)
    }


def source_at(settings: DataSettings, path: str) -> registry.Source:
    """Return the source of a path of dataset_path or eval_dataset_path."""
    return registry.Source(settings.dataset_type, path, settings.text_column)


def key_of(name: str) -> str:
    """Return the key of a source of `training_sources`, for messages."""
    return f"dataset_mixture, source {name}" if name else "dataset_path"


def eval_key(name: str) -> str:
    """Return the key of an evaluated text for messages, such as eval_dataset_path.wiki."""
    return f"eval_dataset_path.{name}" if name else "eval_dataset_path"


def prepare_sources(
    settings: DataSettings,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    *,
    splits: Collection[str] = ("train", "eval"),
) -> dict[registry.Source, str]:
    """Prepare each source of the splits that is not yet a folder of shards.

    All processes call it, each for the cache that it sees. A lock decides which process writes a
    folder; the others wait for it, or find it complete. Processes without a shared cache each
    prepare their own. `require_same_data` compares the results.

    Returns:
      The folders of shards, by source.

    Raises:
      DataError: text that is missing, unreadable or damaged, or a cache that cannot be written.
    """
    return _prepare(settings, _unprepared(settings, tokenizer, splits), say)


def _prepare(
    settings: DataSettings,
    unprepared: Mapping[registry.Source, Unprepared],
    say: Callable[[str], None],
) -> dict[registry.Source, str]:
    for source, (work, out, key) in unprepared.items():
        if (size := size_of(work.source)) > _LARGE_TEXT and not shards.is_folder(out):
            say(
                f"note: {work.name} has {size / 1e9:,.1f} GB to tokenise before the first step. "
                f"`{_prepare_command(settings, source)}` does that on any machine, once for all "
                "runs."
            )
        prepare(work, out, say, waits=True, key=key)
    if jax.process_count() > 1 and settings.dataset_type != "synthetic":
        coordination.barrier(_BARRIER, "prepared its text", timeout_s=_PREPARE_S)
    return {source: out for source, (_, out, _) in unprepared.items()}


def _unprepared(
    settings: DataSettings, tokenizer: Tokenizer, splits: Collection[str]
) -> dict[registry.Source, Unprepared]:
    """Open the sources of the splits that are not yet folders of shards."""
    keys = {}
    evaluates = "eval" in splits and settings.eval_interval != -1
    if "train" in splits or (evaluates and settings.holds_out):
        keys = {source: key_of(name) for name, source in training_sources(settings).items()}
    if evaluates:
        paths = settings.eval_paths.items()
        keys |= {source_at(settings, path): eval_key(name) for name, path in paths if path}
    # Open every source before preparing the first, so that a missing source leaves no folder.
    works = {
        source: Work(
            registry.open_source(source, key),
            tokenizer,
            f"{key}={source.path}",
            allowed=settings.max_corrupted_records,
        )
        for source, key in keys.items()
        if source.kind != "synthetic" and not shards.is_folder(source.path)
    }
    return {source: (work, *_cached_folder(settings, work)) for source, work in works.items()}


def _cached_folder(settings: DataSettings, work: Work) -> tuple[str, str]:
    """Return the folder of a source in the cache, and the key that names the cache.

    The name of the folder is a hash of everything that determines its content.
    """
    plan = json.dumps(list(plan_of(work).values()))
    name = hashlib.sha256(plan.encode()).hexdigest()[:16]
    key, cache = "data_cache_directory", settings.data_cache_directory
    if not cache:
        key, cache = "base_output_directory", os.path.join(settings.base_output_directory, CACHE)
    return os.fspath(absolute(cache, key=key) / name), key


@contextlib.contextmanager
def _trial(
    unprepared: Mapping[registry.Source, Unprepared],
) -> Iterator[dict[registry.Source, str]]:
    """Prepare small sources in a temporary folder, to find out whether a run can use them.

    Yields:
      The folders, as `prepare_sources` returns them. {} if all sources are prepared already, or one
      is too large to tokenise twice.
    """
    folders = {source: out for source, (_, out, _) in unprepared.items()}
    absent = [source for source, out in folders.items() if not shards.is_folder(out)]
    if not absent or any(size_of(unprepared[each][0].source) > _SMALL_TEXT for each in absent):
        yield {}
        return
    with corpus.replace_read_error("TMPDIR", "Set it to a folder that can be written."):
        temporary = tempfile.TemporaryDirectory(prefix="maxdiloco-")
    with temporary as parent:
        for source in absent:
            folders[source] = os.path.join(parent, os.path.basename(folders[source]))
            prepare(unprepared[source][0], folders[source], lambda line: None)
        yield folders


def _prepare_command(settings: DataSettings, source: registry.Source) -> str:
    values = {"dataset_type": source.kind, "text_column": source.column}
    values |= {name: vars(settings.tokenizer)[name] for name in KEYS}
    values["max_corrupted_records"] = settings.max_corrupted_records
    words = [f"{name}={shlex.quote(show(value))}" for name, value in values.items()]
    return " ".join(["python -m maxdiloco.prepare", shlex.quote(source.path), "out=FOLDER", *words])


def open_dataset(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    split: str,
    path: str = "",
    prepared: Mapping[registry.Source, str] = MappingProxyType({}),
) -> TrainingData:
    """Open the data of a split.

    Args:
      settings: settings of the run.
      tokenizer: tokenizer of the run.
      split: train or eval. The eval split is a Dataset, not a Mixture.
      path: for eval, a path of eval_dataset_path; empty: the held-out part of the training data.
      prepared: folders of `prepare_sources`; a source without one is a folder of shards itself.

    Raises:
      DataError: a source is missing, unfinished, damaged or too short.
    """
    if settings.dataset_type == "synthetic":
        windows = SyntheticWindows(
            settings.data_shuffle_seed,
            split,
            settings.tokenizer.vocab_size,
            settings.max_target_length,
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    if split == "eval" and not path and not settings.eval_fraction:
        raise DataError(
            "eval_fraction=0 holds nothing out. Set eval_fraction or eval_dataset_path."
        )
    held_out = Fraction(0)
    if settings.holds_out and not path:
        held_out = Fraction(str(settings.eval_fraction))  # as it is written: 1/20 for 0.05
    sources = {"": source_at(settings, path)} if path else training_sources(settings)
    requests = {
        name: Request(
            prepared.get(source, source.path),
            "eval_dataset_path" if path else "dataset_path",
            source.path,
            tokenizer,
            length=settings.max_target_length,
            packing=settings.grain_packing_type if settings.packing else packing.DOCUMENTS_APART,
            held_out=held_out,
            # Each source has its own seed, so that sources of equal size differ in order.
            seed=order.seed_of(name, settings.data_shuffle_seed),
            shuffled=settings.enable_data_shuffling,
            split=split,
        )
        for name, source in sources.items()
    }
    if path or not settings.dataset_mixture:
        return pipeline.open_dataset(requests[""])
    weights = None  # the order in the list assigns the texts to the replicas
    if not settings.dataset_per_replica:
        entries = map(dict, settings.dataset_mixture)
        weights = {entry["name"]: Fraction(entry.get("weight", "1")) for entry in entries}
        requests = dict(sorted(requests.items()))
    return mixture.open_mixture(requests, seed=settings.data_shuffle_seed, weights=weights)


def open_evaluated(
    settings: DataSettings, tokenizer: Tokenizer, **options: Any
) -> dict[str, Dataset]:
    """Return {name: data set} of eval_dataset_path, the one of eval/loss first.

    For the arguments and errors see `open_dataset`.
    """
    texts = {}
    for name, path in settings.eval_paths.items():
        try:
            texts[name] = open_dataset(settings, tokenizer, split="eval", path=path, **options)
        except DataError as error:
            if not name:
                raise
            raise DataError(f"{eval_key(name)}: {error}") from error
    return texts


def require_same_texts(texts: Mapping[str, Dataset]) -> None:
    """Raise DataError unless all processes evaluate on the same texts. All processes call it."""
    if texts:
        require_same_data(
            "".join(text.contents for text in texts.values()), "the texts to evaluate on"
        )


def require_same_data(data: str, key: str, what: str = "text") -> str:
    """Return a fingerprint of data, if all processes have the same one.

    Args:
      data: fingerprint in this process.
      key: name of the option that names the data, for the error.
      what: the kind of data, for the error.

    Raises:
      DataError: the processes have different data.
    """
    shared_folder.barrier()  # the first process may still wait for the lock of the run's folder
    checksum = zlib.crc32(data.encode()) >> 1  # fits a signed 32-bit integer
    if in_any_process(from_first_process(checksum) != checksum):
        why = "; the built-in text differs with the version of Python" if what == "text" else ""
        who = f"process {jax.process_index()} and others have different {what}"
        raise DataError(f"{key}: {who}. Give every host the same files{why}.")
    return data


def data_fingerprints(text: TrainingData, tokenizer: Tokenizer) -> dict[str, str]:
    """Return fingerprints of the training data and the tokenizer, equal in all processes.

    Raises:
      DataError: as `require_same_data`.
    """
    return {
        "contents": require_same_data(text.contents, "dataset_path"),
        "tokenizer": require_same_data(tokenizer.fingerprint, "tokenizer_path", "tokenizers"),
    }


def open_data(
    settings: DataSettings,
    tokenizer: Tokenizer,
    shape: tuple[int, int, int],
    say: Callable[[str], None],
) -> tuple[TrainingData, dict[str, Dataset]]:
    """Open the training data, and the evaluation data if the run evaluates.

    Call it before the run's folder is created, so that bad data leave no folder. Unprepared sources
    are prepared first. Small ones are first prepared in a temporary folder, so that text that is
    too short leaves no cache. A cache of larger text stays, and later starts can use it.

    Args:
      settings: settings of the run.
      tokenizer: tokenizer of the run.
      shape: R, B, L of a step.
      say: receives lines for the user.

    Raises:
      DataError: data that are missing, unreadable or too short for a step.
    """
    unprepared = _unprepared(settings, tokenizer, ("train", "eval"))
    with _trial(unprepared) as folders:
        if folders:
            _open_splits(settings, tokenizer, shape, folders)
    return _open_splits(settings, tokenizer, shape, _prepare(settings, unprepared, say))


def _open_splits(
    settings: DataSettings,
    tokenizer: Tokenizer,
    shape: tuple[int, int, int],
    prepared: Mapping[registry.Source, str],
) -> tuple[TrainingData, dict[str, Dataset]]:
    """Open the data of both splits. Raises DataError if they are too short for a step."""
    train = open_dataset(settings, tokenizer, split="train", prepared=prepared)
    train.check_size(train.first_position(*shape[:2]))
    held_out = {}
    if settings.eval_interval != -1:
        held_out = open_evaluated(settings, tokenizer, prepared=prepared)
    return train, held_out


def lines(
    settings: DataSettings,
    text: TrainingData,
    held_out: Mapping[str, Dataset],
    shape: tuple[int, int, int],
) -> list[str]:
    """Return log lines on the data read, other files in their folders, and the held-out parts."""
    out = text.summary(text.first_position(*shape[:2]))
    if text.computed:
        return out
    for name, source in training_sources(settings).items():
        out += registry.left_out_lines(source, key_of(name))
    for name, dataset in held_out.items():
        read = "all" if settings.eval_steps == -1 else f"{settings.eval_steps} batches"
        out.append(
            f"held out{f' as {name}' if name else ''}: {dataset.num_windows:,} sequences, of which "
            f"an evaluation reads {read}"
        )
    for name, path in settings.eval_paths.items():
        if held_out and not path:
            out += _large_shares(settings, text, held_out[name])
    if settings.holds_out and not held_out and settings.eval_fraction:
        out.append(
            f"held out: eval_fraction={settings.eval_fraction}, which is not evaluated "
            "(eval_interval=-1); eval_fraction=0 trains on all of the text"
        )
    return out


def _large_shares(settings: DataSettings, text: TrainingData, held: Dataset) -> Iterator[str]:
    """Yield a warning for each source whose held-out part is far above eval_fraction."""
    pairs, fraction = [(text, held.windows)], settings.eval_fraction
    if settings.dataset_mixture:
        pairs = zip(text.sources, held.windows.sources, strict=True)
    for source, windows in pairs:
        sequences = windows.num_windows + source.num_windows
        share = windows.num_windows / sequences
        if share > _LARGE * fraction:
            yield (
                f"warning: {share:.0%} of {source.name} is held out, not eval_fraction={fraction}: "
                f"at least one of its {sequences} sequences is. Give more text, or set "
                "eval_dataset_path."
            )
