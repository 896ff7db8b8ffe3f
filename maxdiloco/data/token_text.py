"""Tokens as text: the bytes of each, a prompt, and where a continuation ends."""

# V vocabulary

from collections.abc import Sequence

import numpy as np

from maxdiloco.data.tokenizer import BYTES, ByteTokenizer


def bytes_of_tokens(tokenizer: ByteTokenizer, vocab_size: int) -> np.ndarray:
    """Bytes of UTF-8 that each token adds to a text, int32 [V].

    A token that marks the start or the end of a document adds none. vocab_size: V; rows of the
    embedding beyond the tokenizer's tokens count no byte.
    """
    bytes_V = np.zeros(vocab_size, np.int32)
    bytes_V[:BYTES] = 1
    return bytes_V


def prompt_tokens(tokenizer: ByteTokenizer, text: str) -> list[int]:
    """The tokens of a text that starts a document."""
    return [tokenizer.document_start, *tokenizer.encode(text)]


def continuation(tokenizer: ByteTokenizer, tokens: Sequence[int]) -> str:
    """The text of generated tokens, up to the end of the document."""
    tokens = [int(token) for token in tokens]
    if tokenizer.document_start in tokens:
        tokens = tokens[: tokens.index(tokenizer.document_start)]
    return tokenizer.decode(tokens)
