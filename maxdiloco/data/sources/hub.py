"""Data of Hugging Face's package datasets: from the hub, from its cache or from local files."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from maxdiloco.data.packages import require
from maxdiloco.data.sources.spans import Damaged, Item, Span, Text, check_column
from maxdiloco.errors import DataError

_ROWS = 256  # read at once; our choice


@dataclasses.dataclass(frozen=True)
class Hub:
    """A split of a data set, whose rows lie in Arrow files of the package's cache (spans.Reader).

    dataset: a datasets.Dataset; its pickle names the files.
    """

    names: tuple[str, ...]
    dataset: Any
    column: str

    def spans(self, limit: int) -> Iterator[Span]:
        """Runs of rows of about limit bytes."""
        rows = len(self.dataset)
        bytes_a_row = self.dataset.data.nbytes / max(rows, 1)
        step = max(1, int(limit / max(bytes_a_row, 1)))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield Span(0, begin, end, int((end - begin) * bytes_a_row))

    def read(self, span: Span) -> Iterator[Item]:
        """Documents of some rows (spans.Reader)."""
        for begin in range(span.begin, span.end, _ROWS):
            rows = range(begin, min(begin + _ROWS, span.end))
            try:
                texts = self.dataset[rows.start : rows.stop][self.column]
            except UnicodeDecodeError as error:
                where = f"{self.names[0]} rows {rows.start} to {rows.stop - 1}"
                yield Damaged(where, f"not UTF-8 ({error.reason})")
                continue
            yield from (Text(text) for text in texts if text)

    def stamps(self) -> list[list]:
        """Name, rows and bytes, and the hash by which the package's cache knows the data."""
        files = [os.path.basename(os.path.dirname(f["filename"])) for f in self.dataset.cache_files]
        return [[self.names[0], len(self.dataset), int(self.dataset.data.nbytes), *files]]


def open_hub(path: str, key: str, column: str) -> Hub:
    """A split of a data set.

    path: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT (NAME::SPLIT for the only config); NAME is that of
      the hub or a folder; the split is train by default. key: the flag of the path.
    Raises DataError when it cannot be had or has no such column, ConfigError without the package.
    """
    name, _, rest = path.partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise DataError(
            f"{key} is empty, but dataset_type=hf needs the name of a data set. Set {key} to one "
            "of the hub, such as allenai/c4:en, or to a folder."
        )
    user = f"dataset_type=hf of {key}={path}"
    datasets = require("datasets", user, extra="data")
    hub_logging = require("huggingface_hub.utils.logging", user, extra="data")
    hub_logging.set_verbosity_error()  # one line of ours instead of a line for each attempt
    try:
        dataset = _load(datasets, os.path.expanduser(name), config or None, split or "train")
    except ConnectionError as error:
        raise DataError(
            f"{key}={path} cannot be downloaded ({error}). On a machine with a network run `hf "
            f"download {name} --repo-type dataset --local-dir DIR`, copy DIR here and set "
            f"{key}=DIR."
        ) from error
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{key}={path} is no data set that the package datasets can load: {error}. Give NAME, "
            "NAME:CONFIG or NAME:CONFIG:SPLIT of the hub, or a folder."
        ) from error
    check_column(dataset.data.schema, column, f"{key}={path}")
    return Hub((path,), dataset.select_columns([column]), column)


def _load(datasets, name, config, split):
    if os.path.isfile(os.path.join(name, "state.json")):  # what Dataset.save_to_disk writes
        return datasets.load_from_disk(name)
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        return datasets.load_from_disk(name)[split]
    return datasets.load_dataset(name, config, split=split)
