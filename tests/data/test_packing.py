"""How documents fill windows: by hand, against plain statements, and nothing lost or doubled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maxdiloco.data import packing

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=60)
lengths = st.integers(2, 12)
KINDS = (packing.CONCATENATED, packing.DOCUMENTS_APART, packing.BEST_FIT)


def layout(documents, length, kind):
    return packing.layout(np.array(documents, np.int64), length, kind)


def read(windows):
    """Per window: pieces with their first places."""
    return [list(zip(*windows.pieces(i), strict=True)) for i in range(windows.num_windows)]


def test_best_fit_by_hand():
    """Documents of 3, 9, 1, 2 and 1 tokens, windows of 4. 9 is 4 + 4 + 1. The rest, largest
    first: 3 opens a window, 2 another; of the ones, the last first, one fills the first, one goes
    to the second and the last one, of document 2, fills it. Windows stand in file order.
    """
    windows = layout([3, 9, 1, 2, 1], 4, packing.BEST_FIT)
    assert read(windows) == [
        [(0, (0, 0, 3)), (3, (4, 0, 1))],
        [(0, (1, 0, 4))],
        [(0, (1, 4, 8))],
        [(0, (1, 8, 9)), (1, (2, 0, 1)), (2, (3, 0, 2))],
    ]
    assert windows.num_tokens(np.arange(4)).tolist() == [4, 4, 4, 4]


def naive_best_fit(pieces, length):
    """Room left in every window: each piece, largest first, where it leaves the least room."""
    rooms = []
    for size in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(length - size)
    return sorted(rooms)


@settings(max_examples=200)
@given(pieces=sizes, length=st.integers(30, 70))
def test_pieces_of_one_size_together_are_best_fit_one_by_one(pieces, length):
    """Which of two windows with equal room takes a piece is all that differs."""
    windows, count = packing.best_fit(np.array(pieces, np.int32), length)
    filled = np.bincount(windows, weights=pieces, minlength=count)
    assert sorted(length - filled) == naive_best_fit(pieces, length)


@given(documents=sizes, length=lengths, kind=st.sampled_from(KINDS))
def test_every_token_is_in_one_window_and_pieces_lie_side_by_side(documents, length, kind):
    """Concatenated documents lose the last tokens, fewer than a window; the others lose none."""
    windows = layout(documents, length, kind)
    stream, seen, filled = np.cumsum([0, *documents]), [], []
    for pieces in read(windows):
        place = 0
        for first, (document, begin, end) in pieces:
            assert first == place and begin < end
            place += end - begin
            seen += range(stream[document] + begin, stream[document] + end)
        assert place <= length
        filled.append(place)
    assert windows.num_tokens(np.arange(len(filled))).tolist() == filled
    kept = stream[-1] // length * length if kind == packing.CONCATENATED else stream[-1]
    assert sorted(seen) == list(range(kept))
