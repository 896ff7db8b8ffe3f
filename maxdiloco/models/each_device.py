"""Functions of one device's part of an array, inside a program that XLA partitions.

A need more than a gain: XLA cannot split a kernel over an automatic axis. Scattered gradients
(models/product.py) and the experts' own sums are formed so, too.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from maxdiloco.parallel.sharding import Names, Rules, axes_of, spec


def automatic_spec(names: Names, rules: Rules, *, split_only: bool = False) -> P:
    """PartitionSpec of dims with these logical names, over the context's automatic mesh axes.

    Every entry is None without such axes. Axes that are manual already, `diloco` under the map
    over replicas, are left out; with split_only those of size 1 too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    known = {axis for _, axes in rules for axis in axes}
    left_out = {*mesh.manual_axes, *(known - set(mesh.axis_names))}
    if split_only:
        left_out |= {axis for axis, size in mesh.shape.items() if size == 1}
    return spec(names, rules, without=tuple(left_out))


def on_each_device(
    fn: Callable,
    *,
    in_names: Sequence[Names],
    out_names: Names | list[Names],
    rules: Rules,
    split_only: bool = False,
) -> Callable:
    """Make fn, a function of one device's parts, a function of whole arrays.

    All axes of the mesh that are still automatic become manual around fn: a compiler cannot split
    a kernel over an automatic axis. Without such axes fn itself is returned.
    in_names, out_names: logical names of each argument's dims and of the result's; a list of them
    for several results.
    split_only: only the axes that split an argument or the result, for fn without kernels.
    """
    mesh = jax.sharding.get_abstract_mesh()
    results = out_names if isinstance(out_names, list) else [out_names]
    specs = [automatic_spec(n, rules, split_only=split_only) for n in (*in_names, *results)]
    manual = set(mesh.axis_names) - set(mesh.manual_axes)
    if split_only:
        manual = {axis for dims in specs for entry in dims for axis in axes_of(entry)}
    if not manual:
        return fn
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(specs[: len(in_names)]),
        out_specs=tuple(specs[len(in_names) :]) if results is out_names else specs[-1],
        axis_names=manual,
        check_vma=False,  # kernels carry no replication types, nor does the map over replicas
    )
