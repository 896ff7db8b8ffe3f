"""The data of a run: the texts that its keys name, as data/ takes them.

    # R replicas  B sequences per replica  L tokens
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from maxdiloco.data import kinds, mixture, order, packing, pipeline
from maxdiloco.data.documents import LineIndex
from maxdiloco.data.kinds import Source
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import Request
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError
from maxdiloco.evaluation import run_sources
from maxdiloco.flags import checks
from maxdiloco.flags.config import Config
from maxdiloco.metrics import line_files
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.storage import shared_folder
from maxdiloco.storage.run_folder import RunFolder

# Times eval_fraction: our choice; a source without enough sequences for its share has more.
_LARGE = 2


def open_dataset(
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    split: str,
    path: str = "",
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] = MappingProxyType({}),
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
    sources = {"": run_sources.of_path(cfg, path)} if path else run_sources.trained(cfg)
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
    prepared = run_sources.tokenise(cfg, tokenizer, say)
    index = LineIndex(cfg.text_column, report=say)
    if any(source.kind == "text" for source in run_sources.trained(cfg).values()):
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
    for name, source in run_sources.trained(cfg).items():
        out += kinds.left_out_lines(source, run_sources.key_of(name))
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
    """Keep the index for the next start; a failure is reported in a line."""
    so = ": the next start reads .jsonl files through again"
    with line_files.noted(path, index.report, so=so):
        index.save(path)
