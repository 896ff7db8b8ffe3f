"""What is no text is refused by name before a run; what a folder leaves out is counted."""

import gzip

import pytest

from maxdiloco.data import corpus, mixture, split
from maxdiloco.data.sources import plain_text
from maxdiloco.errors import DataError

AE = "\u00e4".encode()  # two bytes


@pytest.mark.parametrize(
    "content, words",
    [
        (b"plain \xe4 latin-1", "byte 6 is 0xe4 (invalid continuation byte)"),
        ("UTF-16".encode("utf-16"), "byte 3 is NUL"),
        (b"text\0", "byte 4 is NUL"),
        (gzip.compress(b"text" * 99, mtime=0), "is no UTF-8 text: byte "),
        (b"a" * 9000 + b"\xff" + b"a" * 9000, "byte 9000 is 0xff (invalid start byte)"),
        (b"cut off " + AE[:1], "byte 8 is 0xc3 (unexpected end of data)"),
        (b"a" * (1 << 20) + b"\xff" * 8, "is 0xff (invalid start byte)"),
    ],
)
def test_bytes_that_are_no_utf_8_are_refused_with_file_place_and_remedy(tmp_path, content, words):
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b.txt").write_bytes(content)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    with pytest.raises(DataError) as caught:
        plain_text.refuse_other(paths, "dataset_path")
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/b.txt is no UTF-8 text: byte ") and words in line
    assert line.endswith("Convert it (as iconv -f LATIN1 -t UTF-8 does), or leave it out of "
                         "dataset_path.")  # fmt: skip


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("size", [0, 5, 8192, 16384, 400_000])
def test_text_is_text_wherever_a_block_ends(tmp_path, size, shift):
    """Characters of two and four bytes lie across the ends of blocks."""
    text = b"x" * shift + (AE + "\U0001f600".encode()) * (size // 6)
    (tmp_path / "a.txt").write_bytes(text)
    assert plain_text.refuse_other([str(tmp_path / "a.txt")], "dataset_path") is None


@pytest.mark.parametrize(
    "name, words",
    [
        ("a.gz", "a.gz is no text. JSON lines may be compressed"),
        ("a.parquet", "Set dataset_type=parquet"),
        ("a.zip", "a.zip is no text"),
        ("noise.txt", "noise.txt is no UTF-8 text"),
    ],
)
def test_a_file_that_is_given_by_name_and_is_no_text_is_refused(settings, tmp_path, name, words):
    """Read as bytes it would train without a word. The suffix alone is enough."""
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08" if name == "noise.txt" else b"text " * 99)
    cfg = settings(dataset_path=str(tmp_path / name))
    with pytest.raises(DataError, match=words):
        split.open_split(cfg, split="train")


def test_files_that_a_folder_leaves_out_are_counted_by_suffix(tmp_path):
    for name in ("a.txt", "b.json", "c.parquet", "e.TXT", "f.html", ".hidden.bin", "README"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g.html").write_text("x")
    found = corpus.left_out(str(tmp_path))
    assert found == {".html": 2, ".json": 1, ".parquet": 1, ".TXT": 1, "": 1}
    for path in ("", str(tmp_path / "a.txt"), str(tmp_path / "*.json")):
        assert not corpus.left_out(path)


def test_the_line_on_the_data_counts_what_an_epoch_reads(settings, tmp_path):
    """40 bytes and 2 starts in sequences of 4: 10, of which one is held out."""
    for name, size in (("a.txt", 30), ("b.txt", 10)):
        (tmp_path / name).write_text("x" * size)
    data = mixture.open_dataset(
        settings(dataset_path=str(tmp_path), max_target_length=4), split="train"
    )
    assert data.summary(data.first_position(2, 1)) == [
        f"data: dataset_path={tmp_path}: 2 files, 2 documents, 40 bytes; 9 sequences of 4 tokens "
        "to train on, 4.5 steps an epoch"
    ]
