"""The tokenizer that the keys of a run name, or that a folder holds.

A tokenizer is its files: `save` writes them into a folder, and `load` needs nothing else.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco import json_text
from maxdiloco.data import subword
from maxdiloco.data.tokenizer_base import SETTINGS, ByteTokenizer, Tokenizer
from maxdiloco.errors import ConfigError, DataError


class Keys(NamedTuple):
    """The keys of a run that name its tokenizer."""

    tokenizer_type: str
    tokenizer_path: str
    add_bos: bool
    add_eos: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Keys":
        """Those among the values of other keys."""
        kind, path = values["tokenizer_type"], values["tokenizer_path"]
        return cls(kind, path, values["add_bos"], values["add_eos"])


def build(keys: Keys, rows: int | None = None) -> Tokenizer:
    """The tokenizer that keys name. rows: of the embedding, vocab_size.

    Raises DataError when tokenizer_path holds no such tokenizer or it has more tokens than rows,
    ConfigError when a package or one of the tokens around a document is missing.
    """
    kind, path, add_bos, add_eos = keys
    found: Tokenizer = ByteTokenizer()
    if kind != found.kind:
        named = subword.read(kind, path)
        _require("add_bos", add_bos, named.bos, f"tokenizer_path={path} has no token that starts")
        _require("add_eos", add_eos, named.eos, f"tokenizer_path={path} has no token that ends")
        bos, eos = named.bos if add_bos else None, named.eos if add_eos else None
        found = dataclasses.replace(named, bos=bos, eos=eos)
    if rows is not None and found.vocab_size > rows:
        path = "" if kind == "byte" else f" tokenizer_path={path}"
        raise DataError(
            f"vocab_size={rows} is too small for tokenizer_type={kind}{path}: it has "
            f"{found.vocab_size} tokens. Set vocab_size={found.vocab_size} or more."
        )
    return found


def _require(key: str, wanted: bool, token: int | None, why: str) -> None:
    if wanted and token is None:
        raise ConfigError(
            f"{key}=true, but {why} a document. Set {key}=false, or name its "
            f"{key.removeprefix('add_')}_token in a {subword.CONFIG} beside "
            f"{subword.FILES['huggingface']}."
        )


def load(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer that `save` wrote. Raises DataError when the folder holds none, OSError."""
    try:
        fields = json_text.parse((folder / SETTINGS).read_bytes())
        kind, bos, eos = fields["tokenizer_type"], fields["bos"], fields["eos"]
        if kind == ByteTokenizer.kind:
            return ByteTokenizer()
        file = folder / subword.FILES[kind]
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} holds no saved tokenizer: {error}. Give the folder tokenizer of a run or of "
            "a checkpoint."
        ) from error
    return subword.of_content(kind, content, str(file), bos, eos)
