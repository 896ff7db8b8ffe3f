"""A whole source into a folder of shards: what is left to do, the processes, the manifest."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from maxdiloco import output
from maxdiloco.data import shards
from maxdiloco.data.corpus import check_damage
from maxdiloco.data.kinds import Reader
from maxdiloco.data.prepared import part
from maxdiloco.data.prepared.part import Work
from maxdiloco.data.read_ahead import read_ahead
from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.storage import durable
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.run_folder import absolute, reason
from maxdiloco.storage.store import is_local

# Source bytes of a part, which is a file of the result and what a kill costs a process; a small
# source has _PARTS parts of 1 MB or more, some for every core. Our choice; it depends on the source
# alone, so that the folder does.
_PART_BYTES = 64 << 20
_PARTS = 32
_LEAST_BYTES = 1 << 20
_PLAN = "source.json"
_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# Names of what only an unfinished folder needs, and of what a kill leaves half written.
_FACTS = r"part-\d{5,}\.json"
_WHOLE = rf"({_FACTS}|part-\d{{5,}}\.arrayrecord|(source|manifest)\.json|(lengths|checksums)\.npy)"
_LEFT = rf"{_WHOLE}\.[0-9a-f]{{8}}\.part"  # durable.beside
_MOST_NAMED = 10  # damaged records that are printed; the manifest has all


def size_of(source: Reader) -> int:
    """About how many bytes are read of a source."""
    return sum(span.size for span in source.spans(_PART_BYTES))


def part_bytes_of(source: Reader) -> int:
    """Bytes of the source in a part, where nothing else is asked for."""
    return min(_PART_BYTES, max(_LEAST_BYTES, -(-size_of(source) // _PARTS)))


def plan_of(work: Work) -> dict[str, Any]:
    """What a folder is made from, as JSON: equal plans are the same folder."""
    return {
        "source": work.source.version(),
        "column": work.source.column,
        "tokenizer": work.tokenizer.fingerprint,
        "part_bytes": work.part_bytes or part_bytes_of(work.source),
    }


class _Target(NamedTuple):
    """The folder that is made, as the process that has its lock sees it."""

    path: epath.Path
    require: Callable[[], None]  # raises ConfigError when another process has taken the lock over


def prepare(work: Work, out: str, say: Callable[[str], None], *, waits: bool = False) -> None:
    """Make a folder of shards, or the rest of one that was begun, or find it made.

    out: the folder, also in a bucket. It is the same to the byte, whatever the number of processes
    and of kills before. waits: for another process that makes it, but in a bucket.
    Raises DataError for text that is missing, unreadable or damaged, ConfigError when the folder is
    in use or holds something else, LostPeerError when a process is gone, CheckpointError for a
    bucket without obstore.
    """
    plan, folder = plan_of(work), absolute(out, key="out")
    try:
        with _locked(folder, say, waits) as target:
            if _is_complete(plan, folder):
                _remove(folder, _FACTS, _LEFT)
                say(f"{folder} is prepared: nothing to do")
            else:
                _make(work, plan["part_bytes"], target, say)
        if is_local(folder):
            shards.open_shards(os.fspath(folder), "out")
    except OSError as error:
        mend = "Put the disk in order" if is_local(folder) else "See that it can be"
        raise DataError(
            f"out={folder} cannot be written ({reason(error)}). {mend}, or choose another folder; "
            "the same command resumes."
        ) from error


@contextlib.contextmanager
def _locked(folder: epath.Path, say: Callable[[str], None], waits: bool) -> Iterator[_Target]:
    """Lock the folder for the time of a `with`. Raises ConfigError where another process has it,
    unless it waits for it; in a bucket it does not."""
    if not is_local(folder):
        words = {"key": f"out={folder}", "otherwise": "choose another folder"}
        try:
            with ObjectLock(folder / _LOCK, **words, say=say) as lock:
                yield _Target(folder, lock.require)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return
    durable.make_folder(folder)
    with (folder / _LOCK).open("a") as file:
        try:  # until the file is closed: the kernel does that for a process that dies
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                raise ConfigError(
                    f"out={folder} is being written by another process. Wait for it, or choose "
                    "another folder."
                ) from None
            say(f"{folder} is being written by another process: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise ConfigError(
                f"out={folder} is on a file system without locks ({reason(error)}), where two "
                "programs could write it at once. Choose a folder on another file system, and "
                "copy it when it is complete."
            ) from error
        yield _Target(folder, lambda: None)


def _make(work, part_bytes, target, say):
    begun, folder = time.perf_counter(), target.path
    _remove(folder, _LEFT)
    parts = list(part.runs(work.source.spans(part_bytes), lambda span: span.size, part_bytes))
    if not parts:
        raise DataError(f"{work.name} holds no text: its files are empty. Give text to read.")
    facts, there = {}, _sizes(folder)
    for number in range(len(parts)):
        name = part.facts_name(number)
        known = shards.read_fields(folder / name) if name in there else None
        if known and there.get(shards.part_name(number)) == known["bytes"]:
            for table in part.TABLES:  # read again when the parts are joined: all may not fit
                del known[table]
            facts[number] = known
    sizes = [sum(span.size for span in spans) for spans in parts]
    done = sum(sizes[number] for number in facts)
    processes = min(work.processes or len(os.sched_getaffinity(0)), len(parts))
    say(
        f"tokenising {work.name}: {len(work.source.names)} files, {sum(sizes) / 1e6:,.1f} MB in "
        f"{len(parts)} parts, {processes} processes, to {folder}"
        + (f"; {len(facts)} parts were done before" if facts else "")
    )
    todo = [(number, spans) for number, spans in enumerate(parts) if number not in facts]

    def check():
        target.require()
        damaged = [record for number in sorted(facts) for record in facts[number]["damaged"]]
        check_damage(damaged, work.allowed)

    check()
    make = functools.partial(part.make_part, work, os.fspath(folder), todo)
    lost = (
        "a process that tokenises text is gone: killed, or out of memory. The same command "
        "resumes; processes=1 needs less memory."
    )
    with _progress(sum(sizes), done, say) as advance:
        count = len(todo)  # ahead: none waits until a slow part's turn is over
        made = read_ahead(
            make,
            count,
            min(processes, count),
            ahead=max(count, 1),
            lost=lost,
            setting=f"processes={processes}",
        )
        with contextlib.closing(made):
            for (number, _), found in zip(todo, made, strict=True):
                facts[number] = found
                check()
                advance(sizes[number])
    manifest = _finish(work, target, [facts[number] for number in range(len(parts))])
    seconds = time.perf_counter() - begun
    tokens = sum(count for count, *_ in manifest.parts)
    say(
        f"prepared {folder}: {manifest.lengths[0]:,} documents, {tokens:,} tokens in "
        f"{seconds:.1f} s ({(sum(sizes) - done) / 1e6 / seconds:.1f} MB/s)"
    )
    if manifest.damaged:
        say(f"{len(manifest.damaged)} damaged records were skipped (max_corrupted_records):")
    for where, why in manifest.damaged[:_MOST_NAMED]:
        say(f"  {where}: {why.removeprefix(f'{where} ')}")


def _is_complete(plan, folder):
    """Whether the folder is complete; a new one gets its plan. Raises ConfigError for another's."""
    plan, there = {"format": shards.FORMAT, **plan}, _sizes(folder)
    if _PLAN not in there:
        # A kill before there was a plan leaves the lock, and what durable.replacing wrote.
        for name, size in there.items():
            is_lock = name == _LOCK and not (size and is_local(folder))
            if not is_lock and not re.fullmatch(_LEFT, name):
                raise ConfigError(
                    f"out={folder} is not empty, and was not made by maxdiloco.prepare. Choose a "
                    "new folder."
                )
        with durable.replacing(folder / _PLAN) as new:
            new.write_text(json.dumps(plan))
        return False
    before = shards.read_fields(folder / _PLAN)
    if different := [key for key in plan if before.get(key) != plan[key]]:
        raise ConfigError(
            f"out={folder} was begun with another {' and '.join(different)}. Choose another "
            "folder, or remove this one."
        )
    return {shards.MANIFEST, shards.LENGTHS, shards.CHECKSUMS} <= there.keys()


def _finish(work, target, facts):
    """The table of documents, the tokenizer's files and, last, the manifest."""
    folder = target.path
    lengths, checksums = [], []
    for number in range(len(facts)):
        fields = shards.read_fields(folder / part.facts_name(number))
        lengths.append(np.array(fields["lengths"], "<i8"))
        checksums.append(np.array(fields["checksums"], "<u4"))
    # A document that goes on in the next part is one.
    begins = [np.arange(found["documents"]) >= found["continues"] for found in facts]
    firsts = np.flatnonzero(np.concatenate(begins))
    if not len(firsts):
        raise DataError(f"{work.name} holds no text: all documents are empty. Give text to read.")
    of_documents, of_records = np.concatenate(lengths), np.concatenate(checksums)
    digest = _write_table(folder / shards.LENGTHS, np.add.reduceat(of_documents, firsts))
    of_checksums = _write_table(folder / shards.CHECKSUMS, of_records)
    work.tokenizer.save(folder / shards.TOKENIZER)
    if is_local(folder):
        durable.sync_tree(folder / shards.TOKENIZER)
    documents = Counter()  # that begin in each file of the source
    for found in facts:
        documents.update(dict(found["files"]))
    manifest = shards.Manifest(
        tokenizer=work.tokenizer.fingerprint,
        vocab_size=work.tokenizer.vocab_size,
        dtype=part.dtype_of(work.tokenizer),
        record=shards.RECORD,
        parts=[[found["tokens"], found["bytes"], found["sha256"]] for found in facts],
        lengths=[len(firsts), digest],
        checksums=[len(of_records), of_checksums],
        files=[[os.path.basename(f), documents[i]] for i, f in enumerate(work.source.names)],
        damaged=[record for found in facts for record in found["damaged"]],
    )
    target.require()
    with durable.replacing(folder / shards.MANIFEST) as path:
        path.write_bytes(manifest.to_bytes())
    _remove(folder, _FACTS, _LEFT)
    return manifest


def _write_table(path, table):
    """Write a NumPy file; returns its SHA-256."""
    with durable.made_here(path) as new:
        with new.open("wb") as file:
            np.save(file, table)
        return shards.file_hash(os.fspath(new))


def _sizes(folder):
    """{name: bytes} of what is in a folder, in a bucket of all below."""
    if is_local(folder):
        entries = os.scandir(folder)
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    there = {os.fspath(path.relative_to(folder)): entry.size for path, entry in folder.entries()}
    there.pop(".", None)  # the empty object that a console makes for a folder
    return there


def _remove(folder, *patterns):
    names = [n for n in _sizes(folder) if any(re.fullmatch(p, n) for p in patterns)]
    if is_local(folder):
        for name in names:
            os.remove(folder / name)
    elif names:
        folder.bucket().delete([(folder / name).key for name in names])


@contextlib.contextmanager
def _progress(total, done, say):
    """A function to call with bytes that are done: a bar on a terminal, elsewhere a line a tenth"""
    if output.shows_bars():
        from tqdm import tqdm

        with tqdm(total=total, initial=done, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
        return
    begun, total = time.perf_counter(), max(total, 1)

    def advance(size):
        nonlocal done
        before, done = done, done + size
        if before * 10 // total != done * 10 // total < 10:
            say(f"tokenised {done / total:.0%} after {time.perf_counter() - begun:.0f} s")

    yield advance
