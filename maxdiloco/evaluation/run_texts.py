"""The data of a run: the texts that its keys name, as data/ takes them.

    # R replicas  B sequences per replica  L tokens
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from etils import epath

from maxdiloco.data import agreed, kinds, mixture, order, packing, pipeline, shards
from maxdiloco.data.kinds import Source
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.order import Position
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.prepared import at_start
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import Request
from maxdiloco.data.tokenizer import Keys
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError
from maxdiloco.flags import checks
from maxdiloco.flags.config import Config
from maxdiloco.metrics import line_files
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
    """The data of a split, train or eval. index, prepared: of data.text.Request.

    The eval split is a Dataset: path, of eval_dataset_path, or what is held out of the training.
    Raises DataError for a source that is missing, empty or unreadable.
    """
    if cfg.dataset_type == "synthetic":
        windows = SyntheticWindows(
            cfg.data_shuffle_seed, split, cfg.vocab_size, cfg.max_target_length
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    options = dict(split=split, index=index, prepared=prepared, held_out=Fraction(0))
    if path:
        request = _request(cfg, tokenizer, _source(cfg, path), "eval_dataset_path", **options)
        return pipeline.open_dataset(request)
    if split == "eval" and not cfg.eval_fraction:
        raise DataError(
            "eval_fraction=0 holds nothing out. Set eval_fraction or eval_dataset_path."
        )
    if cfg.holds_out():  # as it is written: 1/20 for 0.05
        options["held_out"] = Fraction(str(cfg.eval_fraction))
    # Sources of one size differ in order: each has a seed of its own.
    requests = {
        name: _request(cfg, tokenizer, source, name=name, **options)
        for name, source in trained(cfg).items()
    }
    if not cfg.dataset_mixture:
        return pipeline.open_dataset(requests[""])
    if cfg.dataset_per_replica:  # the order in the list says which replica reads what
        return mixture.open_mixture(requests, seed=cfg.data_shuffle_seed, weights=None)
    entries = map(dict, cfg.dataset_mixture)
    weights = {entry["name"]: Fraction(entry.get("weight", "1")) for entry in entries}
    requests = dict(sorted(requests.items()))
    return mixture.open_mixture(requests, seed=cfg.data_shuffle_seed, weights=weights)


def open_evaluated(
    cfg: Config,
    tokenizer: Tokenizer,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] = MappingProxyType({}),
) -> dict[str, Dataset]:
    """{name: data set} of eval_dataset_path, that of eval/loss first; otherwise as open_dataset."""
    texts, options = {}, dict(split="eval", index=index, prepared=prepared)
    for name, path in cfg.eval_paths().items():
        try:
            texts[name] = open_dataset(cfg, tokenizer, path=path, **options)
        except DataError as error:
            if not name:
                raise
            raise DataError(f"{checks.key_of_eval(name)}: {error}") from error
    return texts


def agree(texts: Mapping[str, Dataset]) -> None:
    """Raise DataError unless all processes evaluate on the same texts. All processes call it."""
    if texts:
        agreed.contents(
            "".join(text.contents for text in texts.values()), key="the texts to evaluate on"
        )


def trained(cfg: Config) -> dict[str, Source]:
    """The sources that are trained on, by their names in a mixture; one alone has the name ""."""
    if not cfg.dataset_mixture:
        return {"": _source(cfg, cfg.dataset_path)}
    return {
        entry["name"]: Source(
            entry.get("dataset_type", cfg.dataset_type),
            entry["path"],
            entry.get("text_column", cfg.text_column),
        )
        for entry in map(dict, cfg.dataset_mixture)
    }


def _source(cfg: Config, path: str) -> Source:
    return Source(cfg.dataset_type, path, cfg.text_column)


def key_of(name: str) -> str:
    """The key of a source of `trained`, for messages."""
    return f"dataset_mixture, source {name}" if name else "dataset_path"


def _request(
    cfg: Config,
    tokenizer: Tokenizer,
    source: Source,
    key: str = "dataset_path",
    name: str = "",
    **options: Any,
) -> Request:
    return Request(
        source,
        key,
        tokenizer,
        length=cfg.max_target_length,
        packing=cfg.grain_packing_type if cfg.packing else packing.DOCUMENTS_APART,
        allowed=cfg.max_corrupted_records,
        seed=order.seed_of(name, cfg.data_shuffle_seed),
        shuffled=cfg.enable_data_shuffling,
        **options,
    )


def prepare(
    cfg: Config,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    *,
    splits: Collection[str] = ("train", "eval"),
) -> dict[Source, str]:
    """Tokenise the sources of splits that have no known token counts (at_start.prepare_sources)."""
    keys = {}
    evaluates = "eval" in splits and cfg.eval_interval != -1
    if "train" in splits or (evaluates and cfg.holds_out()):
        keys = {source: key_of(name) for name, source in trained(cfg).items()}
    if evaluates:
        for name, path in cfg.eval_paths().items():
            if path:
                keys[_source(cfg, path)] = checks.key_of_eval(name)
    return at_start.prepare_sources(
        keys,
        tokenizer,
        folder=cfg.base_output_directory,
        allowed=cfg.max_corrupted_records,
        flags=Keys.of(vars(cfg))._asdict(),
        say=say,
    )


def open_data(
    cfg: Config,
    tokenizer: Tokenizer,
    shape: tuple[int, int, int],
    folder: RunFolder,
    say: Callable[[str], None],
) -> tuple[TrainingData, dict[str, Dataset], LineIndex]:
    """The training text, those to evaluate on if the run does, and the index of all.

    Before the run's folder is made: data that are refused must not create one; save_index comes
    after. shape: R, B, L of a step. Sources without known token counts are tokenised first, below
    base_output_directory. Raises DataError for data that are missing, unreadable or too short for
    a step.
    """
    prepared = prepare(cfg, tokenizer, say)
    index = LineIndex(cfg.text_column, report=say)
    if any(source.kind == "text" for source in trained(cfg).values()):
        load_index(index, folder.line_index)
    train = open_dataset(cfg, tokenizer, split="train", index=index, prepared=prepared)
    train.check_size(train.first_position(*shape[:2]))
    held_out = {}
    if cfg.eval_interval != -1:
        held_out = open_evaluated(cfg, tokenizer, index=index, prepared=prepared)
    return train, held_out, index


def lines(
    cfg: Config, text: TrainingData, held_out: Mapping[str, Dataset], shape: tuple[int, int, int]
) -> list[str]:
    """What is read, what lies in the folder beside it, and what is held out, for the user."""
    out = text.summary(text.first_position(*shape[:2]))
    if text.computed:
        return out
    for name, source in trained(cfg).items():
        if not shards.is_folder(source.path):
            line = kinds.left_out_line(source, key_of(name))
            out += [line] if line else []
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


def metrics(text: TrainingData, position: Position, length: int, step: int) -> dict[str, float]:
    """learning/tokens, read by all replicas up to the end of a step, and data/* of the text."""
    sequences = position.base + position.sequences_before(step + 1)
    return {"learning/tokens": sequences * length} | text.metrics(position, step)


def load_index(index: LineIndex, path: epath.Path) -> None:
    """Take over the index of an earlier start; a failure costs time and is reported in a line."""
    with line_files.noted(path, index.report, "read", ": .jsonl files are read"):
        index.load(path)


def save_index(index: LineIndex, path: epath.Path) -> None:
    """Keep the index for the next start; a failure is reported in a line."""
    so = ": the next start reads .jsonl files through again"
    with line_files.noted(path, index.report, so=so):
        index.save(path)
