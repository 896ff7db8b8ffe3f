"""Arrays of checkpoints: read leaf by leaf, each directly to its devices, or part by part.

Orbax writes the arrays of a run. An import writes and an export reads the same kind of files part
by part, so that memory holds one part.
"""

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from maxdiloco.checkpoint import staging
from maxdiloco.checkpoint.trees import is_key, named_leaves
from maxdiloco.engine.calls import OUTSIDE, Call
from maxdiloco.errors import CheckpointError
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import axes_of
from maxdiloco.storage.os_errors import reason

if TYPE_CHECKING:
    import tensorstore as ts

# Bytes that a process reads ahead of the leaf that it copies to its devices. They bound the host
# memory that is used, except for a single larger leaf.
READ_AHEAD_BYTES = 1 << 30
# Bytes that are committed together, because each commit rewrites the list of all parts.
_COMMIT_BYTES = 1 << 25
ACROSS_SLICES = "diloco"  # the mesh axis that joins the slices

Bounds = tuple[tuple[int, int], ...]  # of each dim: first index, index after the last
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Cycled:
    """A request for an array whose first dim has another number of entries than the saved array's.

    Entry i of the target is entry (first + i) mod `stored` of the saved array.

    Attributes:
      target: shape, dtype and sharding of the array to make.
      stored: entries of the saved array.
      first: entry of the saved array that becomes entry 0.
    """

    target: jax.ShapeDtypeStruct
    stored: int
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the saved array."""
        return (self.stored, *self.target.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the target."""
        return self.target.dtype


class PartedLeaf(NamedTuple):
    """A leaf to write.

    Attributes:
      shape: shape of the whole leaf.
      dtype: dtype of the leaf.
      num_indexed: number of leading dims whose entries are written separately.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    num_indexed: int


def read_item(
    step_folder: epath.Path, name: str, abstract: Any, *, absent: Collection[str] = ()
) -> Any:
    """Read the arrays of one item. A device holds its part of them, and of one more leaf at most.

    In several processes, if all slices hold the same leaf, each slice reads one part of it. The
    parts are then gathered over the slow link. A byte is read from the storage once, not once for
    each slice. (Orbax's broadcast from one slice sums with zeros: it loses -0.0 and widens int8.)

    Args:
      step_folder: folder of the checkpoint.
      name: name of the item.
      abstract: tree of jax.ShapeDtypeStruct or Cycled. A leaf without a sharding goes to the first
        device. A leaf of another dtype than the saved one is cast.
      absent: names of leaves that are not read, but are zeros.

    Returns:
      The tree of arrays.

    Raises:
      CheckpointError: a leaf cannot be read.
    """
    wanted = {".".join(path): leaf for path, leaf in named_leaves(abstract)}
    stored = dict.fromkeys(
        path for path, leaf in wanted.items() if math.prod(leaf.shape) and path not in absent
    )
    where = f"of {name} in checkpoint {step_folder}"
    found, started = [], deque()
    opening_item = opened(step_folder / name, stored) if stored else contextlib.nullcontext({})
    with opening_item as opening:
        for path, leaf in wanted.items():
            started.append(_started(opening.get(path), leaf, f"{path} {where}"))
            while sum(nbytes for nbytes, _ in started) > READ_AHEAD_BYTES:
                found.append(started.popleft()[1]())
        while started:  # not a loop over the deque: a finished leaf is freed on the host
            found.append(started.popleft()[1]())
    return jax.tree.structure(abstract).unflatten(found)


@contextlib.contextmanager
def opened(
    folder: epath.Path, leaves: Mapping[str, PartedLeaf | None]
) -> Iterator[dict[str, "ts.Future[ts.TensorStore]"]]:
    """Start to open the arrays of an item; they stay open inside a `with`.

    Args:
      folder: folder of the item.
      leaves: by name, the leaves to create; None for an existing leaf.

    Yields:
      Futures of the arrays, by name.

    Raises:
      OSError: the item must be copied to be read, and the copy failed.
    """
    import orbax.checkpoint as ocp
    import tensorstore as ts

    handlers = ocp.type_handlers
    context = handlers.get_ts_context(use_ocdbt=True)

    def open_array(name, leaf, readable, base):
        info = handlers.ParamInfo(
            name=name, parent_dir=readable, use_zarr3=False, ts_context=context
        )
        if leaf is None:
            spec = handlers.get_json_tspec_read(info, use_ocdbt=True)
        else:
            spec = handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=leaf.shape,
                local_shape=(*[1] * leaf.num_indexed, *leaf.shape[leaf.num_indexed :]),
                dtype=leaf.dtype,
            )
        spec["kvstore"]["base"] |= base
        return ts.open(spec, create=leaf is not None, open=True, context=context)

    with staging.readable(folder) as place:
        yield {name: open_array(name, leaf, *place) for name, leaf in leaves.items()}


def _started(
    opening: "ts.Future[ts.TensorStore] | None", leaf: Any, name: str
) -> tuple[int, Callable[[], jax.Array]]:
    """Start to read the parts of a leaf that devices of this process hold, each part once.

    Args:
      opening: the array; None for a leaf of zeros or without elements.
      leaf: ShapeDtypeStruct or Cycled.
      name: name of the leaf in messages.

    Returns:
      The bytes of the parts on the host, and a function that copies the leaf to its devices.
    """
    import tensorstore as ts

    if is_key(leaf.dtype):
        nbytes, finish_data = _started(opening, _as_stored(leaf), name)
        return nbytes, lambda: jax.random.wrap_key_data(finish_data(), dtype=leaf.dtype)
    wanted = leaf.target if isinstance(leaf, Cycled) else leaf
    target = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape, sharding = wanted.shape, target
    if opening is None:
        return 0, lambda: _zeros(shape, wanted.dtype, target)
    array = result(opening, name)
    if isinstance(leaf, Cycled):
        array = array[(leaf.first + np.arange(shape[0])) % leaf.stored]
    if array.dtype.numpy_dtype != wanted.dtype:
        array = ts.cast(array, ts.dtype(wanted.dtype))
    if jax.process_count() > 1 and _is_gathered(wanted):
        shape, sharding = split_over_slices(shape, sharding)
    indices = sharding.addressable_devices_indices_map(shape).values()
    parts = {bounds: read_part(array, bounds) for bounds in {_bounds(i, shape) for i in indices}}
    elements = sum(math.prod(end - start for start, end in part) for part in parts)

    def part(index):
        bounds = _bounds(index, shape)
        values = result(parts[bounds], name)
        missing = [(0, b - a - n) for (a, b), n in zip(bounds, values.shape, strict=True)]
        return np.pad(values, missing) if any(map(any, missing)) else values

    def finish():
        made = jax.make_array_from_callback(shape, sharding, part, dtype=wanted.dtype)
        jax.block_until_ready(made)  # otherwise the host would hold parts of many leaves
        return made if sharding == target else _gathered(made, wanted)

    return elements * wanted.dtype.itemsize, finish


def _as_stored(leaf: Any) -> Any:
    """Return a leaf of typed PRNG keys as the integers in the files; any other leaf unchanged."""
    if not is_key(leaf.dtype):
        return leaf
    if isinstance(leaf, Cycled):
        return replace(leaf, target=_as_stored(leaf.target))
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    def part(index):
        return np.zeros([end - start for start, end in _bounds(index, shape)], dtype)

    # With device_put the processes would compare their values in a collective.
    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def read_part(array: "ts.TensorStore", bounds: Bounds) -> "ts.Future[np.ndarray]":
    """Start to read a part of an array; indices beyond its end are ignored."""
    pairs = zip(bounds, array.shape, strict=True)
    return array[tuple(slice(min(a, n), min(b, n)) for (a, b), n in pairs)].read()


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def result(future: "ts.Future[Any]", name: str) -> Any:
    """Wait for a future of TensorStore and return its value.

    Args:
      future: future of a read, or of an array that opens.
      name: name of the array in messages.

    Raises:
      CheckpointError: the read or the opening failed.
    """
    try:
        return future.result()
    except (OSError, ValueError) as error:  # TensorStore also raises ValueError for files
        raise CheckpointError(
            f"{name} cannot be read: {reason(error)}. Check that the storage can be reached and "
            f"start again, or remove that checkpoint to resume from the one before it."
        ) from error


def calls(abstract: Any, *, on_compile: Callable) -> list[Call]:
    """Return the program that read_item uses to gather the largest leaf of a state, if it gathers.

    Args:
      abstract: the state, as ShapeDtypeStructs.
      on_compile: see parallel.program.Program.
    """
    leaves = [_as_stored(leaf) for leaf in jax.tree.leaves(abstract) if _is_gathered(leaf)]
    devices = leaves[0].sharding.mesh.devices.flat if leaves else ()
    if len({device.process_index for device in devices}) < 2:
        return []
    leaf = max(leaves, key=lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)))
    shape, sharding = split_over_slices(leaf.shape, leaf.sharding)
    parts = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    program = Program(
        "restore",
        functools.partial(_without_padding, shape=leaf.shape),
        out_shardings=NamedSharding(sharding.mesh, leaf.sharding.spec),
        on_compile=on_compile,
    )
    return [Call(program, (parts,), 0, OUTSIDE)]


def _is_gathered(leaf: jax.ShapeDtypeStruct) -> bool:
    sharding = leaf.sharding
    if not leaf.shape or not isinstance(sharding, NamedSharding):
        return False
    used = {name for entry in sharding.spec for name in axes_of(entry)}
    return dict(sharding.mesh.shape).get(ACROSS_SLICES, 1) > 1 and ACROSS_SLICES not in used


def split_over_slices(
    shape: tuple[int, ...], sharding: NamedSharding
) -> tuple[tuple[int, ...], NamedSharding]:
    """Split one more dim of an array over the slices.

    It is the first dim whose shards can be divided; if there is none, the longest dim is padded.
    Orbax chooses the same dim when it writes replicated arrays, so a part is a whole stored chunk.

    Returns:
      The shape, perhaps padded, and the sharding.
    """
    size = sharding.mesh.shape[ACROSS_SLICES]
    local = sharding.shard_shape(shape)
    dividing = [dim for dim, length in enumerate(local) if length % size == 0]
    dim = dividing[0] if dividing else int(np.argmax(shape))
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    entries[dim] = (*axes_of(entries[dim]), ACROSS_SLICES)
    parts = shape[dim] // local[dim] * size
    padded = -(-shape[dim] // parts) * parts
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return (*shape[:dim], padded, *shape[dim + 1 :]), sharding


def _gathered(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    target = leaf.sharding
    on_device = NamedSharding(target.mesh, target.spec)
    gather = jax.jit(_without_padding, static_argnums=1, out_shardings=on_device)
    # One leaf at a time: the gather needs memory for two copies of one leaf, not of all leaves.
    return jax.device_put(jax.block_until_ready(gather(array, leaf.shape)), target)


def _without_padding(padded: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(padded, [0] * padded.ndim, shape)


class Writer:
    """Writes one item of a checkpoint, part by part."""

    def __init__(self, folder: epath.Path, leaves: Mapping[str, PartedLeaf]):
        """Create the arrays of the item in `folder`, an absolute path on this machine."""
        import tensorstore as ts

        folder.mkdir(parents=True)
        with opened(folder, leaves) as opening:
            self._stores = {name: store.result() for name, store in opening.items()}
        self._pending, self._pending_bytes = ts.Transaction(), 0

    def write(self, name: str, index: Sequence[int], values: np.ndarray) -> None:
        """Write the part of a leaf at an index of its leading dims.

        Raises:
          OSError, ValueError: the part cannot be written.
        """
        store = self._stores[name].with_transaction(self._pending)
        store[tuple(index)].write(values).result()
        self._pending_bytes += values.nbytes
        if self._pending_bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Make all parts since the last commit durable."""
        import tensorstore as ts

        pending, self._pending, self._pending_bytes = self._pending, ts.Transaction(), 0
        pending.commit_async().result()


class Reader:
    """Reads leaves of one item of a checkpoint, box by box."""

    def __init__(
        self, step_folder: epath.Path, item: str, names: Sequence[str], entry: int | None = None
    ):
        """Open the leaves.

        Args:
          step_folder: folder of the checkpoint.
          item: name of the item.
          names: names of the leaves.
          entry: index in the first dim of each leaf; None for whole leaves.

        Raises:
          CheckpointError: a leaf cannot be opened.
        """
        self._where = f"of {item} in checkpoint {step_folder}"
        self._stores = {}
        self._copy = contextlib.ExitStack()  # removes the local copy of the item, if one is needed
        opening = self._copy.enter_context(opened(step_folder / item, dict.fromkeys(names)))
        for name, future in opening.items():
            store = result(future, f"{name} {self._where}")
            self._stores[name] = store if entry is None else store[entry]

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a leaf."""
        return self._stores[name].dtype.numpy_dtype

    def boxes(self, name: str, num_indexed: int) -> Iterator[Box]:
        """Yield the boxes of a leaf: stored chunks, joined up to the size of one entry."""
        store = self._stores[name]
        shape, chunk = store.shape, store.chunk_layout.read_chunk.shape or store.shape
        size = [min(n, c) for n, c in zip(shape, chunk, strict=True)]
        most = math.prod(shape[num_indexed:])
        for dim in range(num_indexed, len(shape)):
            size[dim] = min(shape[dim], size[dim] * max(1, most // math.prod(size)))
        for start in itertools.product(*map(range, [0] * len(shape), shape, size)):
            yield tuple(
                slice(i, min(i + step, n)) for i, step, n in zip(start, size, shape, strict=True)
            )

    def read(self, name: str, box: Box = ()) -> np.ndarray:
        """Read a box of a leaf, or all of it.

        Raises:
          CheckpointError: the box cannot be read.
        """
        return result(self._stores[name][box].read(), f"{name} {self._where}")
