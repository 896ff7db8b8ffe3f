"""How long the chunks are in which fragments travel: one length a run, or two.

A chunk of each length needs its own program of an inner step, which is what takes long to compile;
a chunk longer than its fragment is filled up with zeros. So there is a second, shorter length only
where it saves enough.
"""

from collections.abc import Sequence

from maxdiloco.diloco.quantize import ceil_div
from maxdiloco.exchange.payload import pad_to_tile

# What a second length has to save in a period to be worth a program; our choice.
LEAST_PART = 0.1  # of all bytes
LEAST_BYTES = 1 << 16  # that a replica sends to one other


def pieces_of_a_chunk(sizes: Sequence[int], *, max_chunks: int, unit: int) -> tuple[int, ...]:
    """Lengths of the arrays that make a chunk [wire elements per replica and device].

    One length, for chunks that are all alike; or two: a short chunk is the first array, a long one
    is both. The largest fragment fills `max_chunks` long chunks, up to whole tiles.
    sizes: of the fragments, at least one. unit: bytes of an element on all devices of a replica.
    """

    def sent(pieces):
        return sum(cut(size, pieces, max_chunks)[0] for size in sizes)

    longest = pad_to_tile(ceil_div(max(sizes), max_chunks))
    counts = range(1, max_chunks + 1)
    lengths = {pad_to_tile(ceil_div(size, n)) for size in set(sizes) for n in counts}
    shorter = sorted((length for length in lengths if length < longest), reverse=True)
    if not shorter:
        return (longest,)
    best = min(((short, longest - short) for short in shorter), key=sent)
    saved = sent((longest,)) - sent(best)
    worth = saved >= LEAST_PART * sent((longest,)) and saved * unit >= LEAST_BYTES
    return best if worth else (longest,)


def steps_to_owners(steps: int, *, to_owners: int, shared: int) -> int:
    """Of the steps in which a fragment travels those that bring its parts to their owners.

    Both ways load the link alike, and have a step at least if there are two. to_owners, shared:
    bytes of a device.
    """
    even = round(steps * to_owners / (to_owners + shared))
    return max(1, min(even, steps - 1))


def cut(size: int, pieces: Sequence[int], max_chunks: int) -> tuple[int, int, int]:
    """A fragment of `size` wire elements in the chunks that send least; if equal, long ones.

    (wire elements sent, number of chunks, of the first pieces that make each).
    """
    cuts = []
    for num_pieces in range(1, len(pieces) + 1):
        length = sum(pieces[:num_pieces])
        num_chunks = ceil_div(size, length)
        if num_chunks <= max_chunks:
            cuts.append((num_chunks * length, num_chunks, num_pieces))
    return min(cuts)
