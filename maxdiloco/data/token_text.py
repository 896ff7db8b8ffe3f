"""Tokens as text: the bytes of each, a prompt, and where a continuation ends."""

# V vocabulary

from collections.abc import Sequence

import numpy as np

from maxdiloco.data.tokenizer_base import Tokenizer


def bytes_of_tokens(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Bytes of UTF-8 that each token adds to a text, int32 [V].

    A token that marks the start or the end of a document adds none. vocab_size: V; rows of the
    embedding beyond the tokenizer's tokens count no byte.
    """
    bytes_V = np.zeros(vocab_size, np.int32)
    known = tokenizer.token_bytes()[:vocab_size]
    bytes_V[: len(known)] = known
    return bytes_V


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that starts a document."""
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    return [*before, *tokenizer.encode(text)]


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of generated tokens that follow those of a prompt, up to the end of the document.

    The token that ends a document, or the one that starts the next, ends the text.
    """
    prompt, tokens = [int(t) for t in prompt], [int(t) for t in tokens]
    ends = [i for i, token in enumerate(tokens) if token in (tokenizer.bos, tokenizer.eos)]
    tokens = tokens[: ends[0]] if ends else tokens
    # Decoded together: the space in front of a first word may not be part of its text.
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]
