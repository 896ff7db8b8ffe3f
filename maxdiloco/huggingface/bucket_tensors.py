"""Read a safetensors file in a bucket by ranges: the header first, then single tensors."""

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

_MOST_HEADER = 100_000_000  # largest header [bytes]; the package refuses larger ones


@contextlib.contextmanager
def local_header(file: BucketPath) -> Iterator[str]:
    """Copy the header of a file in a bucket into a sparse local file of the same size.

    The package safetensors reads and checks the copy in the same way as the whole file.

    Raises:
      CheckpointError: the file cannot be read.
    """
    with tempfile.NamedTemporaryFile(prefix="maxdiloco-header-") as copy:
        with folders.replace_read_error(file):
            size, bucket = file.nbytes(), file.bucket()
            length = bucket.get_range(file.key, 0, min(8, size))
            end = min(8 + int.from_bytes(length, "little"), size, 8 + _MOST_HEADER)
            copy.write(length + b"".join(staging.blocks(file, len(length), end)))
        copy.truncate(size)
        copy.flush()
        yield copy.name


def tensor_offsets(header: os.PathLike) -> dict[str, int]:
    """Return {tensor: its offset in bytes} of a file whose header the package has checked."""
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
    """Read some rows of a tensor.

    Args:
      file: a safetensors file.
      begin: offset of the tensor in the file, in bytes.
      shape: shape of the tensor.
      dtype: dtype of the tensor.
      rows: slice of dim 0.

    Raises:
      CheckpointError: the file cannot be read.
    """
    count, *inner = shape or (1,)
    first, last, _ = rows.indices(count)
    row = math.prod(inner) * dtype.itemsize
    with folders.replace_read_error(file):
        data = b"".join(staging.blocks(file, begin + row * first, begin + row * last))
    return np.frombuffer(data, dtype).reshape((last - first, *inner) if shape else ())
