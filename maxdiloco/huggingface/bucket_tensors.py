"""Tensors of a safetensors file in a bucket: the header first, then the bytes asked for."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator

import numpy as np

from maxdiloco import json_text
from maxdiloco.checkpoint import staging
from maxdiloco.huggingface import folders
from maxdiloco.storage.object_store import BucketPath

_MOST_HEADER = 100_000_000  # bytes; the package refuses more


@contextlib.contextmanager
def header_here(file: BucketPath) -> Iterator[str]:
    """A file of this machine with the header of one in a bucket; the rest of it is a hole. The
    package checks it like the whole file. Raises CheckpointError."""
    with tempfile.NamedTemporaryFile(prefix="maxdiloco-header-") as copy:
        with folders.reading(file):
            size, bucket = file.nbytes(), file.bucket()
            length = bucket.get_range(file.key, 0, min(8, size))
            end = min(8 + int.from_bytes(length, "little"), size, 8 + _MOST_HEADER)
            copy.write(length + b"".join(staging.blocks(file, len(length), end)))
        copy.truncate(size)
        copy.flush()
        yield copy.name


def places(header: os.PathLike) -> dict[str, int]:
    """{tensor: where its bytes begin}, of a header that the package has checked."""
    with open(header, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        fields = json_text.parse(file.read(length))
    return {
        name: 8 + length + fields[name]["data_offsets"][0]
        for name in fields.keys() - {"__metadata__"}
    }


def read(
    file: BucketPath, begin: int, shape: tuple[int, ...], dtype: np.dtype, rows: slice
) -> np.ndarray:
    """Some rows of a tensor whose bytes begin there. Raises CheckpointError."""
    count, *inner = shape or (1,)
    first, last, _ = rows.indices(count)
    row = math.prod(inner) * dtype.itemsize
    with folders.reading(file):
        data = b"".join(staging.blocks(file, begin + row * first, begin + row * last))
    return np.frombuffer(data, dtype).reshape((last - first, *inner) if shape else ())
