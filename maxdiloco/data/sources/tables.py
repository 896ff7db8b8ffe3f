"""Read text from a column of a table: parquet files, and data sets of the package datasets."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from maxdiloco.data.corpus import Skip, Span, Text
from maxdiloco.data.packages import require
from maxdiloco.data.paths import is_local
from maxdiloco.errors import DataError

# Number of rows that are decoded at once. A page of text has some hundreds.
_ROWS = 256
# First letters of the names of Arrow's text types.
_TEXT = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")


def read(file: BinaryIO, path: str, span: Span, column: str, skip: Skip) -> Iterator[Text]:
    """Yield the documents of the row groups that begin in a span of a parquet file.

    Spans are in bytes, so that they can be planned without reading the footers of files.

    Raises:
      DataError: the column is missing or is not text.
      OSError: the file cannot be read.
    """
    pyarrow = require("pyarrow", path, extra="data")
    tables = require("pyarrow.parquet", path, extra="data")
    try:
        table = tables.ParquetFile(path if is_local(path) else file)
    except pyarrow.ArrowInvalid as error:
        if span.begin == 0:  # one damaged record for any number of spans
            skip(path, f"not a parquet file, or truncated ({error})")
        return
    with table:
        _check_column(table.schema_arrow, column, path)
        for group in range(table.num_row_groups):
            first = table.metadata.row_group(group).column(0)
            place = first.data_page_offset
            if first.has_dictionary_page:
                place = min(place, first.dictionary_page_offset)
            if span.begin <= place < span.end:
                yield from _rows(pyarrow, table, group, column, path, skip)


def _rows(pyarrow, table, group, column, path, skip):
    where = f"{path} row group {group}"
    done = 0
    try:
        for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column]):
            for row, value in enumerate(batch.column(0), start=done):
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    skip(f"{where} row {row}", f"not UTF-8 ({error.reason})")
                    continue
                if text:  # None if the column is null in this row
                    yield Text(text)
            done += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        skip(f"{where} after row {done}", str(error))


@dataclasses.dataclass(frozen=True)
class Hub:
    """A split of a data set of the package datasets, with the methods of `files.Files`."""

    names: tuple[str, ...]  # one name
    dataset: Any  # datasets.Dataset; pickled as the names of the cache files that hold the rows
    column: str  # the column that holds the text

    def spans(self, limit: int) -> Iterator[Span]:
        """Yield spans of rows of about `limit` bytes (Files)."""
        rows = len(self.dataset)
        bytes_a_row = self.dataset.data.nbytes / max(rows, 1)
        step = max(1, int(limit / max(bytes_a_row, 1)))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield Span(0, begin, end, int((end - begin) * bytes_a_row))

    def read(self, span: Span, skip: Skip) -> Iterator[Text]:
        """Yield the documents of some rows (Files)."""
        for begin in range(span.begin, span.end, _ROWS):
            end = min(begin + _ROWS, span.end)
            try:
                texts = self.dataset[begin:end][self.column]
            except UnicodeDecodeError as error:
                where = f"{self.names[0]} rows {begin} to {end - 1}"
                skip(where, f"not UTF-8 ({error.reason})")
                continue
            yield from (Text(text) for text in texts if text)

    def version(self) -> list[list]:
        """Return name, rows, bytes and hashes of the package's cache, as JSON (Files)."""
        files = [os.path.basename(os.path.dirname(f["filename"])) for f in self.dataset.cache_files]
        return [[self.names[0], len(self.dataset), int(self.dataset.data.nbytes), *files]]


def open_hub(path: str, key: str, column: str) -> Hub:
    """Open a split of a data set of the Hugging Face hub, or of a folder.

    Args:
      path: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT (NAME::SPLIT for the only config). NAME is a name
        on the hub or a folder. The default split is train.
      key: the key that has the path, for messages.
      column: the column that holds the text.

    Raises:
      DataError: the data set cannot be loaded, or lacks the column.
      ConfigError: the package datasets is not installed.
    """
    name, _, rest = path.partition(":")
    config, _, split = rest.partition(":")
    if not name or not is_local(path):
        raise DataError(
            f"{key}={path}: dataset_type=hf reads a data set of the hub, such as allenai/c4:en, or "
            "a local folder. Use dataset_type=parquet or text for files in a bucket."
        )
    user = f"dataset_type=hf of {key}={path}"
    datasets = require("datasets", user, extra="data")
    hub_logging = require("huggingface_hub.utils.logging", user, extra="data")
    hub_logging.set_verbosity_error()  # the hub logs each attempt; one line suffices
    try:
        dataset = _load(datasets, os.path.expanduser(name), config or None, split or "train")
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{key}={path} cannot be loaded by the package datasets: {error}. Give NAME, "
            "NAME:CONFIG or NAME:CONFIG:SPLIT of the hub, or a folder. A machine without a network "
            f"needs a folder from `hf download {name} --repo-type dataset --local-dir DIR`."
        ) from error
    _check_column(dataset.data.schema, column, f"{key}={path}")
    return Hub((path,), dataset.select_columns([column]), column)


def _load(datasets, name, config, split):
    if os.path.isfile(os.path.join(name, "state.json")):  # written by Dataset.save_to_disk
        return datasets.load_from_disk(name)
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        return datasets.load_from_disk(name)[split]
    return datasets.load_dataset(name, config, split=split)


def _check_column(schema, column, where):
    """Raise DataError unless an Arrow schema has this column, with text."""
    if column not in schema.names:
        raise DataError(
            f"text_column={column} is not in {where}, which has {', '.join(schema.names)}. Set "
            "text_column to the column that holds the text."
        )
    kind = schema.field(column).type
    if not str(kind).startswith(_TEXT):
        raise DataError(
            f"text_column={column} is {kind} in {where}, not string. Set text_column to the column "
            "that holds the text."
        )
