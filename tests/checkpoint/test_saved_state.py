"""A state out of a checkpoint: with the same M and mesh, and with others; and theta alone."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import bytes_of_new_arrays, bytes_on_devices
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from tiers import full

from maxdiloco import DiLoCo
from maxdiloco.checkpoint import arrays as arrays_lib
from maxdiloco.checkpoint import parameter_sets, saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.read import restore_from
from maxdiloco.engine.trainer import OUTER_OF_EACH, SavedLayout
from maxdiloco.errors import CheckpointError

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


def inner_step(params, opt_state, batch):
    return jax.tree.map(lambda p: p - batch * p, params), opt_state + batch, {}


def trained(M, steps, **options):
    algorithm = DiLoCo(
        inner_step, num_replicas=M, layer_axis={"w": 0}, **(dict(sync_period=3) | options)
    )
    state = algorithm.init(jax.tree.map(jnp.asarray, PARAMS), jnp.zeros(()))
    return algorithm, stepped(algorithm, state, steps)


def layout_of(source, state):
    return SavedLayout(**source.checkpoint(state)[1], same_rules=True)


def moved(folder, source, state, target):
    """Save a state and read it as another trainer's, through files."""
    save(folder, source, state)
    return read(folder, target, layout_of(source, state))


def save(folder, trainer, state):
    with Checkpointer(folder, max_to_keep=1, use_async=False) as checkpointer:
        checkpointer.save(state.t, trainer.checkpoint(state)[0], trainer.checkpoint(state)[1])


def read(folder, trainer, layout):
    with Checkpointer(folder, max_to_keep=1) as checkpointer:
        restored = checkpointer.restore(lambda meta: saved_state.abstract_items(trainer, layout))
    return trainer.restore_plan(layout).state_of(restored.items, t=restored.step)


def test_eager_history_restarts_with_another_M(tmp_path):
    """theta is per replica: replica r takes that of old r mod M; what was in flight is zeros."""
    algorithm, state = trained(2, 5, round_overlap="eager")
    larger, _ = trained(4, 0, round_overlap="eager")
    back = moved(tmp_path, algorithm, state, larger)
    np.testing.assert_array_equal(back.outer["w"][3], state.outer["w"][1])
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.incoming))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(back.incoming))


@pytest.mark.parametrize("missing", ["sizes", "update_ratio", "bad", None])
def test_a_state_saved_before_a_diagnostic_was_added_is_restored(tmp_path, missing):
    """To the bit in all else; the diagnostic itself begins at zero. None: all of them are new."""
    algorithm, state = trained(2, 5)
    items = algorithm.checkpoint(state)[0]
    if missing is None:
        del items["diagnostics"]
    else:
        del items["diagnostics"][missing]
    with Checkpointer(tmp_path, max_to_keep=1, use_async=False) as checkpointer:
        checkpointer.save(state.t, items, algorithm.checkpoint(state)[1])
    back = read(tmp_path, algorithm, layout_of(algorithm, state))
    named = dict.fromkeys(["sizes", "update_ratio", "bad"] if missing is None else [missing])
    zero = {name: jax.tree.map(jnp.zeros_like, vars(state)[name]) for name in named}
    assert any(np.any(x) for x in jax.tree.leaves(state.sizes))  # the positive control
    expected = replace(state, **zero, bad_before=zero.get("bad", state.bad))
    jax.tree.map(np.testing.assert_array_equal, back, expected)
    assert np.isfinite(stepped(algorithm, back, 6).params["w"]).all()


@functools.cache
def streaming(M, mesh, outer_memory="device"):
    """Four layers and a vector of 5, in fragments of two layers and the vector; tau=3.

    Sends at 2, 4, 6, ...: after step 8 those of 6 and 8 are in flight. The trainer, whose programs
    all tests share, and its state before the first step.
    """
    algorithm = DiLoCo(
        inner_step, num_replicas=M, mesh=mesh, layer_axis={"w": 1, "b": None}, sync_period=6,
        num_fragments=3, overlap_steps=3, alpha=0.25, outer_memory=outer_memory,
    )  # fmt: skip
    numbers = np.random.default_rng(3)
    params = {"w": numbers.normal(size=(4, 4)), "b": numbers.normal(size=5)}
    lies = {"w": NamedSharding(mesh, P("fsdp")), "b": NamedSharding(mesh, P())}
    placed = jax.tree.map(lambda x, at: jax.device_put(np.float32(x), at), params, lies)
    return algorithm, algorithm.init(placed, jnp.zeros(()))


def copy_of(state):
    """A step donates its state."""

    def copy(x):
        return x if isinstance(x, int) else jax.device_put(np.array(x), x.sharding)

    return jax.tree.map(copy, state)


def stepped(algorithm, state, steps):
    for _ in range(steps):
        M = algorithm.num_replicas
        state, _ = algorithm.step(state, np.arange(1, M + 1, dtype=np.float32) / 10)
    return state


class Watched:
    """The most that devices hold of new arrays whenever a part of a leaf arrives or one is done."""

    def __init__(self, monkeypatch):
        self.before = jax.live_arrays()
        self.most = Counter()
        result, start = arrays_lib.result, arrays_lib._started
        monkeypatch.setattr(arrays_lib, "result", lambda *a: self.look(result(*a)))

        def started(*args):
            nbytes, finish = start(*args)
            return nbytes, lambda: self.look(finish())

        monkeypatch.setattr(arrays_lib, "_started", started)

    def look(self, found=None):
        self.most |= bytes_of_new_arrays(self.before)
        return found


@pytest.mark.parametrize(
    ("old", "new", "memory"),
    [(4, 3, "device"), (4, 2, "pinned_host"), (2, 4, "device"), full(3, 2, "device")],
)
def test_a_slice_more_or_less_takes_no_room_beyond_the_new_state(
    mesh_of, tmp_path, monkeypatch, old, new, memory
):
    """One replica a slice of two devices. Every leaf is that of old r mod M_old, in its place."""
    source, first = streaming(old, mesh_of(old, 1, 2), memory)
    target, _ = streaming(new, mesh_of(new, 1, 2), memory)
    state = stepped(source, copy_of(first), 8)
    saved = {name: jax.tree.map(np.asarray, x) for name, x in vars(state).items()}
    save(tmp_path, source, state)
    watched = Watched(monkeypatch)
    back = read(tmp_path, target, layout_of(source, state))

    like = target.layout.state
    for name in ("params", "opt_state", "outer", "outer_opt"):
        wanted = saved[name]
        if name in ("params", "opt_state"):
            wanted = jax.tree.map(lambda x: x[np.arange(new) % old], wanted)
        jax.tree.map(np.testing.assert_array_equal, getattr(back, name), wanted)
    for x, struct in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        assert isinstance(x, int) or (x.shape, x.sharding) == (struct.shape, struct.sharding)

    read_back = (back.params, back.opt_state, back.outer, back.outer_opt)
    room = bytes_on_devices(jax.tree.leaves(read_back))
    assert set(watched.most) == set(target.mesh.devices.flat)
    assert all(nbytes <= room[device] for device, nbytes in watched.most.items())
    # Positive control: the old replicas, read whole and dealt out, would have been seen.
    whole = jax.device_put(saved["params"], NamedSharding(target.mesh, P()))
    watched.look()
    assert whole["w"].shape[0] == old
    assert any(nbytes > room[device] for device, nbytes in watched.most.items())


@pytest.mark.parametrize("grid", [(4, 1, 2), full((2, 2, 2))])
def test_what_was_in_flight_is_dropped_with_another_M_or_mesh(mesh_of, tmp_path, grid):
    """After step 8 those of 6 and 8 are in flight; their applies at 9 and 11 do nothing.

    The next send is that of step 10, applied at 13. A second resume in between keeps to that.
    Positive control: without dropped_until the zeros move theta, by its momentum.
    """
    M = grid[0]
    source, first = streaming(2, mesh_of(2, 1, 2))
    target, _ = streaming(M, mesh_of(*grid))
    state = stepped(source, copy_of(first), 8)
    theta = jax.tree.map(np.asarray, state.outer)

    def moves(state, until):
        after = stepped(target, state, until - state.t).outer
        return any(np.any(np.asarray(after[name]) != theta[name]) for name in theta)

    back = moved(tmp_path / "a", source, state, target)
    assert not moves(copy_of(back), until=8)
    assert back.dropped_until == 8
    assert moves(replace(copy_of(back), dropped_until=0), until=11)
    assert not moves(copy_of(back), until=12)
    assert moves(copy_of(back), until=13)
    again = stepped(target, copy_of(back), 2)
    again = moved(tmp_path / "b", target, again, target)
    assert again.dropped_until == 8
    assert not moves(copy_of(again), until=12)
    a, b = stepped(target, back, 8), stepped(target, again, 6)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_log_names_the_fragments_that_were_dropped(mesh_of):
    """Only those in flight, only once, and none on the same layout."""
    source, state = streaming(2, mesh_of(2, 1, 2))
    target, _ = streaming(4, mesh_of(4, 1, 2))
    layout = layout_of(source, state)

    def sent(trainer, layout):
        return re.findall(
            r"(\d) \(sent after step (\d)\)", " ".join(trainer.restore_plan(layout).lines(8))
        )

    assert sent(target, layout) == [("0", "6"), ("1", "8")]
    assert source.restore_plan(layout).lines(8) == []
    assert sent(source, layout._replace(same_rules=False)) == [("0", "6"), ("1", "8")]
    assert sent(target, layout._replace(dropped_until=6)) == [("1", "8")]
    assert sent(target, layout._replace(dropped_until=8)) == []
    assert "replicas 2 -> 4" in target.restore_plan(layout).lines(8)[0]


def test_the_log_names_the_replicas_whose_work_is_lost(mesh_of):
    """M before and after, the first replica that is dropped, and the age of its work in steps.
    Fragment 0 was first sent after step 6. With H=3 all is merged after step 3."""

    def numbers(run, layout, t):
        return [re.findall(r"\d+", line) for line in run.restore_plan(layout).lines(t)[:2]]

    source, state = streaming(2, mesh_of(2, 1, 2))
    fewer, _ = streaming(1, mesh_of(1, 1, 2))
    assert numbers(fewer, layout_of(source, state), 8) == [["2", "1", "2"], ["1", "8"]]
    plain, state = trained(4, 0)
    one, _ = trained(1, 0)
    assert numbers(one, layout_of(plain, state), 3) == [["4", "1", "4"], ["1", "0"]]
    assert numbers(one, layout_of(plain, state), 4) == [["4", "1", "4"], ["1", "1"]]


def test_an_eager_run_is_read_as_its_mean_and_resumes_without(tmp_path):
    """In float32, then rounded. Control: the two thetas differ."""
    algorithm, state = trained(2, 5, sync_period=2, round_overlap="eager")
    w_R = np.asarray(state.outer["w"])
    assert np.any(w_R[0] != w_R[1])
    mean = (w_R[0] + w_R[1]) / np.float32(2)
    np.testing.assert_array_equal(algorithm.outer_params(state)["w"], mean)
    save(tmp_path / "checkpoints", algorithm, state)
    here = SingleDeviceSharding(jax.devices()[0])
    for dtype in (jnp.float32, jnp.bfloat16):
        like = {"w": jax.ShapeDtypeStruct((3, 2), dtype, sharding=here)}
        found, restored = parameter_sets.restore_parameters(
            tmp_path, lambda _, like=like: like, key="RUN"
        )
        assert restored.items.keys() == {"outer"}
        np.testing.assert_array_equal(found["w"], mean.astype(dtype))
    target, _ = trained(2, 0, sync_period=2)
    layout = functools.partial(saved_state.read_layout, same_rules=True)
    restored = restore_from(
        tmp_path, lambda meta: saved_state.abstract_items(target, layout(meta)), key="RUN"
    )
    assert "outer_params" not in restored.items
    back = target.restore_plan(layout(restored.meta)).state_of(restored.items, t=5)
    np.testing.assert_array_equal(back.outer["w"], mean)


@pytest.mark.parametrize(("R", "first"), [(4, "diloco"), (3, None)])
def test_eager_outer_parameters_are_divided_among_the_slices(mesh_of, R, first):
    """Read in float32, whatever the mean is wanted in."""
    like = jax.ShapeDtypeStruct((6,), jnp.bfloat16, sharding=NamedSharding(mesh_of(2), P()))
    item, wanted, _ = parameter_sets.plan_read(
        {"w": like}, {"outer_item": OUTER_OF_EACH, "num_replicas": R}
    )
    found = wanted["w"]
    assert (item, found.shape, found.dtype) == (OUTER_OF_EACH, (R, 6), jnp.float32)
    assert found.sharding.spec == P(first)
    like = {"w": like}
    for meta in ({}, {"outer_item": "outer_params"}):  # of any other run
        assert parameter_sets.plan_read(like, meta)[:2] == ("outer_params", like)


def noisy_step(params, opt_state, batch):
    """Move by noise that is drawn from a typed PRNG key in the optimizer state."""
    key, noise = jax.random.split(opt_state["key"])
    params = jax.tree.map(lambda p: p - batch * jax.random.normal(noise, p.shape), params)
    return params, {"key": key, "count": opt_state["count"] + 1}, {}


def noisy(M, mesh, *, impl="rbg", memory=None, bind=False):
    """A trainer, and its state before the first step unless it is only bound."""
    algorithm = DiLoCo(noisy_step, num_replicas=M, sync_period=3, mesh=mesh)
    everywhere = NamedSharding(mesh, P(), memory_kind=memory)
    key = jax.device_put(jax.random.key(5, impl=impl), everywhere)
    start = jax.tree.map(jnp.asarray, PARAMS), {"key": key, "count": jnp.zeros((), jnp.int32)}
    return algorithm, algorithm.bind(*start) if bind else algorithm.init(*start)


def bits(state):
    """The leaves of a state as NumPy arrays; the data of a typed key."""

    def array(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [array(x) for x in jax.tree.leaves((state.params, state.opt_state, state.outer))]


@pytest.mark.parametrize(("impl", "memory"), [("rbg", "pinned_host"), full("threefry2x32", None)])
@pytest.mark.usefixtures("few_compiler_passes")
def test_typed_keys_resume_as_if_never_interrupted(mesh_of, tmp_path, impl, memory):
    """Two slots of two devices: the same keys, shardings and values after five more steps.

    Control: the noise of a resume with the first key would differ.
    """
    mesh = mesh_of(2, 1, 2)
    source, state = noisy(2, mesh, impl=impl, memory=memory)
    first = bits(state)
    state = stepped(source, state, 4)
    with Checkpointer(tmp_path, max_to_keep=1) as saver:
        saved_state.save_state(saver, source, state)
        saved, expected = bits(state), bits(stepped(source, state, 5))
        target, _ = noisy(2, mesh, impl=impl, memory=memory, bind=True)
        back = saved_state.restore_state(saver, target)
    like = target.abstract_state.opt_state["key"]
    key = back.opt_state["key"]
    assert (key.dtype, key.shape, key.sharding) == (like.dtype, like.shape, like.sharding)
    for found, wanted in zip(bits(back), saved, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(bits(stepped(target, back, 5)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not all(np.array_equal(a, b) for a, b in zip(first, saved, strict=True))


def test_typed_keys_of_more_replicas_all_differ(mesh_of, tmp_path):
    source, state = noisy(2, mesh_of(2), memory="pinned_host")
    state = stepped(source, state, 1)
    target, _ = noisy(4, mesh_of(4), memory="pinned_host", bind=True)
    with Checkpointer(tmp_path, max_to_keep=1, say=lambda line: None) as saver:
        saved_state.save_state(saver, source, state)
        back = saved_state.restore_state(saver, target)
    found, saved = (
        np.asarray(jax.random.key_data(each.opt_state["key"])) for each in (back, state)
    )
    np.testing.assert_array_equal(found[:2], saved)
    assert len(np.unique(found, axis=0)) == 4


def test_a_typed_key_of_another_implementation_is_refused(mesh_of, tmp_path):
    source, state = noisy(1, mesh_of(1))
    target, _ = noisy(1, mesh_of(1), impl="unsafe_rbg", bind=True)
    with Checkpointer(tmp_path, max_to_keep=1) as saver:
        saved_state.save_state(saver, source, state)
        with pytest.raises(CheckpointError, match="opt_state.key .*key<rbg>"):
            saved_state.restore_state(saver, target)
