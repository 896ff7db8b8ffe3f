"""The lock of a run, or of a folder in preparation, in a bucket: an object that its holder renews.

A killed holder leaves the object behind. A process that waits sees, by its own clock, that the
content is the same for STALE_S, and takes the lock over. A write names the version that it
replaces, so of two processes one fails.
"""

import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from maxdiloco import json_text
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.object_store import BucketPath
from maxdiloco.storage.store import Version

# Seconds. Five renewals in a row must fail before the lock is stale. A restart after a kill waits
# for STALE_S, and a second run of that name is refused after at most RENEW_S.
RENEW_S = 20.0
STALE_S = 120.0  # longer than a request with its retries, see store.py


class LockHeldError(CheckpointError):
    """Another process holds the lock and renews it."""


class _Lock(NamedTuple):
    """The lock object in the store.

    Attributes:
      holder: the process that holds it, in words.
      nonce: random text of the holder; "" if no run wrote the object.
      version: of the object.
    """

    holder: str
    nonce: str
    version: Version


class ObjectLock:
    """The lock of one run. A context manager: entering waits or refuses, leaving deletes it."""

    def __init__(self, path: BucketPath, *, key: str, otherwise: str, say: Callable[[str], None]):
        """Take nothing yet.

        Args:
          path: of the object.
          key: the key that names the run, with its value, for messages.
          otherwise: the remedy other than to wait.
          say: prints a line; called from another thread too.
        """
        self._path, self._key, self._otherwise, self._say = path, key, otherwise, say
        self._nonce = secrets.token_hex(8)
        since = time.strftime("%F %T %z")
        self._holder = f"process {os.getpid()} on {socket.gethostname()} (started {since})"
        self._beats = itertools.count()  # or the version would stay the same: s3:// hashes contents
        self._version: Version | None = None
        self._lost: str | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="maxdiloco-lock", daemon=True)

    def __enter__(self) -> "ObjectLock":
        """Take the lock.

        Raises:
          CheckpointError: another process renews it, or the object is not a lock.
          OSError: the bucket cannot be reached.
        """
        self._acquire()
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        """Delete the lock, unless another process has it by now."""
        self._leaving.set()
        self._thread.join()
        # A lock that cannot be deleted goes stale. Renewed just now, it is not yet another's.
        with contextlib.suppress(OSError):
            if self._lost is None and self._write(self._version):
                self._path.unlink(missing_ok=True)

    def require(self) -> None:
        """Raise CheckpointError when another process has taken the lock over."""
        if self._lost is not None:
            raise CheckpointError(self._lost)

    def _acquire(self) -> None:
        first: _Lock | None = None  # as it was seen first
        limit = 0.0
        while not self._write(None):
            lock = self._read()
            if lock is None:  # deleted meanwhile
                continue
            words = f"{self._path} of {lock.holder}"
            if not lock.nonce:
                raise CheckpointError(
                    f"{self._key}: {self._path} is not the lock of a run, and files of others are "
                    f"kept. Move it, or {self._otherwise}."
                )
            if first is None:
                first, limit = lock, time.monotonic() + STALE_S
                self._say(
                    f"{words} exists: waiting up to {STALE_S:.0f} s to see whether that run is "
                    "still active."
                )
            if lock.version != first.version:
                raise LockHeldError(
                    f"{self._key} is in use: {words} was renewed just now. Wait for it, stop it, "
                    f"or {self._otherwise}."
                )
            if time.monotonic() >= limit:
                if self._write(lock.version):
                    self._say(f"{words} was not renewed for {STALE_S:.0f} s: taken over.")
                    return
                continue
            time.sleep(min(RENEW_S / 4, max(0.0, limit - time.monotonic())))

    def _write(self, expected: Version | None) -> bool:
        """Write the object if it has the expected version; return whether this process holds it."""
        content = {"holder": self._holder, "nonce": self._nonce, "beat": next(self._beats)}
        bucket, data = self._path.bucket(), json.dumps(content).encode()
        version = bucket.put_if(self._path.key, data, expected)
        if version is None:  # perhaps only the answer to a write of ours was lost
            lock = self._read()
            version = lock.version if lock is not None and lock.nonce == self._nonce else None
        self._version = version or self._version
        return version is not None

    def _read(self) -> _Lock | None:
        try:
            text, version = self._path.bucket().get_version(self._path.key)
        except FileNotFoundError:
            return None
        try:
            content = json_text.parse(text)
            return _Lock(str(content["holder"]), str(content["nonce"]), version)
        except (ValueError, KeyError, TypeError):  # no run wrote it
            return _Lock("an unknown process", "", version)

    def _renew(self) -> None:
        failed = False
        while self._lost is None and not self._leaving.wait(RENEW_S):
            try:
                if not self._write(self._version):
                    self._lose(self._read())
                failed = False
            except OSError as error:
                if not failed:
                    why = error.strerror or error
                    self._say(f"warning: {self._path} cannot be renewed: {why}. Trying again.")
                failed = True

    def _lose(self, lock: _Lock | None) -> None:
        self._lost = (
            f"{self._key}: {self._path} was not renewed in time and now belongs to "
            f"{lock.holder if lock else 'nobody'}. Two processes must not write to one run, so "
            "this one exits; before you start it again, check that the other has ended."
        )
