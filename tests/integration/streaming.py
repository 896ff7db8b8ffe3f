"""Small trainers in every mode and on every wire, for tests in one process and in several.

# R replicas
"""

import functools
import hashlib
import itertools
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo
from maxdiloco.engine.trainer import SavedLayout

M, H, STEPS = 4, 6, 20
MOST = 8  # replicas that there are numbers for
WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
# Three fragments: `embed` sent after steps 6, 12, ..., layers 0 and 2 after 2, 8, ..., layers 1
# and 3 after 4, 10, ...
MODES = {
    "at once": dict(alpha=0.0),
    "overlapped": dict(alpha=0.25, overlap_steps=3),  # two fragments between send and apply
    "delayed": dict(alpha=0.0, round_overlap="delayed"),
    "eager": dict(alpha=0.25, round_overlap="eager"),
}
# A fragment of `kernel` has 2800 values on each device of a slice: two chunks on every wire.
SHAPES = {"embed": (6, 40), "kernel": (4, 2, 1400)}
LIES = {"embed": P(None, "fsdp"), "kernel": P(None, None, "fsdp")}


def inner_step(params, opt_state, batch):
    """Sums alone: a product may be contracted with a sum, and round once, where programs differ."""
    return jax.tree.map(lambda p, b: p + b, params, batch), opt_state, {}


@functools.cache
def numbers():
    """(parameters, [t - 1] batches): about 1 and 0.1, other ones in every replica and step."""
    rng = np.random.default_rng(0)

    def draw(size, *lead):
        return {n: np.float32(size * rng.normal(size=(*lead, *s))) for n, s in SHAPES.items()}

    return draw(1.0), [draw(0.1, MOST) for _ in range(STEPS)]


def mesh_of(slots, in_slice):
    devices = np.array(jax.devices()[: in_slice * slots])
    return Mesh(devices.reshape(slots, in_slice), ("diloco", "fsdp"))


def made(mode, wire, slots, **options):
    """A trainer on `slots` emulated slices of `in_slice` devices. options: of DiLoCo, too."""
    mesh = mesh_of(slots, options.pop("in_slice", 2))
    sizes = dict(num_replicas=M, sync_period=H, num_fragments=3, exchange_dtype=wire, mesh=mesh)
    layer_axis = {"embed": None, "kernel": 0}
    return DiLoCo(inner_step, layer_axis=layer_axis, **sizes | MODES[mode] | options)


def placed(mesh):
    """The first parameters of one replica."""
    return {n: jax.device_put(x, NamedSharding(mesh, LIES[n])) for n, x in numbers()[0].items()}


def steps(algorithm, state, until=STEPS):
    """The state after each further step."""
    rows = NamedSharding(algorithm.mesh, P("diloco"))
    for batch in numbers()[1][state.t : until]:
        batch = {name: x[: algorithm.num_replicas] for name, x in batch.items()}
        state, _ = algorithm.step(state, jax.device_put(batch, rows))
        yield state


# What is planted before step 10, when layers 1 and 3 are sent: the step that would apply it, and
# the last one done when the run stops, before the first send or apply after the next apply.
STOPS = {
    "at once": ("int8", np.nan, 10, 13),
    "overlapped": ("float4_e3m0", np.inf, 13, 15),
    "delayed": ("bfloat16", -np.inf, 16, 19),
    "eager": ("float4_e3m0", np.nan, 16, 19),
}


def planted(state, value):
    """In one value of layer 1 of replica 2."""
    kernel = state.params["kernel"]
    put = jax.jit(lambda x: x.at[2, 1, 1, 700].set(value), out_shardings=kernel.sharding)
    return replace(state, params=state.params | {"kernel": put(kernel)})


def poisoned(algorithm, first, bad):
    """The state after each step of a run that gets a bad value after step 9."""
    for state in steps(algorithm, first, until=9):
        yield state
    yield from steps(algorithm, planted(state, bad))


def digests(state):
    """{what, and which part of it a device of this process holds: hash of its bits}."""
    found = {}
    names = ("params", "outer", "outer_opt", "bad", "sizes", "residual", "residual_norm_R")
    trees = {name: getattr(state, name) for name in names}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        for shard in leaf.addressable_shards:
            name = f"{jax.tree_util.keystr(path)} {shard.index}"
            bits = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            assert found.setdefault(name, bits) == bits, f"{name} differs between devices"
    return found


def with_start(algorithm):
    """A trainer, and what gives its first state, any number of times: a step donates it."""
    first = algorithm.init(placed(algorithm.mesh), ())
    shardings = jax.tree.map(lambda x: x.sharding, first)
    arrays = jax.tree.map(np.array, first)
    return algorithm, lambda: jax.device_put(arrays, shardings)


def assert_carriers_agree_and_resume(trainer, saved_at, check=lambda *_: None):
    """`digests` compares the copies on all slots after every step, and either carrier goes on from
    what either has saved. trainer(carrier): as with_start. check: of every state."""
    states, saved = {}, {}
    for carrier in ("xla", "host"):
        algorithm, start = trainer(carrier)
        states[carrier] = []
        for state in steps(algorithm, start()):
            states[carrier].append(digests(state))
            check(algorithm, state)
            if state.t in saved_at:
                saved[carrier, state.t] = copied(algorithm.checkpoint(state)[0])
    assert states["host"] == states["xla"]
    assert len({str(state) for state in states["host"]}) == STEPS
    layout = SavedLayout(**algorithm.checkpoint(state)[1], same_rules=True)
    for saver, resumer, t in itertools.product(states, states, saved_at):
        algorithm, _ = trainer(resumer)
        again = algorithm.restore_plan(layout).state_of(copied(saved[saver, t]), t=t)
        found = list(map(digests, steps(algorithm, again)))
        assert found == states["xla"][t:], f"{saver} -> {resumer} at {t}"


def copied(items):
    """As a checkpoint gives them back: of their own memory."""
    shardings = jax.tree.map(lambda x: x.sharding, items)
    return jax.device_put(jax.tree.map(np.array, items), shardings)
