"""theta of a checkpoint, whichever way the run kept it: one, or one for each replica.

    # R replicas
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.trainer import OUTER_OF_EACH, OUTER_PARAMS
from maxdiloco.parallel.replicas import reduce_mean


class Wanted(NamedTuple):
    """An item to read, as ShapeDtypeStructs, and what makes one set of parameters of it."""

    item: str
    abstract: Any
    pick: Callable[[Any], Any]


def item_of(meta: dict[str, Any]) -> str:
    """The item that has theta."""
    return meta["theta_item"] if "theta_item" in meta else OUTER_PARAMS


def wanted(abstract: Any, meta: dict[str, Any]) -> Wanted:
    """What to read for theta. abstract: of one set of parameters; pick gives its dtypes.

    Of a run with eager updates it is the mean over the replicas, taken where it is read.
    """
    item = item_of(meta)
    if item != OUTER_OF_EACH:
        return Wanted(item, abstract, lambda params: params)

    def mean(params_R):
        return jax.tree.map(lambda x, like: reduce_mean(x).astype(like.dtype), params_R, abstract)

    def theta_R(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)

    return Wanted(item, of_replicas(jax.tree.map(theta_R, abstract), meta["num_replicas"]), mean)


def picked(wanted: Wanted, params: Any, abstract: Any) -> Any:
    """One set of parameters laid out like `abstract`, from what was read."""
    if wanted.item == OUTER_PARAMS:
        return params
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(wanted.pick, out_shardings=shardings)(params)


def of_replicas(abstract: Any, R: int) -> Any:
    """R sets of parameters, divided among the slices where they divide."""

    def of_leaf(x):
        if not isinstance(x.sharding, NamedSharding):
            return jax.ShapeDtypeStruct((R, *x.shape), x.dtype, sharding=x.sharding)
        slots = x.sharding.mesh.shape["diloco"]
        first = "diloco" if R % slots == 0 else None
        sharding = NamedSharding(x.sharding.mesh, P(first, *x.sharding.spec))
        return jax.ShapeDtypeStruct((R, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map(of_leaf, abstract)
