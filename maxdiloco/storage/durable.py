"""Files that appear whole, and fsync, so that a power cut cannot undo a finished write.

fsync of a file makes its contents durable, fsync of its folder its name. All raise OSError.
"""

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator

from etils import epath

from maxdiloco.storage import store

# Errors of fsync of a folder on systems that sync only files (FUSE, some network mounts). They
# include the error of open for a folder that may be entered but not read.
_FOLDERS_NOT_SYNCED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES}


def sync_file(path: epath.PathLike) -> None:
    """Force the contents of a file to the disk."""
    descriptor = os.open(os.fspath(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: epath.PathLike) -> None:
    """Force the names in a folder to the disk: files made, renamed and removed."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _FOLDERS_NOT_SYNCED:
            raise


def sync_tree(path: epath.PathLike) -> None:
    """Force a folder and everything below it to the disk, innermost first."""
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            sync_tree(entry.path)
        else:
            sync_file(entry.path)
    sync_folder(path)


def make_folder(path: epath.PathLike) -> None:
    """Make a folder with its parents, and force their names to the disk."""
    path = epath.Path(path)
    missing = [folder for folder in path.parents if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in [path, *missing]:  # path too: a process that made it may have died before this
        sync_folder(folder.parent)


def temp_sibling(path: epath.PathLike) -> epath.Path:
    """Return an unused name in the folder of a file, to write the file under before it replaces."""
    path = epath.Path(path)
    return path.parent / f"{path.name}.{secrets.token_hex(4)}.part"


@contextlib.contextmanager
def atomic_write(path: epath.PathLike) -> Iterator[epath.Path]:
    """Yield a name to write a file under, which replaces `path` when the `with` ends without error.

    The file is on the disk before it gets its name, and the name before the `with` is over. An
    error leaves no other file; a killed process may leave a `temp_sibling`. An object in a bucket
    is written whole anyway, so there the name is its own.
    """
    if not store.is_local(path):
        yield epath.Path(path)
        return
    part = temp_sibling(path)
    try:
        yield part
        sync_file(part)
        part.replace(epath.Path(path))
        sync_folder(part.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # gone already if all went well


@contextlib.contextmanager
def atomic_write_local(path: epath.Path) -> Iterator[epath.Path]:
    """Yield a name on this machine, for writers that only know local files; see `atomic_write`.

    A file for a bucket is uploaded when the `with` ends without error. It has no name before that,
    so a killed process leaves nothing.
    """
    if store.is_local(path):
        with atomic_write(path) as part:
            yield part
        return
    with tempfile.TemporaryFile() as file:
        part = epath.Path(f"/proc/self/fd/{file.fileno()}")
        yield part
        path.bucket().put(path.key, part)
