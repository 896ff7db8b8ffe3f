"""What is no text is refused by name before a run; what a folder leaves out is counted."""

import gzip

import pytest
from data.shards_on_disk import open_dataset, open_source

from maxdiloco.data import kinds
from maxdiloco.data.sources import files
from maxdiloco.errors import DataError
from maxdiloco.evaluation import run_texts
from maxdiloco.flags import config
from maxdiloco.trainer.assemble import BatchShape

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
    with pytest.raises(DataError) as caught:
        files.refuse_other(open_source(tmp_path), "dataset_path")
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/b.txt is no UTF-8 text: byte ") and words in line
    assert line.endswith("Convert it (as iconv -f LATIN1 -t UTF-8 does), or leave it out of "
                         "dataset_path.")  # fmt: skip


def test_text_is_text_wherever_a_block_ends(tmp_path):
    """Characters of two and four bytes lie across the ends of blocks."""
    path = tmp_path / "a.txt"
    for size in (0, 5, 8192, 16384, 400_000):
        for shift in range(3):
            path.write_bytes(b"x" * shift + (AE + "\U0001f600".encode()) * (size // 6))
            assert files.refuse_other(open_source(path), "dataset_path") is None


def test_a_file_that_is_given_by_name_and_is_no_text_is_refused(settings, tmp_path):
    """Read as bytes it would train without a word. The suffix alone is enough."""
    for name, words in {
        "a.gz": "a.gz is no text. JSON lines may be compressed",
        "a.parquet": "Set dataset_type=parquet",
        "a.zip": "a.zip is no text.*; or leave the file out",
        "noise.txt": "noise.txt is no UTF-8 text",
    }.items():
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08" if name == "noise.txt" else b"text " * 99)
        with pytest.raises(DataError, match=words):
            open_dataset(settings(dataset_path=str(tmp_path / name)))


def test_the_line_on_the_data_counts_what_an_epoch_reads_and_what_a_folder_leaves_out(
    settings, tmp_path
):
    """40 bytes and 2 starts in sequences of 4: 10, of which one is held out."""
    for name, size in (("a.txt", 30), ("b.txt", 10)):
        (tmp_path / name).write_text("x" * size)
    data = open_dataset(settings(dataset_path=str(tmp_path), max_target_length=4))
    assert data.summary(data.first_position(2, 1)) == [
        f"data: dataset_path={tmp_path}: 2 files, 2 documents, 40 bytes; 9 sequences of 4 tokens "
        "to train on, 4.5 steps an epoch"
    ]
    (tmp_path / "sub").mkdir()
    for name in ("c.json", "d.parquet", "e.TXT", "f.html", ".hidden.bin", "README", "sub/g.html"):
        (tmp_path / name).write_text("x")
    (line,) = kinds.left_out_lines(kinds.Source("text", str(tmp_path), "text"), "SOURCE")
    assert "not read: 2 .html, 1 without a suffix, 1 .json, 1 .parquet, 1 .TXT; data" in line
    for path in ("", str(tmp_path / "a.txt"), str(tmp_path / "*.json")):
        assert not list(kinds.left_out_lines(kinds.Source("text", path, "text"), "SOURCE"))


def warned(*argv):
    """The warnings of a start that reads text and evaluates."""
    cfg = config.load(["max_target_length=4", "vocab_size=257", *argv], {})
    text, held = (open_dataset(cfg, split=split) for split in ("train", "eval"))
    lines = run_texts.lines(cfg, text, {"": held}, BatchShape(2, 1, 4))
    return [line for line in lines if line.startswith("warning: ")]


def test_a_start_warns_where_far_more_is_held_out_or_files_are_left_out(tmp_path):
    """One sequence of 5 is 20 %, of 20 it is 5 %; the source of a mixture is named."""
    for name, tokens in (("small", 20), ("large", 80)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("x" * (tokens - 1))
    small, large = f"dataset_path={tmp_path}/small", f"dataset_path={tmp_path}/large"
    (warning,) = warned(small)
    assert warning.startswith(f"warning: 20% of {small} is held out, not eval")
    for argv in ([large], [small, "eval_fraction=0.1"], [small, f"eval_{large}"]):
        assert warned(*argv) == []
    sources = ", ".join(f"{{path: {tmp_path}/{name}, name: {name}}}" for name in ("small", "large"))
    (warning,) = warned(f"dataset_mixture=[{sources}]")
    assert "20% of dataset_mixture, source small is held out" in warning
    (tmp_path / "large" / "b.parquet").write_bytes(b"?")
    assert warned(f"dataset_mixture=[{{path: {tmp_path}/large, name: a}}]") == [
        f"warning: 1 other files in dataset_mixture, source a={tmp_path}/large are not read: 1 "
        ".parquet; dataset_type=parquet reads those."
    ]
