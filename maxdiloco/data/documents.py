"""Documents as tokens: how long each is, and any piece of any of them, however they are stored."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from maxdiloco.data import corpus

# A text is compared by this many pieces spread over its bytes and as many over its documents, so
# that a start reads 2 MiB of it at most. Our choice.
SAMPLES = 256
SAMPLE_BYTES = 4096

# Document, begin, end. begin and end are in tokens of the document, those that the tokenizer puts
# around its text included.
Piece = tuple[int, int, int]


class TokenDocuments(Protocol):
    """Documents in a fixed order, of which only the table of lengths is in memory.

    lengths: int64 [documents], tokens of each; none is 0.
    """

    lengths: np.ndarray

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces, one array of integers for each, in the order of the pieces.

        Neighbouring pieces of one file cost one open or one decoded record.
        Raises DataError for a file that is gone, damaged or has changed.
        """

    def identity(self) -> Iterator[bytes]:
        """What a fingerprint hashes: equal when the documents are."""

    def summary(self) -> str:
        """How many files, documents and bytes or tokens, for the user."""

    def contents(self) -> Iterator[bytes]:
        """The same of the contents, whatever the files are called. Raises DataError as `read`."""


@dataclasses.dataclass(frozen=True)
class ByteDocuments:
    """Text of the byte tokenizer, read where it is: document_start, then the bytes of UTF-8."""

    table: corpus.Documents
    lengths: np.ndarray
    document_start: int

    @classmethod
    def of(cls, table: corpus.Documents, document_start: int) -> "ByteDocuments":
        """The documents of a table; each has one token more than bytes."""
        return cls(table, table.size + 1, document_start)

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces, uint16 (TokenDocuments)."""
        pieces = list(pieces)
        of_text = [(number, max(begin - 1, 0), end - 1) for number, begin, end in pieces]
        texts = corpus.read_pieces(self.table, of_text)
        for (_, begin, end), data in zip(pieces, texts, strict=True):
            tokens = np.empty(end - begin, np.uint16)
            if begin == 0:
                tokens[0] = self.document_start
            tokens[len(tokens) - len(data) :] = data
            yield tokens

    def summary(self) -> str:
        """Files, documents and bytes of text (TokenDocuments)."""
        size = int(self.table.size.sum())
        return f"{len(self.table.paths):,} files, {len(self.table):,} documents, {size:,} bytes"

    def identity(self) -> Iterator[bytes]:
        """File names and lengths of documents; a change that keeps them goes unnoticed."""
        names = "\n".join(os.path.basename(path) for path in self.table.paths)
        yield f"{names}\n".encode("utf-8", errors="replace")
        yield self.table.file.tobytes()
        yield self.table.size.tobytes()

    def contents(self) -> Iterator[bytes]:
        """Lengths of the documents and a hash of `sampled` pieces, which are read."""
        yield self.table.size.tobytes()
        digest = hashlib.sha256()
        for data in corpus.read_pieces(self.table, sampled(self.table.size)):
            digest.update(data)
        yield digest.digest()


def sampled(sizes: np.ndarray) -> list[Piece]:
    """Pieces of a text that stand for all of it, in its order; begin and end are in bytes.

    sizes: int64 [documents], bytes of each. They hold all of a text of up to SAMPLES documents and
    SAMPLES * SAMPLE_BYTES bytes, and a part of each stretch of a longer one.
    """
    ends = np.cumsum(sizes)
    starts, total = ends - sizes, int(ends[-1])
    by_document = starts[:: -(-len(sizes) // SAMPLES)]
    by_byte = np.arange(0, total, max(SAMPLE_BYTES, -(-total // SAMPLES)))
    places = np.unique(np.concatenate([by_document, by_byte]))
    documents = np.searchsorted(ends, places, side="right")
    begins = places - starts[documents]
    stops = np.minimum(begins + SAMPLE_BYTES, sizes[documents])
    columns = (documents.tolist(), begins.tolist(), stops.tolist())
    return list(zip(*columns, strict=True))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the documents, in the order of their numbers.

    numbers: int64 [chosen], numbers in `documents`.
    """

    documents: TokenDocuments
    numbers: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, documents: TokenDocuments, numbers: np.ndarray) -> "Chosen":
        """The documents with these numbers."""
        return cls(documents, numbers, documents.lengths[numbers])

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces (TokenDocuments)."""
        return self.documents.read(
            (int(self.numbers[number]), begin, end) for number, begin, end in pieces
        )

    def summary(self) -> str:
        """Documents and tokens of the chosen (TokenDocuments)."""
        return f"{len(self.numbers):,} documents, {int(self.lengths.sum()):,} tokens"

    def identity(self) -> Iterator[bytes]:
        """That of all documents and the numbers of the chosen."""
        yield from self.documents.identity()
        yield self.numbers.tobytes()

    def contents(self) -> Iterator[bytes]:
        """That of all documents and the numbers of the chosen."""
        yield from self.documents.contents()
        yield self.numbers.tobytes()
