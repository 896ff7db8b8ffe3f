"""The texts of every kind of source, whole, in order, wherever its files are cut."""

import functools
import gzip
import json
import os
import pickle
import subprocess
import sys

import pytest
from data.shards_on_disk import open_source

from maxdiloco.data import corpus
from maxdiloco.data.sources import files
from maxdiloco.errors import DataError

TEXTS = ["one", "zwei ü\r\n", "three \0 \U0001f600", "", "x" * 700, "six\nlines\nof\n\ntext"]


def lines(texts=TEXTS):
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def compressed(data, codec):
    pyarrow = pytest.importorskip("pyarrow")
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, codec) as file:
        file.write(data)
    return stream.getvalue().to_pybytes()


def parquet(path, columns=None, rows=2):
    pyarrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns or {"id": list(range(len(TEXTS))), "text": TEXTS})
    tables.write_table(table, path, row_group_size=rows)
    return path


def arrayrecord(path, texts=TEXTS, group_size=2):
    """Records of tf.train.Example, encoded by hand: 0x0a is field 1 with its length."""

    def field(number, data):
        size = len(data)
        varint = b""
        while size >= 128:
            varint, size = varint + bytes([size % 128 + 128]), size // 128
        return bytes([number * 8 + 2]) + varint + bytes([size]) + data

    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), f"group_size:{group_size}")
    for text in texts:
        feature = field(1, field(1, text if isinstance(text, bytes) else text.encode()))
        entry = field(1, field(1, b"text") + field(2, feature))
        number = field(1, field(1, b"id") + field(2, field(3, b"\x0a\x01\x07")))
        writer.write(field(1, number + entry))
    writer.close()
    return path


def items(kind, path, *, limit=1 << 20, column="text", damaged=None):
    """What is read, each span by a copy of the source, as other processes have it."""
    source = pickle.loads(pickle.dumps(open_source(path, kind, column)))
    skip = functools.partial(corpus.skip, damaged, 9)
    return [text for span in source.spans(limit) for text in source.read(span, skip)]


def documents(found):
    whole = []
    for item in found:
        if item.begins:
            whole.append("")
        whole[-1] += item.text
    return whole


@pytest.mark.parametrize("limit", [1, 7, 50, 1 << 20])
@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "arrayrecord", "hf"])
def test_every_source_gives_each_document_once_however_cut(tmp_path, kind, limit):
    """The empty document has no tokens and is left out. hf reads a folder of JSON lines.

    An ArrayRecord file is padded to 64 KiB, and a reader is opened for each span, so its spans are
    longer: of 6 records, from a fifteenth of one to all of them.
    """
    data, path = lines(), tmp_path / f"a.jsonl.{kind}"
    if kind == "parquet":
        path = parquet(tmp_path / "a.parquet")
    elif kind == "arrayrecord":
        path = arrayrecord(tmp_path / "a.arrayrecord")
        limit *= path.stat().st_size // 90
    elif kind == "hf":
        path = stored(tmp_path, {"text": TEXTS})
    elif kind == "jsonl":
        path = tmp_path / "a.jsonl"
        path.write_bytes(data)
    else:
        half = len(lines(TEXTS[:3]))  # two members, as two files put end to end
        codec = {"gz": "gzip", "zst": "zstd"}[kind]
        path.write_bytes(compressed(data[:half], codec) + compressed(data[half:], codec))
    dataset_type = kind if kind in ("parquet", "arrayrecord", "hf") else "text"
    assert documents(items(dataset_type, path, limit=limit)) == [t for t in TEXTS if t]


def stored(folder, columns):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "stored")
    return folder / "stored"


@pytest.mark.parametrize("limit", [1, 3, 10, 1 << 20])
def test_a_text_file_is_one_document_wherever_it_is_cut(tmp_path, monkeypatch, limit):
    """Cut at line ends, and between characters in a line that has none for long."""
    monkeypatch.setattr(files, "PIECE", 8)
    texts = {"1.txt": "a\nbb\n\nccc\n", "2.txt": "\u00fc\U0001f600" * 20, "3.txt": "", "4.txt": "x"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert documents(items("text", tmp_path, limit=limit)) == [t for t in texts.values() if t]
    assert corpus.PIECE == 1 << 20, "only the reader's was changed"
    # Compressed lines lie beside text; a file of another kind has to be named.
    (tmp_path / "5.jsonl.gz").write_bytes(gzip.compress(lines(["packed"])))
    (tmp_path / "6.csv").write_bytes(b"not searched for")
    assert documents(items("text", tmp_path, limit=limit))[-2:] == ["x", "packed"]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_truncated_compressed_file_is_one_damaged_record(tmp_path, codec):
    """What was read before it stays, and the place is named."""
    path = tmp_path / f"a.jsonl.{'gz' if codec == 'gzip' else 'zst'}"
    texts = [os.urandom(500).hex() for _ in range(2000)]
    whole = compressed(lines(texts), codec)
    path.write_bytes(whole)
    assert documents(items("text", path)) == texts
    path.write_bytes(whole[: len(whole) // 2])
    before = items("text", path, damaged=(damaged := []))
    assert before and documents(before) == texts[: len(before)]
    ((where, _),) = damaged
    assert where.startswith(f"{path} after byte ")


def test_a_damaged_row_group_costs_no_other(tmp_path):
    """The second one, in the middle of the file. Without its footer none can be found."""
    texts = [os.urandom(2000).hex() for _ in range(30)]
    path = parquet(tmp_path / "a.parquet", {"text": texts}, rows=10)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = b"\xff" * 400
    path.write_bytes(data)
    kept = documents(items("parquet", path, limit=1000, damaged=(damaged := [])))
    assert damaged and {*texts[:10], *texts[20:]} <= set(kept)
    path.write_bytes(data[:-9])
    assert items("parquet", path, limit=100, damaged=(damaged := [])) == []
    assert [where for where, _ in damaged] == [str(path)]


def test_records_that_hold_no_text_are_damaged(tmp_path):
    """Another feature, bytes that are not UTF-8, and a file that is cut; each is named once."""
    path = arrayrecord(tmp_path / "a.arrayrecord", ["one", b"\xff", "three"])
    assert documents(items("arrayrecord", path, damaged=(damaged := []))) == ["one", "three"]
    assert [where for where, _ in damaged] == [f"{path} record 1"]
    items("arrayrecord", path, column="id", damaged=(damaged := []))
    assert len(damaged) == 3 and "text_column=id" in damaged[0][1]
    path.write_bytes(path.read_bytes()[:-100])
    assert items("arrayrecord", path, damaged=(damaged := [])) == []
    assert [where for where, _ in damaged] == [str(path)]


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_column_that_is_missing_or_no_text_is_refused(tmp_path, kind):
    """Whatever number of damaged records is allowed: no row would be left."""
    if kind == "hf":
        path = stored(tmp_path, {"id": [1], "text": ["x"]})
    else:
        path = parquet(tmp_path / "a.parquet")
    for column, found in (("body", "id, text"), ("id", "int64")):
        with pytest.raises(DataError, match=f"^text_column={column} .*{found}"):
            items(kind, path, column=column)


def test_a_file_that_has_changed_since_it_was_listed_is_refused(tmp_path):
    """Its spans would no longer be what they were."""
    (tmp_path / "a.txt").write_bytes(b"abc")
    source = open_source(tmp_path)
    for data in (b"abcd", b"xyz"):
        (tmp_path / "a.txt").write_bytes(data)
        os.utime(tmp_path / "a.txt", ns=(0, source.stamps[0].version + 1))
        with pytest.raises(DataError, match=r"a\.txt has changed"):
            list(source.read(next(source.spans(10)), None))


def test_a_data_set_of_the_hub_without_a_network_is_named(tmp_path):
    """In a separate process, because the package reads HF_HUB_OFFLINE when it is imported."""
    pytest.importorskip("datasets")
    code = (
        "from maxdiloco.data.sources.tables import open_hub\n"
        "open_hub('someone/some-text', 'dataset_path', 'text')\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "DataError: dataset_path=someone/some-text " in done.stderr
