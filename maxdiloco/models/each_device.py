"""Functions of one device's part of an array, inside a program that XLA partitions.

XLA cannot split a kernel over an automatic axis. Scattered gradients (models/product.py) and the
experts' own sums are formed so, too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from maxdiloco.parallel.sharding import Names, Rules, axes_of, spec


def automatic_spec(names: Names, rules: Rules, *, without: Sequence[str] = ()) -> P:
    """PartitionSpec over the automatic axes of the context's mesh, those in `without` left out.

    Manual are all axes inside on_each_device, and `diloco` under the map over replicas.
    """
    mesh = jax.sharding.get_abstract_mesh()
    absent = {axis for _, axes in rules for axis in axes} - set(mesh.axis_names)
    return spec(names, rules, without=(*mesh.manual_axes, *absent, *without))


def split_axes(names: Names, rules: Rules) -> list[tuple[str, ...]]:
    """Of each dim the automatic axes of several devices that split it."""
    sizes = jax.sharding.get_abstract_mesh().shape
    single = [axis for axis, size in sizes.items() if size == 1]
    return [axes_of(entry) for entry in automatic_spec(names, rules, without=single)]


def token_shards(rules: Rules) -> tuple[int, int]:
    """Numbers of devices that batch and length are spread over, on the mesh of the context."""
    sizes = jax.sharding.get_abstract_mesh().shape
    batch, length = split_axes(("batch", "length"), rules)
    return math.prod(sizes[axis] for axis in batch), math.prod(sizes[axis] for axis in length)


def on_each_device(
    fn: Callable,
    *,
    in_names: Sequence[Names],
    out_names: Names | list[Names],
    rules: Rules,
    split_only: bool = False,
) -> Callable:
    """Make fn, a function of one device's parts, a function of whole arrays.

    All axes of the mesh that are still automatic become manual around fn.
    in_names, out_names: logical names of each argument's dims and of the result's; a list of them
    for several results.
    split_only: only the axes that split an argument or the result, for fn without kernels.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.axis_names) - set(mesh.manual_axes)

    def spec_of(names):
        if split_only:
            return P(*(axes or None for axes in split_axes(names, rules)))
        return automatic_spec(names, rules)

    in_specs = tuple(spec_of(names) for names in in_names)
    if isinstance(out_names, list):
        out_specs = tuple(spec_of(names) for names in out_names)
    else:
        out_specs = spec_of(out_names)
    if split_only:
        specs = jax.tree.leaves((in_specs, out_specs), is_leaf=lambda x: isinstance(x, P))
        manual = {axis for dims in specs for entry in dims for axis in axes_of(entry)}
    return by_parts(fn, in_specs, out_specs, manual)


def by_parts(fn: Callable, in_specs: Any, out_specs: Any, manual: set[str]) -> Callable:
    """jax.shard_map over these axes of the context's mesh; fn itself without any."""
    if not manual:
        return fn
    return jax.shard_map(
        fn,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
        check_vma=False,  # kernels carry no replication types, nor does the map over replicas
    )
