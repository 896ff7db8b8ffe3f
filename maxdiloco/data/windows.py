"""Read windows of L tokens of a split of a text, cut from its documents as laid out in packing.py.

# N windows to read  L tokens
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from maxdiloco.data import packing, shards
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.errors import DataError


@dataclasses.dataclass(frozen=True)
class Request:
    """A split of a text to read as sequences."""

    folder: str  # folder of the shards
    key: str  # the key that names the text, for messages
    path: str  # value of the key; empty: the default text
    tokenizer: Tokenizer
    length: int  # tokens of a window, L
    packing: str  # a kind of packing.layout
    held_out: Fraction  # share of the text that is held out for the eval split; 0: nothing
    seed: int
    shuffled: bool  # True: in a random order that depends on the seed; False: in file order
    split: str  # train or eval


@dataclasses.dataclass(frozen=True)
class TextWindows:
    """The windows from `first` to first + num_windows - 1 of the documents.

    The class is a `grain.sources.RandomAccessDataSource`, so `grain.MapDataset.source(windows)`
    reads single windows. A training step reads all of its windows with one call of `read`.
    """

    documents: shards.Shards
    layout: packing.EndToEnd | packing.Table  # layout of all windows of the documents
    length: int
    packing: str  # a kind of packing.layout
    first: int
    num_windows: int

    def __len__(self) -> int:
        """Return the number of windows."""
        return self.num_windows

    def __getitem__(self, window: int) -> dict[str, np.ndarray]:
        """Return the tokens and segment ids of a window, int32 [L]."""
        tokens_NL, segments_NL = self.read(np.array([window]))
        return {"tokens": tokens_NL[0], "segment_ids": segments_NL[0]}

    @property
    def padded(self) -> bool:
        """Return True if windows may contain padding."""
        return self.packing != packing.CONCATENATED

    @property
    def requests(self) -> int:
        """Return the requests that may be in flight at the same time; 0 for local files."""
        return self.documents.requests

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read windows.

        Args:
          windows_N: numbers of the windows, counted from `first`.

        Returns:
          Tokens and segment ids, int32 [N, L]. Segments number the documents of a window from 1; 0
          is padding, whose token is 0.

        Raises:
          DataError: a file has changed since it was opened.
        """
        tokens_NL = np.zeros((len(windows_N), self.length), np.int32)
        segments_NL = np.zeros_like(tokens_NL)
        pieces_N = [self.layout.pieces(int(window) + self.first) for window in windows_N]
        read = self.documents.read(itertools.chain.from_iterable(pieces_N))
        for row, pieces in enumerate(pieces_N):
            begin = 0
            for segment, data in enumerate(itertools.islice(read, len(pieces)), start=1):
                end = begin + len(data)
                segments_NL[row, begin:end] = segment
                tokens_NL[row, begin:end] = data
                begin = end
        return tokens_NL, segments_NL

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Return the tokens of windows without padding, int64 [N]."""
        return self.layout.num_tokens(np.asarray(windows_N, np.int64) + self.first)

    def contents(self) -> str:
        """Return 16 hexadecimal digits, a hash of the tokens, the windows and L.

        The processes of a run, or a run and its checkpoint, have the same data if these agree.
        """
        shape = (self.length, self.first, self.num_windows)
        # The other two kinds differ in the number of windows, unless their windows are equal.
        if self.packing == packing.BEST_FIT:
            shape = (*shape, self.packing)
        digest = hashlib.sha256(f"{shape}\n".encode())
        for part in self.documents.contents():
            digest.update(part)
        return digest.hexdigest()[:16]


def open_text(request: Request) -> tuple[TextWindows, str]:
    """Open the windows of a split.

    If `held_out_files` finds files for the share, these whole files are held out for eval.
    Otherwise the last windows are held out, at least one.

    Returns:
      The windows, and the key and path of their text, for messages.

    Raises:
      DataError: the shards are missing, damaged, too short for the split, or were made with another
        tokenizer.
    """
    name = f"{request.key}={request.path}"
    if not request.path:
        name += " (Python's standard library)"
    found = shards.open_shards(request.folder, request.key)
    shards.refuse_other_tokenizer(found, request.tokenizer, name)
    held = held_out_files(found.sizes(), request.held_out)
    if held is not None:
        found = found.chosen(held == (request.split == "eval"))
    layout = packing.layout(found.lengths, request.length, request.packing)
    first, end = 0, layout.num_windows
    if request.held_out and held is None and end:
        cut = end - max(1, int(end * request.held_out))
        first, end = (cut, end) if request.split == "eval" else (0, cut)
    if first == end:
        raise DataError(
            f"{name} is too short: its {found.lengths.sum()} tokens leave no sequence of "
            f"max_target_length={request.length} for {request.split}. Add text, or lower "
            "max_target_length."
        )
    return TextWindows(found, layout, request.length, request.packing, first, end - first), name


def held_out_files(sizes: Sequence[int], share: Fraction) -> np.ndarray | None:
    """Choose the files to hold out, evenly spaced: files 0, 20, 40, ... for a share of 1/20.

    Args:
      sizes: tokens of each file.
      share: share of all tokens to hold out.

    Returns:
      bool [files], or None if there are too few files or their sizes differ too much. The chosen
      files must have half to twice the share, and leave at least half of the rest for training.
    """
    p, q = share.numerator, share.denominator
    if len(sizes) * share < 1:
        return None
    held = np.array([-(-(i + 1) * p // q) > -(-i * p // q) for i in range(len(sizes))])
    total = sum(sizes)
    part = sum(size for size, is_held in zip(sizes, held, strict=True) if is_held)
    within = share / 2 * total <= part <= min(2 * share, (1 + share) / 2) * total
    return held if total and within else None
