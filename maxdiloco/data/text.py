"""Windows of a split of a text: L tokens each, cut from its documents as packing.py lays them out.

# N windows asked for  L tokens
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from maxdiloco.data import corpus, packing, shards
from maxdiloco.data.documents import ByteDocuments, LineIndex, read_table
from maxdiloco.data.kinds import KINDS, Source
from maxdiloco.data.sources import files
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError


@dataclasses.dataclass(frozen=True)
class Request:
    """A split of a text to read as sequences."""

    source: Source
    key: str  # the flag of its path, for messages
    tokenizer: Tokenizer
    length: int  # L
    packing: str  # a kind of packing.layout
    held_out: Fraction  # that the eval split takes from the train split; 0: a split is all of it
    allowed: int  # damaged records that are left out
    seed: int
    shuffled: bool  # in the order of the seed, else in file order
    split: str  # train or eval
    index: LineIndex | None = None  # known documents of .jsonl files, to which others are added


@dataclasses.dataclass(frozen=True)
class TextWindows:
    """Windows first .. first + num_windows - 1 of the documents."""

    documents: ByteDocuments | shards.Shards
    layout: packing.EndToEnd | packing.Table  # of all of their windows
    length: int
    packing: str  # a kind of packing.layout
    first: int
    num_windows: int

    @property
    def padded(self) -> bool:
        """Whether windows may hold padding."""
        return self.packing != packing.CONCATENATED

    @property
    def requests(self) -> int:
        """How many requests for objects may be under way at once; 0: the files are mounted."""
        return self.documents.requests

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and segment ids, int32 [N, L], of windows counted from `first`. Segments number
        the documents of a window from 1; 0 is padding, which has token 0. Raises DataError when a
        file has changed since it was opened."""
        tokens_NL = np.zeros((len(windows_N), self.length), np.int32)
        segments_NL = np.zeros_like(tokens_NL)
        pieces_N = [self.layout.pieces(int(window) + self.first) for window in windows_N]
        read = self.documents.read(itertools.chain.from_iterable(pieces_N))
        for row, pieces in enumerate(pieces_N):
            place = 0
            for segment, data in enumerate(itertools.islice(read, len(pieces)), start=1):
                segments_NL[row, place : place + len(data)] = segment
                tokens_NL[row, place : place + len(data)] = data
                place += len(data)
        return tokens_NL, segments_NL

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Tokens in windows that are no padding, int64 [N]."""
        return self.layout.num_tokens(np.asarray(windows_N, np.int64) + self.first)

    def contents(self) -> str:
        """16 hexadecimal digits: a hash of the documents' contents, the windows and L. A bounded
        part of the text is read. Processes of a run, and a run and its checkpoint, have the same
        data when these agree."""
        shape = (self.length, self.first, self.num_windows)
        # The others differ in the number of windows: where that is equal, so are the windows.
        if self.packing == packing.BEST_FIT:
            shape = (*shape, self.packing)
        digest = hashlib.sha256(f"{shape}\n".encode())
        for part in self.documents.contents():
            digest.update(part)
        return digest.hexdigest()[:16]


def open_text(request: Request) -> tuple[TextWindows, str]:
    """The windows asked for, and the flag and path of their text, for messages.

    A path that is a folder of shards is read as one, whatever its dataset_type is. Files that make
    up the share request.held_out are for eval; where none do, the last windows are, at least one.
    Raises DataError for data that are missing, damaged, empty, without a sequence for the split, or
    of another tokenizer.
    """
    key, (kind, path, column) = request.key, request.source
    name = f"{key}={path}" if path else f"{key}= (Python's standard library)"
    if kind == "arrayrecord" or shards.is_folder(path):
        found = shards.open_shards(path, key)
        shards.refuse_other_tokenizer(found, request.tokenizer, name)
    else:
        assert KINDS[kind].in_place and request.tokenizer.kind == "byte"  # others were tokenised
        found = files.open_files(corpus.SUFFIXES, files.check_text, path, key, column)
    held = held_out_files(found.sizes(), request.held_out)
    if held is not None:
        found = found.chosen(held == (request.split == "eval"))
    documents = found if isinstance(found, shards.Shards) else _in_place(found, request, name)
    layout = packing.layout(documents.lengths, request.length, request.packing)
    first, end = 0, layout.num_windows
    if request.held_out and held is None and end:
        cut = end - max(1, int(end * request.held_out))
        first, end = (cut, end) if request.split == "eval" else (0, cut)
    if first == end:
        raise DataError(
            f"{name} is too short: its {documents.lengths.sum()} tokens leave no sequence of "
            f"max_target_length={request.length} for {request.split}. Give more text or lower "
            "max_target_length."
        )
    count = end - first
    return TextWindows(documents, layout, request.length, request.packing, first, count), name


def _in_place(found: files.Files, request: Request, name: str) -> ByteDocuments:
    """Documents of files whose bytes are the tokens."""
    if request.source.path:  # what Python's own source is written in is its own affair
        files.refuse_other(found, request.key)
    table = read_table(found, index=request.index, allowed=request.allowed)
    if not len(table.size):
        raise DataError(
            f"{name} holds no text for {request.split}: {len(found.names)} files, all empty. Give "
            "text to read."
        )
    return table


def held_out_files(sizes: Sequence[int], share: Fraction) -> np.ndarray | None:
    """Which files are held out, bool [files]: 0, 20, 40, ... for a twentieth. sizes: of the files,
    in any unit. None where files are too few, or too unequal: with half to twice the share of what
    there is, and no less than half of the rest left to train on."""
    p, q = share.numerator, share.denominator
    if len(sizes) * share < 1:
        return None
    held = np.array([-(-(i + 1) * p // q) > -(-i * p // q) for i in range(len(sizes))])
    total = sum(sizes)
    part = sum(size for size, is_held in zip(sizes, held, strict=True) if is_held)
    within = share / 2 * total <= part <= min(2 * share, (1 + share) / 2) * total
    return held if total and within else None
