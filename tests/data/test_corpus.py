"""The files and documents of a data set."""

import errno
import glob
import json
import os
import resource

import pytest
from data.shards_on_disk import make, open_source, texts_of

from maxdiloco.data import corpus
from maxdiloco.data.sources import files
from maxdiloco.errors import DataError

LINE = b'{"text": "abcdef"}\n'


def texts(path):
    """The texts of the documents of a source, in their order."""
    return [text.text.encode(errors="replace") for text in texts_of(path)]


def names(root, paths):
    return [os.path.relpath(path, root) for path in paths]


def find(root, path=""):
    """The files of a path below a folder, by their names there."""
    return names(root, corpus.find(f"{root}/{path}".rstrip("/"), "dataset_path"))


def test_a_folder_is_its_text_files_sorted_by_path(folder):
    """Subfolders are searched; hidden names and other suffixes are left out. Links that lead back
    end no search and repeat no text."""
    made = "b.txt a/z.py a/a.jsonl c[1].md c1.md image.png .git/x.txt .hidden.txt".split()
    root = folder(dict.fromkeys(made, b"1"))
    assert find(root) == "a/a.jsonl a/z.py b.txt c1.md c[1].md".split()
    assert find(root, "c[1].md") == ["c[1].md"]  # what looks like a glob
    # Two links to the folder itself: 2 ** 40 ways to the file. A link by name is used.
    root = f"{folder({'linked/a/text.txt': b'1'})}/linked"
    for name in ("one", "two"):
        os.symlink(".", f"{root}/a/{name}")
    for path in ("", "**/*.txt", "**"):
        assert find(root, path) == ["a/text.txt"]
    assert find(root, "a/one/*.txt") == ["a/one/text.txt"]


@pytest.mark.parametrize(
    "pattern",
    ["**", "**/*.c", "*/**/a.c", "**/deep/**", "**/**/b.?", "[d]*/**/er/*", "b.c/**", "**/none"],
)
def test_a_glob_matches_what_python_s_glob_does(folder, monkeypatch, pattern):
    """Sorted, each file once, of any suffix; also one that begins in the working directory."""
    made = ("b.c", "deep/er/a.c", "deep/b.h", ".git/x.c", "e[1]/deep/z[1].c")
    root = folder(dict.fromkeys(made, b"1"))
    monkeypatch.chdir(root)
    for path in (pattern, f"{root}/{pattern}"):
        expected = sorted(filter(os.path.isfile, set(glob.glob(path, recursive=True))))
        try:
            assert list(corpus.find(path, "dataset_path")) == expected
        except DataError:
            assert not expected


def test_a_file_is_a_document_and_a_jsonl_line_is_one(folder, tmp_path_factory, monkeypatch):
    """Empty ones and blank lines are none. Half of a surrogate pair becomes a question mark."""
    lines = b'{"text": "tw\\u00e9"}\n\n{"id": 1, "text": ""}\n{"text": "a\\ud800b"}'
    root = folder({"a.txt": b"one\n", "b.txt": b"", "c.jsonl": lines})
    documents = make(root, tmp_path_factory.mktemp("shards") / "out")
    assert documents.lengths.tolist() == [5, 5, 4]
    found = documents.read((number, 1, 4) for number in range(3))
    assert [bytes(tokens.tolist()) for tokens in found] == [b"one", "twé".encode()[:3], b"a?b"]
    # A line too long for the memory is an error, as of one JSON array without line feeds.
    monkeypatch.setattr(files, "MAX_LINE", 20)
    root = folder({"d.jsonl": b'{"text": "1234567"}\n', "e.jsonl": b'{"text": "12345678"}\n'})
    assert texts(f"{root}/d.jsonl") == [b"1234567"]
    with pytest.raises(DataError, match=r"e\.jsonl byte 0: "):
        texts(f"{root}/e.jsonl")


def test_the_default_is_the_source_of_the_standard_library():
    paths = list(corpus.find("", "dataset_path"))
    root = os.path.dirname(json.__path__[0])
    assert paths == sorted(paths)
    assert json.__file__ in paths and os.path.join(root, "ast.py") in paths
    parts = {part for name in names(root, paths) for part in name.split(os.sep)}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert all(path.endswith(".py") for path in paths)


def test_a_standard_library_without_files_is_named(folder, monkeypatch):
    """Some distributions ship it as a zip file."""
    root = folder({"a.c": b"1"})
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": root})
    with pytest.raises(DataError, match=rf"^dataset_path= .*{root}\) "):
        corpus.find("", "dataset_path")


def test_a_subfolder_that_cannot_be_read_is_named(folder, monkeypatch):
    """Leaving it out would train on something else."""
    root = folder({"a.txt": b"1", "closed/b.txt": b"2"})
    scandir = os.scandir

    def refuse(path):
        if path == os.path.join(root, "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=rf"^dataset_path={root}: .*{root}/closed "):
        corpus.find(root, "dataset_path")


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to(path), lambda path: path.symlink_to("none"), os.mkfifo]
)
def test_a_file_that_cannot_be_read_is_named_before_any_is_read(tmp_path, make):
    """Leaving it out would train on something else. A pipe would wait for a writer."""
    (tmp_path / "a.jsonl").write_bytes(b"not JSON")
    make(tmp_path / "z.txt")
    with pytest.raises(DataError, match=r"z\.txt "):
        texts(f"{tmp_path}/*")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("change", ["before", "during", "gone"])
def test_a_file_that_changes_while_it_is_prepared_is_named(folder, monkeypatch, name, change):
    """Before its part is read, while it is read, or removed: its spans would be others."""
    root = folder({name: LINE * 9})
    source = open_source(root)
    (span,) = source.spans(1 << 20)

    def grow():
        with open(f"{root}/{name}", "ab") as file:
            file.write(LINE)

    read = source.read(span, None)
    if change == "during":
        assert next(read).text
        grow()
    elif change == "before":
        grow()
    else:
        os.remove(f"{root}/{name}")
    with pytest.raises(DataError, match=rf"{root}/{name} "):
        list(read)


def test_a_disk_error_names_the_file(folder):
    """Reading page 0 of /proc/self/mem fails like a disk."""
    root = folder({"a.jsonl": LINE, "a.txt": LINE})
    for name in ("a.txt", "a.jsonl"):
        stamp = corpus.stamp(f"{root}/{name}")
        os.remove(f"{root}/{name}")
        os.symlink("/proc/self/mem", f"{root}/{name}")
        source = files.Files((f"{root}/{name}",), (stamp._replace(size=100, version=0),), "text")
        with pytest.raises(DataError, match=rf"{root}/{name} "):
            list(source.read(next(source.spans(1 << 20)), None))


def test_no_file_is_kept_open(folder):
    """More files than a process may have open, each read once."""
    root = folder({f"{number}.{kind}": LINE for number in range(40) for kind in ("txt", "jsonl")})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, limits[1]))
    try:
        assert len(texts(root)) == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
