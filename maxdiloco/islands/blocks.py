"""Rule 8, the data follows the log: its blocks, leased by put-if-absent. Pure, of plain values."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from maxdiloco.islands import records
from maxdiloco.islands.records import Block, Ledger, Message, Range, Record, Run

PERIODS = 3  # that are read without the store
LEAST, MOST_MORE = 2, 6  # blocks; our choice
MOST_AHEAD = 1 << 20  # blocks above the highest one seen that may be read; our choice
# Unfinished blocks in a ledger, which drops the lowest first. An island has one or two of them.
MOST_UNFINISHED = 2048
# Values of `top` in a ledger. The oldest is four snapshots old, as long as a dead incarnation is
# remembered: a slow island sends what it leases much sooner, or is so late that it joins as new.
TOPS = 5
# Bytes of a message's header without ranges: names, sha256 and signature, and numbers of 19 digits
# take 900 at the most.
WITHOUT_DATA = 1 << 10


def after(run: Run, ledger: Ledger, record: Record) -> tuple[tuple[Block, ...], int]:
    """The unfinished blocks, and the highest one seen, after a record."""
    blocks, top = {(b.block, b.lease): b for b in ledger.blocks}, ledger.top
    size = run.block_tokens
    for member in record.members:
        for part in (one for each in member.data for one in in_blocks(each, size)):
            key, top = (part.block, part.lease), max(top, part.block)
            *_, stop, tokens = blocks.get(key, (0, 0))
            # A rejected message's part may come after a later one.
            stop, tokens = max(stop, part.stop), tokens + part.stop - part.start
            blocks[key] = Block(*key, member.island, member.incarnation, stop, tokens)
            if part.lease == 2:  # it is the rest of a dead island's
                blocks.pop((part.block, 1), None)
    kept = (blocks[key] for key in sorted(blocks))
    unfinished = [b for b in kept if (b.tokens if b.lease == 1 else b.stop) < size]
    return tuple(unfinished[-MOST_UNFINISHED:]), top


def in_blocks(part: Range, size: int) -> Iterator[Range]:
    """A range, block by block."""
    block, lease, start, stop = part
    while stop > size > 0:
        yield Range(block, lease, start, size)
        block, start, stop = block + 1, 0, stop - size
    yield Range(block, lease, start, stop)


def tokens_of(data: Sequence[Range]) -> int:
    """Tokens of ranges."""
    return sum(part.stop - part.start for part in data)


def fitting(data: Sequence[Range]) -> int:
    """How many of the first ranges a message takes."""
    left = records.max_header(Message) - WITHOUT_DATA
    for number, part in enumerate(data):
        left -= records.size_in_list(part)
        if left < 0:
            return number
    return len(data)


def tops(run: Run, ledger: Ledger, number: int, top: int) -> tuple[int, ...]:
    """Ledger.tops after a record. top: after it."""
    return (*ledger.tops, top)[-TOPS:] if number % run.snapshot_every == 0 else ledger.tops


def over(ledger: Ledger, blocks: Iterable[int]) -> Iterator[int]:
    """Return the blocks that no message may name any more, so that their leases can go.

    They are finished, or were not begun four snapshots after a higher one was. Once a block is over
    it is in all later ledgers: an island whose ledger is so old that it leases one again, after the
    lease was deleted, sends what no record takes.
    """
    highest, unfinished = floor(ledger), {one.block for one in ledger.blocks}
    return (block for block in blocks if block <= highest and block not in unfinished)


def floor(ledger: Ledger) -> int:
    """The highest block that can be over, 0: none is."""
    return ledger.tops[0] if len(ledger.tops) == TOPS else 0


def are_parts(run: Run, ledger: Ledger, data: Sequence[Range]) -> bool:
    """Whether a message's ranges can be of blocks that an island holds."""
    size = run.block_tokens
    known = all(
        0 <= part.start < min(part.stop, size)
        and part.lease in (1, 2)
        and part.block + (part.stop - 1) // size <= ledger.top + MOST_AHEAD
        for part in data
    )
    end = floor(ledger) + 1  # of a range with very many blocks few are below
    parts = (range(p.block, min(p.block + -(-p.stop // size), end)) for p in data)
    return known and not any(True for _ in over(ledger, itertools.chain.from_iterable(parts)))


def free(ledger: Ledger, size: int) -> list[Range]:
    """The rests of blocks of dead islands, which may be leased once more."""
    first = (b for b in ledger.blocks if b.lease == 1 and (b.island, b.incarnation) in ledger.dead)
    return [Range(b.block, 2, b.stop, size) for b in first if b.stop < size]


def wants(held: Sequence[Range], period_tokens: int, missed: int) -> bool:
    """Whether one more block is to be claimed, so that an island can read while the store is away.

    It trains on for up to three periods then, with two messages undecided and a third one due. At
    least it holds the block that is read and the next one. held: claims under way, too. missed:
    the last blocks in a row that others had: a newcomer passes over theirs in few round trips.
    """
    tokens = sum(part.stop - part.start for part in held)
    return len(held) < LEAST + min(missed, MOST_MORE) or tokens < PERIODS * period_tokens


def to_claim(ledger: Ledger, size: int, claimed: Collection[tuple[int, int]]) -> tuple[str, Range]:
    """The next one, and the name of its claim. claimed: here, whoever has them."""
    rests = [r for r in free(ledger, size) if (r.block, r.lease) not in claimed]
    block = max([ledger.top, *(block for block, _ in claimed)]) + 1
    found = rests[0] if rests else Range(block, 1, 0, size)
    return f"d/{found.block}.2" if found.lease == 2 else f"d/{found.block}", found
