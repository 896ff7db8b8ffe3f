"""The lock of a run on gs://: an object that its holder renews.

A killed holder leaves the object behind. After STALE_S without a renewal, by the store's clock, the
next run takes it over. A request names the generation that it replaces: of two processes one fails.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from maxdiloco import json_text
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_store

# In seconds, our choice. Some renewals may fail before the lock is stale; a restart after a kill
# waits at most STALE_S, and a second run with the name is refused after at most RENEW_S.
RENEW_S = 20.0
STALE_S = 120.0


class _Lock(NamedTuple):
    """The lock object as it is in the store."""

    holder: str
    nonce: str  # "" where no run wrote it
    generation: int
    age: float  # [seconds] since it was renewed


def _patience() -> dict[str, Any]:
    """Arguments of a request that is repeated for less than STALE_S."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": STALE_S / 4, "retry": DEFAULT_RETRY.with_timeout(STALE_S / 4)}


class ObjectLock:
    """The lock of one run. A context manager: entering waits or refuses, leaving deletes it.

    say: called from another thread too. Entering raises CheckpointError when another process renews
    the lock or the object is no lock, and what object_store.errors names.
    """

    def __init__(self, path: epath.Path, *, run_name: str, say: Callable[[str], None]):
        from google.cloud import storage

        self._path, self._run_name, self._say = path, run_name, say
        bucket, _, self._name = os.fspath(path).removeprefix("gs://").partition("/")
        # Requests with preconditions, which gcsfs does not have. Objects need no project.
        self._bucket = storage.Client(project=None).bucket(bucket)
        self._nonce = secrets.token_hex(8)
        since = time.strftime("%F %T %z")
        self._holder = f"process {os.getpid()} on {socket.gethostname()} (started {since})"
        self._generation = 0
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
        # A lock that cannot be deleted goes stale; one that was lost has another generation.
        with contextlib.suppress(OSError, *object_store.errors(self._path)):
            blob = self._bucket.blob(self._name)
            blob.delete(if_generation_match=self._generation, **_patience())

    def require(self) -> None:
        """Raise CheckpointError when another process has taken the lock over."""
        if self._lost is not None:
            raise CheckpointError(self._lost)

    def _acquire(self) -> None:
        before: int | None = None  # the generation that was seen first
        while not self._write(expected=0):
            lock = self._look()
            if lock is None:  # deleted meanwhile
                continue
            if lock.nonce == self._nonce:  # the answer to an upload of ours was lost
                self._generation = lock.generation
                return
            words = f"{self._path} of {lock.holder} was renewed {lock.age:.0f} s ago"
            if not lock.nonce:
                raise CheckpointError(
                    f"run_name={self._run_name}: {self._path} is no lock of a run, and nothing of "
                    "others is replaced. Move it, or set another run_name."
                )
            if lock.age >= STALE_S:
                if self._write(expected=lock.generation):
                    self._say(f"{words}: taken over.")
                    return
                continue
            if before is None:
                self._say(
                    f"{words}: waiting up to {STALE_S - lock.age:.0f} s to see whether that run "
                    "still lives."
                )
                before = lock.generation
            if lock.generation != before:
                raise CheckpointError(
                    f"run_name={self._run_name} is in use: {words}. Wait for it, stop it, or set "
                    "another run_name."
                )
            time.sleep(min(RENEW_S / 4, STALE_S - lock.age))

    def _write(self, *, expected: int) -> bool:
        """Write the object if its generation is the expected one; whether it was."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(
                json.dumps({"holder": self._holder, "nonce": self._nonce}),
                if_generation_match=expected,
                **_patience(),
            )
        except PreconditionFailed:
            return False
        self._generation = blob.generation
        return True

    def _look(self) -> _Lock | None:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket.get_blob(self._name)
        if blob is None:
            return None
        try:
            text = blob.download_as_bytes(if_generation_match=blob.generation)
        except (NotFound, PreconditionFailed):  # written or deleted in between
            return None
        try:
            content = json_text.parse(text)
            holder, nonce = str(content["holder"]), str(content["nonce"])
        except (ValueError, KeyError, TypeError):
            holder, nonce = "an unknown process", ""  # no run wrote it
        # The time by the clock of the store; the clocks of hosts may differ.
        probe = self._bucket.blob(f"{self._name}.asked-{self._nonce}")
        probe.upload_from_string(b"")
        probe.delete()
        age = (probe.updated - blob.updated).total_seconds()
        return _Lock(holder, nonce, blob.generation, age)

    def _renew(self) -> None:
        failed = False
        while self._lost is None and not self._leaving.wait(RENEW_S):
            try:
                if not self._write(expected=self._generation):
                    self._regain()
                failed = False
            except (OSError, *object_store.errors(self._path)) as error:
                if not failed:
                    why = object_store.reason(error) or error
                    self._say(f"warning: {self._path} cannot be renewed: {why}. Trying again.")
                failed = True

    def _regain(self) -> None:
        """Keep the lock where only the answer to a renewal was lost; else note that it is gone."""
        lock = self._look()
        if lock is not None and lock.nonce == self._nonce:
            self._generation = lock.generation
            return
        self._lost = (
            f"run_name={self._run_name}: {self._path} was not renewed in time and is now that of "
            f"{lock.holder if lock else 'nobody'}. Two processes must not write to one run, so "
            "this one ends; to start it again, first see that the other has ended."
        )
