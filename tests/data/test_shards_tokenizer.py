"""Prepared shards are read with the tokenizer that made them."""

from types import SimpleNamespace

import pytest
from data.shards_on_disk import make
from data.tokenizers_on_disk import byte_level_bpe

from maxdiloco.data import subword, text, tokenizer
from maxdiloco.errors import DataError


@pytest.mark.usefixtures("parts_here")
def test_shards_of_another_tokenizer_are_refused_and_what_differs_is_named(
    settings, source, tmp_path
):
    """The same file without its end of a document is the commonest case."""
    place = tmp_path / "one"
    place.mkdir()
    path = byte_level_bpe(place, vocab_size=300)
    subwords = subword.of_source(subword.read("huggingface", str(path)), add_bos=True, add_eos=True)
    folders = {
        "own": tokenizer.ByteTokenizer(),
        "byte": tokenizer.ByteTokenizer(document_start=255),
        "subword": subwords,
    }
    for name, tokens in folders.items():
        make(source, tmp_path / name, tokens=tokens)

    def opened(name, **keys):
        own = dict(add_bos=True, add_eos=True, eval_dataset_path="unused")
        own |= dict(dataset_type="arrayrecord", dataset_path=str(tmp_path / name))
        return text.open_text(SimpleNamespace(**vars(settings()) | own | keys), split="train")

    def refusal(name, **keys):
        with pytest.raises(DataError) as caught:
            opened(name, **keys)
        return str(caught.value).removeprefix(f"dataset_path={tmp_path / name} was tokenised ")

    assert opened("own")
    assert refusal("byte") == (
        "otherwise than with tokenizer_type=byte: with token 255 as bos, not 256. Prepare the "
        "text again."
    )
    there = f"{tmp_path / 'subword/tokenizer'}"
    assert refusal("subword") == (
        "otherwise than with tokenizer_type=byte: with tokenizer_type=huggingface, not byte, "
        f"add_eos=true. Set tokenizer_type=huggingface add_eos=true tokenizer_path={there}, or "
        "prepare the text again."
    )
    same = dict(tokenizer_type="huggingface", tokenizer_path=str(path), vocab_size=400)
    assert opened("subword", **same)
    assert refusal("own", **same) == (  # a path beside byte is refused
        "otherwise than with tokenizer_type=huggingface: with tokenizer_type=byte, not "
        "huggingface, add_eos=false. Set tokenizer_type=byte tokenizer_path= add_eos=false, or "
        "prepare the text again."
    )
    assert refusal("subword", add_eos=False, **same) == (
        "otherwise than with tokenizer_type=huggingface: with add_eos=true. Set add_eos=true, or "
        "prepare the text again."
    )
    (tmp_path / "two").mkdir()
    same["tokenizer_path"] = str(byte_level_bpe(tmp_path / "two", vocab_size=310))
    assert refusal("subword", **same) == (
        "otherwise than with tokenizer_type=huggingface: with another tokenizer.json. Set "
        f"tokenizer_path={there}, or prepare the text again."
    )
