"""Pytrees to and from Orbax, and what several processes must agree on around it.

Orbax takes half a second to import, so the functions that use it import it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from maxdiloco.run_folder import is_local

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

META = "meta"  # the item that is JSON; every other item is a tree of arrays
COMMIT = "commit_success.txt"  # Orbax writes it last
# A smaller share is not worth the program that cuts it out, 50-100 ms to compile on a CPU.
SHARED_WRITE_BYTES = 1 << 22  # our choice


def open_writer(before_commit: Callable[[], None]) -> "ocp.AsyncCheckpointer":
    """A writer of whole checkpoints, each visible at once or not at all.

    before_commit: called by the first process when all files are written, just before the
    checkpoint becomes visible.
    Its save() copies the arrays to the host before it returns, so the caller may donate or
    delete them; on the CPU backend that copy is a view, and JAX copies a donated buffer that a
    view still holds (both are tested).
    """
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(
        # Slices share the writing of what they all hold; in one process that only compiles.
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=SHARED_WRITE_BYTES,
    )
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=types)
    handlers.add(None, ocp.args.PyTreeSave, trees)
    handlers.add(None, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(handler_registry=handlers),
        async_options=ocp.options.AsyncOptions(post_finalization_callback=before_commit),
    )


class Note(NamedTuple):
    """What a checkpoint says about itself."""

    step: int
    meta: dict[str, Any]
    arrays: dict[str, dict[str, Any]]  # {item: {leaf name: [shape, dtype name]}}


def save_arguments(
    step: int, items: Mapping[str, Any], meta: Mapping[str, Any]
) -> "ocp.args.Composite":
    """What the writer is told to save: the items that hold arrays, and the Note as JSON."""
    import orbax.checkpoint as ocp

    arrays = {name: shapes(tree) for name, tree in items.items()}
    note = Note(step, dict(meta), arrays)._asdict()
    trees = {name: nested(tree) for name, tree in items.items()}
    saved = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items() if tree}
    return ocp.args.Composite(**saved, **{META: ocp.args.JsonSave(note)})


def read_note(step_folder: epath.Path) -> Note:
    """The Note of a checkpoint."""
    import orbax.checkpoint as ocp

    return Note(**ocp.JsonCheckpointHandler().restore(step_folder / META))


def is_complete(step_folder: epath.Path) -> bool:
    """Whether the folder became visible as a whole checkpoint."""
    if is_local(step_folder):
        return step_folder.is_dir()  # it got this name by an atomic rename
    return (step_folder / COMMIT).exists()


def read_item(step_folder: epath.Path, name: str, abstract: Any, *, axis: str) -> Any:
    """Read one item.

    abstract: tree of jax.ShapeDtypeStruct. A leaf without a sharding goes to the first device;
    a dtype other than the saved one is a cast.
    axis: mesh axis that joins the slices. With several processes, a leaf that is replicated over
    it is read in parts, one part a slice, and the parts are gathered over the slow link: a byte
    leaves the storage once, not once a slice, except in leaves too small for SHARED_WRITE_BYTES.
    (Orbax's broadcast from one slice sums with zeros: it loses -0.0 and widens int8.)
    Returns the tree with arrays for leaves.
    """
    import orbax.checkpoint as ocp

    names, leaves, treedef = _flat(abstract)
    wanted = {path: leaf for path, leaf in zip(names, leaves, strict=True) if leaf.size}
    plans = {path: _read_plan(leaf, axis) for path, leaf in wanted.items()}
    restored: dict[str, Any] = {}
    if wanted:
        handler = ocp.PyTreeCheckpointHandler()
        arguments = ocp.args.PyTreeRestore(item=_nest(wanted), restore_args=_nest(plans))
        restored = handler.restore(step_folder / name, args=arguments)
        handler.close()

    def array(path, leaf):
        if not leaf.size:
            return _empty(leaf)
        found = _lookup(restored, path)
        return _gathered(found, leaf) if _is_gathered(leaf, axis) else found

    return treedef.unflatten(map(array, names, leaves))


def shapes(tree: Any) -> dict[str, list[Any]]:
    """{leaf name: [shape, dtype name]} of a tree of arrays or ShapeDtypeStructs."""
    names, leaves, _ = _flat(tree)
    return {
        ".".join(path): [list(leaf.shape), np.dtype(leaf.dtype).name]
        for path, leaf in zip(names, leaves, strict=True)
    }


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, each counted once however many devices hold it."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def nested(tree: Any) -> dict[str, Any]:
    """Any pytree as nested dicts of its leaves, {} when it has none.

    So the files do not depend on which containers the program uses, and others can read them.
    Arrays without elements are left out: Orbax refuses them.
    """
    names, leaves, _ = _flat(tree)
    return _nest({path: leaf for path, leaf in zip(names, leaves, strict=True) if leaf.size})


def from_first_process(value: int) -> int:
    """The first process's value, in all processes."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def from_all(value: int) -> list[int]:
    """The values of all processes, in all processes."""
    if jax.process_count() == 1:
        return [int(value)]
    return multihost_utils.process_allgather(np.int32(value)).tolist()


def in_any_process(flag: bool) -> bool:
    """Whether flag is true in at least one process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def _flat(tree: Any) -> tuple[list[tuple[str, ...]], list[Any], Any]:
    paths_and_leaves, treedef = jax.tree.flatten_with_path(tree)
    names = [
        # An item that is a single array has an empty path.
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("array",)
        for path, _ in paths_and_leaves
    ]
    return names, [leaf for _, leaf in paths_and_leaves], treedef


def _nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def _lookup(root: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        root = root[key]
    return root


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.device_put(zeros, leaf.sharding or _first_device())


def _first_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _read_plan(leaf: jax.ShapeDtypeStruct, axis: str) -> "ocp.ArrayRestoreArgs":
    import orbax.checkpoint as ocp

    sharding = leaf.sharding or _first_device()
    shape = leaf.shape
    if _is_gathered(leaf, axis):
        shape, spec = split_over(shape, sharding, axis)
        sharding = NamedSharding(sharding.mesh, spec)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=sharding,
        global_shape=shape,
        dtype=leaf.dtype,
        strict=shape == leaf.shape,  # otherwise padded to shape with zeros
    )


def _is_gathered(leaf: jax.ShapeDtypeStruct, axis: str) -> bool:
    sharding = leaf.sharding
    if jax.process_count() == 1 or not leaf.shape or not isinstance(sharding, NamedSharding):
        return False
    used = {name for entry in sharding.spec for name in _axes(entry)}
    return dict(sharding.mesh.shape).get(axis, 1) > 1 and axis not in used


def split_over(
    shape: tuple[int, ...], sharding: NamedSharding, axis: str
) -> tuple[tuple[int, ...], PartitionSpec]:
    """Split one more dimension over a mesh axis: the first whose shards divide, else the longest.

    Returns the shape, padded where nothing divides, and the spec. The choice of dimension is
    that of Orbax when it writes replicated arrays, so that a part is a whole stored chunk.
    """
    size = sharding.mesh.shape[axis]
    local = sharding.shard_shape(shape)
    dividing = [dim for dim, length in enumerate(local) if length % size == 0]
    dim = dividing[0] if dividing else int(np.argmax(shape))
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    entries[dim] = (*_axes(entries[dim]), axis)
    parts = shape[dim] // local[dim] * size
    padded = -(-shape[dim] // parts) * parts
    return (*shape[:dim], padded, *shape[dim + 1 :]), PartitionSpec(*entries)


def _axes(entry: None | str | tuple[str, ...]) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _gathered(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    target = leaf.sharding
    on_device = NamedSharding(target.mesh, target.spec)
    starts = [0] * array.ndim
    gather = jax.jit(
        lambda padded: jax.lax.slice(padded, starts, leaf.shape), out_shardings=on_device
    )
    # One leaf at a time: the gather needs room for one leaf twice, not for all.
    return jax.device_put(jax.block_until_ready(gather(array)), target)
