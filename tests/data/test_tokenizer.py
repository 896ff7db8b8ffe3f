"""Tokenizers: what comes back, what is saved, what is refused."""

import json
import pickle
import sys

import huggingface_hub.constants
import numpy as np
import pytest
import tokenizers_on_disk as on_disk
from data.shards_on_disk import make
from tiers import full

from maxdiloco.data import corpus, tokenizer, tokenizer_base
from maxdiloco.errors import ConfigError, DataError

HARD = (
    "",
    "emoji \U0001f468‍\U0001f469‍\U0001f467 \U0001f600 e\u0301 \ufeff \u2047 \u4e2d",
    "a\r\nb\rc\n\n\t  d  ",
    "nul \0 \x01\x7f",
    "<|begin_of_text|> a <|end_of_text|> <s> </s> <unk> <0x41>",
    "one line " * 110_000,  # 1 MB
    "x" * 1_000_000,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tokenizers")
    on_disk.byte_level_bpe(found)
    on_disk.sentencepiece_model(found)
    return found


def build(kind, path, rows=10**6, **changed):
    keys = dict(tokenizer_type=kind, tokenizer_path=str(path), add_bos=True, add_eos=True)
    return tokenizer.build(keys | changed, rows)


@pytest.fixture(params=["byte", "huggingface", "sentencepiece"])
def each(request, folder):
    return build(request.param, folder)


def stdlib(step):
    """Text of every step-th file of the standard library."""
    paths = list(corpus.find("", "dataset_path"))[::step]
    return [open(path, "rb").read().decode("utf-8", errors="replace") for path in paths]


@pytest.mark.parametrize(
    ("texts", "least"),
    [(lambda: HARD, 5), (lambda: stdlib(60), 6), full(lambda: stdlib(1), 501)],
    ids=["hard", "some_of_the_library", "all_of_the_library"],
)
def test_every_text_comes_back_exactly(each, texts, least):
    found = texts()
    assert len(found) >= least
    for start in range(0, len(found), 50):
        batch = found[start : start + 50]
        for text, tokens in zip(batch, each.encode_all(batch), strict=True):
            assert each.decode(tokens) == text
            tokens_T = np.array(tokens, np.int32)
            assert 0 <= tokens_T.min(initial=0) and tokens_T.max(initial=0) < each.vocab_size
    assert each.decode(each.encode(found[1])) == found[1]


def test_tokens_of_bytes_are_those_of_utf_8():
    """U+00E9 is C3 A9. A sample may end within a character."""
    found = tokenizer.ByteTokenizer()
    assert found.encode("aé") == [97, 0xC3, 0xA9]
    assert (found.bos, found.vocab_size) == (256, 257)
    assert found.decode([97, 256, 98, 300, 0xC3]) == "ab\ufffd"


def test_a_sentencepiece_model_that_normalises_is_not_exact(tmp_path):
    """The positive control; U+2581, its sign for a space, never comes back."""
    path = on_disk.sentencepiece_model(tmp_path, normalization_rule_name="nmt_nfkc")
    changing = build("sentencepiece", path)
    assert changing.decode(changing.encode("ﬁne")) == "fine"
    assert changing.decode(changing.encode("\u2581")) == " "


def test_a_document_stands_between_its_start_and_end(each, tmp_path):
    """Half a surrogate pair is a question mark; numbers that are no token have no text."""
    tokens = each.encode("a b").copy()
    end = [] if each.eos is None else [each.eos]
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "a"}\n')
    whole, other = make(tmp_path / "a.jsonl", tmp_path / "out", tokens=each).read(
        [(0, 0, len(tokens) + 1 + len(end)), (1, 0, 1)]
    )
    assert (whole.tolist(), other.tolist()) == ([each.bos, *tokens, *end], [each.bos])
    assert each.decode(each.encode("a\ud800")) == "a?"
    assert [each.decode(found) for found in each.encode_all(["a\ud800"])] == ["a?"]
    assert each.decode([-1, *tokens[:1], 10**6, each.bos, *tokens[1:]]) == "a b"
    # What is saved or pickled is the same; text that reads like a special token stays text.
    each.save(tmp_path / "deep" / "copy")
    copies = tokenizer.load(tmp_path / "deep" / "copy"), pickle.loads(pickle.dumps(each))
    assert copies == (each, each) and copies[0].fingerprint == each.fingerprint
    for found in (each, *copies):
        assert found.encode("a b") == tokens
        assert each.eos is None or each.eos not in found.encode("a <|end_of_text|> </s> b")


def test_a_saved_tokenizer_and_a_single_file_are_tokenizer_paths(folder, tmp_path):
    """The tokens around a document are known without their names."""
    for kind, name in (("huggingface", "tokenizer.json"), ("sentencepiece", "tokenizer.model")):
        assert build(kind, folder / name) == build(kind, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "!", "eos_token": {"content": '"'}}))
    found = build("huggingface", folder)
    config.unlink()
    assert (found.bos, found.eos) == (2, 3)
    assert found != build("huggingface", folder)
    found.save(tmp_path)
    assert build("huggingface", tmp_path) == found


def test_fingerprints_tell_tokenizers_apart_and_are_made_once(folder, tmp_path, monkeypatch):
    of = [
        tokenizer.ByteTokenizer(),
        *(build(kind, folder) for kind in ("huggingface", "sentencepiece")),
        build("huggingface", folder, add_eos=False),
        build("huggingface", folder, add_bos=False),
        build("huggingface", on_disk.byte_level_bpe(tmp_path, vocab_size=599)),
    ]
    assert len({each.fingerprint for each in of}) == len(of)
    assert of[1].fingerprint == build("huggingface", folder).fingerprint
    # A file of 12 MB takes a third of a second: it is parsed once for a tokenizer.
    monkeypatch.setattr(tokenizer_base, "meaning", None)
    assert of[1].fingerprint


def test_a_token_around_documents_that_the_file_lacks_is_refused(folder, tmp_path):
    """Truncation and padding of the file do not apply."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    limit = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | {"truncation": limit}))
    found = build("huggingface", tmp_path)
    assert found.decode(found.encode("abcdefgh")) == "abcdefgh"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "!"}')
    with pytest.raises(ConfigError, match="^add_bos=true"):
        build("huggingface", tmp_path)
    assert build("huggingface", tmp_path, add_bos=False).eos == 2
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json "):
        build("huggingface", tmp_path)


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece"])
def test_a_tokenizer_larger_than_the_embedding_names_vocab_size(kind, folder):
    size = 257 if kind == "byte" else 600
    build(kind, folder, rows=size)
    with pytest.raises(DataError, match=f"^vocab_size={size - 1} .*vocab_size={size}"):
        build(kind, folder, rows=size - 1)


@pytest.mark.parametrize(
    ("kind", "package"), [("huggingface", "tokenizers"), ("sentencepiece", "sentencepiece")]
)
def test_a_file_that_is_not_a_tokenizer_is_named(kind, package, folder, tmp_path, monkeypatch):
    for content in (b"", b"{}", b"\xff\x00 words " * 9, b'{"model": 3}'):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.json .*tokenizer_type={kind}"):
            build(kind, tmp_path / "a.json")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"\b{package}\b"):
        build(kind, folder)


def test_a_tokenizer_of_the_hub_without_a_network_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="^tokenizer_path=org/name "):
        build("huggingface", "org/name")


def test_a_folder_without_a_saved_tokenizer_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"settings\.json"):
        tokenizer.load(folder)
    (tmp_path / "settings.json").write_text('{"tokenizer_type": "bits", "bos": 1, "eos": 2}')
    with pytest.raises(DataError, match="'bits'"):
        tokenizer.load(tmp_path)
