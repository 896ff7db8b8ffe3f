"""What all processes must read alike: the contents of the text, and the tokenizer."""

import zlib

import jax

from maxdiloco.errors import DataError
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.storage import shared_folder


def contents(data: str, *, key: str = "dataset_path") -> str:
    """The contents of the data. Raises DataError unless they are the same in all processes.

    key: what gave the data, for the message.
    """
    shared_folder.meet()  # the first process may still wait for the lock of the run's folder
    return _same(
        data,
        key,
        "text. Give every host the same files; the built-in text differs with the version of "
        "Python.",
    )


def tokenizer(fingerprint: str) -> str:
    """The fingerprint of the tokenizer. Raises DataError unless all processes have the same."""
    return _same(fingerprint, "tokenizer_path", "tokenizers. Give every host the same files.")


def _same(text: str, key: str, what: str) -> str:
    checksum = zlib.crc32(text.encode()) >> 1  # fits a signed 32-bit integer
    if in_any_process(from_first_process(checksum) != checksum):
        raise DataError(f"{key}: process {jax.process_index()} and others have different {what}")
    return text
