"""Tokenizers in buckets and on https://: those of a disk, and one line where there is none."""

import json

import faulty_store
import pytest
from data import tokenizers_on_disk as on_disk
from fake_gcs import BUCKET

from maxdiloco import tokenizer as program
from maxdiloco.data import tokenizer
from maxdiloco.errors import DataError
from maxdiloco.storage import store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer.json with a file beside it that names its tokens, and a tokenizer.model."""
    found = tmp_path_factory.mktemp("tokenizers")
    on_disk.byte_level_bpe(found)
    on_disk.sentencepiece_model(found)
    names = {"bos_token": "!", "eos_token": {"content": '"'}}
    (found / "tokenizer_config.json").write_text(json.dumps(names))
    return found


def fill(bucket, folder, name="a b/tok"):
    for path in folder.iterdir():
        bucket.put(f"{name}/{path.name}", path)


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_tokenizer_in_a_bucket_is_that_of_a_disk(cloud, folder, kind):
    """By its folder and by its file."""
    fill(store.connect(cloud, BUCKET), folder)
    here, there = tokenizer.read(kind, str(folder)), f"{cloud}://{BUCKET}/a b/tok"
    assert tokenizer.read(kind, there) == here
    assert tokenizer.read(kind, f"{there}/{tokenizer.FILES[kind]}") == here
    assert here.bos == (2 if kind == "huggingface" else here.engine.bos_id())


@pytest.fixture
def web(folder, https):
    """The folder on https://."""
    https.files |= {path.name: path.read_bytes() for path in folder.iterdir()}
    return https


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_tokenizer_on_https_is_that_of_a_disk(web, folder, kind):
    """With its tokens around a document, which the file beside it names."""
    found = tokenizer.read(kind, f"{web.url}/{tokenizer.FILES[kind]}")
    assert found == tokenizer.read(kind, str(folder))


def test_a_file_that_is_absent_closed_or_too_large_is_named(web, folder, monkeypatch):
    """tokenizer_config.json may be absent, but not out of reach: its tokens count."""
    url = f"{web.url}/tokenizer.json"
    with pytest.raises(DataError, match=f"tokenizer_path={web.url}/absent.json"):
        tokenizer.read("huggingface", f"{web.url}/absent.json")
    web.status["tokenizer.json"] = 403
    with pytest.raises(DataError, match=rf"{url} .*\(403\)"):
        tokenizer.read("huggingface", url)
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 1000)
    web.status.clear()
    for path in (url, str(folder)):
        with pytest.raises(DataError, match="tokenizer.* 1,000 bytes"):
            tokenizer.read("huggingface", path)


@pytest.mark.parametrize("kind", faulty_store.KINDS)
def test_a_fault_of_a_bucket_is_one_line_or_nothing(faulty, folder, kind):
    """Never another tokenizer: the file that names its tokens is not left out."""
    bucket, path = faulty.connect("az", BUCKET), f"az://{BUCKET}/tok"
    fill(bucket, folder, "tok")
    wanted = tokenizer.read("huggingface", str(folder))
    faulty.calls.clear()
    assert tokenizer.read("huggingface", path) == wanted
    for number in range(len(faulty.calls)):
        faulty.calls.clear()
        faulty.fault = faulty_store.at(number, kind)
        said = ""
        try:
            found = tokenizer.read("huggingface", path)
        except DataError as error:
            found, said = wanted, str(error)
        assert found == wanted, (kind, number)
        assert not said or (path in said and "\n" not in said)
        assert not said or kind in ("429", "503", "lost", "cut")


def test_the_program_writes_into_a_bucket(cloud, tmp_path, capsys):
    """The bytes of the file on a disk; one that is there stays."""
    (tmp_path / "a.txt").write_text("the cat and the hat; the end é\n" * 200)
    argv, out = [str(tmp_path / "a.txt"), "vocab_size=280"], f"{cloud}://{BUCKET}/toks/tok.json"
    assert program.main([*argv, f"out={tmp_path / 'tok.json'}"]) == 0
    assert program.main([*argv, f"out={out}"]) == 0
    assert f"tokenizer_path={out}" in capsys.readouterr().out
    bucket = store.connect(cloud, BUCKET)
    assert [entry.name for entry in bucket.list_all("")] == ["toks/tok.json"]
    assert bucket.get("toks/tok.json") == (tmp_path / "tok.json").read_bytes()
    bucket.put("toks/tok.json", b"of others")
    assert program.main([*argv, f"out={out}"]) == 2
    assert f"out={out} " in capsys.readouterr().err
    assert bucket.get("toks/tok.json") == b"of others"


@pytest.mark.parametrize("out", ["https://h/tok.json", "gs://absent/tok.json"])
def test_an_output_that_cannot_be_written_is_named(gcs, tmp_path, capsys, out):
    """Before the text is read."""
    assert program.main([str(tmp_path / "absent"), f"out={out}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"out={out}" in line
