"""The texts that theta is evaluated on, those of eval_dataset_path."""

from collections.abc import Mapping

from maxdiloco.data import agreed, mixture
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.split import Source
from maxdiloco.errors import DataError
from maxdiloco.flags import eval_paths
from maxdiloco.flags.config import Config


def open_texts(
    cfg: Config,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] | None = None,
) -> dict[str, Dataset]:
    """{name: data set} of eval_dataset_path, that of eval/loss first.

    index, prepared: of data.text.open_text. Raises DataError for text that is missing, unreadable
    or too short.
    """
    texts = {}
    for name, path in eval_paths.named(cfg).items():
        of_text = eval_paths.with_path(cfg, path)
        try:
            texts[name] = mixture.open_dataset(
                of_text, split="eval", index=index, prepared=prepared
            )
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
