"""DiLoCo and DataParallel have the interface engine.trainer.Trainer, whole and alike."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiloco.checkpoint import saved_state
from maxdiloco.engine.data_parallel import DataParallel
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.engine.trainer import OUTER_PARAMS, SavedLayout, Trainer
from maxdiloco.parallel import chips

METHODS = {name: f for name, f in vars(Trainer).items() if isinstance(f, types.FunctionType)}
METHODS = {name: f for name, f in METHODS.items() if not name.startswith("_")}
ATTRIBUTES = Trainer.__annotations__
# Of the library class alone.
LIBRARY = {"bind", "init", "replica_params"}
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


def deviations(cls):
    """Methods of Trainer that a class lacks or spells otherwise, and public ones it has besides."""
    own = {name: f for name, f in vars(cls).items() if isinstance(f, types.FunctionType)}
    out = []
    for name, method in METHODS.items():
        if name not in own:
            out.append(f"{name} is missing")
        elif parameters(own[name]) != parameters(method):
            out.append(f"{name} has other parameters")
    return out + [f"{name} is more" for name in own if name not in METHODS and name[0] != "_"]


def parameters(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def test_the_methods_of_both_trainers_are_those_of_the_interface():
    assert len(METHODS) > 10
    assert deviations(DataParallel) == []
    assert deviations(DiLoCo) == [f"{name} is more" for name in vars(DiLoCo) if name in LIBRARY]


def test_a_method_that_is_missing_renamed_or_more_is_found():
    """The controls of the test above."""
    lacking = type("Lacking", (), {k: v for k, v in vars(DataParallel).items() if k != "note"})
    assert deviations(lacking) == ["note is missing"]
    renamed = type("Renamed", (), dict(vars(DataParallel)) | {"note": lambda self, other: {}})
    assert deviations(renamed) == ["note has other parameters"]
    assert deviations(type("More", (DataParallel,), dict(vars(DataParallel)) | {"more": deviations})
                      ) == ["more is more"]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(DiLoCo, {"inner", "inner + exchange"}), (DataParallel, {"data parallel"})],
)
def test_the_programs_with_a_training_step_take_the_options_of_the_chip(
    cls, expected, monkeypatch
):
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
    assert all(hasattr(trainer, name) for name in ATTRIBUTES)
    R = trainer.num_replicas
    batch = np.ones((R, 2), np.float32)
    state = trainer.init_program(lambda x: ({"w": x}, ()))(PARAMS["w"])
    like = jax.eval_shape(lambda s: s, state)
    assert jax.tree.structure(like) == jax.tree.structure(trainer.abstract_state)
    calls = trainer.calls(jax.ShapeDtypeStruct(batch.shape, batch.dtype))
    assert calls[0].runs <= trainer.period
    assert trainer.eval_calls(1) == []
    assert trainer.abstract_metrics(batch)["loss"].shape == (R,)

    for _ in range(3):
        state, metrics = trainer.step(state, batch)
    trainer.check_finite(state)
    assert metrics["loss"].shape == (R,)
    # Data parallel: 1 - 3. DiLoCo: theta moves once, in step 2.
    theta = np.asarray(trainer.outer_params(state)["w"])
    assert theta.shape == trainer.abstract_outer_params["w"].shape
    assert (theta == -2).all() if cls is DataParallel else (theta < 1).all()
    assert all(isinstance(x, float) for x in trainer.extra_metrics(state, range(1, 4)).values())
    described = trainer.description()
    assert described.title and described.fragments
    assert trainer.closing_line(state).startswith("done: step 3")

    items = trainer.saved_items(state)
    assert saved_state.nbytes(trainer) == sum(x.nbytes for x in jax.tree.leaves(items))
    saved = SavedLayout(**trainer.note(state), same_rules=True)
    assert OUTER_PARAMS in items and set(trainer.replica_items(saved)) <= set(items)
    assert trainer.restore_lines(saved, 3) == []
    assert items.keys() >= trainer.abstract_items(saved).keys()
    back = trainer.restored(items, saved, t=3)
    jax.tree.map(np.testing.assert_array_equal, back, state)
