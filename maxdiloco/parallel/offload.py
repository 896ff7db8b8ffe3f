"""Arrays that are kept in host memory between programs, and on the device inside them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

HOST = "pinned_host"


def on_host(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is kept in host memory."""
    return kind_of(x) == HOST


def kind_of(x: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> str | None:
    """HOST for an array that is kept in host memory; None for any other, a NumPy array too."""
    has_place = isinstance(x, jax.Array | jax.ShapeDtypeStruct) and x.sharding is not None
    return HOST if has_place and x.sharding.memory_kind == HOST else None


def moved(
    x: jax.Array | jax.ShapeDtypeStruct, memory: str | None
) -> jax.Array | jax.ShapeDtypeStruct:
    """x in another memory of its devices: HOST or, None, the devices' own.

    Copied beside the programs that run, not by one: it holds up only what takes the result.
    """
    if kind_of(x) == memory:
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
    """step(params, opt_state, batch) over an opt_state that is kept as `like` says, under jit.

    A TPU computes in device memory only: what is in host memory is loaded and stored again.
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
