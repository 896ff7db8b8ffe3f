"""A start that knows the .jsonl files of the one before reads none of them through."""

import os

import pytest
from data.shards_on_disk import open_source
from etils import epath

from maxdiloco.data import corpus
from maxdiloco.data.documents import LineIndex, read_table
from maxdiloco.data.sources.files import Files
from maxdiloco.errors import DataError
from maxdiloco.evaluation import run_texts
from maxdiloco.storage import durable

LINES = b'{"text": "abc"}\n\n{"text": "\xc3\xa9"}\n'
OTHER = b'{"text": "abcd"}\n'


@pytest.fixture
def start(folder, tmp_path_factory):
    """Opens some files as a start of a run does; returns the table and the lines told."""
    place = epath.Path(tmp_path_factory.mktemp("run")) / "line_index"

    def open_files(names, column="text", path=place):
        told = []
        index = LineIndex(column, told.append)
        run_texts.load_index(index, path)
        paths = tuple(os.path.join(folder({}), name) for name in names)
        table = read_table(Files(paths, tuple(map(corpus.stamp, paths)), column), index=index)
        run_texts.save_index(index, path)
        return table, told

    open_files.place = place
    return open_files


def columns(table):
    return [array.tolist() for array in (table.file, table.offset, table.stored, table.size)]


def test_the_second_start_reads_no_line_and_has_the_same_table(folder, start):
    """Also next to text files, empty ones and blank lines; nothing new is written then."""
    files = ["a.jsonl", "b.txt", "c.jsonl", "d.jsonl", "e.jsonl"]
    folder({"a.jsonl": LINES, "b.txt": b"text", "c.jsonl": b"", "d.jsonl": OTHER, "e.jsonl": b"\n"})
    first, told = start(files)
    assert len(told) == 1
    written = os.stat(start.place).st_mtime_ns
    second, told = start(files)
    assert told == []
    assert columns(second) == columns(first)
    assert columns(first)[0] == [0, 0, 1, 3] and columns(first)[3] == [3, 2, 4, 4]
    assert os.stat(start.place).st_mtime_ns == written
    # An index of another column is not used.
    folder({"b.jsonl": b'{"text": "abc", "body": "de"}\n'})
    assert start(["b.jsonl"])[0].size.tolist() == [3]
    table, told = start(["b.jsonl"], column="body")
    assert (table.size.tolist(), len(told)) == ([2], 1)


def test_only_a_file_with_another_size_or_time_is_read_again(folder, start):
    """A document of 4 bytes in place of 3, then one of other bytes in as many."""
    files = ["a.jsonl", "b.jsonl"]
    root = folder({"a.jsonl": b'{"text": "abc" }\n', "b.jsonl": LINES})
    start(files)
    before = os.stat(f"{root}/a.jsonl").st_mtime_ns
    for line, later, size in ((b'{"text": "abcd"   }\n', 0, 4), (b'{"text": "abcde"  }\n', 1, 5)):
        folder({"a.jsonl": line})
        os.utime(f"{root}/a.jsonl", ns=(0, before + later))
        table, told = start(files)
        assert (table.size.tolist(), len(told)) == ([size, 3, 2], 1)
    assert start(files)[1] == []


def test_a_damaged_index_is_named_and_written_again(folder, start):
    """Cut anywhere, any byte changed, of another kind, or empty."""
    folder({"a.jsonl": LINES})
    table, _ = start(["a.jsonl"])
    good = start.place.read_bytes()
    damaged = [good[:length] for length in range(0, len(good), 7)]
    damaged += [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(0, len(good), 5)]
    damaged += [good + b"\0", b"\0" * len(good), b"PK\3\4" + good]
    for data in damaged:
        start.place.write_bytes(data)
        again, told = start(["a.jsonl"])
        assert len(told) == 2 and str(start.place) in told[0]
        assert columns(again) == columns(table)
        assert start.place.read_bytes() == good


def test_an_index_that_cannot_be_stored_is_named_and_ends_no_run(folder, start, monkeypatch):
    """A file where a folder should be, and a folder where the file should be. On a full disk, like
    /dev/full, the earlier index stays and no partial file remains."""
    root = folder({"a.jsonl": LINES, "b.jsonl": OTHER, "file": b"", "folder/x": b""})
    for name in ("file/index", "folder"):
        place = epath.Path(root) / name
        table, told = start(["a.jsonl"], path=place)
        assert [str(place) in line for line in told] == [True, False, True]
        assert table.size.tolist() == [3, 2]
    start(["a.jsonl"])
    part = start.place.parent / "full"
    os.symlink("/dev/full", part)
    monkeypatch.setattr(durable, "beside", lambda path: part)
    _, told = start(["a.jsonl", "b.jsonl"])
    assert [str(start.place) in line for line in told] == [False, True]
    assert not os.path.lexists(part)
    assert start(["a.jsonl"])[1] == []


def test_lines_without_the_text_are_left_out_up_to_a_number(folder):
    """Each one is named. The index does not include the file: a start that allows fewer fails."""
    root = folder({"a.jsonl": LINES + b"no\n" + OTHER, "b.jsonl": b"{}\n" + OTHER})
    found, told = open_source(root), []
    index = LineIndex("text", report=told.append)
    documents = read_table(found, index=index, allowed=2)
    assert documents.size.tolist() == [3, 2, 4, 4]
    for named in ("a.jsonl line 4 ", "b.jsonl line 1,"):
        assert sum(named in line for line in told) == 1
    with pytest.raises(DataError, match=r"b\.jsonl line 1\b"):
        read_table(found, index=index, allowed=1)
