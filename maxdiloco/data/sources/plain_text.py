"""Whether files that are read as bytes are text: looked at here and there before a run begins."""

import codecs
import os

from maxdiloco.data import corpus
from maxdiloco.data.sources.text_files import inside_character
from maxdiloco.errors import DataError

# Our choice: a folder of 100,000 files is looked at in seconds; a file that is no text has some
# byte that is none in nearly every block.
_BLOCK = 1 << 13  # bytes
_BLOCKS = 16  # of one file, spread evenly


def refuse_other(paths: list[str], key: str) -> None:
    """Raise DataError for the first file with a block that is no UTF-8 or has a NUL byte.

    .jsonl files are left out: they are read through as JSON. key: the flag of the path.
    """
    for path in paths:
        if path.endswith(".jsonl"):
            continue
        try:
            place = _first_wrong(path)
        except OSError as error:
            raise corpus.unreadable(path, error) from error
        if place is not None:
            offset, why = place
            raise DataError(
                f"{path} is no UTF-8 text: byte {offset} {why}. Convert it (as iconv -f LATIN1 -t "
                f"UTF-8 does), or leave it out of {key}."
            )


def _first_wrong(path: str) -> tuple[int, str] | None:
    """Place of a byte that is no text, and why; None where the blocks are text."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _BLOCK)
        starts = {last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}
        if size <= _BLOCK * _BLOCKS:
            starts = set(range(0, size, _BLOCK))
        for start in sorted(starts):
            file.seek(start)
            data = file.read(_BLOCK)
            begin = inside_character(data) if start else 0
            if (nul := data.find(b"\0")) >= 0:
                return start + nul, "is NUL"
            # Not the last block: its last character may go on behind it.
            final = start + len(data) >= size
            try:
                codecs.getincrementaldecoder("utf-8")().decode(data[begin:], final)
            except UnicodeDecodeError as error:
                value = data[begin + error.start]
                return start + begin + error.start, f"is 0x{value:02x} ({error.reason})"
    return None
