"""What all tokenizers do alike: their files and the hash of them, the tokens around a document."""

import abc
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from maxdiloco import json_text

# Type of a saved tokenizer and the tokens around its documents, beside the files of its package.
SETTINGS = "settings.json"
# Parts of a tokenizer.json that add, cut or pad after the tokens of a text: none is used here.
_UNUSED = ("post_processor", "truncation", "padding")


class Tokenizer(abc.ABC):
    """Text to tokens and back. Tokens are numbers from 0 to vocab_size - 1.

    kind: value of tokenizer_type. bos, eos: the token before and after each document; None: none.
    """

    kind: str
    vocab_size: int
    bos: int | None
    eos: int | None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text (encode_all)."""
        (tokens,) = self.encode_all([text])
        return [int(token) for token in tokens]

    @abc.abstractmethod
    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Tokens of texts, without bos and eos. Text that reads like bos or eos stays text.

        Half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark. Takes all cores.
        """

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Special tokens and numbers that are no token have none."""

    @abc.abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 that each token adds to a text, int32 [vocab_size]; special tokens none.

        A tokenizer that normalises text counts the bytes of what it gives back.
        """

    def files(self) -> dict[str, bytes]:
        """Content of each file that tokenizer.load needs, by its name in the folder."""
        fields = {"tokenizer_type": self.kind, "bos": self.bos, "eos": self.eos}
        return {SETTINGS: (json.dumps(fields, sort_keys=True) + "\n").encode()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits: a hash of the name and the `meaning` of each file."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            content = meaning(content)
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:16]

    def save(self, folder: pathlib.Path) -> None:
        """Write the files into a folder, which is made. folder: may be an epath. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


def meaning(content: bytes) -> bytes:
    """What of a tokenizer's file decides which tokens a text becomes.

    Of JSON the values, however they are written, but for those that are not used here: a
    tokenizer.json that `hf export` writes puts a token before each text, which add_bos decides
    here. Of other files all.
    """
    try:
        fields = json_text.parse(content)
    except ValueError:
        return content
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in _UNUSED}
    return json.dumps(fields, sort_keys=True).encode()


def to_bytes(text: str) -> bytes:
    """UTF-8 of a text, a question mark for what UTF-8 cannot hold."""
    return text.encode("utf-8", errors="replace")
