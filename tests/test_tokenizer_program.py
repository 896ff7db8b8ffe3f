"""python -m maxdiloco.tokenizer: a tokenizer for the user's own text."""

import collections
import gzip
import json

import pytest

from maxdiloco import tokenizer as program
from maxdiloco.data import registry, shards, tokenizer


def as_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def source(tmp_path):
    """A text file and a .jsonl file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat and the hat; the end é\r\n" * 200)
    (folder / "b.jsonl").write_text(json.dumps({"body": "concatenate " * 50}) + "\n")
    return folder


def test_the_same_text_gives_the_same_file_and_texts_round_trip(source, tmp_path, capsys):
    """A file that exists is not changed."""
    other = tmp_path / "a.json.unfinished"
    other.write_text("a file of others")
    for name in ("a.json", "b.json"):
        arguments = [str(source), f"out={tmp_path / name}", "vocab_size=280", "text_column=body"]
        assert program.main(arguments) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "280 tokens" in line and "2 documents" in line
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert other.read_text() == "a file of others"
    keys = dict(tokenizer_type="huggingface", tokenizer_path=str(tmp_path / "a.json"))
    found = tokenizer.build(keys | dict(add_bos=True, add_eos=True))
    assert (found.bos, found.eos, found.vocab_size) == (0, 1, 280)
    assert found.decode(found.encode("no such word ☃\0")) == "no such word ☃\0"
    assert len(found.encode(" the")) == 1 < len(found.encode(" qxz"))
    other.rename(tmp_path / "a.json")
    assert program.main([str(source), f"out={tmp_path / 'a.json'}"]) == 2
    assert f"out={tmp_path / 'a.json'} " in capsys.readouterr().err
    assert (tmp_path / "a.json").read_text() == "a file of others"


def test_pieces_are_cut_between_characters(tmp_path, monkeypatch):
    """é has two bytes; half of a surrogate pair, which JSON may hold, is a question mark."""
    monkeypatch.setattr(program, "PIECE", 3)
    (tmp_path / "a.txt").write_text("ééééé")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\ud800b"}\n')
    count = collections.Counter()
    source = registry.open_source(registry.Source("text", str(tmp_path), "text"), "SOURCE")
    assert list(program.texts(source, count)) == ["ééé", "éé", "a?b"]
    assert count == {"documents": 2, "bytes": 13}


def test_every_kind_of_source_gives_the_same_tokenizer(tmp_path):
    """The readers are those of training: a compressed file is decompressed, not learnt."""
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"the cat number {number} and the hat; the end" for number in range(99)]
    (tmp_path / "a.jsonl").write_bytes(as_lines(texts))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_lines(texts)))
    tables.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet")
    rows = pytest.importorskip("datasets").Dataset.from_dict({"text": texts})
    rows.save_to_disk(tmp_path / "hub")
    made = []
    kinds = {"a.jsonl": "", "a.jsonl.gz": "", "a.parquet": "parquet", "hub": "hf"}
    for name, kind in kinds.items():
        out, options = tmp_path / f"{name}.json", [f"dataset_type={kind}"] if kind else []
        arguments = [str(tmp_path / name), *options, f"out={out}", "vocab_size=300"]
        assert program.main(arguments) == 0
        made.append(out.read_bytes())
    assert made == [made[0]] * 4


def test_a_folder_is_read_as_in_training_and_counts_other_files(tmp_path, capsys):
    """Compressed lines lie beside text; tables are of another dataset_type."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_lines(["one", "two"])))
    (tmp_path / "b.txt").write_text("three")
    for name in ("c.parquet", "d.parquet", "e.txt.gz"):
        (tmp_path / name).write_bytes(b"?")
    assert program.main([str(tmp_path), f"out={tmp_path}/tok.json", "vocab_size=258"]) == 0
    said = capsys.readouterr().out
    for named in (f"SOURCE={tmp_path} ", "2 .parquet", "1 .gz", "258 tokens", "3 documents"):
        assert named in said


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["text"], 2, "out "),
        (["text", "out=a.json", "vocab_size=257"], 2, "vocab_size=257"),
        (["text", "out=a.json", "vocab_size=1e18"], 2, "vocab_size=1e18"),
        (["text", "out=a.json", "vocab_size=16777217"], 2, "vocab_size=16777217"),
        (["text", "out=a.json", "vocab_size=many"], 2, "vocab_size=many"),
        (["text", "out=a.json", "out=b.json"], 2, "out=b.json"),
        (["text", "out=a.json", "size=3"], 2, "size=3"),
        (["text", "out=no/a.json"], 2, "out=no/a.json"),
        (["text", "out=a.json", "dataset_type=synthetic"], 2, "dataset_type=synthetic"),
        (["text", "out=a.json", "max_corrupted_records=x"], 2, "max_corrupted_records=x"),
        (["text", "out=a.json", "text_column=none"], 3, "text_column=none"),
        (["bad.txt", "out=a.json"], 3, "bad.txt byte 1"),
        (["a.txt.gz", "out=a.json"], 3, "a.txt.gz"),
        (["empty.txt", "out=a.json"], 3, "SOURCE=empty.txt"),
        (["shards", "out=a.json"], 3, "SOURCE=shards"),
        (["nowhere", "out=a.json"], 3, "SOURCE=nowhere"),
    ],
)
def test_an_argument_that_cannot_work_is_named(
    arguments, code, named, source, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, data in (("bad.txt", b"a\xffb"), ("a.txt.gz", b"?"), ("empty.txt", b"")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "shards").mkdir()
    for name in (shards.MANIFEST, shards.OFFSETS):
        (tmp_path / "shards" / name).touch()
    assert program.main(arguments) == code
    line = capsys.readouterr().err.strip()
    assert named in line and "\n" not in line
    assert not (tmp_path / "a.json").exists()
