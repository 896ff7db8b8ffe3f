"""A small training step and its DiLoCo programs, compiled for TPU slices that are not there.

libtpu compiles ahead of time for a topology; the text of what it made is in the order of execution.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo
from maxdiloco.diloco.schedule import INNER_EXCHANGE, Action
from maxdiloco.engine.fragment_values import arrays_of
from maxdiloco.planning import topology

LAYERS, WIDTH, HIDDEN, TOKENS = 4, 128, 512, 256


def mesh_of(num_slices: int, axis: str = "fsdp") -> Mesh:
    """`num_slices` slices of v5e:2x2 as ('diloco', axis)."""
    found = topology.devices("v5e-4", num_slices)
    by_slice = sorted(found, key=lambda device: (device.slice_index, device.id))
    return Mesh(np.array(by_slice).reshape(num_slices, -1), ("diloco", axis))


def struct(mesh, shape, *spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """An array that lies over these axes."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def loss(params, x_BLD):
    """Scanned and rematerialised layers, as in a language model."""

    def layer(x_BLD, w):
        hidden_BLF = jax.nn.gelu(x_BLD @ w["w_in"].astype(jnp.bfloat16))
        return x_BLD + hidden_BLF @ w["w_out"].astype(jnp.bfloat16), None

    y_BLD, _ = jax.lax.scan(jax.checkpoint(layer), x_BLD.astype(jnp.bfloat16), params["layers"])
    return jnp.mean(jnp.square((y_BLD @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)))


def inner_step(params, momentum, batch):
    """Heavy-ball SGD: one replica's view."""
    value, gradient = jax.value_and_grad(loss)(params, batch)
    momentum = jax.tree.map(lambda v, g: 0.9 * v + g, momentum, gradient)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, params, momentum)
    return params, momentum, {"loss": value}


def tiny_step(params, momentum, batch):
    """Next to nothing: for what does not depend on the step."""
    return jax.tree.map(lambda p: 0.9 * p, params), momentum, {"loss": jnp.sum(batch)}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A DiLoCo object bound to abstract parameters, and what its programs take."""

    algorithm: DiLoCo
    batch: jax.ShapeDtypeStruct

    @functools.cached_property
    def inner(self):
        """The plain inner step."""
        state = self.algorithm.layout.state
        return self.algorithm.programs.inner.compile(state.params, state.opt_state, self.batch)

    @functools.cached_property
    def inner_exchange(self):
        """The inner step beside the first chunk of fragment 1."""
        return self.inner_with(1)

    def inner_with(self, index: int, name: str = INNER_EXCHANGE):
        """The inner step with the first chunk of a fragment, by the name of its action."""
        state, found = self.algorithm.layout.state, []
        transport = self.algorithm._transport

        def record(program, *args):
            found.append((program, args))
            return program.out_shapes(*args)

        transport.inner_step(record, state, Action(name, index), self.batch)
        ((program, args),) = found
        return program.compile(*args)

    def program(self, name: str, index: int):
        """pack, reduce, reduce_and_share, merge, synchronise or a step of one fragment."""
        layout, programs = self.algorithm.layout, self.algorithm.programs
        plan, state = layout.plans[index], layout.state
        leaves = arrays_of(state, plan)
        incoming = plan.incoming_chunks
        merging = leaves, state.bad, plan.starts, ()
        match name:
            case "pack":
                bare = leaves._replace(outer_opt=(), residual=())
                args = (bare, plan.starts, leaves.residual, plan.packed_chunks)
            case "reduce":
                args = (plan.scattered_chunks, plan.outgoing_chunks)
            case "reduce_and_share":
                args = (plan.scattered_chunks,)
            case "synchronise":
                args = merging
            case "merge":
                args = (leaves._replace(residual=()), *merging[1:], incoming)
            case _:
                args = (*merging[:3], plan.packed_chunks, incoming)
        return getattr(programs, name)(plan).compile(*args)


def trainer(mesh: Mesh, *, step=inner_step, batch_size: int = 64, **options) -> Trainer:
    """Bind DiLoCo to the small model; parameters lie over fsdp, or everywhere without one."""
    axis = mesh.axis_names[1]
    over = axis if axis == "fsdp" else None
    params = {
        "head": struct(mesh, (WIDTH, WIDTH), over, None),
        "layers": {
            "w_in": struct(mesh, (LAYERS, WIDTH, HIDDEN), None, over, None),
            "w_out": struct(mesh, (LAYERS, HIDDEN, WIDTH), None, over, None),
        },
    }
    M = mesh.shape["diloco"]
    layer_axis = {"head": None, "layers": {"w_in": 0, "w_out": 0}}
    algorithm = DiLoCo(step, num_replicas=M, layer_axis=layer_axis, mesh=mesh, **options)
    algorithm.bind(params, params)
    batch = struct(mesh, (M, batch_size, TOKENS, WIDTH), "diloco", axis)
    return Trainer(algorithm, batch)
