"""The texts that theta is evaluated on, those of eval_dataset_path."""

from collections.abc import Mapping
from types import MappingProxyType

from maxdiloco.data import agreed
from maxdiloco.data.kinds import Source
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError
from maxdiloco.evaluation import run_texts
from maxdiloco.flags import eval_paths
from maxdiloco.flags.config import Config


def open_texts(
    cfg: Config,
    tokenizer: Tokenizer,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] = MappingProxyType({}),
) -> dict[str, Dataset]:
    """{name: data set} of eval_dataset_path, that of eval/loss first.

    index, prepared: of data.text.open_text. Raises DataError for text that is missing, unreadable
    or too short.
    """
    texts, options = {}, dict(split="eval", index=index, prepared=prepared)
    for name, path in eval_paths.named(cfg).items():
        try:
            texts[name] = run_texts.open_dataset(cfg, tokenizer, path=path, **options)
        except DataError as error:
            if not name:
                raise
            raise DataError(f"{eval_paths.key_of(name)}: {error}") from error
    return texts


def agree(texts: Mapping[str, Dataset]) -> None:
    """Raise DataError unless all processes have the same texts. All processes call it."""
    if texts:
        agreed.contents(
            "".join(text.contents for text in texts.values()), key="the texts to evaluate on"
        )
