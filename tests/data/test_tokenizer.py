"""Bytes as tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.data import tokenizer
from maxdiloco.errors import DataError

BYTE = tokenizer.ByteTokenizer()


@given(st.text())
def test_any_text_comes_back(text):
    """decode undoes encode; the document start has no text."""
    assert BYTE.decode(BYTE.encode(text)) == text
    assert BYTE.decode([BYTE.document_start, *BYTE.encode(text)]) == text


def test_tokens_are_the_bytes_of_utf_8():
    """U+00E9 is C3 A9 in UTF-8."""
    assert BYTE.encode("aé") == [97, 0xC3, 0xA9]
    assert (BYTE.document_start, BYTE.vocab_size) == (256, 257)


def test_tokens_without_text_are_left_out_and_broken_utf_8_is_marked():
    """An embedding may have more rows than the tokenizer has tokens, and a sample may end early."""
    assert BYTE.decode([97, 256, 98, 300, 0xC3]) == "ab\ufffd"


def test_half_a_surrogate_pair_is_a_question_mark():
    """JSON may hold one; UTF-8 cannot."""
    assert BYTE.encode("a\ud800") == [97, ord("?")]


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(settings):
    """Both numbers are in the message."""
    assert tokenizer.build(settings(vocab_size=257)) == BYTE
    with pytest.raises(
        DataError, match=r"^vocab_size=256 is too small.*byte.*257 tokens.*vocab_size=257"
    ):
        tokenizer.build(settings(vocab_size=256))
