"""One length of chunks or two: what a second one saves, and when it is worth a program."""

from types import SimpleNamespace

import pytest

from maxdiloco.engine import chunks
from maxdiloco.engine.chunks import Cut
from maxdiloco.engine.state import Layout

K = 1024  # a tile


def pieces(sizes, max_chunks, unit=64):
    return chunks.pieces_of_a_chunk(sizes, max_chunks=max_chunks, unit=unit)


def sent(sizes, lengths, max_chunks):
    return sum(chunks.cut(size, lengths, max_chunks).size for size in sizes)


def test_at_tau_1_the_embedding_and_the_layers_have_a_length_each():
    """Two layer fragments of 10 tiles beside an embedding of 40: 60 tiles, not 120."""
    sizes = [40 * K, 10 * K, 10 * K]
    found = pieces(sizes, 1)
    assert found == (10 * K, 30 * K)
    assert sent(sizes, found, 1) == 60 * K
    assert sent(sizes, (40 * K,), 1) == 120 * K


@pytest.mark.parametrize(
    "sizes, max_chunks, found",
    [
        ([10, 40, 40], 1, (10, 30)),  # either kind may be the larger one
        ([40, 20, 10], 1, (20, 20)),  # the one that saves most: 80 tiles of 120, not 90
        ([40, 20, 10, 10], 1, (20, 20)),  # 100 either way: the longer one takes no more steps
        ([40] * 4, 3, (14,)),  # equal fragments have one length
        ([100] * 30 + [10], 1, (100,)),  # it would save 3 %, and has to save a tenth
        ([100] * 2 + [10], 1, (10, 90)),
    ],
)
def test_the_second_length_is_the_one_that_saves_most_if_it_saves_enough(sizes, max_chunks, found):
    assert pieces([K * size for size in sizes], max_chunks) == tuple(K * size for size in found)


def test_the_arrays_of_a_short_chunk_are_the_first_of_a_long_one():
    """Two arrays a chunk, of which short chunks leave out the second."""
    layout = SimpleNamespace(pieces=(3 * K, 7 * K))
    short, long = (SimpleNamespace(num_chunks=3, num_pieces=n) for n in (1, 2))
    assert Layout.places(layout, short) == [0, 2, 4]
    assert Layout.places(layout, long) == [0, 1, 2, 3, 4, 5]
    assert Layout.places(layout, short, [1]) == [2] and Layout.places(layout, long, [1]) == [2, 3]


def test_a_fragment_has_the_chunks_that_send_least():
    """In 4 steps: 40 tiles in 4 long chunks of 10; 10 tiles in 1 long one, 12 in 4 short ones of 3,
    where long ones would take 20 tiles."""
    lengths = (3 * K, 7 * K)
    assert chunks.cut(40 * K, lengths, 4) == Cut(4, 2, 40 * K)
    assert chunks.cut(10 * K, lengths, 4) == Cut(1, 2, 10 * K)
    assert chunks.cut(12 * K, lengths, 4) == Cut(4, 1, 12 * K)
    assert chunks.cut(13 * K, lengths, 4) == Cut(2, 2, 20 * K), "5 short ones do not fit 4 steps"
    assert chunks.cut(10 * K, (5 * K, 5 * K), 4) == Cut(1, 2, 10 * K), "equal: fewer, long ones"


@pytest.mark.parametrize("max_chunks", [1, 2, 5, 33])
def test_no_length_sends_more_than_one_for_all(max_chunks):
    sizes = [41_003, 9_001, 9_001, 12_500]
    found = pieces(sizes, max_chunks)
    longest = sum(found)
    one = sum(-(-size // longest) * longest for size in sizes)
    assert sent(sizes, found, max_chunks) <= one
    assert not any(length % K for length in found)
    for size in sizes:
        cut = chunks.cut(size, found, max_chunks)
        assert size <= cut.size and cut.num_chunks <= max_chunks


def test_a_second_length_has_to_save_64_KiB():
    """30 tiles a device: 30 KiB for one device and one byte an element, 120 KiB for four."""
    assert pieces([40 * K, 10 * K], 1, unit=1) == (40 * K,)
    assert pieces([40 * K, 10 * K], 1, unit=4) == (10 * K, 30 * K)
