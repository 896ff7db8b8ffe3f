"""Text to tokens and back: bytes here, Hugging Face's and SentencePiece's tokenizers in subword.

A tokenizer is its files: `save` writes them into a folder, and `load` needs nothing else.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from maxdiloco import json_text
from maxdiloco.data import subword, tokenizer_files
from maxdiloco.data.tokenizer_files import SETTINGS, to_bytes
from maxdiloco.errors import DataError

if TYPE_CHECKING:
    from etils import epath  # imported where it is used: benchmarks of a step do without

BYTES = 256


class Tokenizer(Protocol):
    """Text to tokens and back. Tokens are numbers from 0 to vocab_size - 1."""

    @property
    def vocab_size(self) -> int:
        """Every token is below it."""

    @property
    def bos(self) -> int | None:
        """The token put before each document; None: none is."""

    @property
    def eos(self) -> int | None:
        """The token put after each document; None: none is."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without bos and eos. Text that reads like bos or eos stays text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of documents, int32, each with bos and eos."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Special tokens and numbers that are no token have none."""

    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 that each token adds to a text, int32 [vocab_size]; special tokens none.

        A tokenizer that normalises text counts the bytes of what it gives back.
        """

    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for tokenizers with the same files, bos and eos."""

    def files(self) -> Mapping[str, bytes]:
        """Content of each file that `load` needs, by its name in the folder."""

    def save(self, folder: "epath.Path") -> None:
        """Write the files into a folder, which is made. Raises OSError."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Token i below 256 is byte i; token 256 starts a document and has no text."""

    document_start: int = BYTES
    vocab_size: int = BYTES + 1

    @property
    def bos(self) -> int:
        """The token put before each document."""
        return self.document_start

    @property
    def eos(self) -> None:
        """None: the start of the next document ends a document."""
        return None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without the one that starts a document.

        Half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark.
        """
        return list(to_bytes(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of documents, int32, each with the one that starts it."""
        return [
            tokenizer_files.document(np.frombuffer(to_bytes(text), np.uint8), self.bos, self.eos)
            for text in texts
        ]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Those above 255 have none; bytes that are not UTF-8 become U+FFFD."""
        known = bytes(token for token in tokens if 0 <= token < BYTES)
        return known.decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """1 for a byte, 0 for the token that starts a document."""
        bytes_V = np.zeros(self.vocab_size, np.int32)
        bytes_V[:BYTES] = 1
        return bytes_V

    def fingerprint(self) -> str:
        """16 hexadecimal digits; see Tokenizer."""
        return tokenizer_files.fingerprint(self.files())

    def files(self) -> Mapping[str, bytes]:
        """Content of each file that `load` needs, by its name in the folder."""
        return {SETTINGS: tokenizer_files.settings("byte", self.bos, self.eos)}

    def save(self, folder: "epath.Path") -> None:
        """Write the files into a folder, which is made. Raises OSError."""
        tokenizer_files.write(folder, self.files())


def build(cfg) -> Tokenizer:
    """The tokenizer that tokenizer_type, tokenizer_path, add_bos and add_eos name.

    Raises DataError when tokenizer_path holds no such tokenizer or the embedding has too few rows
    for its tokens, ConfigError when a package or one of the tokens around a document is missing.
    """
    tokenizer = of_keys(cfg)
    if tokenizer.vocab_size > cfg.vocab_size:
        path = "" if cfg.tokenizer_type == "byte" else f" tokenizer_path={cfg.tokenizer_path}"
        raise DataError(
            f"vocab_size={cfg.vocab_size} is too small for tokenizer_type={cfg.tokenizer_type}"
            f"{path}: it has {tokenizer.vocab_size} tokens. Set vocab_size={tokenizer.vocab_size} "
            "or more."
        )
    return tokenizer


def of_keys(cfg) -> Tokenizer:
    """`build` without a look at vocab_size, which may still be -1."""
    if cfg.tokenizer_type == "byte":
        return ByteTokenizer()
    source = subword.read(cfg.tokenizer_type, cfg.tokenizer_path)
    return subword.of_source(source, add_bos=cfg.add_bos, add_eos=cfg.add_eos)


def load(folder: "epath.PathLike") -> Tokenizer:
    """The tokenizer that `save` wrote. Raises DataError when the folder holds none, OSError."""
    from etils import epath

    folder = epath.Path(folder)
    try:
        fields = json_text.parse((folder / SETTINGS).read_bytes())
        kind, bos, eos = fields["tokenizer_type"], fields["bos"], fields["eos"]
        if kind == "byte":
            return ByteTokenizer()
        name = subword.FILES[kind]
        content = (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} holds no saved tokenizer: {error}. Give the folder tokenizer of a run or of "
            "a checkpoint."
        ) from error
    return subword.of_content(kind, content, where=f"{folder / name}", bos=bos, eos=eos)
