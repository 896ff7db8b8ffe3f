"""Copy and write the files next to a model's weights: tokenizer, generation config, licence."""

import json
import pathlib
import types
from collections.abc import Callable
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
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.huggingface import folders
from maxdiloco.huggingface.folders import Folder

CONFIG = "config.json"
GENERATION = "generation_config.json"
# Files from which transformers makes a tokenizer, or reads the tokens at which generation stops.
OF_TOKENIZER = frozenset({
    CONFIG, GENERATION, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
})  # fmt: skip
_CHAT_TEMPLATES = "additional_chat_templates"
# Beginnings of the names of files with the licence of the model, in lower case.
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")


def copy_files(
    source: Folder, target: pathlib.Path, wanted: Callable[[str], bool], *, templates: bool = False
) -> None:
    """Copy some files of a folder.

    Args:
      source: the folder of a model, local or in a bucket.
      target: the folder for the copies, which is made if it does not exist.
      wanted: whether to copy a file, by its name.
      templates: whether to copy the additional chat templates, which have their own folder.

    Raises:
      CheckpointError: a file cannot be read.
      OSError: a file cannot be written.
    """
    target.mkdir(exist_ok=True)
    with folders.replace_read_error(source):
        paths = [path for path in sorted(source.iterdir()) if wanted(path.name) and path.is_file()]
        if templates:
            paths += sorted((source / _CHAT_TEMPLATES).glob("*.jinja"))
    for path in paths:
        with folders.replace_read_error(path):
            content = small_files.read_bytes(path, MOST_BYTES)
        there = target / path.relative_to(source)
        there.parent.mkdir(exist_ok=True)
        there.write_bytes(content)


def copy(source: Folder, target: pathlib.Path, *, tokenizer: bool = True) -> None:
    """Copy the licence and, with `tokenizer`, the tokenizer and generation_config.json.

    config.json is not copied. For arguments and errors see `copy_files`.
    """

    def wanted(name):
        of_tokenizer = tokenizer and name in OF_TOKENIZER and name != CONFIG
        return of_tokenizer or name.lower().startswith(_LICENCES)

    copy_files(source, target, wanted, templates=tokenizer)


def write(folder: pathlib.Path, tokenizer: Tokenizer | None, max_length: int) -> None:
    """Write generation_config.json and the files of a tokenizer.

    For this folder, transformers' AutoTokenizer adds the tokenizer's bos to a text, and no eos, so
    that a text can be continued.

    Args:
      folder: the folder of the files.
      tokenizer: the tokenizer, or None if tokens are numbers, not text.
      max_length: the longest sequence of the model, in tokens.

    Raises:
      OSError: a file cannot be written.
    """
    _write_json(folder / GENERATION, special_ids(tokenizer))
    if tokenizer is None:
        return
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    bos, eos = tokenizer.bos, tokenizer.eos
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / FILES["sentencepiece"]).write_bytes(tokenizer.content)
        settings["add_bos_token"] = bos is not None
        name_of, eos = tokenizer.engine.id_to_piece, tokenizer.named_eos
    else:
        engine = _adding_bos(tokenizer)
        engine.save(str(folder / FILES["huggingface"]))
        name_of = engine.id_to_token
        eos = eos if isinstance(tokenizer, ByteTokenizer) else tokenizer.named_eos
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None:
            settings[name] = name_of(token)
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | list[int] | None]:
    """Return the entries of config.json and generation_config.json for the special tokens."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    ends = list(tokenizer.ends)
    eos = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": tokenizer.bos, "eos_token_id": eos}


def _adding_bos(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> Any:
    """Return the engine for a tokenizer.json that adds bos, and no other token, to a text."""
    module = package("huggingface")
    if isinstance(tokenizer, ByteTokenizer):
        engine = _byte_level_bpe(module, tokenizer.bos)
    else:
        engine = module.Tokenizer.from_buffer(tokenizer.content)
    first = [] if tokenizer.bos is None else [engine.id_to_token(tokenizer.bos)]
    engine.post_processor = module.processors.TemplateProcessing(
        single=[*first, "$A"],
        pair=[*first, "$A", "$B"],
        special_tokens=[(name, tokenizer.bos) for name in first],
    )
    return engine


def _byte_level_bpe(module: types.ModuleType, bos: int) -> Any:
    """Return a byte-level BPE without merges, whose tokens are the 256 bytes.

    The vocabulary of a byte-level BPE has a character for each byte: a printable byte is its own
    character, and the characters from U+0100 on represent the other bytes, in order (GPT-2).
    """
    letters = sorted(module.pre_tokenizers.ByteLevel.alphabet())
    hidden = (byte for byte in range(256) if chr(byte) not in letters)
    vocab = {letter: ord(letter) if ord(letter) < 256 else next(hidden) for letter in letters}
    name = "<|document|>"
    engine = module.Tokenizer(module.models.BPE(vocab | {name: bos}, []))
    engine.pre_tokenizer = module.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = module.decoders.ByteLevel()
    engine.add_special_tokens([name])
    return engine
