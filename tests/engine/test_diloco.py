"""The library class: programs and compiles, flags of bad values, bytes sent, refusals.

The numbers are held to an independent oracle in tests/integration/test_against_oracle.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import corner, full

from maxdiloco import DiLoCo
from maxdiloco.engine.fragment_values import arrays_of
from maxdiloco.engine.restore import outer_item
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.replicas import mean_over_replicas, mean_per_position

PARAMS = {
    "embedding": np.full((8, 4), 0.5, np.float32),
    "w": np.linspace(-1, 1, 8 * 6).reshape(8, 6).astype(np.float32),
}
LAYERS = {"embedding": None, "w": 0}


def inner_step(params, opt_state, batch):
    """Gradient descent on the distance to the replica's own target."""
    new = jax.tree.map(lambda p: p - 0.1 * (p - batch["target"]), params)
    return new, opt_state + 1, {"loss": jnp.sum(params["w"] * batch["target"])}


def make(M=2, **options):
    options = dict(sync_period=4, layer_axis=LAYERS) | options
    return DiLoCo(inner_step, num_replicas=M, **options)


def start(algorithm):
    return algorithm.init(jax.tree.map(jnp.asarray, PARAMS), jnp.zeros((), jnp.int32))


def batch(M):
    return {"target": np.arange(1, M + 1, dtype=np.float32)}


def run(algorithm, state, steps):
    for _ in range(steps):
        state, _ = algorithm.step(state, batch(algorithm.num_replicas))
    return state


@pytest.mark.parametrize(
    ("P_", "H", "forms"), [(3, 8, 2), full(5, 8, 2), full(9, 9, 2), (4, 8, 3)], ids=str
)
def test_compiles_grow_with_the_forms_of_fragments_and_not_with_their_number(P_, H, forms):
    """8 layers in 2, 4 or 8 equal fragments, or in three of 3, 3 and 2; and the embedding: the
    state, two step programs, and of each form a pack and a merge."""
    compiles, options = [], dict(num_fragments=P_, sync_period=H, overlap_steps=2)
    algorithm = make(on_compile=lambda name, *_: compiles.append(name), **options)
    run(algorithm, start(algorithm), 2 * H + 2)
    kinds = sorted(re.sub(r" \[.*", "", name) for name in compiles)
    assert kinds == ["init", "inner", "inner + exchange"] + ["merge"] * forms + ["pack"] * forms


MODES = {
    "vanilla": dict(),
    "streaming": dict(num_fragments=3, overlap_steps=2, alpha=0.5),
    "delayed": dict(round_overlap="delayed"),
    "eager": dict(round_overlap="eager", num_fragments=3),
}


@pytest.mark.parametrize("mode", corner(MODES, ["streaming", "eager"]))
def test_a_bad_replica_changes_no_other_and_stops_the_run(mode):
    """A NaN in replica 1 at send time: replica 0 continues as if alone; then exit 4 names leaf."""
    algorithm, alone = make(**MODES[mode]), make(**MODES[mode])
    state = run(algorithm, start(algorithm), 1)
    broken = state.params["w"].at[1, 3, 2].set(np.nan)
    seen = []

    def watched(state):
        for _ in range(4 * 4 + 2):
            state, _ = algorithm.step(state, batch(2))
            w_R = np.asarray(algorithm.replica_params(state)["w"])
            theta = np.asarray(state.outer["embedding"])
            seen.append(np.isfinite(w_R[0]).all() and np.isfinite(theta).all())

    with pytest.raises(NumericsError, match=r"replica 1 .*params\['w'\]"):
        watched(dataclasses.replace(state, params=state.params | {"w": broken}))
    assert len(seen) >= 2 and all(seen)
    run(alone, start(alone), 4 * 4 + 2)  # positive control: without the NaN nothing stops


def test_step_needs_nothing_from_the_other_replicas(devices):
    """`inner` compiles without a collective over `diloco`; positive control: `synchronise`."""
    mesh = Mesh(np.array(devices[:4]), ("diloco",))
    algorithm = make(M=4, mesh=mesh)
    state = start(algorithm)
    like = jax.tree.map(jnp.asarray, batch(4))
    plain = algorithm.programs.inner.compile(state.params, state.opt_state, like)
    collective = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    assert not re.search(collective, plain.as_text())
    (plan,) = algorithm.layout.plans
    arrays = arrays_of(state, plan)
    sync = algorithm.programs.synchronise(plan).compile(arrays, state.bad, plan.starts, ())
    assert re.search(collective, sync.as_text())


@pytest.mark.parametrize("carrier", corner(["xla", "host"], ["xla"]))
@pytest.mark.parametrize("mode", corner(MODES, ["streaming", "eager"]))
def test_pinned_host_memory_changes_no_bit(mode, carrier):
    """The outer parameters and the state of their optimizer are kept there, and nothing else. After
    step 11: streaming has sent a fragment after step 10, which has arrived and is not merged."""
    states = []
    for memory in ("device", "pinned_host"):
        options = MODES[mode] | dict(transport=carrier, exchange_dtype="int2")
        algorithm = make(outer_memory=memory, **options)
        assert bool(algorithm.schedule.pending(11)) == (mode != "vanilla")
        items = algorithm.checkpoint(run(algorithm, start(algorithm), 11))[0]
        algorithm.close()
        kept = {
            name
            for name, tree in items.items()
            if {"pinned_host"} == {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
        }
        outer = {"outer_opt", outer_item(algorithm.layout)}
        assert kept == (outer if memory == "pinned_host" else set())
        states.append(items)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_bfloat16_parameters_keep_their_dtype_and_theta_is_float32():
    algorithm = DiLoCo(lambda p, o, b: (p, o, {}), num_replicas=2, sync_period=1)
    state = algorithm.init({"w": jnp.ones(3, jnp.bfloat16)}, ())
    state, _ = algorithm.step(state, np.zeros(2))
    assert (state.params["w"].dtype, state.outer["w"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("overlap", ["none", "eager"])
def test_sizes_of_outer_gradients_and_of_the_outer_update(overlap):
    """After 4 steps of 0.1 * (p - target): g_m = (1 - 0.9^4) (p - target_m), target 1 and 2; eager
    has them when they arrive. |theta(8) - theta(4)| / |theta(4)|; eager: of replica 0."""
    algorithm = make(round_overlap=overlap)
    state = run(algorithm, start(algorithm), 4)
    if overlap == "none":
        flat = np.concatenate([PARAMS["embedding"].ravel(), PARAMS["w"].ravel()]).astype(np.float64)
        g_R = (1 - 0.9**4) * np.stack([flat - 1, flat - 2])
        np.testing.assert_allclose(state.sizes.norm_R, np.linalg.norm(g_R, axis=1), rtol=1e-5)
        np.testing.assert_allclose(state.sizes.drift_R, np.abs(g_R).mean(1), rtol=1e-5)
        np.testing.assert_allclose(state.sizes.mean_norm, np.linalg.norm(g_R.mean(0)), rtol=1e-5)

    def theta(state):
        leaves = [x[0] if overlap == "eager" else x for x in jax.tree.leaves(state.outer)]
        return np.concatenate([np.ravel(x) for x in leaves])

    before = theta(state)
    state = run(algorithm, state, 4)
    wanted = np.linalg.norm(theta(state) - before) / np.linalg.norm(before)
    told = algorithm.extra_metrics(state)["diloco/outer_update_ratio"]
    assert told == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("mean", "expected"), [(mean_over_replicas, [3.5]), (mean_per_position, [[0.5], [6.5]])]
)
def test_thetas_of_eager_replicas_have_a_mean_of_all_and_one_of_each_slot(devices, mean, expected):
    """Four replicas on two slots: 0 and 1, 4 and 9."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    theta_R = jax.device_put(np.float32([[0], [1], [4], [9]]), NamedSharding(mesh, P("diloco")))
    found = jax.jit(functools.partial(mean, mesh=mesh))({"w": theta_R})["w"]
    assert found.tolist() == expected
