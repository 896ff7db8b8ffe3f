"""The texts that the keys of a run name, as data/ takes them."""

from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from maxdiloco.data import agreed, mixture, order, packing, pipeline
from maxdiloco.data.kinds import Source
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.prepared import at_start
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import Request
from maxdiloco.data.tokenizer import Keys
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError
from maxdiloco.flags import eval_paths
from maxdiloco.flags.config import Config


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
    Raises DataError, one line, for a source that is missing, empty or unreadable.
    """
    if cfg.dataset_type == "synthetic":
        windows = SyntheticWindows(
            cfg.data_shuffle_seed, split, cfg.vocab_size, cfg.max_target_length
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    options = dict(split=split, index=index, prepared=prepared, held_out=Fraction(0))
    if path:
        request = _request(cfg, tokenizer, _source(cfg, path), eval_paths.KEY, **options)
        return pipeline.open_dataset(request)
    if split == "eval" and not cfg.eval_fraction:
        raise DataError(
            "eval_fraction=0 holds nothing out. Set eval_fraction or eval_dataset_path."
        )
    if eval_paths.holds_out(cfg):  # as it is written: 1/20 for 0.05
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
    for name, path in eval_paths.named(cfg).items():
        try:
            texts[name] = open_dataset(cfg, tokenizer, path=path, **options)
        except DataError as error:
            if not name:
                raise
            raise DataError(f"{eval_paths.key_of(name)}: {error}") from error
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
    """Tokenise the sources of splits that have no known token counts (at_start.prepare_sources).

    The text to evaluate on is read where eval_interval is not -1.
    """
    keys = {}
    evaluates = "eval" in splits and cfg.eval_interval != -1
    if "train" in splits or (evaluates and eval_paths.holds_out(cfg)):
        keys = {source: key_of(name) for name, source in trained(cfg).items()}
    if evaluates:
        for name, path in eval_paths.named(cfg).items():
            if path:
                keys[_source(cfg, path)] = eval_paths.key_of(name)
    return at_start.prepare_sources(
        keys,
        tokenizer,
        folder=cfg.base_output_directory,
        allowed=cfg.max_corrupted_records,
        flags=Keys.of(vars(cfg))._asdict(),
        say=say,
    )
