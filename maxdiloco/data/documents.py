"""Documents as tokens: how long each is, and any piece of any of them, however they are stored."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator

import numpy as np

from maxdiloco.data import corpus
from maxdiloco.data.packing import Piece

# A text is compared by this many pieces spread over its bytes and as many over its documents, so
# that a start reads 2 MiB of it at most. Our choice.
SAMPLES = 256
SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class ByteDocuments:
    """Text of the byte tokenizer, read where it is: document_start, then the bytes of UTF-8."""

    table: corpus.Documents
    document_start: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents], none 0: one more than it has bytes."""
        return self.table.size + 1

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces, uint16, one array for each, in the order of the pieces.

        Neighbouring pieces of one file cost one open. Raises DataError for a file that is gone or
        has changed.
        """
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
        """Files, documents and bytes of text, for the user."""
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
