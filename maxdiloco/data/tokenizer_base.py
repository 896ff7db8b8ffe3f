"""The interface of tokenizers, and the byte tokenizer."""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxdiloco import json_text

# File with the type of a saved tokenizer and the tokens around its documents.
SETTINGS = "settings.json"
# Entries of a tokenizer's JSON files that do not decide which tokens a document becomes. In
# tokenizer.json they add tokens, cut or pad, which is not done here. In SETTINGS they only name
# tokens that could be added, and tokens at which generation stops.
_UNUSED = ("post_processor", "truncation", "padding", "named_bos", "named_eos", "ends")
BYTES = 256  # the token of the byte tokenizer that starts a document


class Tokenizer(abc.ABC):
    """Converts text to tokens, numbers from 0 to vocab_size - 1, and back."""

    kind: str  # value of tokenizer_type
    vocab_size: int
    bos: int | None  # token that is added before each document
    eos: int | None  # token that is added after each document
    ends: tuple[int, ...]  # tokens at which generation stops

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as `encode_all`."""
        (tokens,) = self.encode_all([text])
        return [int(token) for token in tokens]

    @abc.abstractmethod
    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the tokens of texts, without bos and eos, using all cores.

        Text that looks like bos or eos is encoded as ordinary text. Half of a surrogate pair, which
        UTF-8 cannot encode, becomes a question mark.
        """

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Special tokens and invalid token ids add no text."""

    @abc.abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes that each token adds to a text, int32 [vocab_size].

        Special tokens add none. If the tokenizer normalises text, the normalised text is counted.
        """

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that starts a document: with bos if it is added, no eos."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of generated tokens that follow a prompt, up to the first of `ends`."""
        prompt, tokens = [int(t) for t in prompt], [int(t) for t in tokens]
        tokens = list(itertools.takewhile(lambda token: token not in self.ends, tokens))
        # Decoded together: the space in front of a first word may not be part of its text.
        return self.decode([*prompt, *tokens])[len(self.decode(prompt)) :]

    def settings(self) -> dict[str, Any]:
        """Return the contents of the file SETTINGS."""
        return {"tokenizer_type": self.kind, "bos": self.bos, "eos": self.eos}

    def files(self) -> dict[str, bytes]:
        """Return the content of each file that tokenizer.load needs, by its name in the folder."""
        return {SETTINGS: (json.dumps(self.settings(), sort_keys=True) + "\n").encode()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the name and the `meaning` of each file, 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            content = meaning(content)
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:16]

    def save(self, folder: pathlib.Path) -> None:
        """Write the files into a new folder, also an epath. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """A tokenizer in which token i < 256 is byte i, and token 256 starts each document."""

    bos: int = BYTES
    vocab_size: int = BYTES + 1
    eos: None = None
    ends: tuple[int, ...] = (BYTES,)  # the start of the next document

    kind = "byte"

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the bytes of each text, uint8 (Tokenizer)."""
        return (np.frombuffer(to_bytes(text), np.uint8) for text in texts)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens below 256. Bytes that are not UTF-8 become U+FFFD."""
        known = bytes(token for token in tokens if 0 <= token < BYTES)
        return known.decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Return 1 for each byte, and 0 for the token that starts a document (Tokenizer)."""
        return (np.arange(self.vocab_size) < BYTES).astype(np.int32)


def meaning(content: bytes) -> bytes:
    """Return the part of a tokenizer's file that decides which tokens a text becomes.

    For JSON, it consists of all entries except _UNUSED. For example, the post-processor in a
    tokenizer.json of `hf export` adds a token before each text, but here add_bos decides that.
    """
    try:
        fields = json_text.parse(content)
    except ValueError:
        return content
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in _UNUSED}
    return json.dumps(fields, sort_keys=True).encode()


def to_bytes(text: str) -> bytes:
    """Encode a text in UTF-8, with a question mark for half a surrogate pair."""
    return text.encode("utf-8", errors="replace")
