"""python -m maxdiloco.tokenizer: a tokenizer for the user's own text."""

import json
import types

import pytest

from maxdiloco import tokenizer as program
from maxdiloco.data import corpus, tokenizer


def made(out):
    """The tokenizer that a run with out as its tokenizer_path has."""
    return tokenizer.build(
        types.SimpleNamespace(
            tokenizer_type="huggingface",
            tokenizer_path=str(out),
            vocab_size=10**6,
            add_bos=True,
            add_eos=True,
        )
    )


@pytest.fixture
def source(tmp_path):
    """A text file and a .jsonl file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat and the hat; the end é\r\n" * 200)
    (folder / "b.jsonl").write_text(json.dumps({"body": "concatenate " * 50}) + "\n")
    return folder


def test_the_same_text_gives_the_same_file_and_every_text_comes_back(source, tmp_path, capsys):
    for name in ("a.json", "b.json"):
        arguments = [str(source), f"out={tmp_path / name}", "vocab_size=280", "text_column=body"]
        assert program.main(arguments) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "280 tokens from 2 documents, 0.0 MB. Train with tokenizer_type=huggingface" in line
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    found = made(tmp_path / "a.json")
    assert (found.bos, found.eos, found.vocab_size) == (0, 1, 280)
    assert found.decode(found.encode("no such word ☃\0")) == "no such word ☃\0"
    assert len(found.encode(" the")) == 1 < len(found.encode(" qxz"))


def test_pieces_are_cut_between_characters(tmp_path, monkeypatch):
    """é has two bytes: pieces of three bytes end inside every other one. \\xff is no UTF-8."""
    monkeypatch.setattr(program, "PIECE", 3)
    (tmp_path / "a.txt").write_bytes("ééé".encode() + b"\xff")
    (tmp_path / "b.txt").write_bytes(b"abc")
    documents = corpus.read_table(corpus.find_files(str(tmp_path), "SOURCE"), column="text")
    assert list(program.texts(documents)) == ["é", "éé", "\ufffd", "abc"]


def test_a_file_that_exists_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "a.json").write_text("mine")
    assert program.main([str(source), f"out={tmp_path / 'a.json'}"]) == 2
    assert "exists already, and runs may use it. Give another name" in capsys.readouterr().err
    assert (tmp_path / "a.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["text"], 2, "out is empty: it says which file to write. Set out=tok.json."),
        (["text", "out=a.json", "vocab_size=257"], 2, "vocab_size=257 is no number of tokens. Use"),
        (["text", "out=a.json", "vocab_size=many"], 2, "vocab_size=many is no number of tokens"),
        (["text", "out=a.json", "out=b.json"], 2, "out=b.json is no option of tokenizer, or is"),
        (["text", "out=a.json", "size=3"], 2, "Use key=value, once each, with out, vocab_size"),
        (["text", "out=no/a.json"], 2, "out=no/a.json: its folder does not exist. Make it first."),
        (["nowhere", "out=a.json"], 3, "SOURCE=nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments, code, words, source, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert program.main(arguments) == code
    line = capsys.readouterr().err.strip()
    assert words in line and "\n" not in line
    assert not (tmp_path / "a.json").exists()


def test_help_names_every_option(capsys):
    assert program.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}=" in text for name in program.MEANING)
