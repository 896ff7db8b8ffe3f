"""Read one set of parameters of a checkpoint: the outer parameters, or a replica's.

# R replicas
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.checkpoint.read import Restored, restore_from
from maxdiloco.engine.trainer import OUTER_OF_EACH, OUTER_PARAMS
from maxdiloco.errors import ConfigError
from maxdiloco.parallel.replicas import reduce_mean

REPLICAS = "params"  # the item with the replicas' own parameters, [R, ...]


def item_of(meta: dict[str, Any], parameters: str) -> tuple[str, range | None]:
    """Choose the item that has the parameters, and the entries of its first dim to average.

    Args:
      meta: meta of the checkpoint.
      parameters: `outer`, with eager updates the mean of the replicas' outer parameters;
        `replica_0` and so on; or `mean`, of all replicas.

    Returns:
      The name of the item and the entries; None if the item is the parameters themselves.

    Raises:
      ConfigError: the checkpoint has no such parameters.
    """
    if parameters == "outer":
        item = meta.get("outer_item", OUTER_PARAMS)
        return item, range(meta["num_replicas"]) if item == OUTER_OF_EACH else None
    R = meta["num_replicas"]
    number = re.fullmatch(r"replica_([0-9]{1,9})", parameters)
    if (number or parameters == "mean") and not meta.get("exchange"):
        raise ConfigError(
            f"parameters={parameters}: the checkpoint has no replicas, since its run had "
            f"enable_diloco=false. Use parameters=outer."
        )
    first, count = (int(number[1]), 1) if number else (0, R)
    if not (number or parameters == "mean") or first >= R:
        raise ConfigError(
            f"parameters={parameters} must be outer, mean, or replica_0 to replica_{R - 1}."
        )
    return REPLICAS, range(first, first + count)


def restore_parameters(
    path: epath.PathLike,
    abstract_of: Callable[[dict[str, Any]], Any],
    *,
    parameters: str = "outer",
    **options: Any,
) -> tuple[Any, Restored]:
    """Read only one set of parameters, cast to the dtypes of abstract_of(meta).

    Args:
      path: path of a run or a checkpoint.
      abstract_of: meta -> the parameters as ShapeDtypeStructs.
      parameters: see item_of.
      **options: options of read.restore_from, whose errors it raises.

    Returns:
      The parameters, and the checkpoint.
    """
    pick: Callable[[Any], Any]

    def items_of(meta):
        nonlocal pick
        item, abstract, pick = plan_read(abstract_of(meta), meta, parameters)
        return {item: abstract}

    restored = restore_from(path, items_of, cast=True, **options)
    (found,) = restored.items.values()
    return pick(found), restored


def plan_read(
    abstract: Any, meta: dict[str, Any], parameters: str = "outer"
) -> tuple[str, Any, Callable[[Any], Any]]:
    """Plan how to read one set of parameters, laid out like `abstract`.

    Args:
      abstract: the parameters as ShapeDtypeStructs.
      meta: meta of the checkpoint.
      parameters: see item_of.

    Returns:
      The name of the item, its ShapeDtypeStructs, and a function that maps the item to the
      parameters.
    """
    item, entries = item_of(meta, parameters)
    if entries is None:
        return item, abstract, lambda params: params
    R, is_mean = meta["num_replicas"], len(entries) > 1

    def of_leaf(x):
        # float32: sums of R bfloat16 values drift.
        dtype = jnp.float32 if is_mean else x.dtype
        sharding = x.sharding
        if isinstance(sharding, NamedSharding):
            positions = sharding.mesh.shape["diloco"]
            first = "diloco" if len(entries) % positions == 0 else None
            sharding = NamedSharding(sharding.mesh, P(first, *sharding.spec))
        x_R = jax.ShapeDtypeStruct((len(entries), *x.shape), dtype, sharding=sharding)
        return x_R if is_mean else Cycled(x_R, stored=R, first=entries[0])

    def mean(params_R):
        return jax.tree.map(lambda x, like: reduce_mean(x).astype(like.dtype), params_R, abstract)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return item, jax.tree.map(of_leaf, abstract), jax.jit(mean, out_shardings=shardings)
