"""Prepared shards of a small source, made in this process."""

from maxdiloco.data import tokenizer
from maxdiloco.data.prepared import prepare
from maxdiloco.data.prepared.prepare import Work
from maxdiloco.data.sources.opening import open_source

TEXTS = ["abcdefg" * 40, "x", "\u00e4\u00f6\u00fc" * 9, "hello world\n" * 300, "y" * 77]


def prepare_in_this_process(monkeypatch):
    """Parts are made here, one after the other: a process of its own costs a second."""
    monkeypatch.setattr(
        prepare.workers,
        "map_parts",
        lambda call, common, calls, processes: (
            (number, call(*common, *one)) for number, one in enumerate(calls)
        ),
    )


def make(path, out, *, tokens=None, part_bytes=1 << 10, **changed):
    """Shards of a source, in this process: the parts one after the other."""
    source = open_source("text", str(path), "dataset_path", "text")
    work = Work(source, tokens or tokenizer.ByteTokenizer(), "source", part_bytes=part_bytes)
    work = prepare.dataclasses.replace(work, **changed)
    return prepare.prepare(work, str(out), lambda line: None)
