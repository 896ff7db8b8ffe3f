"""The lock of a run on gs://: an object that its holder renews.

An object store has no lock that ends with a process, so a holder that was killed leaves the object
behind. It is stale when it was not renewed for STALE_S by the clock of the store; then the next
run takes it over. Creating, renewing, taking over and deleting name the generation that they
replace, so that of two processes one fails.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_store

# In seconds, our choice. Some renewals may fail before the lock goes; a restart after a kill waits
# at most STALE_S, and a second run with the name is refused after at most RENEW_S.
RENEW_S = 20.0
STALE_S = 120.0


class _Found(NamedTuple):
    """The lock object as another process has left it."""

    holder: str
    nonce: str
    generation: int
    age: float  # [seconds] since it was renewed


class ObjectLock:
    """The lock of one run. A context manager: entering waits or refuses, leaving deletes it.

    path: the object. renew_s, stale_s: see RENEW_S and STALE_S.
    say: takes one line for the user, from another thread too. Imports google-cloud-storage.
    Entering raises CheckpointError when another process renews the lock, and what
    object_store.errors names.
    """

    def __init__(
        self,
        path: epath.Path,
        *,
        run_name: str,
        say: Callable[[str], None],
        renew_s: float | None = None,
        stale_s: float | None = None,
    ):
        self._path = path
        self._run_name = run_name
        self._say = say
        self._renew_s = RENEW_S if renew_s is None else renew_s
        self._stale_s = STALE_S if stale_s is None else stale_s
        self._bucket = object_store.bucket(path)
        self._name = object_store.bucket_and_name(path)[1]
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
            self._bucket.blob(self._name).delete(
                if_generation_match=self._generation, **self._patience()
            )

    def require(self) -> None:
        """Raise CheckpointError when another process has taken the lock over."""
        if self._lost is not None:
            raise CheckpointError(self._lost)

    def _acquire(self) -> None:
        seen: _Found | None = None
        while not self._write(expected=0):
            found = self._look()
            if found is None:  # deleted meanwhile
                continue
            if found.nonce == self._nonce:  # the answer to an upload of ours was lost
                self._generation = found.generation
                return
            if found.age >= self._stale_s:
                if self._write(expected=found.generation):
                    self._say(f"{self._words(found)}: taken over.")
                    return
                continue
            if seen is not None and found.generation != seen.generation:
                raise CheckpointError(
                    f"run_name={self._run_name} is in use: {self._words(found)}. Wait for it, "
                    "stop it, or set another run_name."
                )
            if seen is None:
                self._say(
                    f"{self._words(found)}: waiting up to {self._stale_s - found.age:.0f} s to see "
                    "whether that run still lives."
                )
                seen = found
            time.sleep(min(self._renew_s / 4, self._stale_s - found.age))

    def _words(self, found: _Found) -> str:
        return f"{self._path} of {found.holder} was renewed {found.age:.0f} s ago"

    def _write(self, *, expected: int) -> bool:
        """Write the object if its generation is the expected one; whether it was."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(
                json.dumps({"holder": self._holder, "nonce": self._nonce}),
                if_generation_match=expected,
                **self._patience(),
            )
        except PreconditionFailed:
            return False
        self._generation = blob.generation
        return True

    def _patience(self) -> dict[str, Any]:
        """Arguments of a request: it is repeated for less than the lock needs to go stale."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        seconds = self._stale_s / 4
        return {"timeout": seconds, "retry": DEFAULT_RETRY.with_timeout(seconds)}

    def _look(self) -> _Found | None:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket.get_blob(self._name)
        if blob is None:
            return None
        try:
            text = blob.download_as_text(if_generation_match=blob.generation)
        except (NotFound, PreconditionFailed):  # written or deleted in between
            return None
        holder, nonce = _read(text)
        age = (self._now() - blob.updated).total_seconds()
        return _Found(holder, nonce, blob.generation, age)

    def _now(self) -> datetime.datetime:
        """The time of the store, so that clocks of hosts do not matter."""
        probe = self._bucket.blob(f"{self._name}.asked-{self._nonce}")
        probe.upload_from_string(b"")
        probe.delete()
        return probe.updated

    def _renew(self) -> None:
        failed = False
        while self._lost is None and not self._leaving.wait(self._renew_s):
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
        """Keep the lock when only the answer to a renewal was lost."""
        found = self._look()
        if found is not None and found.nonce == self._nonce:
            self._generation = found.generation
            return
        self._lost = (
            f"run_name={self._run_name}: {self._path} was not renewed in time and is now that of "
            f"{found.holder if found else 'nobody'}. Two processes must not write to one run, so "
            "this one ends; to start it again, first see that the other has ended."
        )


def _read(text: str) -> tuple[str, str]:
    """Holder and nonce in a lock object; it may be anybody's text."""
    try:
        content = json.loads(text)
        return content["holder"], content["nonce"]
    except (ValueError, KeyError, TypeError):
        return "an unknown process", ""
