"""Writing trees of arrays with Orbax, without Orbax's log of failures that a save reports itself.

Importing Orbax takes half a second or more, so only the functions that use it import it.
"""

import asyncio
import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

Writes = Sequence["ocp.future.Future"]  # the results of start_writing
# To slice a smaller share is not worth a program, which compiles in 50-100 ms on a CPU.
SHARED_WRITE_BYTES = 1 << 22
# A reader decodes whole chunks. A larger chunk is split if its parts have LEAST_CHUNK_BYTES.
CHUNK_BYTES = 1 << 25
LEAST_CHUNK_BYTES = 1 << 20  # "below 1 MiB could reduce performance" (Orbax)


def open_writer() -> "ocp.PyTreeCheckpointHandler":
    """Return Orbax's writer of trees of arrays."""
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(
        # Slices share the writing of replicated arrays. One process would only compile for it.
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=SHARED_WRITE_BYTES,
    )
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=types)


def start_writing(
    writer: "ocp.PyTreeCheckpointHandler", folder: epath.Path, trees: Mapping[str, Any]
) -> list["ocp.future.Future"]:
    """Start to write trees of arrays, each to the folder of its name.

    The arrays are copied to the host before the function returns, so the caller may donate or
    delete them. On the CPU backend the copy is a view, and JAX copies a donated buffer that a view
    holds.

    Returns:
      Futures; the caller waits for the result() of each.
    """
    import orbax.checkpoint as ocp

    def save_args(leaf):
        shard = leaf.sharding.shard_shape(leaf.shape)
        return ocp.SaveArgs(shard_axes=split_dims(shard, leaf.dtype.itemsize))

    async def start():
        copies = [
            writer.async_save(
                folder / name, args=ocp.args.PyTreeSave(tree, jax.tree.map(save_args, tree))
            )
            for name, tree in trees.items()
        ]
        return [write for writes in await asyncio.gather(*copies) for write in writes]

    # Not asyncio.run: at its end it iterates over the tasks of all threads' loops.
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(start())


def split_dims(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Choose the leading dims (replicas, layers, experts) whose entries get separate chunks.

    A chunk holds one tensor, or several that together have at most CHUNK_BYTES.

    Args:
      shape: shape of a device's part of a leaf.
      itemsize: bytes of an element.
    """
    dims: list[int] = []
    size = math.prod(shape) * itemsize
    for dim, entries in enumerate(shape):
        if size <= CHUNK_BYTES or size // entries < LEAST_CHUNK_BYTES:
            break
        size //= entries
        dims.append(dim)
    return tuple(dims)


# Coroutines that Orbax creates before the event loop that would run them.
_OF_ORBAX = (
    "_async_serialize_shardings",
    "_serialize_arrays_batches_without_dispatcher",
    "BasePyTreeCheckpointHandler",
    "cancellable",
    "run_sync",
)


@contextlib.contextmanager
def silence_logs() -> Iterator[None]:
    """Keep Orbax from logging a failed save, which the Checkpointer reports in one line.

    Orbax runs the writes of a checkpoint as tasks of an event loop and closes the loop at the first
    write that fails. The other writes continue, into a folder that is being removed, and print
    tracebacks of tasks and of a closed loop. The loops set here wait for their tasks before they
    close. If no file descriptor is left for a loop, Python warns of coroutines that it never ran.
    The filters stay after the `with`, because a thread of a save that timed out may log later.
    """
    from absl import logging as of_absl  # its logger must exist before other code requests one

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())
    of_absl.get_absl_logger().addFilter(_not_from_orbax)
    never = rf"coroutine '({'|'.join(_OF_ORBAX)})\b.*' was never awaited"
    warnings.filterwarnings("ignore", message=never, category=RuntimeWarning)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


class _Loop(asyncio.SelectorEventLoop):
    _made = False  # whether its constructor has succeeded; it needs three file descriptors

    def __init__(self) -> None:
        super().__init__()
        self._made = True

    def is_closed(self) -> bool:
        # Otherwise Python closes a half-made loop, which was never opened, on collecting it.
        return not self._made or super().is_closed()

    def close(self) -> None:
        if not self.is_closed() and (left := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        super().close()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        # The save raises the first failure; nobody retrieves the others.
        if "never retrieved" not in context["message"]:
            super().default_exception_handler(context)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Loop()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname
