"""Paths on gs://, s3:// and az:// for epath, which Orbax and all of this package use.

There are no folders: one exists while an object is below it.
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
    """Make epath use BucketPath for a path in a bucket, the value of a key.

    Raises CheckpointError without the package, and for settings that cannot be used.
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
            f"{key}={path} cannot be opened: {error.strerror}. Set what its cloud needs in the "
            "environment, or use a folder on a mounted file system."
        ) from error


class BucketPath(PosixGPath):
    """scheme://bucket/a/b. Every failure is an OSError."""

    _buckets: ClassVar[dict[tuple[str, str], store.Bucket]] = {}  # with their connections

    def bucket(self) -> store.Bucket:
        """The bucket that the path is in."""
        return self.client(self.parts[1], self.parts[2])

    @classmethod
    def client(cls, scheme: str, bucket: str) -> store.Bucket:
        """A bucket by its name. Raises what store.connect does."""
        place = scheme, bucket
        if place not in cls._buckets:
            cls._buckets[place] = store.connect(*place)
        return cls._buckets[place]

    @property
    def key(self) -> str:
        """The name in the bucket."""
        return "/".join(self.parts[3:])

    def entries(self) -> Iterator[tuple["BucketPath", store.Entry]]:
        """The objects below this folder, at any depth, by one listing."""
        for entry in self.bucket().list_all(self.key):
            yield self / entry.name.removeprefix(self.key).lstrip("/"), entry

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return bool(self.key) and self.bucket().head(self.key) is not None

    def is_dir(self) -> bool:
        """Whether there is an object below."""
        with contextlib.suppress(FileNotFoundError):  # the bucket
            return any(True for _ in self.bucket().list_all(self.key))
        return False

    def exists(self) -> bool:
        """Whether there is an object of this name, or below it."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["BucketPath"]:
        """The objects and folders in this folder. Raises FileNotFoundError where there are none."""
        objects, folders = self.bucket().list_folder(self.key)
        if not objects and not folders:
            raise _absent(self)
        yield from (self / os.path.basename(n) for n in [*(e.name for e in objects), *folders])

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """The names in this folder that fit a pattern without a slash."""
        if self.is_dir():
            yield from (path for path in self.iterdir() if fnmatch.fnmatch(path.name, pattern))

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: there are no folders. Raises FileExistsError."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(self))

    def rmtree(self, missing_ok: bool = False) -> None:
        """Delete the object of this name and all below it. Raises FileNotFoundError."""
        names = [entry.name for _, entry in self.entries()]
        names += [self.key] if self.is_file() else []
        if not names and not missing_ok:
            raise _absent(self)
        if names:
            self.bucket().delete(names)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. Raises FileNotFoundError."""
        if not missing_ok and not self.is_file():
            raise _absent(self)
        self.bucket().delete([self.key])

    def open(self, mode: str = "r", **options: str | None) -> io.BytesIO | io.TextIOWrapper:
        """The content, in memory. An object is written by write_bytes and write_text alone."""
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
        """Move the object, or all below: copies, then deletes. Raises FileNotFoundError."""
        target = self._new(target)
        names = [entry.name for _, entry in self.entries()] or [self.key]
        for name in names:
            self.bucket().copy(name, target.key + name.removeprefix(self.key))
        self.bucket().delete(names)
        return target

    replace = rename

    def nbytes(self) -> int:
        """Size of the object in bytes. Raises FileNotFoundError where there is none."""
        entry = self.bucket().head(self.key)
        if entry is None:
            raise _absent(self)
        return entry.size

    def stat(self) -> StatResult:
        """Size and kind; a time is not told. Raises FileNotFoundError."""
        entry = self.bucket().head(self.key)
        if entry is None and not self.is_dir():
            raise _absent(self)
        size = 0 if entry is None else entry.size
        return StatResult(entry is None, size, 0, owner=None, group=None, mode=None)


def _absent(path: BucketPath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such object or folder", str(path))


def sizes(folder: BucketPath) -> dict[epath.Path, int]:
    """{object below folder: its size in bytes}, by one listing."""
    return {path: entry.size for path, entry in folder.entries()}
