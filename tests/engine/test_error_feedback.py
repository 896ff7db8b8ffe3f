"""The residuals of error feedback: by hand, bad values, host memory, saved and resumed.

The numbers of whole runs are held to the oracle in tests/integration/test_wires_against_oracle.py.

    # R replicas
"""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

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


def start(algorithm):
    return algorithm.init(PARAMS, ())


def steps(algorithm, state, count):
    """Every replica moves by half of MOVED times its number from 1 on, so by it in a period."""
    for _ in range(count):
        batch = np.arange(1, algorithm.num_replicas + 1, dtype=np.float32) / 2
        state, _ = algorithm.step(state, batch)
    return state


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def copied(tree):
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.device_put(jax.tree.map(np.array, tree), shardings)


def test_what_is_left_over_by_hand():
    """g of replica 0: v of magnitude 1: s = 5/4, sent as 5/8; w of mean 3/2: s = 15/8 = 1.875, so 1
    is sent as 0.9375 and 2 as 2.8125. Replica 1 moves twice as far."""
    algorithm = made()
    state = steps(algorithm, start(algorithm), 2)
    v, w = np.float32([1, -1, 1, -1]) * 0.375, np.float32([[0.0625, -0.8125]] * 2)
    np.testing.assert_array_equal(state.residual["v"], np.stack([v, 2 * v]))
    np.testing.assert_array_equal(state.residual["w"], np.stack([w, 2 * w]))
    norm = np.sqrt(4 * 0.375**2 + 2 * (0.0625**2 + 0.8125**2))
    found = algorithm.extra_metrics(state, range(1, 3))["diloco/residual_norm"]
    assert found == pytest.approx(1.5 * norm, rel=1e-6)


def test_a_wire_has_feedback_by_its_nature_or_by_request():
    """float32 leaves nothing over."""
    for wire, asked, has in (("topk", None, True), ("topk", False, False), ("int8", None, False),
                             ("int8", True, True)):  # fmt: skip
        algorithm = made(exchange_dtype=wire, error_feedback=asked)
        algorithm.bind(PARAMS, ())
        assert bool(jax.tree.leaves(algorithm.layout.state.residual)) == has
        assert bool(describe.residual_lines(algorithm.layout)) == has
        assert ("residuals" in describe.resident(algorithm.layout)) == has
    with pytest.raises(ValueError, match="error_feedback=True .*float32.*Leave it out"):
        made(exchange_dtype="float32", error_feedback=True)
    with pytest.raises(ValueError, match="merge='median' is unknown. Use one of mean, rda"):
        made(merge="median")
    with pytest.raises(ValueError, match="merge=rda .*outer_overlap=eager.*Use merge=mean"):
        made(merge="rda", outer_overlap="eager")


def planted(state, value):
    return state.__class__(**vars(state) | {
        "params": state.params | {"w": state.params["w"].at[1, 0, 1].set(value)}
    })  # fmt: skip


def test_a_bad_value_leaves_the_residual_of_its_leaf_as_it_was():
    """Replica 1's `w`; its `v`, and all of replica 0, go on."""
    algorithm = made()
    state = steps(algorithm, start(algorithm), 3)
    before = np.array(state.residual["w"]), np.array(state.residual["v"])
    state = steps(algorithm, planted(state, np.nan), 1)
    w, v = np.asarray(state.residual["w"]), np.asarray(state.residual["v"])
    assert bits(w[1]) == bits(before[0][1]) and bits(w[0]) != bits(before[0][0])
    assert np.isfinite(w).all() and bits(v[1]) != bits(before[1][1])
    assert np.asarray(state.bad)[1].tolist() == [False, True]


@pytest.mark.parametrize("mode", [
    dict(num_fragments=2), dict(num_fragments=2, overlap_steps=1),
    dict(outer_overlap="eager", num_fragments=2),
])  # fmt: skip
def test_in_host_memory_the_residual_has_the_same_bits(mode):
    seen = {}
    for memory in ("device", "pinned_host"):
        algorithm = made(outer_memory=memory, **mode)
        state = steps(algorithm, start(algorithm), 7)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.residual)} == {memory}
        seen[memory] = bits((state.residual, state.params, state.outer))
    assert seen["device"] == seen["pinned_host"]


# Fragments sent at 2, 4 .. and 3, 5 .., applied a step later.
OVERLAPPED = dict(num_fragments=2, sync_period=2, overlap_steps=1)


def test_a_send_puts_the_residual_in_its_own_place():
    """Of the fragment that is sent, so that there is no second copy of it."""
    algorithm = made(**OVERLAPPED)
    state = steps(algorithm, start(algorithm), 1)
    before = jax.tree.leaves(state.residual)
    steps(algorithm, state, 1)
    assert sum(x.is_deleted() for x in before) == 1


def restored(saver, state, resumer):
    items = copied(saver.saved_items(state))
    layout = SavedLayout(**saver.note(state), same_rules=True)
    resumer.bind(PARAMS, ())
    wanted = saved_state.abstract_items(resumer, layout)
    read = {}
    for name, tree in wanted.items():
        read[name] = jax.tree.map(
            lambda x, like: jax.device_put(
                np.asarray(x)[np.arange(like.target.shape[0]) % like.stored], like.target.sharding
            ) if isinstance(like, Cycled) else x,
            items[name], tree,
        )  # fmt: skip
    return resumer.restored(read, layout, t=state.t), resumer.restore_lines(layout, state.t)


@pytest.mark.parametrize("carrier", ["program", "host"])
def test_a_run_resumed_between_send_and_apply_goes_on_to_the_bit(carrier):
    """After step 4 fragment 0 was sent and not applied."""
    algorithm, resumer = made(**OVERLAPPED), made(exchange_carrier=carrier, **OVERLAPPED)
    state = steps(algorithm, start(algorithm), 4)
    again, lines = restored(algorithm, state, resumer)
    assert lines == [] and bits(again.residual) == bits(state.residual)
    assert np.abs(np.asarray(state.residual["v"])).max() > 0
    on, resumed = steps(algorithm, state, 5), steps(resumer, again, 5)
    for name in ("params", "outer", "residual", "residual_norm_R"):
        assert bits(vars(on)[name]) == bits(vars(resumed)[name]), name


def test_with_more_replicas_each_takes_the_residual_of_its_number_mod_m():
    algorithm = made()
    state = steps(algorithm, start(algorithm), 2)
    again, lines = restored(algorithm, state, made(M=4))
    for name in PARAMS:
        old = np.asarray(state.residual[name])
        np.testing.assert_array_equal(again.residual[name], old[[0, 1, 0, 1]])
    assert lines == ["replicas 2 -> 4: replica r goes on from what was replica r mod 2."]


BEGIN, DROPPED = "begin at zero", "are dropped"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ({}, dict(exchange_dtype="topk"), BEGIN),
        ({}, dict(exchange_dtype="int8"), DROPPED),
        ({}, dict(error_feedback=False), DROPPED),
        (dict(error_feedback=False), {}, BEGIN),
    ],
)
def test_another_wire_or_feedback_begins_without_residuals_and_says_so(old, new, said):
    algorithm = made(**old)
    state = steps(algorithm, start(algorithm), 2)
    resumer = made(**new)
    again, lines = restored(algorithm, state, resumer)
    assert lines[-1] == f"error feedback: the residuals of the replicas {said}."
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(again.residual))
    state = steps(resumer, again, 3)
    if not new:  # topk sends all of leaves as small as these
        assert np.abs(np.asarray(state.residual["w"])).max() > 0
