"""Bounded reads of small files that a person or another program may have written.

For configuration, secrets, prompts, tokenizers, manifests and the like. Not for weights, shards or
text, which are read in blocks.
"""

import errno
import os
import stat
from typing import BinaryIO

from etils import epath

_BLOCK_BYTES = 16 << 20
MAX_BYTES = 64 << 20  # twice the largest tokenizer.json in use (Gemma 3 has 33 MB)

# The errors for a path that is not a small file: a device or FIFO, too large, or a folder.
NOT_SMALL_FILE = (errno.EINVAL, errno.EFBIG, errno.EISDIR)


def read_bytes(path: epath.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    A device, a FIFO or a socket is refused without waiting for it, and a file that grows while it
    is read is read up to the limit only. A path of a bucket is read with one request.

    Args:
      path: a local path, or an `epath.Path` of a bucket.
      max_bytes: the largest accepted size in bytes.

    Returns:
      The contents.

    Raises:
      OSError: the file cannot be read, is not a regular file (EINVAL), or is too large (EFBIG).
        Its `strerror` says which.
    """
    if "://" in os.fspath(path):
        path = epath.Path(path)
        content, _ = path.bucket().get_first(path.key, max_bytes + 1)
    else:
        content = _read_local(os.fspath(path), max_bytes)
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def _read_local(path: str, max_bytes: int) -> bytes:
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return _read_at_most(file, max_bytes + 1)


def _read_at_most(file: BinaryIO, count: int) -> bytes:
    parts = []
    while part := file.read(min(count, _BLOCK_BYTES)):  # of a large count memory would be reserved
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _too_large(path: epath.PathLike, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", os.fspath(path))
