"""The residuals of error feedback: by hand, bad values, host memory, saved and resumed.

The numbers of whole runs are held to the oracle in tests/integration/test_wires_against_oracle.py.

    # R replicas
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiers import full

from maxdiloco import DiLoCo
from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.engine import describe
from maxdiloco.engine.trainer import SavedLayout

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

# The mean magnitude of what every replica has moved is 3/2 of `step` in `w` and 1 in `v`.
PARAMS = {"v": np.zeros(4, np.float32), "w": np.zeros((2, 2), np.float32)}
MOVED = {"v": np.float32([1, -1, 1, -1]), "w": np.float32([[1, 2], [1, 2]])}


def inner_step(params, opt_state, batch):
    moved = jax.tree.map(lambda x, d: x - batch * d, params, MOVED)
    return moved, opt_state, {"loss": batch}


def made(M=2, **options):
    options = dict(sync_period=2, outer_lr=1.0, outer_momentum=0.0, exchange_dtype="int2") | options
    mesh = Mesh(np.array(jax.devices()[:2]), ("diloco",))
    return DiLoCo(inner_step, num_replicas=M, mesh=mesh, **options)


def steps(algorithm, state, count):
    """Every replica moves by half of MOVED times its number from 1 on, so by it in a period."""
    for _ in range(count):
        batch = np.arange(1, algorithm.num_replicas + 1, dtype=np.float32) / 2
        state, _ = algorithm.step(state, batch)
    return state


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def restored(saver, state, resumer):
    items = saver.checkpoint(state)[0]
    shardings = jax.tree.map(lambda x: x.sharding, items)
    items = jax.device_put(jax.tree.map(np.array, items), shardings)
    layout = SavedLayout(**saver.checkpoint(state)[1], same_rules=True)
    resumer.bind(PARAMS, ())
    wanted = saved_state.abstract_items(resumer, layout)

    def of_replicas(x, like):
        if not isinstance(like, Cycled):
            return x
        cycled = np.asarray(x)[np.arange(like.target.shape[0]) % like.stored]
        return jax.device_put(cycled, like.target.sharding)

    read = {name: jax.tree.map(of_replicas, items[name], wanted[name]) for name in wanted}
    plan = resumer.restore_plan(layout)
    return plan.state_of(read, t=state.t), plan.lines(state.t)


def test_what_is_left_over_by_hand():
    """g of replica 0: v of magnitude 1: s = 5/4, sent as 5/8; w of mean 3/2: s = 15/8 = 1.875, so 1
    is sent as 0.9375 and 2 as 2.8125. Replica 1 moves twice as far."""
    algorithm = made()
    state = steps(algorithm, algorithm.init(PARAMS, ()), 2)
    v, w = np.float32([1, -1, 1, -1]) * 0.375, np.float32([[0.0625, -0.8125]] * 2)
    np.testing.assert_array_equal(state.residual["v"], np.stack([v, 2 * v]))
    np.testing.assert_array_equal(state.residual["w"], np.stack([w, 2 * w]))
    norm = np.sqrt(4 * 0.375**2 + 2 * (0.0625**2 + 0.8125**2))
    found = algorithm.extra_metrics(state)["diloco/residual_norm"]
    assert found == pytest.approx(1.5 * norm, rel=1e-6)
    # With more replicas each takes the residual of its number mod M.
    again, lines = restored(algorithm, state, made(M=4))
    np.testing.assert_array_equal(again.residual["v"], np.stack([v, 2 * v, v, 2 * v]))
    np.testing.assert_array_equal(again.residual["w"], np.stack([w, 2 * w, w, 2 * w]))
    assert len(lines) == 1 and lines[0].startswith("replicas 2 -> 4")


@pytest.mark.parametrize(
    ("wire", "asked", "has"),
    [("topk", None, True), ("topk", False, False), ("int8", None, False), ("int8", True, True)],
)
def test_a_wire_has_feedback_by_its_nature_or_by_request(wire, asked, has):
    algorithm = made(exchange_dtype=wire, error_feedback=asked)
    layout = algorithm.bind(PARAMS, ())
    assert bool(jax.tree.leaves(layout.state.residual)) == has
    assert any("error feedback" in line for line in describe.memory_lines(layout)) == has
    assert ("residuals" in describe.resident(layout)) == has


def test_a_bad_value_leaves_the_residual_of_its_leaf_as_it_was():
    """Replica 1's `w`; its `v`, and all of replica 0, continue."""
    algorithm = made()
    state = steps(algorithm, algorithm.init(PARAMS, ()), 3)
    before = np.array(state.residual["w"]), np.array(state.residual["v"])
    w = state.params["w"].at[1, 0, 1].set(np.nan)
    state = steps(algorithm, dataclasses.replace(state, params=state.params | {"w": w}), 1)
    w, v = np.asarray(state.residual["w"]), np.asarray(state.residual["v"])
    assert bits(w[1]) == bits(before[0][1]) and bits(w[0]) != bits(before[0][0])
    assert np.isfinite(w).all() and bits(v[1]) != bits(before[1][1])
    assert np.asarray(state.bad)[1].tolist() == [False, True]


# Fragments sent at 2, 4 .. and 3, 5 .., applied a step later.
OVERLAPPED = dict(num_fragments=2, sync_period=2, overlap_steps=1)


@pytest.mark.parametrize("carrier", [full("xla"), "host"])
def test_a_run_resumed_between_send_and_apply_goes_on_to_the_bit(carrier):
    """After step 4 fragment 0 was sent and not applied. Its residual has taken the place of the one
    before, so that there is no second copy of it."""
    algorithm, resumer = made(**OVERLAPPED), made(transport=carrier, **OVERLAPPED)
    state = steps(algorithm, algorithm.init(PARAMS, ()), 3)
    before = jax.tree.leaves(state.residual)
    state = steps(algorithm, state, 1)
    assert sum(x.is_deleted() for x in before) == 1
    again, lines = restored(algorithm, state, resumer)
    assert lines == [] and bits(again.residual) == bits(state.residual)
    assert np.abs(np.asarray(state.residual["v"])).max() > 0
    on, resumed = steps(algorithm, state, 5), steps(resumer, again, 5)
    for name in ("params", "outer", "residual", "residual_norm_R"):
        assert bits(vars(on)[name]) == bits(vars(resumed)[name]), name


@pytest.mark.parametrize(
    "old, new",
    [
        full({}, dict(exchange_dtype="topk")),
        ({}, dict(exchange_dtype="int8")),
        full({}, dict(error_feedback=False)),
        (dict(error_feedback=False), {}),
    ],
)
def test_another_wire_format_or_feedback_begins_without_residuals(old, new):
    algorithm = made(**old)
    state = steps(algorithm, algorithm.init(PARAMS, ()), 2)
    resumer = made(**new)
    again, lines = restored(algorithm, state, resumer)
    assert "error feedback" in lines[-1]
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(again.residual))
    state = steps(resumer, again, 3)
    if not new:  # topk sends all of leaves as small as these
        assert np.abs(np.asarray(state.residual["w"])).max() > 0
