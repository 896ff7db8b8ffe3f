"""Folders on gs://: setting up the libraries, their errors, operations on whole folders.

epath uses gcsfs, Orbax TensorStore, the lock of a run google-cloud-storage.
"""

import contextlib
import http
import importlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from etils import epath

from maxdiloco.errors import CheckpointError

EXTRA = ("gcsfs", "google.cloud.storage")  # of setup.py, [gcs]


def is_local(path: epath.PathLike) -> bool:
    """Whether path is on a mounted file system; gs:// is not."""
    return "://" not in os.fspath(path)


def prepare(path: epath.PathLike, key: str) -> None:
    """Set gcsfs up for a path on gs://, the value of a key. Raises CheckpointError without it."""
    try:
        for name in EXTRA:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{key}={path} needs the packages gcsfs and google-cloud-storage, which are not "
            "installed: pip install -e '.[gcs]' in a checkout of maxdiloco, or use a folder on a "
            "mounted file system."
        ) from error
    from fsspec.config import conf

    # gcsfs caches a listing for ever, but TensorStore and other hosts write to these folders too.
    conf.setdefault("gs", {})["use_listings_cache"] = False
    # gcsfs logs an error with its traceback before it raises it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def errors(path: epath.PathLike) -> tuple[type[Exception], ...]:
    """Errors that access to path can raise beside OSError and ValueError."""
    if is_local(path):
        return ()
    import aiohttp
    import gcsfs.retry
    import google.api_core.exceptions
    import google.auth.exceptions

    return (
        aiohttp.ClientError,
        gcsfs.retry.HttpError,
        google.api_core.exceptions.GoogleAPIError,
        google.auth.exceptions.GoogleAuthError,
    )


@contextlib.contextmanager
def as_os_errors(path: epath.PathLike) -> Iterator[None]:
    """Raise OSError where access to path raises what `errors` names."""
    try:
        yield
    except errors(path) as error:
        raise OSError(reason(error) or str(error)) from error


def reason(error: BaseException) -> str | None:
    """Status and text of a store's answer; None for another error."""
    text = str(error)
    status = (
        re.match(r"(\d{3}) [A-Z]+ http", text)  # google-cloud-storage
        or re.search(r"status code', (\d{3})", text)  # the same, after its retries
        or re.search(r", (\d{3})$", text)  # gcsfs
    )
    forbidden = re.match(r"Forbidden: \S+\n(.*)", text)  # gcsfs
    if status is None and forbidden is None:
        return None
    code = http.HTTPStatus(int(status[1]) if status else 403)
    words = forbidden or re.search(r'"message": "([^"]*)"', text)
    return f"{code.phrase} ({code}){f': {words[1]}' if words else ''}".rstrip(".")


def sizes(folder: epath.Path) -> dict[epath.Path, int]:
    """{object below folder: its size in bytes}, by one listing."""
    objects = _filesystem().find(os.fspath(folder), detail=True)
    prefix = os.fspath(folder).removeprefix("gs://") + "/"
    return {folder / name.removeprefix(prefix): entry["size"] for name, entry in objects.items()}


def remove(folder: epath.Path) -> None:
    """Delete a folder; on gs://, all objects below it: one listing, then the deletes in batches."""
    if is_local(folder):
        folder.rmtree()
        return
    objects = _filesystem().find(os.fspath(folder))
    if objects:
        _filesystem().rm(objects)


def _filesystem() -> Any:
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)  # the instance that epath uses
