"""Gather arrays of a mesh over several processes in the memory of process 0, and scatter them.

No device ever holds a whole array. Process 0 receives every shard that it does not hold once, and
sends to each other process the shards that this process holds.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from maxdiloco.cluster.deadlines import Deadlines
from maxdiloco.cluster.payloads import put_payload
from maxdiloco.engine.host_transfer import Mailbox

Index = tuple[slice, ...]

_UP, _DOWN = ("whole",), ("shards",)  # keys; messages of a key keep their order


class HostGather:
    """Gathers and scatters; all processes call the same methods in the same order."""

    def __init__(self, mailbox: Mailbox | None):
        """Keep the mailbox; None in a run of one process."""
        self._mailbox = mailbox
        self._here = 0 if mailbox is None else jax.process_index()

    def gather(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return the values in process 0, and [] in others. Waits; raises LostPeerError."""
        if self._mailbox is None:
            return jax.device_get(list(arrays))
        for x in arrays:
            x.copy_to_host_async()
        owned = [_owned(x.sharding, x.shape) for x in arrays]
        own = [
            (place, index, _part(arrays[place], index))
            for place, of_process in enumerate(owned)
            for index in of_process.get(self._here, ())
        ]
        if self._here:
            if own:
                put_payload(self._mailbox, 0, _UP, [part for _, _, part in own])
            return []
        found = [np.empty(x.shape, x.dtype) for x in arrays]
        for place, index, part in own:
            found[place][index] = part
        for peer in sorted(set[int]().union(*owned) - {0}):
            data = self._received(peer, _UP)
            for values, of_process in zip(found, owned, strict=True):
                for index in of_process.get(peer, ()):
                    data = _filled(values, index, data)
        return found

    def scatter(
        self, values: Sequence[np.ndarray], like: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Return arrays with the values of process 0. Raises LostPeerError.

        Args:
          values: in process 0; they must not change afterwards. Other processes may pass [].
          like: ShapeDtypeStructs with shardings.
        """
        if self._mailbox is None:
            return jax.device_put(list(values), [x.sharding for x in like])
        held = [_held(x.sharding, x.shape) for x in like]
        if self._here:
            data, values = self._received(0, _DOWN), [np.empty(x.shape, x.dtype) for x in like]
            for array, of_process in zip(values, held, strict=True):
                for index in of_process[self._here]:
                    data = _filled(array, index, data)
        else:
            for peer in sorted(held[0].keys() - {0}):
                parts = [
                    np.ascontiguousarray(array[index])
                    for array, of_process in zip(values, held, strict=True)
                    for index in of_process[peer]
                ]
                put_payload(self._mailbox, peer, _DOWN, parts)
        return [
            jax.make_array_from_callback(x.shape, x.sharding, array.__getitem__)
            for x, array in zip(like, values, strict=True)
        ]

    def _received(self, peer: int, key: tuple[str]) -> np.ndarray:
        what = "its part of a fragment" if key == _UP else "a fragment"
        return Deadlines().receive_payload(self._mailbox, peer, key, what)


def _held(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, list[Index]]:
    """Return {process: the parts of an array that its devices hold}, each part once, in order."""
    found: dict[int, dict[str, Index]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(device.process_index, {})[str(index)] = index
    return {process: [parts[key] for key in sorted(parts)] for process, parts in found.items()}


def _owned(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[int, list[Index]]:
    """Like `_held`, but assign each part to one process, the lowest-numbered holder."""
    held, seen, found = _held(sharding, shape), set[str](), {}
    for process in sorted(held):
        found[process] = [index for index in held[process] if str(index) not in seen]
        seen.update(map(str, found[process]))
    return {process: parts for process, parts in found.items() if parts}


def _part(x: jax.Array, index: Index) -> np.ndarray:
    (data, *_) = (shard.data for shard in x.addressable_shards if shard.index == index)
    return np.ascontiguousarray(data)


def _filled(values: np.ndarray, index: Index, data: np.ndarray) -> np.ndarray:
    """Fill one part from the front of the bytes; return the remaining bytes."""
    part = values[index]
    values[index] = data[: part.nbytes].view(values.dtype).reshape(part.shape)
    return data[part.nbytes :]
