"""python -m maxdiloco.prepare: the same folder after kills, and runs that train on it."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from data.shards_on_disk import open_dataset
from run import names_key, refused

from maxdiloco import prepare, tokenizer
from maxdiloco.config import config
from maxdiloco.data import shards
from maxdiloco.data.corpus import Stamp, stamp
from maxdiloco.data.prepared import prepare as preparing
from maxdiloco.data.sources.files import Files
from maxdiloco.data.tokenizer import ByteTokenizer
from maxdiloco.errors import DataError, LostPeerError
from maxdiloco.run import data as run_data
from maxdiloco.run import settings as run_settings
from maxdiloco.run import tokenizer as run_tokenizer

WAIT_S = 300  # far above what a command takes


def prepared(cfg, say=print):
    return run_data.prepare_sources(
        run_settings.read_data(cfg), run_tokenizer.open_tokenizer(cfg), say
    )


def command(*arguments):
    return [sys.executable, "-m", "maxdiloco.prepare", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=WAIT_S)


def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path):
    """12 MB of JSON lines, which are tokenised in 12 parts: one process, undisturbed, against two
    that are killed with SIGKILL, as soon as there is one part and again when there are more, and
    then left to end. Before the first kill a second preparation of the folder is refused; the lock
    is the kernel's, and goes with the process."""
    lines, quiet, killed = tmp_path / "a.jsonl", tmp_path / "quiet", tmp_path / "killed"
    words = [f"word{number}" for number in range(500)]
    draw = random.Random(0)
    with lines.open("w") as file:
        for _ in range(1200):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=1300))}) + "\n")
    done = run(lines, f"out={quiet}", "part_mb=1", "processes=1")
    assert done.returncode == 0, done.stderr
    kills = 0
    nothing = subprocess.DEVNULL
    two = [lines, f"out={killed}", "part_mb=1", "processes=2"]
    for parts in (1, 4, 8):
        with subprocess.Popen(command(*two), stdout=nothing, stderr=nothing) as process:
            deadline = time.monotonic() + WAIT_S
            while process.poll() is None and len(list(killed.glob("part-*.json"))) < parts:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            kills += process.poll() is None
            if parts == 1:
                process.send_signal(signal.SIGSTOP)
                second = run(*two[:3])
            process.send_signal(signal.SIGKILL)
    assert kills, "the first kill comes long before the end"
    assert second.returncode == 2
    assert names_key(second.stderr, "out")
    done = run(*two)
    assert done.returncode == 0, done.stderr
    assert "parts were done before" in done.stdout or "nothing to do" in done.stdout
    found, wanted = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (killed, quiet)
    )
    same = found == wanted  # what pytest would say of megabytes takes minutes
    assert same and len(found) > 12
    assert "nothing to do" in run(*two[:3]).stdout
    assert "12 parts: good" in run(killed, "check=true").stdout


class Fatal(ByteTokenizer):
    def encode_all(self, texts):
        os._exit(7)


def test_a_killed_worker_ends_prepare_and_the_next_start_resumes(tmp_path):
    """As the kernel does when memory runs out. The part is made again."""
    (tmp_path / "a.txt").write_text("text")
    path = str(tmp_path / "a.txt")
    source = Files((path,), (stamp(path),), "")
    work, out = preparing.Work(source, Fatal(), "a.txt", processes=1), str(tmp_path / "out")
    with pytest.raises(LostPeerError, match="processes=1"):
        preparing.prepare(work, out, print)
    work = dataclasses.replace(work, tokenizer=ByteTokenizer())
    preparing.prepare(work, out, print)
    assert shards.open_shards(out, "out").lengths.tolist() == [5]


@pytest.fixture
def parquet(tmp_path):
    """Flags of a parquet file with text in the column body."""
    pyarrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    texts = [f"text number {number} of them, {'and so on ' * 9}" for number in range(60)]
    tables.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet")
    return ["dataset_type=parquet", f"dataset_path={tmp_path}", "text_column=body"]


def test_a_source_is_tokenised_once(tmp_path, parquet):
    """The second start finds it; and it has the contents that prepare makes of the same source."""
    keys = [*parquet, f"base_output_directory={tmp_path}/runs", "max_target_length=32"]
    cfg, said = config.load(keys, {}), []
    first = prepared(cfg, said.append)
    assert said[0].startswith("tokenising dataset_path=")
    said.clear()
    assert prepared(cfg, said.append) == first
    assert [line.rpartition(" is ")[2] for line in said] == ["prepared: nothing to do"]
    assert prepare.main([str(tmp_path), f"out={tmp_path}/shards", *parquet[::2]]) == 0
    stored = ["dataset_type=arrayrecord", f"dataset_path={tmp_path}/shards"]
    data = open_dataset(cfg, split="train")
    same = open_dataset(config.load([*keys[3:], *stored], {}), split="train")
    assert data.contents == same.contents


@pytest.fixture
def mixed(tmp_path, parquet, capsys):
    """Argv of a mixture of a prepared folder, a parquet file, lines whose text is in another field,
    and a text file, all read by a tokenizer of one's own."""
    (tmp_path / "a.txt").write_text("one two three. " * 400)
    (tmp_path / "b.jsonl").write_text(json.dumps({"content": "four five six. " * 400}) + "\n")
    own = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path}/tok.json"]
    text = str(tmp_path / "a.txt")
    assert tokenizer.main([text, f"out={tmp_path}/tok.json", "vocab_size=280"]) == 0
    assert prepare.main([text, f"out={tmp_path}/shards", *own]) == 0
    sources = [
        f"{{path: {tmp_path}/shards, name: stored}}",
        f"{{path: {tmp_path}/a.parquet, name: table, dataset_type: parquet, text_column: body}}",
        f"{{path: {tmp_path}/b.jsonl, name: lines, text_column: content}}",
        f"{{path: {text}, name: plain}}",
    ]
    capsys.readouterr()
    runs = f"base_output_directory={tmp_path}/runs"
    return [*own, runs, "max_target_length=16", f"dataset_mixture=[{', '.join(sources)}]"]


@pytest.mark.parametrize("kind", ["text", "arrayrecord"])
def test_a_mixture_may_have_sources_of_every_kind(mixed, kind):
    """A folder of shards is recognised, and dataset_type=arrayrecord goes with a mixture."""
    argv = [*mixed, f"dataset_type={kind}", "vocab_size=auto"]
    if kind == "arrayrecord":
        for of in ("text_column: content", "name: plain"):
            argv = [argument.replace(of, f"{of}, dataset_type: text") for argument in argv]
    cfg = run_tokenizer.resolve_vocab_size(config.load(argv, {}))
    found = prepared(cfg)
    names = sorted(os.path.basename(path) for _, path, _ in found)
    assert names == ["a.parquet", "a.txt", "b.jsonl"]
    data = open_dataset(cfg, split="train")
    by_name = dict(zip(data.names, data.sources, strict=True))
    assert by_name["stored"].windows.contents() == by_name["plain"].windows.contents()
    position = data.first_position(2, 4)
    assert data.read(position, 1, *np.ix_(range(2), range(4)))["tokens"].max() < 280
    assert open_dataset(cfg, split="eval").num_windows >= 4


def test_a_source_prepared_with_another_tokenizer_is_refused(mixed):
    """By the name of the source."""
    for argv, name in (
        ([*mixed[2:3], *mixed[4:]], "huggingface"),
        ([*mixed, "vocab_size=384", "add_eos=false"], "add_eos=true"),
    ):
        cfg = config.load(argv, {})
        with pytest.raises(DataError, match=f"^dataset_mixture, source stored: .*{name}"):
            open_dataset(cfg, split="train")


def test_a_small_source_has_a_part_for_every_core(tmp_path, capsys):
    """20 MB in 20 parts of 1 MB, 40 MB in 32, and 64 MB a part from 2 GB on."""
    (tmp_path / "a.txt").write_bytes(b"one two three. " * 170_000)
    assert prepare.main([str(tmp_path / "a.txt"), f"out={tmp_path}/out"]) == 0
    assert "2.5 MB in 3 parts" in capsys.readouterr().out
    files = [Files(("a",), (Stamp(mb << 20, 0),), "text") for mb in (0, 20, 40, 2048, 9999)]
    assert [preparing.part_bytes_of(each) / 2**20 for each in files] == [1, 1, 1.25, 64, 64]


def test_one_path_may_be_two_sources_of_two_kinds(tmp_path, parquet):
    """A folder with lines and tables: each source has its own, and its own field."""
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "four five six. " * 400}) + "\n")
    sources = [
        f"{{path: {tmp_path}, name: lines}}",
        f"{{path: {tmp_path}, name: table, dataset_type: parquet, text_column: body}}",
    ]
    argv = [f"base_output_directory={tmp_path}/runs", "max_target_length=16"]
    cfg = config.load([*argv, f"dataset_mixture=[{', '.join(sources)}]"], {})
    data = open_dataset(cfg, split="train")
    sizes = [len(source.windows.documents.lengths) for source in data.sources]
    assert (data.names, sizes) == (("lines", "table"), [1, 60])


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        ("out=x", 2, "SOURCE"),
        ("a.txt", 2, "out"),
        ("a.txt out=x processes=-1", 2, "processes"),
        ("a.txt out=x dataset_type=synthetic", 2, "dataset_type"),
        ("shards out=x", 3, "SOURCE"),
        ("a.txt check=true", 3, "SOURCE"),
        ("not_utf8.txt out=x", 3, "not_utf8.txt"),
    ],
)
def test_refused_arguments_of_prepare_are_named(tmp_path, monkeypatch, arguments, code, key):
    """Exit code 2 for options, 3 for data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "not_utf8.txt").write_bytes(b"a\xffb")
    (tmp_path / "shards").mkdir()
    for name in (shards.MANIFEST, shards.OFFSETS):
        (tmp_path / "shards" / name).touch()
    found, line = refused(prepare.main, *arguments.split())
    assert found == code and names_key(line, key)
