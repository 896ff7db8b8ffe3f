"""Leaves of a checkpoint written and read part by part, so that memory holds one part.

An import writes a checkpoint so, and an export reads one. The files are those of Orbax.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from maxdiloco.checkpoint import arrays

# Bytes that are committed together: a commit writes the list of all parts anew. Our choice.
_COMMIT_BYTES = 1 << 25

Box = tuple[slice, ...]


class PartedLeaf(NamedTuple):
    """A leaf to write. num_indexed: leading dims whose entries are written apart."""

    shape: tuple[int, ...]
    dtype: np.dtype
    num_indexed: int


class Writer:
    """Writes one item of a checkpoint. folder: of the item, absolute and on this machine."""

    def __init__(self, folder: epath.Path, leaves: Mapping[str, PartedLeaf]):
        import orbax.checkpoint as ocp
        import tensorstore as ts

        folder.mkdir(parents=True)
        self._context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        self._stores = {}
        for name, leaf in leaves.items():
            info = ocp.type_handlers.ParamInfo(
                name=name, parent_dir=folder, use_zarr3=False, ts_context=self._context
            )
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=leaf.shape,
                local_shape=(*[1] * leaf.num_indexed, *leaf.shape[leaf.num_indexed :]),
                dtype=leaf.dtype,
            )
            store = ts.open(spec, create=True, open=True, context=self._context)
            self._stores[name] = store.result()
        self._pending: ts.Transaction | None = None
        self._pending_bytes = 0

    def write(self, name: str, index: Sequence[int], values: np.ndarray) -> None:
        """Write the part of a leaf at an index of its leading dims. Raises OSError, ValueError."""
        import tensorstore as ts

        if self._pending is None:
            self._pending = ts.Transaction()
        store = self._stores[name].with_transaction(self._pending)
        store[tuple(index)].write(values).result()
        self._pending_bytes += values.nbytes
        if self._pending_bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Put what was written since the last commit on the disk."""
        pending, self._pending, self._pending_bytes = self._pending, None, 0
        if pending is not None:
            pending.commit_async().result()


class Reader:
    """Reads leaves of one item of a checkpoint, or of one entry of their first dim, box by box."""

    def __init__(
        self, step_folder: epath.Path, item: str, names: Sequence[str], entry: int | None = None
    ):
        self._where = f"of {item} in checkpoint {step_folder}"
        self._stores = {}
        self._copy = contextlib.ExitStack()  # of the item, where it takes one; goes with the reader
        opened = self._copy.enter_context(arrays.opened(step_folder / item, names))
        for name, opening in opened.items():
            store = arrays.result(opening, f"{name} {self._where}")
            self._stores[name] = store if entry is None else store[entry]

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a leaf."""
        return self._stores[name].dtype.numpy_dtype

    def boxes(self, name: str, num_indexed: int) -> Iterator[Box]:
        """Boxes that make up a leaf: a stored chunk each, or several up to one indexed entry."""
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
        """A box of a leaf, () for all of it. Raises CheckpointError."""
        return arrays.result(self._stores[name][box].read(), f"{name} {self._where}")


def nbytes(leaves: Mapping[str, PartedLeaf]) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
