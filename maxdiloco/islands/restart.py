"""What an island of fixed mode keeps in its own checkpoint, to go on from to the bit. Rule 10.

It takes its steps again from there, with the records that the log has by now, and makes its
messages again under the same names: they have to be what they were.
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.islands import outer, records, wires
from maxdiloco.islands.island import Island, Log, Own
from maxdiloco.islands.records import Damaged, Part, Place, Run


class Kept(NamedTuple):
    """A checkpoint, beside theta, trace and x. Of each fragment: left, arrays [K, N] of the
    caller's, and payloads, of the undecided messages by seq.
    """

    place: Place
    left: list[np.ndarray]
    payloads: list[dict[int, bytes]]


def place_of(s: Island, sha256: str = "") -> Place:
    """Where an island is between two inner steps."""
    parts = tuple(
        Part(log.ledger, tuple((own.message, own.t) for own in log.own), log.seq, log.steps,
             log.tokens)
        for log in s.logs
    )  # fmt: skip
    return Place(s.name, records.digest(s.run), s.t, s.read, parts, sha256)


def restored(s: Island, place: Place) -> Island:
    """A started island at its place. Whether the store has its messages is asked again."""
    s.logs = tuple(
        Log(
            ledger=part.ledger,
            own=tuple(Own(message, t, False) for message, t in part.own),
            seq=part.seq,
            steps=part.steps,
            tokens=part.tokens,
        )
        for part in place.parts
    )
    s.t, s.read = place.t, place.read
    return s


def encode(
    s: Island, left: Sequence[Sequence[np.ndarray]], payloads: Sequence[Mapping[int, bytes]]
) -> bytes:
    """The bytes of a Kept."""
    arrays = (np.asarray(array, "<f4").tobytes() for arrays in left for array in arrays)
    messages = (found[seq] for found in payloads for seq in sorted(found))
    payload = b"".join([*arrays, *messages])
    return records.encode(place_of(s, records.sha256(payload)), payload)


def decode(run: Run, name: str, saved: bytes) -> Kept:
    """Of encode. Raises ConfigError where it is damaged, or another run's or island's."""
    try:
        place, payload = records.decode(f"k/{name}", saved)
    except Damaged as error:
        raise ConfigError(f"{error}. Restore another checkpoint of island={name}.") from error
    if not run.islands or (place.run, place.island) != (records.digest(run), name):
        raise ConfigError(
            f"island={name} cannot go on from this checkpoint: it is of island={place.island} of "
            "islands=fixed, and every key of its run has to be as it was. Restore its own."
        )
    sizes = [outer.sizes_of(run, fragment) for fragment in range(len(run.fragments))]
    own = [[message.seq for message, _ in part.own] for part in place.parts]
    coded = [wires.payload_size(run.wire, leaves) for leaves in sizes]
    messages = sum(size * len(seqs) for size, seqs in zip(coded, own, strict=True))
    K = (len(payload) - messages) // (4 * sum(map(sum, sizes)))
    stream = io.BytesIO(payload)
    left = [
        np.frombuffer(stream.read(4 * K * N), "<f4").astype(np.float32).reshape(K, N)
        for N in map(sum, sizes)
    ]
    payloads = [{seq: stream.read(n) for seq in seqs} for n, seqs in zip(coded, own, strict=True)]
    return Kept(place, left, payloads)
