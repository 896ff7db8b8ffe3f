"""Write output folders that get their final name only when they are complete."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from etils import epath

from maxdiloco.checkpoint import staging
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.storage import durable
from maxdiloco.storage.object_store import BucketPath
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_folder import CHECK_AND_RESTART, absolute
from maxdiloco.storage.store import is_local

Folder = pathlib.Path | BucketPath  # a folder that a user names
UNFINISHED = ".maxdiloco-unfinished"


def folder_at(path: str, key: str) -> Folder:
    """Return the folder at a path that a key names.

    Raises:
      CheckpointError: the folder is in a bucket, and obstore is not installed.
    """
    return pathlib.Path(os.path.expanduser(path)) if is_local(path) else absolute(path, key=key)


def replace_read_error(path: epath.PathLike) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError inside the `with` into a CheckpointError that names the path."""
    return replace_os_error(CheckpointError, f"{path} cannot be read", CHECK_AND_RESTART)


def refuse_existing(target: Folder) -> None:
    """Raise ConfigError if the target exists."""
    if target.exists() or (is_local(target) and target.is_symlink()):
        raise ConfigError(f"DST={target} exists already. Give another folder, or remove it.")


@contextlib.contextmanager
def atomic_folder(target: Folder) -> Iterator[epath.Path]:
    """Make a folder to write inside the `with`, and rename it to the target at the end.

    After an error the folder is removed. Files of a killed program in it are removed first. A
    folder for a bucket is written on this machine and then uploaded, with config.json last.

    Raises:
      ConfigError: another program is writing the folder.
      CheckpointError: the disk or the bucket cannot be written.
    """
    remedy = "Free some space or give another folder."
    failures = replace_os_error(CheckpointError, f"DST={target} cannot be written", remedy)
    if not is_local(target):
        with failures, tempfile.TemporaryDirectory(prefix="maxdiloco-hf-") as made:
            yield epath.Path(made)
            staging.upload(epath.Path(made), target, last="config.json")
        return
    folder = epath.Path(f"{target}{UNFINISHED}")
    with contextlib.ExitStack() as stack, failures:
        durable.make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:  # the kernel releases the lock when the program ends
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"DST={target} is being written by another process. Wait for it, or give another "
                "folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for left in folder.iterdir():
            left.rmtree() if left.is_dir() else left.unlink()
        yield folder
        durable.sync_tree(folder)
        folder.rename(target)
        durable.sync_folder(target.parent)
