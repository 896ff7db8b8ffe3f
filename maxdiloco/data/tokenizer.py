"""Text to tokens and back: the bytes of UTF-8 and one token that starts a document."""

import dataclasses
from collections.abc import Iterable

from maxdiloco.errors import DataError

BYTES = 256


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Token i below 256 is byte i; token 256 starts a document and has no text."""

    document_start: int = BYTES
    vocab_size: int = BYTES + 1

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without the one that starts a document.

        Half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark.
        """
        return list(to_bytes(text))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Those above 255 have none; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < BYTES).decode("utf-8", errors="replace")


def to_bytes(text: str) -> bytes:
    """UTF-8 of a text, a question mark for what UTF-8 cannot hold."""
    return text.encode("utf-8", errors="replace")


def build(cfg) -> ByteTokenizer:
    """The tokenizer of tokenizer_type, of which there is one: byte.

    Raises DataError when the embedding has too few rows for its tokens.
    """
    tokenizer = ByteTokenizer()
    if tokenizer.vocab_size > cfg.vocab_size:
        raise DataError(
            f"vocab_size={cfg.vocab_size} is too small for tokenizer_type={cfg.tokenizer_type}: "
            f"it has {tokenizer.vocab_size} tokens. Set vocab_size={tokenizer.vocab_size} or more."
        )
    return tokenizer
