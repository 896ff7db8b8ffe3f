"""Which files and documents a data set has, and what is said when it has none."""

import errno
import glob
import json
import os
import resource

import pytest
from data.shards_on_disk import open_source

from maxdiloco.data import corpus
from maxdiloco.data import documents as documents_of
from maxdiloco.data.sources import files
from maxdiloco.errors import DataError

LINE = b'{"text": "abcdef"}\n'


def read_table(path):
    return documents_of.read_table(open_source(path))


def texts(documents):
    whole = ((number, 1, int(size) + 1) for number, size in enumerate(documents.size))
    return [bytes(tokens.tolist()) for tokens in documents.read(whole)]


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


def test_a_file_is_a_document_and_a_jsonl_line_is_one(folder, monkeypatch):
    """Empty ones and blank lines are none; the size is that of the text, not of the line."""
    lines = b'{"text": "tw\\u00e9"}\n\n{"id": 1, "text": ""}\n{"text": "a\\ud800b"}'
    root = folder({"a.txt": b"one\n", "b.txt": b"", "c.jsonl": lines})
    documents = read_table(root)
    assert texts(documents) == [b"one\n", "twé".encode(), b"a?b"]  # half a surrogate pair
    assert documents.size.tolist() == [4, 4, 3]
    # A line too long for the memory is told, as of one JSON array without line feeds.
    monkeypatch.setattr(files, "MAX_LINE", 20)
    root = folder({"d.jsonl": b'{"text": "1234567"}\n', "e.jsonl": b'{"text": "12345678"}\n'})
    assert texts(read_table(f"{root}/d.jsonl")) == [b"1234567"]
    with pytest.raises(DataError, match=r"e\.jsonl byte 0: a line is longer than 20 bytes\. Every"):
        read_table(f"{root}/e.jsonl")


def test_the_default_is_the_source_of_the_standard_library():
    paths = list(corpus.find("", "dataset_path"))
    root = os.path.dirname(json.__path__[0])
    assert paths == sorted(paths)
    assert json.__file__ in paths and os.path.join(root, "ast.py") in paths
    parts = {part for name in names(root, paths) for part in name.split(os.sep)}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert all(path.endswith(".py") for path in paths)


def test_a_path_without_text_or_with_a_closed_folder_is_told_with_its_key(folder, monkeypatch):
    """Leaving a subfolder out would train on something else. Some distributions ship the standard
    library as a zip file."""
    root = folder({"a.c": b"1"})
    for path, words in (
        ("none", r"dataset_path=\S*/none does not exist.*Give a folder"),
        ("\0/*.txt", r"dataset_path=.* does not exist"),  # no file system has such a name
        ("*.txt", r"dataset_path=.*\*\.txt matches no file.*Correct the"),
        ("", r"dataset_path=\S* has no files that end in \.txt.*glob"),
    ):
        with pytest.raises(DataError, match="^eval_" + words):
            list(corpus.find(f"{root}/{path}".rstrip("/"), "eval_dataset_path"))
    with monkeypatch.context() as patch:
        patch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": root})
        words = rf"^dataset_path is empty.*{root} has no \.py.*Set dataset_path"
        with pytest.raises(DataError, match=words):
            list(corpus.find("", "dataset_path"))
    folder({"a.txt": b"1", "closed/b.txt": b"2"})
    scandir = os.scandir

    def refuse(path):
        if path == os.path.join(root, "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        DataError, match=rf"^dataset_path={root}: folder {root}/closed cannot be read \(Perm.*right"
    ):
        list(corpus.find(root, "dataset_path"))


def test_a_file_that_cannot_be_read_is_told_before_any_is_read_through(tmp_path):
    """Leaving it out would train on something else. A pipe would wait for a writer."""
    (tmp_path / "a.jsonl").write_bytes(b"not JSON")
    path = tmp_path / "z.txt"
    for make, words in (
        (lambda: path.symlink_to(path), r"cannot be read \(.*symbolic links.*leave it out"),
        (lambda: path.symlink_to("none"), r"cannot be read \(No such file"),
        (lambda: os.mkfifo(path), r"cannot be read: it is no regular file\. Leave"),
    ):
        make()
        with pytest.raises(DataError, match=rf"z\.txt {words}"):
            read_table(f"{tmp_path}/*")
        path.unlink()


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": ' + b"[" * 100_000, r"a\.jsonl line 2 is not JSON: its values are nested"),
        (b"\0" * 50, r"a\.jsonl line 2 is not JSON: "),
        (b"{text}", r"a\.jsonl line 2 is not JSON: .*Every line of a \.jsonl file is one JSON"),
        (b'"text"', r"text_column=text is not in .*a\.jsonl line 2, which has str.*Set text_col"),
        (b"{}", r"text_column=text is not in .*line 2, which has no field\. Set text_column"),
        (b'{"id": 1, "body": "x"}', r"text_column=text is not in .* which has id, body\. Set"),
        (b'{"text": 7}', r"text_column=text is a int in .*line 2, not a string.*Set text_column"),
        (b'{"text": "\xff"}', r"a\.jsonl line 2 is not JSON: .*utf-8"),
    ],
)
def test_a_jsonl_line_without_the_text_is_told_by_its_number(folder, line, message):
    root = folder({"a.jsonl": b'{"text": "good"}\n' + line + b"\n"})
    with pytest.raises(DataError, match=message) as raised:
        read_table(f"{root}/a.jsonl")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("a.txt", b"abcdef", b"abc"),
        ("a.txt", b"abcdef", b"abcdefg"),
        ("a.jsonl", LINE, b'{"text": "abc"   }\n'),
        ("a.txt", b"abcdef", b"ghijkl"),
        ("a.jsonl", LINE, b'{"text": "ghijkl"}\n'),
        ("a.jsonl", LINE, LINE[:9]),
    ],
)
def test_a_file_that_changes_under_a_run_is_told(folder, name, before, after):
    """Its windows would hold other text than before, or none; also where its size stays.

    It is not told as a line that never was JSON. A file that only grew holds its documents still.
    """
    root = folder({name: before})
    documents = read_table(f"{root}/{name}")
    if name == "a.jsonl":
        folder({name: before + LINE})
        assert texts(documents) == [b"abcdef"]
    folder({name: after})
    os.utime(f"{root}/{name}", ns=(0, os.stat(f"{root}/{name}").st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"has changed since the run.*of 6 bytes.*start again"):
        texts(documents)
    os.remove(f"{root}/{name}")
    with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file"):
        texts(documents)


def test_a_file_that_grows_while_it_is_read_and_an_error_of_the_disk_are_told(folder, monkeypatch):
    """Half of its last line may be missing. Page 0 of a process's memory is a file that fails like
    a disk; the rights are not to blame."""
    root = folder({"a.jsonl": LINE, "a.txt": LINE})

    def grow(line):
        with open(f"{root}/a.jsonl", "ab") as file:
            file.write(b" ")
        return json.loads(line.strip())

    with monkeypatch.context() as patch:
        patch.setattr(files.json_text, "parse", grow)
        with pytest.raises(DataError, match=r"a\.jsonl has changed while it was read\. Start ag"):
            read_table(f"{root}/a.jsonl")
    for path in (f"{root}/a.txt", f"{root}/a.jsonl"):
        documents, stamp = read_table(path), corpus.stamp(path)
        os.remove(path)
        os.symlink("/proc/self/mem", path)
        words = rf"{path} cannot be read \(Input/output error\)\. Put the file or its"
        with pytest.raises(DataError, match=words):
            texts(documents)
        with pytest.raises(DataError, match=words):
            documents_of._read_through(path, stamp, "text", 0)


def test_no_file_is_kept_open(folder):
    """More files than a process may have open, each read twice."""
    root = folder({f"{number}.{kind}": LINE for number in range(40) for kind in ("txt", "jsonl")})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, limits[1]))
    try:
        assert len(texts(read_table(root))) == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
