"""How many bytes of text each token stands for: the unit of bits per byte."""

# V vocabulary

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
