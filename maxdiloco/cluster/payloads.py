"""Build messages of at most MESSAGE_BYTES, and split payloads of any size into several messages.

The first message of a payload holds the payload's size. After a broken connection only some
messages are sent again, not the whole payload.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

# The channels to a peer. Each has its own connection, so that control does not wait behind bulk.
CONTROL, BULK = "control", "bulk"
# Largest message: 1.7 s at 5 Mbit/s. A link that is cut every few seconds still makes progress.
MESSAGE_BYTES = 1 << 20
Key = tuple[str | int, ...]
_SIZE = "size"


class Message(NamedTuple):
    """A message to send: its key and its bytes, in one or more buffers."""

    key: Key
    buffers: Sequence[memoryview]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(buffer.nbytes for buffer in self.buffers)


def message(key: Key, buffers: Sequence[object]) -> Message:
    """Return a message of contiguous buffers, which must not change afterwards.

    Raises:
      TypeError: a buffer is not contiguous, or the key is not a valid key.
      ValueError: the message has more than MESSAGE_BYTES.
    """
    if not key or not all(isinstance(part, str | int) for part in key):
        raise TypeError(f"key={key!r}: expected a tuple of numbers and words.")
    made = Message(key, _views(buffers))
    if made.size > MESSAGE_BYTES:
        raise ValueError(f"key={key!r}: {made.size} bytes, expected at most {MESSAGE_BYTES}.")
    return made


class Outbox(Protocol):
    """An object to which messages are queued; see cluster.messages.Messenger."""

    def put(self, peer: int, key: Key, buffers: Sequence[object]) -> None:
        """Queue a message."""


def put_payload(messenger: Outbox, peer: int, key: Key, buffers: Sequence[object]) -> None:
    """Queue the bytes of contiguous buffers, which must not change afterwards, as a payload."""
    views = _views(buffers)
    size = sum(view.nbytes for view in views)
    messenger.put(peer, (*key, _SIZE), [size.to_bytes(8, "big")])
    for number, part in enumerate(_parts(views)):
        messenger.put(peer, (*key, number), part)


def get_payload(get: Callable[[Key], bytearray], key: Key) -> np.ndarray:
    """Receive a payload and return its bytes, uint8. get: waits for the next message of a key.

    Only one message is in memory twice, because pages of the result use memory once written.
    """
    data = np.empty(int.from_bytes(get((*key, _SIZE)), "big"), np.uint8)
    for number, start in enumerate(range(0, data.size, MESSAGE_BYTES)):
        data[start : start + MESSAGE_BYTES] = np.frombuffer(get((*key, number)), np.uint8)
    return data


def _parts(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the views into parts of MESSAGE_BYTES; the last one may be smaller."""
    part, room = [], MESSAGE_BYTES
    for view in views:
        while view.nbytes:
            part.append(view[:room])
            view, room = view[room:], room - part[-1].nbytes
            if not room:
                yield part
                part, room = [], MESSAGE_BYTES
    if part:
        yield part


def _views(buffers: Sequence[object]) -> list[memoryview]:
    return [view.cast("B") for view in map(memoryview, buffers) if view.nbytes]
