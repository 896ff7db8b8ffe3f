"""The files beside a model's weights: those that an import keeps, a tokenizer's in an export."""

import itertools
import json
import pathlib
from typing import Any

from maxdiloco.data.tokenizer import FILES, ByteTokenizer, SentencePieceTokenizer
from maxdiloco.data.tokenizer_base import Tokenizer, meaning

_JSON = FILES["huggingface"]
_FILES = {
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
}  # fmt: skip
# Beginnings of the names of files that say who may do what with the model, in any case.
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")


def copy(source: pathlib.Path, target: pathlib.Path, *, licence_alone: bool = False) -> None:
    """Copy what a folder has of them, but config.json. target: a folder, made if there is none.

    licence_alone: without what belongs to the tokenizer. Raises OSError.
    """
    target.mkdir(exist_ok=True)
    names = set() if licence_alone else _FILES
    paths = [
        path
        for path in sorted(source.iterdir())
        if path.is_file() and (path.name in names or path.name.lower().startswith(_LICENCES))
    ]
    if not licence_alone:
        paths += sorted(source.glob("additional_chat_templates/*.jinja"))
    for path in paths:
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())


def write(
    folder: pathlib.Path, tokenizer: Tokenizer | None, max_length: int, like: pathlib.Path | None
) -> None:
    """Write generation_config.json and the tokenizer. like: folder with files to copy, or None.

    tokenizer: None where tokens are numbers, not text. max_length: of the model [tokens]. Of a
    folder with another tokenizer the licence alone is copied. Raises OSError.
    """
    same = like is not None and has_tokenizer(like, tokenizer)
    if like is not None:
        copy(like, folder, licence_alone=not same)
    if same:
        return
    (folder / "generation_config.json").write_text(json.dumps(ends(tokenizer), indent=2) + "\n")
    if tokenizer is None:
        return
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / FILES["sentencepiece"]).write_bytes(tokenizer.content)
        return
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    model = _of_bytes(tokenizer) if is_bytes else json.loads(tokenizer.content)
    names = {token["id"]: token["content"] for token in model["added_tokens"]}
    if tokenizer.bos is not None:
        model["post_processor"] = _starting(names[tokenizer.bos], tokenizer.bos, model)
    (folder / _JSON).write_text(json.dumps(model, ensure_ascii=False, indent=1) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        if token is not None:
            settings[name] = names[token]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def has_tokenizer(like: pathlib.Path, tokenizer: Tokenizer | None) -> bool:
    """Whether a folder has this tokenizer; tokens that are no text have any. Raises OSError."""
    if tokenizer is None:
        return True
    if isinstance(tokenizer, ByteTokenizer):
        return not any((like / name).is_file() for name in FILES.values())
    path = like / FILES[tokenizer.kind]
    return path.is_file() and meaning(path.read_bytes()) == meaning(tokenizer.content)


def ends(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The tokens around a document, as config.json and generation_config.json name them."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    # A document of bytes ends where the next one starts.
    end = tokenizer.bos if isinstance(tokenizer, ByteTokenizer) else tokenizer.eos
    return {"bos_token_id": tokenizer.bos, "eos_token_id": end}


def _starting(name: str, token: int, model: dict[str, Any]) -> dict[str, Any]:
    """A post-processor that puts a token before a text, after the one that the model has."""
    special = {"SpecialToken": {"id": name, "type_id": 0}}
    text, second = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
    start = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, second],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }
    before = model.get("post_processor")
    if before is None or before["type"] == "TemplateProcessing":
        return start
    return {"type": "Sequence", "processors": [before, start]}


def _of_bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """A byte-level BPE without merges: its tokens are the bytes."""
    name = "<|document|>"
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": tokenizer.bos, "content": name, **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **level},
        "model": {
            "type": "BPE",
            "vocab": _byte_letters() | {name: tokenizer.bos},
            "merges": [],
        },
    }


def _byte_letters() -> dict[str, int]:
    """{letter that byte-level BPE writes for a byte (GPT-2): byte}: itself where it can be read."""
    shown = [range(ord(first), ord(last) + 1) for first, last in ("!~", "¡¬", "®ÿ")]
    hidden = itertools.count(256)
    return {
        chr(byte if any(byte in part for part in shown) else next(hidden)): byte
        for byte in range(256)
    }
