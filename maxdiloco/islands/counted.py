"""A bucket that counts what is asked of it, and keeps why it last failed."""

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from maxdiloco.storage.store import Bucket, Entry, Version

T = TypeVar("T")


class Counts(NamedTuple):
    """Requests, and bytes of bodies to and from the store."""

    requests: int = 0
    sent: int = 0
    received: int = 0


class Counted:
    """A Bucket, as far as islands use one. counts: so far; failure: the last one, "" if none."""

    def __init__(self, bucket: Bucket):
        self._bucket, self._lock = bucket, threading.Lock()
        self.counts, self.failure = Counts(), ""

    def get(self, name: str) -> bytes:
        """Bucket.get."""
        data = self._ask(self._bucket.get, name)
        return self._count(data, received=len(data))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Bucket.get_range."""
        data = self._ask(self._bucket.get_range, name, start, end)
        return self._count(data, received=len(data))

    def get_first(self, name: str, most: int) -> tuple[bytes, Entry]:
        """Bucket.get_first."""
        found = self._ask(self._bucket.get_first, name, most)
        return self._count(found, received=len(found[0]))

    def put(self, name: str, data: bytes) -> None:
        """Bucket.put."""
        self._count(self._ask(self._bucket.put, name, data), sent=len(data))

    def put_if(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Bucket.put_if."""
        return self._count(self._ask(self._bucket.put_if, name, data, version), sent=len(data))

    def head(self, name: str) -> Entry | None:
        """Bucket.head."""
        return self._count(self._ask(self._bucket.head, name))

    def list_all(self, prefix: str) -> Iterator[Entry]:
        """Bucket.list_all, of which a page of 1000 is a request."""
        found = list(self._ask(lambda: list(self._bucket.list_all(prefix))))
        return iter(self._count(found, requests=1 + len(found) // 1000))

    def delete(self, names: Collection[str]) -> None:
        """Bucket.delete."""
        self._count(self._ask(self._bucket.delete, names))

    def _ask(self, request: Callable[..., T], *args: Any) -> T:
        try:
            return request(*args)
        except FileNotFoundError:
            raise
        except OSError as error:
            self.failure = str(error.strerror)
            raise

    def _count(self, result: T, *, requests: int = 1, sent: int = 0, received: int = 0) -> T:
        with self._lock:
            more = requests, sent, received
            self.counts = Counts(*(a + b for a, b in zip(self.counts, more, strict=True)))
        return result
