"""Windows of a folder of shards are those of the text it was made from."""

import errno
import fcntl
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grain
import numpy as np
import pytest
from data.shards_on_disk import TEXTS, make, open_dataset, open_source, open_text
from data.tokenizers_on_disk import byte_level_bpe

from maxdiloco.data import shards, tokenizer
from maxdiloco.data.prepared import part
from maxdiloco.data.prepared.prepare import Work, prepare
from maxdiloco.errors import ConfigError, DataError


@pytest.fixture
def prepared(settings, tmp_path):
    """The config of a run that reads a folder of shards."""
    shards_of = {"dataset_type": "arrayrecord"}
    return lambda name, **keys: settings(dataset_path=str(tmp_path / name), **shards_of | keys)


@pytest.mark.parametrize("block", [5, 64, 8192])
@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
def test_windows_of_shards_are_those_of_the_text(
    prepared, source, tmp_path, monkeypatch, block, part_bytes
):
    """Windows of 16 tokens of the joined documents, in parts and blocks of any size; a text file of
    3,600 bytes continues over several parts. The last tokens, fewer than 16, are left out."""
    with monkeypatch.context() as patch:
        patch.setattr(shards, "BLOCK", block)
        make(source, tmp_path / "out", part_bytes=part_bytes)
    windows, _ = open_text(prepared("out", eval_dataset_path="unused", max_target_length=16))
    stream = [token for text in 2 * TEXTS for token in (256, *text.encode())]
    expected = np.array(stream[: len(stream) // 16 * 16]).reshape(-1, 16)
    assert windows.documents.lengths.tolist() == [1 + len(t.encode()) for t in 2 * TEXTS]
    assert windows.num_windows == len(expected) > 100
    numbers = np.random.default_rng(0).permutation(len(expected))
    np.testing.assert_array_equal(windows.read(numbers)[0], expected[numbers])


def test_grain_reads_the_windows(prepared, source, tmp_path):
    """They are a data source of Grain, so that its MapDataset reads the same."""
    make(source, tmp_path / "out")
    windows, _ = open_text(prepared("out", eval_dataset_path="unused"))
    assert isinstance(windows, grain.sources.RandomAccessDataSource)
    dataset = grain.MapDataset.source(windows)
    tokens, segments = windows.read(np.array([7, 0]))
    assert len(dataset) == windows.num_windows
    for row, window in enumerate((7, 0)):
        np.testing.assert_array_equal(dataset[window]["tokens"], tokens[row])
        np.testing.assert_array_equal(dataset[window]["segment_ids"], segments[row])


def test_any_piece_is_read_and_a_copy_opens_its_own_files(source, tmp_path, monkeypatch):
    """Each piece of the longest document, through a pickle. The table of a large vocabulary is
    wider: token 65,536 needs four bytes."""
    documents = pickle.loads(pickle.dumps(make(source, tmp_path / "out")))
    number = int(np.argmax(documents.lengths))
    (whole,) = documents.read([(number, 0, int(documents.lengths[number]))])
    assert bytes(whole[1:].astype(np.uint8)).decode() == TEXTS[3]
    pieces = [(number, begin, begin + 10) for begin in range(0, len(whole) - 10, 7)]
    for (_, begin, end), found in zip(pieces, documents.read(pieces), strict=True):
        assert found.tolist() == whole[begin:end].tolist()
    assert documents.manifest.dtype == "<u2"
    wide = make(source, tmp_path / "wide", tokens=tokenizer.ByteTokenizer(vocab_size=65537))
    assert wide.manifest.dtype == "<u4"
    assert [t.tolist() for t in wide.read([(0, 0, 3)])] == [[256, 97, 98]]
    # A long line is one document in pieces, here of 8 characters; document_start comes once.
    monkeypatch.setattr(part, "PIECE", 8)
    long = "ab\ncd" * 11
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}) + '\n{"text": "z"}\n')
    documents = make(tmp_path / "a.jsonl", tmp_path / "long")
    assert documents.lengths.tolist() == [1 + len(long), 2]
    (whole,) = documents.read([(0, 0, 1 + len(long))])
    assert whole.tolist() == [256, *long.encode()]


def test_equal_files_are_held_out_whole_and_unequal_ones_divided(prepared, tmp_path):
    """File 0 of the unequal 20 has a third of the tokens, an empty file none: 6014 tokens are 1503
    windows of 4."""

    def split(name, sizes):
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / name / f"{number:02d}.txt").write_text(chr(97 + number) * size)
        documents = make(tmp_path / name, tmp_path / f"{name}.out", part_bytes=300)
        assert documents.sizes() == [size + (size > 0) for size in sizes]
        parts = [open_text(prepared(f"{name}.out"), split)[0] for split in ("train", "eval")]
        return [part.read(np.arange(part.num_windows))[0] for part in parts]

    train, held_out = split("equal", [7] * 21)
    assert {*held_out.flat} == {256, ord("a"), ord("u")}
    assert {*train.flat} == {256, *range(ord("b"), ord("u"))}
    assert [len(part) for part in split("unequal", [1999, 0, *[222] * 18])] == [1428, 75]


def test_contents_tell_the_tokens_and_the_split_apart(prepared, source, tmp_path):
    make(source, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (source / "1.txt").write_text("z")
    make(source, tmp_path / "three")
    one, two, three = (open_dataset(prepared(name)).contents for name in ("one", "two", "three"))
    held_out = open_dataset(prepared("one"), "eval").contents
    assert one == two and len({one, three, held_out}) == 3


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path):
    """The lengths of two documents: their number and sum stay."""
    offsets = np.load(path)
    offsets[1] = offsets[2] - offsets[1]
    np.save(path, offsets)


def zero(path):
    """As after a power cut: of the right size, and empty."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", os.remove),
        ("manifest.json", flip),
        ("offsets.npy", cut),
        ("offsets.npy", swap),
        ("part-00000.bin", flip),
        ("part-00003.bin", zero),
        ("part-00000.bin", cut),
        ("part-00001.bin", os.remove),
    ],
)
def test_a_damaged_file_of_shards_is_named_when_it_is_opened(source, tmp_path, name, damage):
    documents = make(source, tmp_path / "out")
    shards.check_contents(documents)
    damage(tmp_path / "out" / name)
    named = re.escape(name)
    if damage is cut and name.startswith("part"):  # noticed before any record is read
        named += f" .*{(tmp_path / 'out' / name).stat().st_size} bytes"
    with pytest.raises(DataError, match=named):
        shards.open_shards(str(tmp_path / "out"), "dataset_path")
    if damage is flip and name.startswith("part"):  # after the start, which looks at some
        with pytest.raises(DataError, match=re.escape(name)):
            shards.check_contents(documents)
        with pytest.raises(DataError, match=f"{re.escape(name)} block 0"):
            list(documents.read([(0, 0, 3)]))


@pytest.fixture
def two_folders(tmp_path):
    """Shards of two texts, with equal manifests but for hashes: sizes of files and tokens agree."""
    for number, letters in enumerate(("ab", "cd")):
        (tmp_path / f"{number}.txt").write_text(letters * 50_000)
        make(tmp_path / f"{number}.txt", tmp_path / f"{number}.out", part_bytes=50_000)
    ours, theirs = (sorted((tmp_path / f"{n}.out").glob("part-*.bin")) for n in (0, 1))
    assert len(ours) == 2
    assert [path.stat().st_size for path in ours] == [path.stat().st_size for path in theirs]
    return ours, theirs


def test_a_replaced_part_is_refused_at_a_start(two_folders):
    ours, theirs = two_folders
    folder = ours[0].parent
    assert shards.open_shards(str(folder), "dataset_path")
    os.replace(theirs[1], ours[1])
    with pytest.raises(DataError, match=f"dataset_path={folder}.*{ours[1].name}"):
        shards.open_shards(str(folder), "dataset_path")


@pytest.mark.parametrize("how", ["rename", "overwrite"])
def test_a_part_that_is_replaced_while_it_is_read_is_refused(two_folders, how):
    ours, theirs = two_folders
    documents = shards.open_shards(str(ours[0].parent), "dataset_path")
    begin, count = 70_000, 8192  # in part 1, neither its first nor its last block
    (before,) = documents.read([(0, begin, begin + count)])
    assert len(before) == count
    copy = pickle.loads(pickle.dumps(documents))  # as a worker process that opens its first reader
    if how == "rename":
        os.replace(theirs[1], ours[1])
    else:
        ours[1].write_bytes(theirs[1].read_bytes())
    (of_part_0,) = copy.read([(0, 10, 20)])
    assert len(of_part_0) == 10
    with pytest.raises(DataError, match=f"dataset_path={ours[0].parent}.*{ours[1].name}"):
        list(copy.read([(0, begin, begin + count)]))


def test_damaged_records_are_counted_over_all_parts_and_named(source, tmp_path):
    """One more than is allowed is an error that names the last: of three, in two parts."""
    fine = json.dumps({"text": "fine " * 100})
    (source / "a.jsonl").write_text(f'{{no\n{{"id": 2}}\n{fine}\n')
    (source / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"b\.txt byte 3: .*max_corrupted_records=2"):
        make(source, tmp_path / "out", allowed=2, part_bytes=100)
    documents = make(source, tmp_path / "out", allowed=3, part_bytes=100)
    places = [os.path.basename(where) for where, _ in documents.manifest.damaged]
    assert places == ["a.jsonl byte 0", "a.jsonl byte 4", "b.txt byte 3"]
    assert len(documents.lengths) == 2 * len(TEXTS) + 1


def test_another_folder_and_an_empty_source_are_named(source, tmp_path):
    make(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=f"out={tmp_path / 'out'} .*part_bytes"):
        make(source, tmp_path / "out", part_bytes=77)
    (source / "1.txt").write_text("changed")
    with pytest.raises(ConfigError, match=f"out={tmp_path / 'out'} .*source"):
        make(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=f"out={source} "):
        make(source, source)
    for name, content in (("a.txt", ""), ("a.jsonl", "\n\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="^source"):
            make(tmp_path / name, tmp_path / f"{name}.out")


def test_a_run_waits_for_another_that_makes_its_shards(source, tmp_path):
    """Two runs of one text that start at once; the program `prepare` fails instead."""
    out, said = tmp_path / "out", []
    out.mkdir()
    work = Work(open_source(source), tokenizer.ByteTokenizer(), "source")
    with (out / "lock").open("a") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"out={out} "):
            prepare(work, str(out), said.append)
        assert not said
        waiting = pool.submit(prepare, work, str(out), said.append, waits=True)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert len(said) == 1 and str(out) in said[0]
        file.close()
        waiting.result(60)
    assert shards.open_shards(str(out), "out") and str(out) in said[-1]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_without_locks_is_not_written(source, tmp_path, monkeypatch, number):
    """Two preparations at once could not see each other. A complete folder is read as it is."""
    documents = make(source, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    assert shards.MANIFEST in before

    def no_locks(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(DataError, match=f"^out={tmp_path / 'new'} .*{os.strerror(number)}"):
        make(source, tmp_path / "new")
    make(source, tmp_path / "out")  # complete: nothing is written
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["lock"]
    again = shards.open_shards(str(tmp_path / "out"), "dataset_path")
    assert again.lengths.tolist() == documents.lengths.tolist()


@pytest.mark.full
def test_two_preparations_at_once_make_one_folder(source, tmp_path):
    """One of two programs makes it; the other is refused, or finds it made."""
    (source / "long.txt").write_text("many words " * 200_000)
    make(source, tmp_path / "alone", part_bytes=1 << 20)
    command = [sys.executable, "-m", "maxdiloco.prepare", str(source), f"out={tmp_path / 'both'}"]
    started = [
        subprocess.Popen([*command, "part_mb=1"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [(process.communicate(timeout=300)[1], process.returncode) for process in started]
    assert 0 in [code for _, code in ends]
    for errors, code in ends:
        assert code in (0, 2) and len(errors.splitlines()) == (code != 0), errors
        assert code == 0 or f"out={tmp_path / 'both'}" in errors
    alone, both = (
        {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.*")}
        for name in ("alone", "both")
    )
    assert both == alone and len(both) > 5


OTHERS = ("work.part", "part-list.json", "part-00000.old.offsets.npy", "part-00000.json.bak.part")


def test_files_of_others_in_the_folder_stay(source, tmp_path):
    """Where it is made, where that goes on, and where it is found made; or it is refused. One that
    was killed before its first part continues: the plan was on its way to the disk."""
    out = tmp_path / "out"
    for name, content in ((OTHERS[0], ""), ("lock", "mine")):
        out.mkdir()
        (out / name).write_text(content)
        with pytest.raises(ConfigError, match=f"out={out} "):
            make(source, out)
        assert (out / name).read_text() == content
        shutil.rmtree(out)
    out.mkdir()
    (out / "lock").touch()
    (out / "source.json.0123abcd.part").write_text("{")
    make(source, out)
    assert not list(out.glob("*.part"))
    for name in ("lock", *OTHERS):
        (out / name).write_text("mine")
    for left in ("part-00007.json", "part-00000.bin.0123abcd.part"):
        (out / left).write_text("{}")
    make(source, out)
    (out / shards.MANIFEST).unlink()
    make(source, out)
    assert {(out / name).read_text() for name in ("lock", *OTHERS)} == {"mine"}
    assert {path.name for path in out.glob("*.part")} == {OTHERS[0], OTHERS[3]}
    assert {path.name for path in out.glob("part*.json")} == {"part-list.json"}


def test_shards_of_another_tokenizer_name_the_keys_that_differ(prepared, source, tmp_path):
    def bpe(size):
        (tmp_path / str(size)).mkdir()
        path = byte_level_bpe(tmp_path / str(size), vocab_size=size)
        return dict(tokenizer_type="huggingface", tokenizer_path=str(path), vocab_size=400)

    same, other = bpe(300), bpe(310)
    subwords = tokenizer.build(same | dict(add_bos=True, add_eos=True))
    make(source, tmp_path / "own")
    make(source, tmp_path / "byte", tokens=tokenizer.ByteTokenizer(bos=255))
    make(source, tmp_path / "subword", tokens=subwords)

    def opened(name, **keys):
        own = dict(add_bos=True, add_eos=True, eval_dataset_path="unused")
        return open_text(prepared(name, **own | keys))

    there = f"tokenizer_path={tmp_path / 'subword/tokenizer'}"
    assert opened("own") and opened("subword", **same)
    after = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    path = pathlib.Path(same["tokenizer_path"])
    exported = json.loads(path.read_text()) | {"post_processor": after}
    path.write_text(json.dumps(exported, indent=1))  # other bytes, the same tokens of a text
    assert opened("subword", **same)
    for name, keys, named in (
        ("byte", {}, ["bos=255"]),
        ("subword", {}, ["tokenizer_type=huggingface", "add_eos=true", there]),
        ("own", same, ["tokenizer_type=byte", "tokenizer_path= ", "add_eos=false"]),
        ("subword", same | {"add_eos": False}, ["add_eos=true"]),
        ("subword", other, ["tokenizer_type=huggingface", there]),
    ):
        with pytest.raises(DataError, match=f"^dataset_path={tmp_path / name} ") as caught:
            opened(name, **keys)
        assert all(each in str(caught.value) for each in named), caught.value
