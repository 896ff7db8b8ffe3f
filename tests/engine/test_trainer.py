"""DiLoCo and DataParallel have the interface engine.trainer.Trainer, whole and alike."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiloco.checkpoint import saved_state
from maxdiloco.engine.data_parallel import DataParallel
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.engine.trainer import OUTER_PARAMS, SavedLayout, Trainer, abstract_metrics
from maxdiloco.parallel import chips

LIBRARY = {"bind", "init", "outer_params", "replica_params"}  # methods of the library class alone
PARAMS = {"w": np.ones(3, np.float32)}


def inner_step(params, opt_state, batch):
    """One step down by the batch's value."""
    return jax.tree.map(lambda p: p - batch.mean(), params), opt_state, {"loss": batch.mean()}


def trainer_of(cls, **options):
    mesh = Mesh(np.array(jax.devices()[:1]), ("diloco",))
    params = jax.tree.map(jnp.asarray, PARAMS)
    if cls is DataParallel:
        return DataParallel(inner_step, params, (), mesh=mesh, on_compile=lambda *_: None)
    trainer = DiLoCo(inner_step, num_replicas=2, sync_period=2, mesh=mesh, **options)
    trainer.bind(params, ())
    return trainer


def methods(cls):
    """{name: names and kinds of the parameters} of the public methods of a class."""
    return {
        name: [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]
        for name, f in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_methods_of_both_trainers_are_those_of_the_interface():
    """DataParallel has no other, DiLoCo those of the library besides."""
    wanted, library = methods(Trainer), methods(DiLoCo)
    assert len(wanted) == 10 and methods(DataParallel) == wanted
    assert {name: library[name] for name in wanted} == wanted
    assert library.keys() - wanted.keys() == LIBRARY


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(DiLoCo, {"inner", "inner + exchange"}), (DataParallel, {"data parallel"})],
)
def test_the_programs_with_a_training_step_take_the_options_of_the_chip(cls, expected, monkeypatch):
    """The others are compiled as they were: pack and merge of DiLoCo."""
    batch = jax.ShapeDtypeStruct((2, 1), np.float32)

    def fingerprints():
        calls = trainer_of(cls, overlap_steps=1).calls(batch)
        return {call.program.name: call.program.fingerprint(*call.args) for call in calls}

    before = fingerprints()
    monkeypatch.setattr(chips, "step_options", lambda kind: {f"option of {kind}": "1"})
    changed = dict(fingerprints().items() - before.items())
    assert set(changed) == expected
    assert len(before) == (1 if cls is DataParallel else 4)


@pytest.mark.parametrize("cls", [DiLoCo, DataParallel])
def test_a_trainer_goes_through_a_run_by_the_interface_alone(cls):
    """Made, stepped, asked for metrics, saved and restored: every method is called."""
    trainer = trainer_of(cls)
    assert all(hasattr(trainer, name) for name in Trainer.__annotations__)
    R = trainer.num_replicas
    batch = np.ones((R, 2), np.float32)
    state = trainer.init_program(lambda x: ({"w": x}, ()))(PARAMS["w"])
    like = jax.eval_shape(lambda s: s, state)
    assert jax.tree.structure(like) == jax.tree.structure(trainer.abstract_state)
    calls = trainer.calls(jax.ShapeDtypeStruct(batch.shape, batch.dtype))
    assert calls[0].runs <= trainer.period
    assert trainer.evaluated.calls(trainer.abstract_state, 1) == []
    assert abstract_metrics(trainer, batch)["loss"].shape == (R,)

    for _ in range(3):
        state, metrics = trainer.step(state, batch)
    trainer.check_finite(state)
    assert metrics["loss"].shape == (R,)
    # Data parallel: 1 - 3. DiLoCo: theta moves once, in step 2.
    theta = np.asarray(trainer.evaluated.read(state)["w"])
    assert theta.shape == trainer.exported.like["w"].shape
    assert (theta == -2).all() if cls is DataParallel else (theta < 1).all()
    assert all(isinstance(x, float) for x in trainer.extra_metrics(state).values())
    assert trainer.description.title and trainer.description.fragments
    assert "step 3" in trainer.closing_line(state)

    items, metadata = trainer.checkpoint(state)
    assert saved_state.nbytes(trainer) == sum(x.nbytes for x in jax.tree.leaves(items))
    plan = trainer.restore_plan(SavedLayout(**metadata, same_rules=True))
    assert OUTER_PARAMS in items and set(plan.replica_items) <= set(items)
    assert plan.lines(3) == []
    assert items.keys() >= plan.items.keys()
    back = plan.state_of(items, t=3)
    jax.tree.map(np.testing.assert_array_equal, back, state)
