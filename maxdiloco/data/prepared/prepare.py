"""Prepare a folder of shards from a source: plan parts, make missing ones, write the manifest."""

import contextlib
import fcntl
import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from maxdiloco import output
from maxdiloco.data import shards
from maxdiloco.data.corpus import check_damage
from maxdiloco.data.prepared import part
from maxdiloco.data.prepared.part import Work
from maxdiloco.data.read_ahead import read_ahead
from maxdiloco.data.registry import Reader
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.storage import durable
from maxdiloco.storage.object_lock import LockHeldError, ObjectLock
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_folder import absolute
from maxdiloco.storage.store import is_local

# Source bytes of a part. A part is one file of the result, and a killed process loses at most one
# part. A small source has _PARTS parts of at least 1 MB, so that every core has some. The size of a
# part depends only on the source, and so does the content of the folder.
_PART_BYTES = 64 << 20
_PARTS = 32
_LEAST_BYTES = 1 << 20
# A smaller source is prepared in this process, because two worker processes need 3 s to start.
_SMALL_BYTES = 32 << 20
_PLAN = "source.json"
_LOCK = "lock"
# Names of files that only an unfinished folder needs, and of temporary files of a killed process.
_FACTS = r"part-\d{5,}\.json"
_WHOLE = rf"({_FACTS}|part-\d{{5,}}\.bin|(source|manifest)\.json|(offsets|checksums)\.npy)"
_LEFT = rf"{_WHOLE}\.[0-9a-f]{{8}}\.part"  # durable.temp_sibling
_LOOK_S = 1.0  # pause between checks of a folder that another process writes [s]
_MOST_NAMED = 10  # damaged records that are printed; the manifest has all


def size_of(source: Reader) -> int:
    """Return the approximate number of bytes of a source."""
    return sum(span.size for span in source.spans(_PART_BYTES))


def part_bytes_of(source: Reader) -> int:
    """Return the default number of source bytes in a part."""
    return min(_PART_BYTES, max(_LEAST_BYTES, -(-size_of(source) // _PARTS)))


def plan_of(work: Work) -> dict[str, Any]:
    """Return everything that decides a folder's content, as JSON."""
    return {
        "format": shards.FORMAT,
        "source": work.source.version(),
        "column": work.source.column,
        "tokenizer": work.tokenizer.fingerprint,
        "part_bytes": work.part_bytes or part_bytes_of(work.source),
    }


def prepare(
    work: Work,
    out: str,
    say: Callable[[str], None],
    *,
    waits: bool = False,
    key: str = "out",
) -> None:
    """Make a folder of shards, or complete an unfinished one.

    The folder has the same bytes for any number of processes and of earlier interruptions. A
    complete folder is only read, so it may be on a read-only file system.

    Args:
      work: the source and the tokenizer.
      out: the folder, local or in a bucket.
      say: receives lines for the user.
      waits: whether to wait while another process writes the folder, instead of a ConfigError.
      key: the key that names the folder, for messages.

    Raises:
      DataError: text is missing, unreadable or damaged, or the folder cannot be written.
      ConfigError: the folder is in use, or was made from something else.
      LostPeerError: a process that tokenises has died.
      CheckpointError: obstore is not installed, or another process has the lock of a bucket.
    """
    plan, folder = plan_of(work), absolute(out, key=key)
    named = f"{key}={folder}"
    remedy = "Make it writable, or choose another folder; the same command resumes."
    with contextlib.ExitStack() as stack:
        stack.enter_context(replace_os_error(DataError, f"{named} cannot be written", remedy))
        require = None  # raises CheckpointError if the lock was lost
        waiting = False
        while not _is_complete(plan, folder, named):
            try:
                require = stack.enter_context(_locked(folder, named, say))
                break
            except LockHeldError as error:
                if not waits:
                    raise ConfigError(str(error)) from error
                if not waiting:
                    say(f"{folder} is being written by another process: waiting for it")
                waiting = True
                time.sleep(_LOOK_S)
        # Another process may have completed the folder between the check and the lock.
        if require is not None and not _is_complete(plan, folder, named):
            _begin(plan, folder, named)
            _make(work, plan["part_bytes"], folder, require, say)
        else:
            with contextlib.suppress(OSError):  # it may be on a read-only file system
                _remove(folder, _FACTS, _LEFT)  # left if killed after writing the manifest
            say(f"{folder} is prepared: nothing to do")
    if is_local(folder):
        shards.open_shards(os.fspath(folder), key)
    # The run that made the folder may have allowed more damaged records.
    check_damage(shards.read_manifest(os.fspath(folder), named).damaged, work.allowed)


@contextlib.contextmanager
def _locked(
    folder: epath.Path, named: str, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Lock the folder; yield a function that raises CheckpointError if the lock was lost.

    Raises LockHeldError if another process holds the lock.
    """
    if not is_local(folder):
        words = {"key": named, "otherwise": "choose another folder"}
        with ObjectLock(folder / _LOCK, **words, say=say) as lock:
            yield lock.require
        return
    durable.make_folder(folder)
    with (folder / _LOCK).open("a") as file:
        try:  # the lock is held until the file is closed, by the kernel if the process dies
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeldError(
                f"{named} is being written by another process. Wait for it, or choose another "
                "folder."
            ) from None
        yield lambda: None


def _make(work, part_bytes, folder, require, say):
    begun = time.perf_counter()
    _remove(folder, _LEFT)
    parts = list(part.runs(work.source.spans(part_bytes), lambda span: span.size, part_bytes))
    if not parts:
        raise DataError(f"{work.name} holds no text: its files are empty. Give text to read.")
    facts, there = {}, _sizes(folder)
    for number in range(len(parts)):
        name = part.facts_name(number)
        known = shards.read_fields(folder / name) if name in there else None
        if known and there.get(shards.part_name(number)) == known["bytes"]:
            for table in part.TABLES:  # read again when parts are joined, to save memory
                del known[table]
            facts[number] = known
    sizes = [sum(span.size for span in spans) for spans in parts]
    done = sum(sizes[number] for number in facts)
    processes = work.processes or len(os.sched_getaffinity(0))
    if not work.processes and sum(sizes) < _SMALL_BYTES:
        processes = 0
    processes = min(processes, len(parts))
    say(
        f"tokenising {work.name}: {len(work.source.names)} files, {sum(sizes) / 1e6:,.1f} MB in "
        f"{len(parts)} parts, {max(processes, 1)} processes, to {folder}"
        + (f"; {len(facts)} parts were done before" if facts else "")
    )
    todo = [(number, spans) for number, spans in enumerate(parts) if number not in facts]

    def check():
        require()
        damaged = [record for number in sorted(facts) for record in facts[number]["damaged"]]
        check_damage(damaged, work.allowed)

    check()
    make = functools.partial(part.make_part, work, os.fspath(folder), todo)
    with output.progress("tokenised", sum(sizes), say, done=done) as advance:
        count = len(todo)  # as `ahead`, so that no worker waits for a slow part of another
        made = read_ahead(
            make,
            count,
            min(processes, count),
            ahead=max(count, 1),
            setting=f"processes={processes}",
        )
        with contextlib.closing(made):
            for (number, _), found in zip(todo, made, strict=True):
                facts[number] = found
                check()
                advance(sizes[number])
    manifest = _finish(work, folder, require, [facts[number] for number in range(len(parts))])
    seconds = time.perf_counter() - begun
    tokens = sum(count for count, *_ in manifest.parts)
    say(
        f"prepared {folder}: {manifest.offsets[0]:,} documents, {tokens:,} tokens in "
        f"{seconds:.1f} s ({(sum(sizes) - done) / 1e6 / seconds:.1f} MB/s)"
    )
    if manifest.damaged:
        say(f"{len(manifest.damaged)} damaged records were skipped (max_corrupted_records):")
    for where, why in manifest.damaged[:_MOST_NAMED]:
        say(f"  {where}: {why}")


def _is_complete(plan: dict[str, Any], folder: epath.Path, named: str) -> bool:
    """Return whether a folder is complete: not missing, empty or unfinished. Writes nothing.

    Raises:
      ConfigError: the folder was made from another source or with other settings.
    """
    there = _sizes(folder)
    if _PLAN not in there:
        return False
    before = shards.read_fields(folder / _PLAN)
    if different := [key for key in plan if before.get(key) != plan[key]]:
        raise ConfigError(
            f"{named} was begun with another {' and '.join(different)}. Choose another folder, or "
            "remove this one."
        )
    return {shards.MANIFEST, shards.OFFSETS, shards.CHECKSUMS} <= there.keys()


def _begin(plan: dict[str, Any], folder: epath.Path, named: str) -> None:
    """Write the plan into a new folder. Raises ConfigError if it has files of other programs."""
    there = _sizes(folder)
    if _PLAN in there:
        return
    # A process killed before it wrote the plan leaves the lock and temporary files (_LEFT).
    for name, size in there.items():
        is_lock = name == _LOCK and not (size and is_local(folder))
        if not is_lock and not re.fullmatch(_LEFT, name):
            raise ConfigError(
                f"{named} is not empty, and was not made by maxdiloco.prepare. Choose a new folder."
            )
    with durable.atomic_write(folder / _PLAN) as new:
        new.write_text(json.dumps(plan))


def _finish(work, folder, require, facts):
    """Write the tables, the tokenizer's files and, last, the manifest; returns the manifest."""
    lengths, checksums = [], []
    for number in range(len(facts)):
        fields = shards.read_fields(folder / part.facts_name(number))
        lengths.append(np.array(fields["lengths"], "<i8"))
        checksums.append(np.array(fields["checksums"], "<u4"))
    # A document that continues in the next part is counted once.
    begins = [np.arange(found["documents"]) >= found["continues"] for found in facts]
    firsts = np.flatnonzero(np.concatenate(begins))
    if not len(firsts):
        raise DataError(f"{work.name} holds no text: all documents are empty. Give text to read.")
    of_documents, of_blocks = np.concatenate(lengths), np.concatenate(checksums)
    offsets = np.append(np.cumsum(of_documents)[firsts] - of_documents[firsts], of_documents.sum())
    digest = _write_table(folder / shards.OFFSETS, offsets)
    of_checksums = _write_table(folder / shards.CHECKSUMS, of_blocks)
    work.tokenizer.save(folder / shards.TOKENIZER)
    if is_local(folder):
        durable.sync_tree(folder / shards.TOKENIZER)
    documents = Counter()  # {file of the source: documents that begin in it}
    for found in facts:
        documents.update(dict(found["files"]))
    manifest = shards.Manifest(
        tokenizer=work.tokenizer.fingerprint,
        vocab_size=work.tokenizer.vocab_size,
        dtype=part.dtype_of(work.tokenizer),
        block=shards.BLOCK,
        parts=[[found["tokens"], found["sha256"]] for found in facts],
        offsets=[len(firsts), digest],
        checksums=[len(of_blocks), of_checksums],
        files=[[os.path.basename(f), documents[i]] for i, f in enumerate(work.source.names)],
        damaged=[record for found in facts for record in found["damaged"]],
    )
    require()
    with durable.atomic_write(folder / shards.MANIFEST) as path:
        path.write_bytes(manifest.to_bytes())
    _remove(folder, _FACTS, _LEFT)
    return manifest


def _write_table(path, table):
    """Write a NumPy file and return its SHA-256."""
    with durable.atomic_write_local(path) as new:
        with new.open("wb") as file:
            np.save(file, table)
        return shards.file_hash(os.fspath(new))


def _sizes(folder):
    """Return {name: bytes} of the files in a folder, or of all objects below it in a bucket."""
    if is_local(folder):
        entries = os.scandir(folder) if folder.is_dir() else ()
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    there = {os.fspath(path.relative_to(folder)): entry.size for path, entry in folder.entries()}
    there.pop(".", None)  # the empty object that a console makes for a folder
    return there


def _remove(folder, *patterns):
    names = [n for n in _sizes(folder) if any(re.fullmatch(p, n) for p in patterns)]
    if is_local(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                os.remove(folder / name)
    elif names:
        folder.bucket().delete([(folder / name).key for name in names])
