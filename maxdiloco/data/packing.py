"""Packing: decide which tokens of which documents each window of L tokens holds.

    # D documents  P pieces  W windows  N windows to read  L tokens

A piece is (document, begin, end), in tokens of the document. This module reads no tokens.
"""

import bisect
import dataclasses

import numpy as np

# Values of grain_packing_type; DOCUMENTS_APART is packing=false.
CONCATENATED = "concat_then_split"
BEST_FIT = "best_fit"
DOCUMENTS_APART = "none"

Piece = tuple[int, int, int]


def layout(lengths_D: np.ndarray, length: int, kind: str) -> "EndToEnd | Table":
    """Lay out documents in windows.

    * CONCATENATED: documents end to end, cut every L tokens. The last tokens, fewer than L, are
      left out.
    * DOCUMENTS_APART: each document begins a new window, and its last window is padded.
    * BEST_FIT: every L tokens of a document fill a window, and the remainders of documents share
      windows (`best_fit`). A document that fits into a window is not cut.

    Args:
      lengths_D: tokens of each document, int64.
      length: tokens of a window, L.
      kind: one of the three kinds above.
    """
    if kind == BEST_FIT:
        return _best_fit_layout(lengths_D, length)
    padded_D = lengths_D
    if kind == DOCUMENTS_APART:
        padded_D = -(-lengths_D // length) * length
    starts = starts_of(padded_D)
    return EndToEnd(lengths_D, starts, length, int(starts[-1]) // length)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offset of each item if items are end to end, and their end, int64 [n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """A layout of documents end to end. `starts`: first token of each document, with padding."""

    lengths_D: np.ndarray
    starts: np.ndarray
    length: int
    num_windows: int

    def pieces(self, window: int) -> list[Piece]:
        """Return the pieces in a window, in their order."""
        begin = window * self.length
        end = begin + self.length
        document = int(np.searchsorted(self.starts, begin, side="right")) - 1
        pieces = []
        while document < len(self.lengths_D) and self.starts[document] < end:
            start = int(self.starts[document])
            stop = start + int(self.lengths_D[document])
            pieces.append((document, max(begin - start, 0), min(end, stop) - start))
            document += 1
        return pieces

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Return the tokens of windows without padding, int64 [N]."""
        begin_N = np.asarray(windows_N, np.int64) * self.length
        last_N = np.searchsorted(self.starts, begin_N + self.length, side="left") - 1
        stop_N = self.starts[last_N] + self.lengths_D[last_N]
        return np.minimum(stop_N - begin_N, self.length)


@dataclasses.dataclass(frozen=True)
class Table:
    """A layout with a list of pieces for each window.

    Pieces are numbered through all documents. All pieces of a document but the last have L tokens.
    """

    lengths_D: np.ndarray
    first_D: np.ndarray  # number of the first piece of each document, and the number of pieces
    piece_P: np.ndarray  # numbers of the pieces, window by window
    begin_W: np.ndarray  # offset of each window's pieces in piece_P, and the end
    filled_W: np.ndarray  # tokens of each window, without padding
    length: int
    num_windows: int

    def pieces(self, window: int) -> list[Piece]:
        """Return the pieces in a window, in the order of the documents."""
        numbers = self.piece_P[self.begin_W[window] : self.begin_W[window + 1]]
        documents = np.searchsorted(self.first_D, numbers, side="right") - 1
        begins = (numbers - self.first_D[documents]) * self.length
        ends = np.minimum(begins + self.length, self.lengths_D[documents])
        return list(zip(documents.tolist(), begins.tolist(), ends.tolist(), strict=True))

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Return the tokens of windows without padding, int64 [N]."""
        return self.filled_W[windows_N].astype(np.int64)


def _best_fit_layout(lengths_D, length):
    """Lay out documents by best fit, with the windows in the order of their first pieces.

    File order of the windows is then close to the order of the documents.
    """
    first_D = starts_of(-(-lengths_D // length))
    size_P = np.full(first_D[-1], length, np.int32)
    has_rest = lengths_D % length > 0
    size_P[first_D[1:][has_rest] - 1] = lengths_D[has_rest] % length
    window_P, W = best_fit(size_P, length)
    first_W = np.empty(W, np.int64)
    first_W[window_P[::-1]] = np.arange(len(size_P))[::-1]  # the last value written stays
    window_P = np.argsort(np.argsort(first_W))[window_P]
    begin_W = starts_of(np.bincount(window_P, minlength=W))
    filled_W = np.bincount(window_P, weights=size_P, minlength=W).astype(np.int32)
    piece_P = np.argsort(window_P, kind="stable")
    return Table(lengths_D, first_D, piece_P, begin_W, filled_W, length, W)


def best_fit(size_P: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Pack pieces by best-fit decreasing.

    "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830) sec. 3.1: pieces are placed in
    descending order of size, each into the window with the least sufficient room, or a new window.

    Pieces of equal size s are placed together: the window with the least room r >= s receives
    r // s of them. Its room then falls below half, so a window is changed at most log2(L) times.

    Args:
      size_P: tokens of each piece, 1 to L.
      length: L.

    Returns:
      The number of the window of each piece, int64 [P], and the number of windows W.
    """
    small = size_P.astype(np.uint16) if length < 2**16 else size_P  # NumPy sorts uint16 by radix
    order_P = np.argsort(small, kind="stable")[::-1]
    count_S = np.bincount(size_P, minlength=length + 1)
    window_P = np.empty(len(size_P), np.int64)
    open_windows = _OpenWindows(length)
    done = 0
    for size in np.flatnonzero(count_S)[::-1].tolist():
        end = done + int(count_S[size])
        while done < end:
            windows, each = open_windows.fill(size, end - done)
            chosen = np.repeat(windows, each)[: end - done]
            window_P[order_P[done : done + len(chosen)]] = chosen
            done += len(chosen)
    return window_P, open_windows.num_windows


class _OpenWindows:
    """Windows by their free room [tokens]."""

    def __init__(self, length):
        self.num_windows = 0
        self._length = length
        self._rooms = []  # the keys of _windows, ascending; each has a list of arrays of windows
        self._windows = {}

    def fill(self, size, count):
        """Return windows for at most `count` pieces, and the number of pieces in each window.

        The last window may receive fewer pieces.
        """
        position = bisect.bisect_left(self._rooms, size)
        if position == len(self._rooms):
            room, each = self._length, self._length // size
            needed = -(-count // each)
            windows = np.arange(self.num_windows, self.num_windows + needed)
            self.num_windows += needed
        else:
            room = self._rooms[position]
            each = room // size
            needed = -(-count // each)
            windows = self._windows[room].pop()
            if not self._windows[room]:
                del self._windows[room], self._rooms[position]
            if len(windows) > needed:
                self._add(room, windows[needed:])
                windows = windows[:needed]
        taken = min(count, len(windows) * each)
        last = taken - (len(windows) - 1) * each
        if last < each:
            self._add(room - last * size, windows[-1:])
            self._add(room - each * size, windows[:-1])
        else:
            self._add(room - each * size, windows)
        return windows, each

    def _add(self, room, windows):
        if not room or not len(windows):
            return
        if room not in self._windows:
            bisect.insort(self._rooms, room)
            self._windows[room] = []
        self._windows[room].append(windows)
