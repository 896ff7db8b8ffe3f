"""A bucket in memory whose requests go wrong, for tests of all who use storage.store.

    faulty = FaultyStore()
    monkeypatch.setattr(store, "connect", faulty.connect)
    faulty.fault = lambda number, function: "503" if number == 7 else None

A fault is what is left of a failure after obstore's own repetitions:
    delay   the answer comes a little later
    429, 503    the store refuses; nothing has happened
    lost    a time-out: it has happened or could not, and the answer never arrives
    412     the same, and a repetition found its own content there; of a conditional put
    cut     a body is shorter than its object
    late    new objects are in no listing before the second one
"""

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import obstore
from obstore.exceptions import BaseError, GenericError, PreconditionError
from obstore.store import MemoryStore

from maxdiloco.storage import store

KINDS = ("delay", "429", "503", "lost", "412", "cut", "late")
REFUSALS = {"429": "429 Too Many Requests", "503": "503 Service Unavailable"}


class FaultyStore:
    """obstore's functions on one store. fault: from the number and name of a call to its fault."""

    def __init__(self):
        self.client = MemoryStore()
        self.fault: Callable[[int, str], str | None] = lambda number, function: None
        self.calls: list[str] = []
        self.uploaded = 0  # bytes of all puts, also of those that go wrong
        self.threads: set[int] = set()  # that have made a call
        self._unlisted: dict[str, int] = {}  # the listings that lack a new object
        self._lock = threading.Lock()

    def connect(self, scheme: str, bucket: str) -> store.Bucket:
        """Instead of store.connect: every bucket is this one."""
        return store.Bucket(self.client, self)

    def names(self) -> list[str]:
        """The objects that there are, past all faults."""
        pages = obstore.list(self.client)
        return sorted(meta["path"] for page in pages for meta in page)

    def content(self) -> dict[str, bytes]:
        """The same with what they hold."""
        return {name: bytes(obstore.get(self.client, name).bytes()) for name in self.names()}

    def _call(self, function: str, *arguments, **options):
        with self._lock:
            self.threads.add(threading.get_ident())
            kind = self.fault(len(self.calls), function)
            self.calls.append(function)
        if kind == "delay":
            time.sleep(0.02)
        if kind in REFUSALS:
            words = "<Error><Message>slow down</Message></Error>"
            status = f"Server returned non-2xx status code: {REFUSALS[kind]}: {words}"
            raise GenericError(f"Generic Fake error: Error performing {function} - {status}")
        try:
            done = vars(obstore)[function](*arguments, **options)
        except (FileNotFoundError, BaseError):
            if kind != "lost":
                raise
        if kind == "lost":
            raise GenericError(f"Generic Fake error: Error performing {function} - timed out")
        if kind == "412" and options.get("mode", "overwrite") != "overwrite":
            raise PreconditionError("the version is another")
        if kind == "late" and function == "put":
            self._unlisted[arguments[1]] = 1
        return done, kind == "cut"

    def get(self, client, name, **options):
        """A body, or a part of one, which may be cut."""
        found, is_cut = self._call("get", client, name, **options)
        data = bytes(found.bytes())
        return SimpleNamespace(meta=found.meta, bytes=lambda: data[:-1] if is_cut else data)

    def put(self, client, name, data, **options):
        """Also with a mode."""
        if not isinstance(data, os.PathLike):
            self.uploaded += len(data)
        return self._call("put", client, name, data, **options)[0]

    def head(self, client, name):
        """What is known of an object."""
        return self._call("head", client, name)[0]

    def copy(self, client, name, target):
        """From one name to another."""
        return self._call("copy", client, name, target)

    def delete(self, client, names):
        """One or several."""
        return self._call("delete", client, names)

    def list(self, client, prefix):
        """Pages of what is below a folder."""
        pages = list(self._call("list", client, prefix)[0])
        return [[meta for meta in page if self._is_listed(meta["path"])] for page in pages]

    def list_with_delimiter(self, client, prefix):
        """What is in a folder."""
        found, _ = self._call("list_with_delimiter", client, prefix)
        objects = [meta for meta in found["objects"] if self._is_listed(meta["path"])]
        return {"objects": objects, "common_prefixes": found["common_prefixes"]}

    def _is_listed(self, name: str) -> bool:
        left = self._unlisted.get(name, 0)
        self._unlisted[name] = left - 1
        return left <= 0


def at(number: int, kind: str) -> Callable[[int, str], str | None]:
    """A fault of the call of this number alone."""
    return lambda call, function: kind if call == number else None


def from_on(number: int, kind: str) -> Callable[[int, str], str | None]:
    """The store goes wrong with this call, and stays so."""
    return lambda call, function: kind if call >= number else None
