"""Arrays of checkpoints on s3:// and az://, which Orbax writes to a local folder first.

Orbax 0.12 writes only to mounted file systems and gs://. TensorStore reads s3:// directly; items on
az:// are copied to a local folder before they are read. The folders are below $TMPDIR.
"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from maxdiloco.storage.object_store import BucketPath
from maxdiloco.storage.store import BLOCK_BYTES, is_local

_READERS = 8  # blocks of an object read concurrently; one request seldom saturates a link


def begin(folder: epath.Path) -> epath.Path | None:
    """Create a local folder for the arrays of a save to `folder`; None if Orbax can write there."""
    direct = is_local(folder) or folder.parts[1] == "gs"
    return None if direct else epath.Path(tempfile.mkdtemp(prefix="maxdiloco-save-"))


def upload(staged: epath.Path | None, folder: epath.Path, *, last: str = "") -> None:
    """Put the files of `staged` into the bucket's folder, except those that exist there.

    Args:
      staged: the folder from `begin`; None: nothing is uploaded.
      folder: folder in the bucket.
      last: name of a file that is uploaded after the others.
    """
    if staged is None:
        return
    there = {path for path, _ in folder.entries()}
    files = (path for path in pathlib.Path(staged).rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == last):
        target = folder / path.relative_to(staged)
        if target not in there:
            target.bucket().put(target.key, path)


def download(folder: BucketPath, staged: epath.Path) -> None:
    """Copy the objects below a bucket's folder to `staged`, except those that exist there."""
    for path, entry in folder.entries():
        target = staged / path.relative_to(folder)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.writelines(blocks(path, 0, entry.size))


def blocks(path: BucketPath, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes [start, end) of an object in blocks; several are read concurrently."""
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(start, end, _READERS * BLOCK_BYTES):
            starts = range(first, min(first + _READERS * BLOCK_BYTES, end), BLOCK_BYTES)
            ends = (min(begin + BLOCK_BYTES, end) for begin in starts)
            yield from pool.map(path.bucket().get_range, [path.key] * _READERS, starts, ends)


def end(staged: epath.Path | None) -> None:
    """Remove the folder of `begin`, at the end of the save."""
    if staged is not None:
        staged.rmtree(missing_ok=True)


@contextlib.contextmanager
def readable(folder: epath.Path) -> Iterator[tuple[epath.Path, dict[str, Any]]]:
    """Make an item in a bucket readable inside a `with`.

    Yields:
      A folder that Orbax accepts, and changes to the base of TensorStore's specification.
    """
    scheme = "" if is_local(folder) else folder.parts[1]
    if scheme == "s3":
        like = BucketPath(f"gs://{folder.parts[2]}/{folder.key}")
        yield like, _s3(folder)
    elif scheme == "az":
        with tempfile.TemporaryDirectory(prefix="maxdiloco-load-") as copy:
            download(folder, epath.Path(copy))
            yield epath.Path(copy), {}
    else:
        yield folder, {}


def _s3(folder: BucketPath) -> dict[str, Any]:
    """Return TensorStore's driver for s3://, configured by the variables that obstore reads."""
    base = {"driver": "s3", "path": f"{folder.key}/"}
    environ = os.environ
    settings = {
        "endpoint": environ.get("AWS_ENDPOINT_URL") or environ.get("AWS_ENDPOINT"),
        "aws_region": environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"),
        # With any other source TensorStore prints a line for each file that does not exist.
        "aws_credentials": "AWS_ACCESS_KEY_ID" in environ and {"type": "environment"},
    }
    return base | {name: value for name, value in settings.items() if value}
