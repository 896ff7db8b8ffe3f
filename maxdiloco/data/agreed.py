"""What all processes must read alike: the contents of the text, and the tokenizer."""

import zlib

import jax

from maxdiloco.errors import DataError
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.storage import shared_folder


def contents(data: str, *, key: str = "dataset_path") -> str:
    """The contents of data that key names. Raises DataError unless all processes have the same."""
    shared_folder.meet()  # the first process may still wait for the lock of the run's folder
    remedy = "the same files; the built-in text differs with the version of Python."
    return _same(data, key, "text", remedy)


def tokenizer(fingerprint: str) -> str:
    """The fingerprint of the tokenizer. Raises DataError unless all processes have the same."""
    return _same(fingerprint, "tokenizer_path", "tokenizers", "the same files.")


def _same(text, key, what, remedy):
    checksum = zlib.crc32(text.encode()) >> 1  # fits a signed 32-bit integer
    if in_any_process(from_first_process(checksum) != checksum):
        who = f"process {jax.process_index()} and others"
        raise DataError(f"{key}: {who} have different {what}. Give every host {remedy}")
    return text
