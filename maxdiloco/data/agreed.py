"""What all processes must read alike: the contents of the text, and the tokenizer."""

import zlib

import jax

from maxdiloco.errors import DataError
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.storage import shared_folder


def same(data: str, key: str, what: str = "text") -> str:
    """The contents of data that key names. Raises DataError unless all processes have the same."""
    shared_folder.meet()  # the first process may still wait for the lock of the run's folder
    checksum = zlib.crc32(data.encode()) >> 1  # fits a signed 32-bit integer
    if in_any_process(from_first_process(checksum) != checksum):
        why = "; the built-in text differs with the version of Python" if what == "text" else ""
        who = f"process {jax.process_index()} and others have different {what}"
        raise DataError(f"{key}: {who}. Give every host the same files{why}.")
    return data
