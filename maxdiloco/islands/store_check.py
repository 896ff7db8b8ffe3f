"""Check a store for islands: races for a name, reads and listings after writes, latency."""

import functools
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from maxdiloco.errors import ConfigError
from maxdiloco.islands import records
from maxdiloco.storage import os_errors
from maxdiloco.storage.store import Bucket

RACES, WRITERS = 40, 8


def check(bucket: Bucket, say: Callable[[str], None]) -> list[str]:
    """Return the faults of a store, a line each.

    It writes objects below check/ and deletes them again.

    Args:
      bucket: the store.
      say: logs a line for each finding.

    Raises:
      OSError: the store cannot be used.
    """
    folder = f"check/{secrets.token_hex(8)}"
    wrong, names, times = [], [], []
    with ThreadPoolExecutor(WRITERS) as pool:
        for race in range(RACES):
            name, start = f"{folder}/{race}", threading.Barrier(WRITERS)
            names.append(name)
            race_one = functools.partial(_race, bucket, name, start)
            winners = [w for w, won in enumerate(pool.map(race_one, range(WRITERS))) if won]
            began = time.monotonic()
            stored = bucket.get(name)
            times.append(time.monotonic() - began)
            if len(winners) != 1:
                wrong.append(f"race {race} for one name had {len(winners)} winners, not one")
            elif stored != bytes([winners[0]]):
                wrong.append(f"race {race}: the stored object is not the winner's")
    say(f"{RACES} races of {WRITERS} writers for a name: {RACES - len(wrong)} had one winner")
    missing = set(names) - {entry.name for entry in bucket.list_all(folder)}
    say(f"listing after writing: {len(names) - len(missing)} of {len(names)} names are listed")
    if missing:
        wrong.append(f"{sorted(missing)[0]} was written and is not listed")
    name = f"{folder}/beat"
    stale = 0
    for beat in range(WRITERS):
        bucket.put(name, bytes([beat]))
        stale += bucket.get(name) != bytes([beat])
    say(f"reading after replacing: {WRITERS - stale} of {WRITERS} reads saw the last write")
    if stale:
        wrong.append(f"{name} was replaced, and {stale} reads saw the one before")
    say(f"a read takes {1e3 * statistics.median(times):.3g} ms, the slowest {1e3 * max(times):.3g}")
    bucket.delete([*names, name])
    if bucket.head(name) is not None:
        wrong.append(f"{name} was deleted and is still there")
    return wrong


def _race(bucket: Bucket, name: str, start: threading.Barrier, writer: int) -> bool:
    start.wait()
    return bucket.put_if(name, bytes([writer]), None) is not None


def require_rights(bucket: Bucket, url: str, name: str) -> None:
    """Check that this island can read and write, and that put-if-absent works.

    Raises:
      ConfigError: a request fails, or the store replaces an existing object.
    """
    probe = f"check/{name}.{time.time_ns()}"
    remedy = "Make it readable and writable for this machine, or name another."
    with os_errors.replace_os_error(ConfigError, f"islands_store={url} cannot be used", remedy):
        bucket.put(probe, b"")
        replaced = bucket.put_if(probe, b"", None)
        bucket.head(records.RUN)
        bucket.delete([probe])
    if replaced is not None:
        raise ConfigError(
            f"islands_store={url} replaces an object that is to be put only if there is none: "
            "two islands would win the same name. Use another store, and `python -m "
            "maxdiloco.islands check URL` before."
        )
