"""Paths on gs://, s3:// and az:// for epath, which Orbax and this package use.

A bucket has no folders of its own: a folder exists while there is an object below it.
"""

import contextlib
import errno
import fnmatch
import io
import os
from collections.abc import Iterator
from typing import ClassVar

from etils import epath
from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import store


def prepare(path: epath.PathLike, key: str) -> None:
    """Make epath use BucketPath for a path in a bucket.

    Args:
      path: in a bucket.
      key: the configuration key that gave it, for messages.

    Raises:
      CheckpointError: obstore is not installed, or its settings cannot be used.
    """
    if not isinstance(epath.Path(path), BucketPath):
        epath.register_path_cls([f"{scheme}://" for scheme in store.SCHEMES])(BucketPath)
    try:
        BucketPath(path).bucket()
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{key}={path} needs the package obstore, which is not installed: pip install -e "
            "'.[buckets]' in a checkout of maxdiloco, or use a folder on a mounted file system."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{key}={path} cannot be opened: {error.strerror}. Set the variables of its cloud in "
            "the environment, or use a folder on a mounted file system."
        ) from error


class BucketPath(PosixGPath):
    """A path scheme://bucket/a/b.

    Methods raise FileNotFoundError if there is no such object or folder, and OSError for any other
    failure.
    """

    _buckets: ClassVar[dict[tuple[str, str], store.Bucket]] = {}  # with their connections

    def bucket(self) -> store.Bucket:
        """Return the bucket of the path."""
        return self.client(self.parts[1], self.parts[2])

    @classmethod
    def client(cls, scheme: str, bucket: str) -> store.Bucket:
        """Open a bucket by its name, once in a process. Raises as store.connect."""
        name = scheme, bucket
        if name not in cls._buckets:
            cls._buckets[name] = store.connect(*name)
        return cls._buckets[name]

    @property
    def key(self) -> str:
        """The name in the bucket."""
        return "/".join(self.parts[3:])

    def entries(self) -> Iterator[tuple["BucketPath", store.Entry]]:
        """Yield the objects below this folder, at any depth, by one listing."""
        for entry in self.bucket().list_all(self.key):
            yield self / entry.name.removeprefix(self.key).lstrip("/"), entry

    def is_file(self) -> bool:
        """Tell whether there is an object of this name."""
        return bool(self.key) and self.bucket().head(self.key) is not None

    def is_dir(self) -> bool:
        """Tell whether there is an object below this name."""
        with contextlib.suppress(FileNotFoundError):  # the bucket
            return any(True for _ in self.bucket().list_all(self.key))
        return False

    def exists(self) -> bool:
        """Tell whether there is an object of this name, or below it."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yield the objects and folders in this folder. Raises FileNotFoundError if it is empty."""
        objects, folders = self.bucket().list_folder(self.key)
        if not objects and not folders:
            raise _absent(self)
        yield from (self / os.path.basename(n) for n in [*(e.name for e in objects), *folders])

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yield the paths in this folder whose names match a pattern without a slash."""
        if self.is_dir():
            yield from (path for path in self.iterdir() if fnmatch.fnmatch(path.name, pattern))

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, since a bucket needs no folders; raise FileExistsError as other paths do."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(self))

    def rmtree(self, missing_ok: bool = False) -> None:
        """Delete the object of this name and all objects below it."""
        names = [entry.name for _, entry in self.entries()]
        names += [self.key] if self.is_file() else []
        if not names and not missing_ok:
            raise _absent(self)
        if names:
            self.bucket().delete(names)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object of this name."""
        if not missing_ok and not self.is_file():
            raise _absent(self)
        self.bucket().delete([self.key])

    def open(self, mode: str = "r", **options: str | None) -> io.BytesIO | io.TextIOWrapper:
        """Return a reader of the content, in memory; only write_bytes and write_text write."""
        if mode not in ("r", "rb"):
            raise io.UnsupportedOperation(f"mode {mode} of {self}: an object is written whole")
        file = io.BytesIO(self.bucket().get(self.key))
        return file if mode == "rb" else io.TextIOWrapper(file, encoding="utf-8")

    def write_bytes(self, data: bytes) -> int:
        """Write the object."""
        self.bucket().put(self.key, data)
        return len(data)

    def write_text(self, data: str, **options: str | None) -> int:
        """Write the object, in UTF-8."""
        return self.write_bytes(data.encode())

    def rename(self, target: epath.PathLike) -> "BucketPath":
        """Copy the object, or all objects below, to another name and delete the old ones."""
        target = self._new(target)
        names = [entry.name for _, entry in self.entries()] or [self.key]
        for name in names:
            self.bucket().copy(name, target.key + name.removeprefix(self.key))
        self.bucket().delete(names)
        return target

    replace = rename

    def nbytes(self) -> int:
        """Return the size of the object in bytes."""
        entry = self.bucket().head(self.key)
        if entry is None:
            raise _absent(self)
        return entry.size

    def stat(self) -> StatResult:
        """Return size and kind of the object or folder; its times are not known."""
        entry = self.bucket().head(self.key)
        if entry is None and not self.is_dir():
            raise _absent(self)
        size = 0 if entry is None else entry.size
        return StatResult(entry is None, size, 0, owner=None, group=None, mode=None)


def _absent(path: BucketPath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such object or folder", str(path))


def sizes(folder: BucketPath) -> dict[epath.Path, int]:
    """Return {object below the folder: its size in bytes}, by one listing."""
    return {path: entry.size for path, entry in folder.entries()}
