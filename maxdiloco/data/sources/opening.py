"""The source that dataset_type names."""

from maxdiloco.data import shards
from maxdiloco.data.sources import files, hub
from maxdiloco.data.sources.spans import Source
from maxdiloco.errors import DataError

KINDS = ("text", "parquet", "hf")


def open_source(kind: str, path: str, key: str, column: str) -> Source:
    """Text in files, not yet tokenised.

    kind: dataset_type, one of KINDS. path, key: a folder, glob or file, or a name for hf, and the
    flag that gives it. column: with the text, where there are columns or fields.
    Raises DataError for data that are missing or unreadable, and for a prepared folder; ConfigError
    without a package.
    """
    if shards.is_folder(path):
        raise DataError(
            f"{key}={path} is prepared already: it holds tokens, not text. Train with "
            f"dataset_path={path}, or give the text that it was made from."
        )
    if kind == "hf":
        return hub.open_hub(path, key, column)
    return files.open_files(kind, path, key, column)
