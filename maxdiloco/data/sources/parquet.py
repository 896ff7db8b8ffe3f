"""Parquet files, row group by row group.

A row group belongs to the span that its first byte is in, so that no footer is read to plan.
"""

from collections.abc import Iterator

from maxdiloco.data.packages import require
from maxdiloco.data.sources.spans import Damaged, Item, Text, check_column

# Rows that are decoded at once: our choice; a page of text is some hundreds.
_ROWS = 256


def read(path: str, begin: int, end: int, column: str) -> Iterator[Item]:
    """Documents of the row groups that begin in the bytes [begin, end) of a file.

    Raises DataError for a column that is missing or not text, OSError for an unreadable file.
    """
    pyarrow = require("pyarrow", path, extra="data")
    tables = require("pyarrow.parquet", path, extra="data")
    try:
        file = tables.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        if begin == 0:  # once, whatever the number of spans
            yield Damaged(path, f"no parquet file, or one that was cut off ({error})")
        return
    with file:
        check_column(file.schema_arrow, column, path)
        for group in range(file.num_row_groups):
            if begin <= _place(file.metadata.row_group(group)) < end:
                yield from _rows(pyarrow, file, group, column, path)


def _place(group):
    """Where a row group begins [bytes]."""
    first = group.column(0)
    pages = [first.data_page_offset]
    if first.has_dictionary_page:
        pages.append(first.dictionary_page_offset)
    return min(pages)


def _rows(pyarrow, file, group, column, path) -> Iterator[Item]:
    where = f"{path} row group {group}"
    done = 0
    try:
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
            for row, value in enumerate(batch.column(0), start=done):
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    yield Damaged(f"{where} row {row}", f"not UTF-8 ({error.reason})")
                    continue
                if text:  # None where the column is null
                    yield Text(text)
            done += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Damaged(f"{where} after row {done}", str(error))
