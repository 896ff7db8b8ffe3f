"""Map logical axis names to mesh axes: one table for parameters and activations."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.errors import ConfigError

Rules = tuple[tuple[str, tuple[str, ...]], ...]
# For each dim a logical name, or several whose mesh axes share the dim, or None: not sharded.
Names = Sequence[str | tuple[str, ...] | None]

# `batch` has `diloco` for data parallelism; under the map over replicas that axis is manual and
# `constrain` leaves it out.
DEFAULT_RULES: Rules = (
    ("batch", ("diloco", "data", "fsdp", "expert")),
    ("length", ("context",)),
    ("embed_act", ()),
    ("heads_act", ("tensor",)),
    ("kv_act", ("tensor",)),
    ("mlp_act", ("tensor",)),
    ("vocab_act", ("tensor",)),
    ("layers", ()),
    ("embed", ("fsdp", "context")),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("head_dim", ()),
    ("mlp", ("tensor",)),
    ("vocab", ("tensor",)),
    ("lora", ("fsdp",)),
    ("norm", ()),
    ("expert", ("expert",)),
    ("stored_expert", ("expert",)),  # of the experts' matrices: `expert`, and axes to gather over
    ("router", ()),
    ("bias", ()),
)

EXPERTS = ("expert", "stored_expert")  # names of a dim of experts


def rules_with(overrides: Sequence[Sequence[Any]]) -> Rules:
    """Return DEFAULT_RULES with the entries of `logical_axis_rules` replaced.

    The experts' matrices are stored over the axes of `expert`, unless an entry sets
    `stored_expert`.

    Args:
      overrides: pairs (logical name, mesh axis or list of mesh axes).

    Raises:
      ConfigError: a name is unknown, experts use an axis that does not split the batch, or their
        matrices are not stored over the axes of `expert` first.
    """
    table = dict(DEFAULT_RULES)
    for entry in overrides:
        if len(entry) != 2 or entry[0] not in table:
            raise ConfigError(
                f"logical_axis_rules entry {entry!r} is not [name, axes] with a known name. "
                f"Names: {', '.join(table)}."
            )
        axes = entry[1]
        table[entry[0]] = (axes,) if isinstance(axes, str) and axes else tuple(axes or ())
    expert = table["expert"]
    if "stored_expert" not in [entry[0] for entry in overrides]:
        table["stored_expert"] = expert
    for name in EXPERTS:
        for axis in table[name]:
            if axis not in table["batch"] or axis == "diloco":
                raise ConfigError(
                    f"logical_axis_rules puts {name} over {axis}, which does not split the batch "
                    f"of a replica. Use axes of the rule for batch, without diloco."
                )
    if table["stored_expert"][: len(expert)] != expert:
        raise ConfigError(
            f"logical_axis_rules puts stored_expert over {'+'.join(table['stored_expert'])}, but "
            f"expert over {'+'.join(expert)}: a device stores experts that it computes. Use "
            f"[stored_expert, [{', '.join(expert)}, fsdp]]."
        )
    return tuple(table.items())


def is_expert(names: Names) -> bool:
    """Tell whether a parameter has a part for each expert."""
    return any(name in EXPERTS for name in names)


def is_vector(names: Names) -> bool:
    """Tell whether a parameter is a scale, a bias or a sink.

    These have their own dtype and no weight decay, and Adam updates them under muon.
    """
    own = [name for name in names if name not in ("layers", *EXPERTS)]
    return len(own) < 2 or "norm" in own or "bias" in own


def spec(names: Names, rules: Rules, *, without: Sequence[str] = ()) -> P:
    """Return the PartitionSpec of an array whose dims have these logical names.

    A mesh axis shards the first dim whose rule has it; the axes in `without` shard none.
    """
    table = dict(rules)
    taken = set(without)
    dims = []
    for name in names:
        named = () if name is None else (name,) if isinstance(name, str) else name
        axes = tuple(a for each in named for a in table[each] if a not in taken)
        taken.update(axes)
        dims.append(axes[0] if len(axes) == 1 else (axes or None))
    return P(*dims)


def constrain(
    x: jax.Array, names: Names, rules: Rules, *, without: Sequence[str] = ()
) -> jax.Array:
    """Constrain the sharding of x on the context's mesh, if there is one.

    Manual axes and those in `without` are left out.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, automatic_spec(names, rules, without=without))


def automatic_spec(names: Names, rules: Rules, *, without: Sequence[str] = ()) -> P:
    """Return the PartitionSpec over the automatic axes of the context's mesh.

    Manual are all axes inside devices.on_each_device, and `diloco` under the map over replicas.
    Those in `without` are left out too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    absent = {axis for _, axes in rules for axis in axes} - set(mesh.axis_names)
    return spec(names, rules, without=(*mesh.manual_axes, *absent, *without))


def gather_weight(
    w: jax.Array, names: Names, rules: Rules, *, scattered: bool = False
) -> jax.Array:
    """Gather a weight over the mesh axes that split the tokens, for its use in a product.

    Without the constraint the partitioner may cut the product into one piece for each device of
    the axis. That took twice the time on TPU (benchmarks/results/compile_estimates.md). The weight
    stays sharded over `tensor`. Experts are returned unchanged: models/moe.py gathers them.

    Args:
      w: the weight.
      names: of its dims.
      rules: for the names.
      scattered: whether the gradient comes in parts, as from models/kernels/matmul.py, so that it
        is not gathered too.
    """
    if is_expert(names):
        return w
    if scattered:
        return _gathered(tuple(names), rules, w)
    table = dict(rules)
    return constrain(w, names, rules, without=(*table["batch"], *table["length"]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(names, rules, w):
    return gather_weight(w, names, rules)


_gathered.defvjp(
    lambda names, rules, w: (_gathered(names, rules, w), None),
    lambda names, rules, _, dw: (dw,),
)


def parameter_shardings(logical_axes: Any, shapes: Any, mesh: Mesh, rules: Rules) -> Any:
    """Return the NamedSharding of every parameter of one replica.

    Args:
      logical_axes: tuples of logical names.
      shapes: the parameters, of the same structure.
      mesh: of the run.
      rules: for the names.

    Raises:
      ConfigError: the axes of a dim do not divide it, or the rules would add up results that
        belong to different tokens.
    """
    _check_sums(logical_axes, mesh, rules)

    # Checkpoints note the specs, which are the same without the axis.
    unused = ("context",) if mesh.shape["context"] == 1 else ()

    def sharding_of(path, shape, names):
        sharding = NamedSharding(mesh, spec(names, rules, without=("diloco", *unused)))
        for dim, entry in enumerate(sharding.spec):
            axes = axes_of(entry)
            size = math.prod(mesh.shape[axis] for axis in axes)
            if shape.shape[dim] % size:
                raise ConfigError(
                    f"{'+'.join(axes)} parallelism {size} does not divide dim {dim} "
                    f"({names[dim]}={shape.shape[dim]}) of {jax.tree_util.keystr(path)}. Use a "
                    f"divisor, or give {names[dim]} other axes in logical_axis_rules."
                )
        return sharding

    return jax.tree_util.tree_map_with_path(sharding_of, shapes, logical_axes)


def _check_sums(logical_axes: Any, mesh: Mesh, rules: Rules) -> None:
    """Raise ConfigError if devices with different tokens would add up their results."""
    over = {name: [axis for axis in axes if mesh.shape[axis] > 1] for name, axes in rules}
    names = jax.tree.leaves(logical_axes, is_leaf=lambda x: isinstance(x, tuple))
    summed = ("vocab", "mlp") if any(map(is_expert, names)) else ("vocab",)
    for name in summed:
        if shared := [axis for axis in over[name] if axis in over["batch"] + over["length"]]:
            raise ConfigError(
                f"logical_axis_rules puts {name} over {'+'.join(shared)}, as it puts batch or "
                f"length, so devices with parts of {name} have different tokens and cannot add up "
                f"their results. Give {name} other axes, or none: [{name}, []]."
            )


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
    """Return the NamedSharding of every leaf of `optimizer.init(params)`.

    A leaf shaped like a parameter is sharded like it; the others, step counts, are replicated.

    Args:
      optimizer: the transformation.
      params: of one replica.
      shardings: pytree like params.
      mesh: of the run.
    """
    replicated = NamedSharding(mesh, P())

    def sharding_of(leaf, parameter, sharding):
        return sharding if leaf.shape == parameter.shape else replicated

    state = jax.eval_shape(optimizer.init, params)
    return map_parameters(optimizer, sharding_of, state, params, shardings, other=replicated)


def map_parameters(
    optimizer: optax.GradientTransformation, fn: Callable, state: Any, *trees: Any, other: Any
) -> Any:
    """Replace each leaf of an optimizer's state that belongs to a parameter.

    optax's MaskedNode, which stands for a leaf that the optimizer does not keep, stays.

    Args:
      optimizer: whose state it is.
      fn: called with the leaf and the entry of each tree for the parameter.
      state: of the optimizer.
      *trees: pytrees like the parameters.
      other: replaces the other leaves.
    """

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree.map_params(
        optimizer,
        lambda leaf, *entries: leaf if is_masked(leaf) else fn(leaf, *entries),
        state,
        *trees,
        transform_non_params=lambda _: other,
        is_leaf=is_masked,
    )


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every array or ShapeDtypeStruct of a tree."""
    return jax.tree.map(lambda x: x.sharding, tree)


def spec_on(x: Any, mesh: Mesh) -> P:
    """Return the PartitionSpec of x on `mesh`; P() for an array not sharded over its axes."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and isinstance(x.sharding, NamedSharding):
        if x.sharding.mesh.axis_names == mesh.axis_names:
            return x.sharding.spec
    return P()


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Make zeros like x on the devices that keep them, which XLA would send; call it under jit."""
    local = x.sharding.shard_shape(x.shape)
    return jax.shard_map(
        lambda: jnp.zeros(local, x.dtype),
        mesh=x.sharding.mesh,
        in_specs=(),
        out_specs=x.sharding.spec,
        check_vma=False,  # the zeros are equal wherever the sharding replicates them
    )()
