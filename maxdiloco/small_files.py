"""Read small files that a person or another program may have written, up to a limit of size.

Use it for configuration, secrets, prompts, tokenizers, manifests and the like. Weights, shards and
text are read in blocks instead.
"""

import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_BYTES = 64 << 20  # twice the largest tokenizer.json in use (Gemma 3 has 33 MB)
SECRET_BYTES = 1 << 16  # far above any OpenSSH key; an RSA key of 16,384 bits has 13 KB
_BLOCK_BYTES = 16 << 20
# The errors for a path that is not a small file: a device or FIFO, too large, or a folder.
NOT_SMALL_FILE = (errno.EINVAL, errno.EFBIG, errno.EISDIR)


def read_bytes(
    path: Any,
    max_bytes: int = MAX_BYTES,
    check: Callable[[os.stat_result], None] | None = None,
) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    A device, a FIFO or a socket is refused without waiting for it. A file that grows meanwhile is
    read up to the limit only. A path of a bucket is read with one request.

    Args:
      path: a local path (os.PathLike or str), or a BucketPath of storage.object_store. A text with
        the name of a bucket is a local path, too.
      max_bytes: the largest accepted size in bytes.
      check: called with the status of a local file that is open, before it is read. It raises
        to refuse the file.

    Returns:
      The contents.

    Raises:
      OSError: the file cannot be read, is not a regular file (EINVAL), or is too large (EFBIG).
        Its `strerror` names the reason.
    """
    if isinstance(path, str) or "://" not in os.fspath(path):
        content = _read_local(os.fspath(path), max_bytes, check)
    else:
        content, entry = path.bucket().get_first(path.key, max_bytes + 1)
        if len(content) < min(entry.size, max_bytes + 1):
            raise OSError(errno.EIO, "the store has sent a part of it only", os.fspath(path))
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def read_secret(path: os.PathLike[str] | str, max_bytes: int = SECRET_BYTES) -> bytes:
    """Read a file with a secret, which no other user may read.

    The rule is the same as ssh's rule for private keys: a file of this user must not have any
    permission for its group or for others. A file of another user, such as a mounted secret of
    root, is accepted, since its owner has made it readable for this user.

    Args:
      path: a local path.
      max_bytes: the largest accepted size in bytes.

    Returns:
      The contents.

    Raises:
      OSError: as for `read_bytes`; EACCES for a file that others may read, with a remedy in its
        `strerror`.
    """

    def check(status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid() and mode & 0o077:
            why = f"other users may read or write it (mode {mode:03o}): run chmod 600 {path}"
            raise OSError(errno.EACCES, why, os.fspath(path))

    return read_bytes(path, max_bytes, check)


def open_regular(path: str) -> io.BufferedReader:
    """Open a local file for reading, without waiting for one that is not a regular file.

    Raises:
      OSError: the file cannot be opened, or is not a regular file (EINVAL).
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def _read_local(path: str, max_bytes: int, check: Callable[[os.stat_result], None] | None) -> bytes:
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if check is not None:
            check(status)
        if status.st_size > max_bytes:
            raise _too_large(path, max_bytes)
        return _read_at_most(file, max_bytes + 1)


def _read_at_most(file: BinaryIO, count: int) -> bytes:
    parts = []
    while part := file.read(min(count, _BLOCK_BYTES)):  # read() reserves memory for its argument
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _too_large(path: os.PathLike[str] | str, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", os.fspath(path))
