"""Arrays that are kept in host memory between programs, and in device memory inside them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

HOST = "pinned_host"


def on_host(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Tell whether an array is kept in host memory."""
    return memory_kind(x) == HOST


def memory_kind(x: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> str | None:
    """Return HOST for an array in host memory, and None for any other, such as a NumPy array."""
    has_sharding = isinstance(x, jax.Array | jax.ShapeDtypeStruct) and x.sharding is not None
    return HOST if has_sharding and x.sharding.memory_kind == HOST else None


def move_to_memory(
    x: jax.Array | jax.ShapeDtypeStruct, memory: str | None
) -> jax.Array | jax.ShapeDtypeStruct:
    """Copy an array to another memory of its devices.

    The copy runs concurrently with programs: it delays only programs that use the result.

    Args:
      x: the array.
      memory: HOST, or None for the devices' own memory.
    """
    if memory_kind(x) == memory:
        return x
    sharding = x.sharding.with_memory_kind(memory)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    parts = [
        jax.device_put(part.data, SingleDeviceSharding(part.device, memory_kind=memory))
        for part in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def with_state_on_device(step: Callable, like: Any) -> Callable:
    """Let a step compute with an optimizer state that is kept in host memory; call it under jit.

    A TPU computes only in device memory: the leaves in host memory are loaded and stored again.

    Args:
      step: (params, opt_state, batch) -> (params, opt_state, metrics).
      like: opt_state as ShapeDtypeStructs, whose shardings have the memory of each leaf.
    """
    if not any(map(on_host, jax.tree.leaves(like))):
        return step

    def put(tree: Any, space: jax.memory.Space) -> Any:
        def move(x, kept):
            return jax.device_put(x, space) if on_host(kept) else x

        return jax.tree.map(move, tree, like)

    def loading(params: Any, opt_state: Any, batch: Any) -> Any:
        params, opt_state, metrics = step(params, put(opt_state, jax.memory.Space.Device), batch)
        return params, put(opt_state, jax.memory.Space.Host), metrics

    return loading
