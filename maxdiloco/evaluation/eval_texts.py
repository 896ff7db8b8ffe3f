"""The texts that theta is evaluated on: the held-out part, and the named ones of eval_sets."""

from collections.abc import Mapping
from types import MappingProxyType

from maxdiloco.data import agreed
from maxdiloco.data.kinds import Source
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError
from maxdiloco.evaluation import run_texts
from maxdiloco.flags import config
from maxdiloco.flags.config import Config

HELD_OUT = ""  # its metrics have no name between eval/ and loss


def open_texts(
    cfg: Config,
    tokenizer: Tokenizer,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] = MappingProxyType({}),
) -> dict[str, Dataset]:
    """{name: data set}: HELD_OUT, the eval split of the run, then eval_sets in their order.

    index, prepared: of data.text.open_text. Raises DataError for text that is missing, unreadable
    or too short.
    """
    options = dict(split="eval", index=index, prepared=prepared)
    texts = {HELD_OUT: run_texts.open_dataset(cfg, tokenizer, **options)}
    for name, path in cfg.eval_sets:
        of_set = config.from_dict(cfg.as_dict() | {"eval_dataset_path": path})
        try:
            texts[name] = run_texts.open_dataset(of_set, tokenizer, **options)
        except DataError as error:
            raise DataError(f"eval_sets.{name}, read as eval_dataset_path is: {error}") from error
    return texts


def agree(texts: dict[str, Dataset]) -> None:
    """Raise DataError unless all processes have the same texts. All processes call it."""
    if texts:
        agreed.contents(
            "".join(text.contents for text in texts.values()), key="the texts to evaluate on"
        )
