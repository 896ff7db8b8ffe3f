"""Reads saved arrays leaf by leaf, each straight to its devices: Orbax wrote, TensorStore reads."""

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from maxdiloco.checkpoint import staging
from maxdiloco.checkpoint.orbax_io import named_leaves
from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.errors import CheckpointError
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import axes_of
from maxdiloco.storage.run_folder import reason

if TYPE_CHECKING:
    import tensorstore as ts

# Bytes that a process reads ahead of the leaf that goes to its devices; one leaf may be larger.
READ_AHEAD_BYTES = 1 << 30  # our choice
ACROSS_SLICES = "diloco"  # the mesh axis that joins the slices

Bounds = tuple[tuple[int, int], ...]  # of each dim: first index, index after the last


@dataclass(frozen=True)
class Cycled:
    """An array to make from a saved one with another number of entries in its first dim, `stored`.

    Entry i of the target is entry (first + i) mod `stored`. shape, size: of the saved array.
    """

    target: jax.ShapeDtypeStruct
    stored: int
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """[stored, ...]."""
        return (self.stored, *self.target.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """That of the target."""
        return self.target.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class _Reading(NamedTuple):
    """A leaf being read: the parts that the devices of this process hold, each read once."""

    leaf: jax.ShapeDtypeStruct  # the array to make
    shape: tuple[int, ...]  # of the array that the parts make up, before a gather
    sharding: jax.sharding.Sharding  # of the same
    parts: dict[Bounds, "ts.Future[np.ndarray]"]
    name: str  # for messages

    @property
    def nbytes(self) -> int:
        """Bytes of the parts on the host."""
        elements = sum(math.prod(end - start for start, end in part) for part in self.parts)
        return elements * np.dtype(self.leaf.dtype).itemsize


def read_item(step_folder: epath.Path, name: str, abstract: Any) -> Any:
    """The tree of arrays of one item; a device holds its parts of it and of one more leaf at most.

    abstract: tree of jax.ShapeDtypeStruct or Cycled. A leaf without a sharding goes to the first
    device; a dtype other than the saved one is a cast.
    With several processes, a leaf that all slices hold alike is read in parts, one part a slice,
    and the parts are gathered over the slow link: a byte leaves the storage once, not once a slice.
    (Orbax's broadcast from one slice sums with zeros: it loses -0.0 and widens int8.)
    Raises CheckpointError when a leaf cannot be read.
    """
    names, leaves, treedef = named_leaves(abstract)
    wanted = {".".join(path): leaf for path, leaf in zip(names, leaves, strict=True)}
    where = f"of {name} in checkpoint {step_folder}"
    stored = [path for path, leaf in wanted.items() if leaf.size]
    with opened(step_folder / name, stored) as opening:
        readings = (
            _started(opening.get(path), leaf, f"{path} {where}") for path, leaf in wanted.items()
        )
        return treedef.unflatten([_finished(reading) for reading in _ahead(readings)])


def _ahead(readings: Iterable[_Reading]) -> Iterator[_Reading]:
    """The readings in their order, each started READ_AHEAD_BYTES before it is used."""
    started: deque[_Reading] = deque()
    for reading in readings:
        started.append(reading)
        while sum(reading.nbytes for reading in started) > READ_AHEAD_BYTES:
            yield started.popleft()
    while started:
        yield started.popleft()


@contextlib.contextmanager
def opened(
    folder: epath.Path, names: Sequence[str]
) -> Iterator[dict[str, "ts.Future[ts.TensorStore]"]]:
    """The arrays of an item that begin to open, by name, for a `with`. folder: of the item.

    Raises OSError where a copy of the item is needed and fails.
    """
    import orbax.checkpoint as ocp
    import tensorstore as ts

    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)

    def open_array(name, readable, base):
        info = ocp.type_handlers.ParamInfo(
            name=name, parent_dir=readable, use_zarr3=False, ts_context=context
        )
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        spec["kvstore"]["base"] |= base
        return ts.open(spec, open=True, context=context)

    with staging.readable(folder) as place:
        yield {name: open_array(name, *place) for name in names}


def _started(opening: "ts.Future[ts.TensorStore] | None", leaf: Any, name: str) -> _Reading:
    """Begin to read what this process needs of a leaf. opening: None for an empty leaf."""
    import tensorstore as ts

    wanted = leaf.target if isinstance(leaf, Cycled) else leaf
    sharding = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = wanted.shape
    if opening is None:
        return _Reading(wanted, shape, sharding, {}, name)
    array = result(opening, name)
    if isinstance(leaf, Cycled):
        array = array[(leaf.first + np.arange(shape[0])) % leaf.stored]
    if array.dtype.numpy_dtype != wanted.dtype:
        array = ts.cast(array, ts.dtype(wanted.dtype))
    if jax.process_count() > 1 and _is_gathered(wanted):
        shape, spec = split_over_slices(shape, sharding)
        sharding = NamedSharding(sharding.mesh, spec)
    indices = sharding.addressable_devices_indices_map(shape).values()
    parts = {bounds: read_part(array, bounds) for bounds in {_bounds(i, shape) for i in indices}}
    return _Reading(wanted, shape, sharding, parts, name)


def read_part(array: "ts.TensorStore", bounds: Bounds) -> "ts.Future[np.ndarray]":
    """Begin to read a part of an array; indices beyond its end are left out."""
    pairs = zip(bounds, array.shape, strict=True)
    return array[tuple(slice(min(a, n), min(b, n)) for (a, b), n in pairs)].read()


def _finished(reading: _Reading) -> jax.Array:
    """The leaf on its devices."""
    leaf, shape = reading.leaf, reading.shape
    if not leaf.size:
        return jax.device_put(np.zeros(shape, leaf.dtype), reading.sharding)

    def part(index):
        bounds = _bounds(index, shape)
        values = result(reading.parts[bounds], reading.name)
        missing = [(0, b - a - n) for (a, b), n in zip(bounds, values.shape, strict=True)]
        return np.pad(values, missing) if any(map(any, missing)) else values

    array = jax.make_array_from_callback(shape, reading.sharding, part, dtype=leaf.dtype)
    jax.block_until_ready(array)  # or the host would hold parts of many leaves
    is_whole = leaf.sharding is None or reading.sharding == leaf.sharding
    return array if is_whole else _gathered(array, leaf)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def result(future: "ts.Future[Any]", name: str) -> Any:
    """What a future of TensorStore gives. name: of the array. Raises CheckpointError."""
    try:
        return future.result()
    except (OSError, ValueError) as error:  # TensorStore raises ValueError for files too
        raise CheckpointError(
            f"{name} cannot be read: {reason(error)}. See that the storage can be reached and "
            f"start again, or remove that checkpoint to go on from the one before it."
        ) from error


def calls(abstract: Any, *, on_compile: Callable) -> list[Call]:
    """The program with which read_item(abstract) gathers the largest leaf; [] without a gather."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if _is_gathered(leaf)]
    devices = leaves[0].sharding.mesh.devices.flat if leaves else ()
    if len({device.process_index for device in devices}) < 2:
        return []
    leaf = max(leaves, key=lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)))
    shape, spec = split_over_slices(leaf.shape, leaf.sharding)
    mesh = leaf.sharding.mesh
    parts = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    program = Program(
        "restore",
        functools.partial(_without_padding, shape=leaf.shape),
        out_shardings=NamedSharding(mesh, leaf.sharding.spec),
        on_compile=on_compile,
    )
    return [Call(program, (parts,), 0, BESIDE)]


def _is_gathered(leaf: jax.ShapeDtypeStruct) -> bool:
    sharding = leaf.sharding
    if not leaf.shape or not isinstance(sharding, NamedSharding):
        return False
    used = {name for entry in sharding.spec for name in axes_of(entry)}
    return dict(sharding.mesh.shape).get(ACROSS_SLICES, 1) > 1 and ACROSS_SLICES not in used


def split_over_slices(
    shape: tuple[int, ...], sharding: NamedSharding
) -> tuple[tuple[int, ...], PartitionSpec]:
    """Shape, padded where nothing divides, and spec with one more dim split over the slices.

    It is the first dim whose shards divide, else the longest. Orbax chooses the same one when it
    writes replicated arrays, so a part is a whole stored chunk.
    """
    size = sharding.mesh.shape[ACROSS_SLICES]
    local = sharding.shard_shape(shape)
    dividing = [dim for dim, length in enumerate(local) if length % size == 0]
    dim = dividing[0] if dividing else int(np.argmax(shape))
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    entries[dim] = (*axes_of(entries[dim]), ACROSS_SLICES)
    parts = shape[dim] // local[dim] * size
    padded = -(-shape[dim] // parts) * parts
    return (*shape[:dim], padded, *shape[dim + 1 :]), PartitionSpec(*entries)


def _gathered(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    target = leaf.sharding
    on_device = NamedSharding(target.mesh, target.spec)
    gather = jax.jit(_without_padding, static_argnums=1, out_shardings=on_device)
    # One leaf at a time: the gather needs room for one leaf twice, not for all.
    return jax.device_put(jax.block_until_ready(gather(array, leaf.shape)), target)


def _without_padding(padded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(padded, [0] * padded.ndim, shape)
