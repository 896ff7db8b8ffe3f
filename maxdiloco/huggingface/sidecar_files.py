"""The files beside a model's weights: those that an import keeps, a tokenizer's in an export."""

import json
import pathlib
import types
from typing import Any

from maxdiloco import small_files
from maxdiloco.data.tokenizer import (
    FILES,
    MOST_BYTES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    package,
)
from maxdiloco.data.tokenizer_base import Tokenizer, meaning
from maxdiloco.huggingface import folders
from maxdiloco.huggingface.folders import Folder

_JSON = FILES["huggingface"]
_FILES = {
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
}  # fmt: skip
# Beginnings of the names of files that say who may do what with the model, in any case.
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")


def copy(source: Folder, target: pathlib.Path, *, licence_alone: bool = False) -> None:
    """Copy what a folder has of them, but config.json. target: a folder, made if there is none.

    licence_alone: without what belongs to the tokenizer. Raises CheckpointError where one cannot be
    read, OSError where it cannot be written.
    """
    target.mkdir(exist_ok=True)
    names = set() if licence_alone else _FILES
    with folders.reading(source):
        paths = [
            path
            for path in sorted(source.iterdir())
            if (path.name in names or path.name.lower().startswith(_LICENCES)) and path.is_file()
        ]
        if not licence_alone:
            paths += sorted((source / "additional_chat_templates").glob("*.jinja"))
    for path in paths:
        with folders.reading(path):
            content = small_files.read_bytes(path, MOST_BYTES)
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)


def write(
    folder: pathlib.Path, tokenizer: Tokenizer | None, max_length: int, like: Folder | None
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
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / FILES["sentencepiece"]).write_bytes(tokenizer.content)
        settings["add_bos_token"] = tokenizer.bos is not None
        name_of = tokenizer.engine.id_to_piece
    else:
        engine = _starting_texts(tokenizer)
        engine.save(str(folder / _JSON))
        name_of = engine.id_to_token
    for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        if token is not None:
            settings[name] = name_of(token)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _starting_texts(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> Any:
    """The engine of a tokenizer.json that puts bos before a text, and nothing else around it."""
    module = package("huggingface")
    if isinstance(tokenizer, ByteTokenizer):
        engine = _of_bytes(module, tokenizer.bos)
    else:
        engine = module.Tokenizer.from_buffer(tokenizer.content)
    first = [] if tokenizer.bos is None else [engine.id_to_token(tokenizer.bos)]
    engine.post_processor = module.processors.TemplateProcessing(
        single=[*first, "$A"],
        pair=[*first, "$A", "$B"],
        special_tokens=[(name, tokenizer.bos) for name in first],
    )
    return engine


def has_tokenizer(like: Folder, tokenizer: Tokenizer | None) -> bool:
    """Whether a folder has this tokenizer; tokens that are no text have any. Raises OSError."""
    if tokenizer is None:
        return True
    if isinstance(tokenizer, ByteTokenizer):
        return not any((like / name).is_file() for name in FILES.values())
    path = like / FILES[tokenizer.kind]
    if not path.is_file():
        return False
    return meaning(small_files.read_bytes(path, MOST_BYTES)) == meaning(tokenizer.content)


def ends(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The tokens around a document, as config.json and generation_config.json name them."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    # A document of bytes ends where the next one starts.
    end = tokenizer.bos if isinstance(tokenizer, ByteTokenizer) else tokenizer.eos
    return {"bos_token_id": tokenizer.bos, "eos_token_id": end}


def _of_bytes(module: types.ModuleType, bos: int) -> Any:
    """A byte-level BPE without merges: its tokens are the bytes, of which each has a letter.

    A byte that can be read is its own letter (GPT-2); the others have those from 256 on.
    """
    letters = sorted(module.pre_tokenizers.ByteLevel.alphabet())
    hidden = (byte for byte in range(256) if chr(byte) not in letters)
    vocab = {letter: ord(letter) if ord(letter) < 256 else next(hidden) for letter in letters}
    name = "<|document|>"
    engine = module.Tokenizer(module.models.BPE(vocab | {name: bos}, []))
    level = dict(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = module.pre_tokenizers.ByteLevel(**level)
    engine.decoder = module.decoders.ByteLevel()
    engine.add_special_tokens([name])
    return engine
