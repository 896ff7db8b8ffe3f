"""The lock of a run, or of a folder that is made, in a bucket: an object that its holder renews.

A killed holder leaves the object behind. Who waits sees, by its own clock, that its content stays
the same for STALE_S, and takes it over. A write names the version that it replaces: of two
processes one fails.
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

# In seconds, our choice. Some renewals may fail before the lock is stale; a restart after a kill
# waits for STALE_S, and a second run with the name is refused after at most RENEW_S.
RENEW_S = 20.0
STALE_S = 120.0  # more than a request may take, with its repetitions


class LockHeldError(CheckpointError):
    """Another process holds the lock and renews it."""


class _Lock(NamedTuple):
    """The lock object as it is in the store."""

    holder: str
    nonce: str  # "" where no run wrote it
    version: Version


class ObjectLock:
    """The lock of one run. A context manager: entering waits or refuses, leaving deletes it.

    key: what names that run and its value, for messages. otherwise: the remedy beside waiting.
    say: called from another thread too. Entering raises CheckpointError when another process renews
    the lock or the object is no lock, and OSError.
    """

    def __init__(self, path: BucketPath, *, key: str, otherwise: str, say: Callable[[str], None]):
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
        self._acquire()
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
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
            lock = self._look()
            if lock is None:  # deleted meanwhile
                continue
            words = f"{self._path} of {lock.holder}"
            if not lock.nonce:
                raise CheckpointError(
                    f"{self._key}: {self._path} is no lock of a run, and nothing of others is "
                    f"replaced. Move it, or {self._otherwise}."
                )
            if first is None:
                first, limit = lock, time.monotonic() + STALE_S
                self._say(
                    f"{words} is there: waiting up to {STALE_S:.0f} s to see whether that run "
                    "still lives."
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
        """Write the object if its version is the expected one; whether this process has it."""
        content = {"holder": self._holder, "nonce": self._nonce, "beat": next(self._beats)}
        bucket, data = self._path.bucket(), json.dumps(content).encode()
        version = bucket.put_if(self._path.key, data, expected)
        if version is None:  # perhaps only the answer to a write of ours was lost
            lock = self._look()
            version = lock.version if lock is not None and lock.nonce == self._nonce else None
        self._version = version or self._version
        return version is not None

    def _look(self) -> _Lock | None:
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
                    self._lose(self._look())
                failed = False
            except OSError as error:
                if not failed:
                    why = error.strerror or error
                    self._say(f"warning: {self._path} cannot be renewed: {why}. Trying again.")
                failed = True

    def _lose(self, lock: _Lock | None) -> None:
        self._lost = (
            f"{self._key}: {self._path} was not renewed in time and is now that of "
            f"{lock.holder if lock else 'nobody'}. Two processes must not write to one run, so "
            "this one ends; to start it again, first see that the other has ended."
        )
