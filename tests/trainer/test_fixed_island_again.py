"""An island of fixed mode that is killed, and takes its steps again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from test_on_islands import ELASTIC, STEPS, an_island, fixed, in_threads, leaves, steps_of

from maxdiloco.checkpoint.saved_state import layout_of


def test_a_fixed_island_that_was_killed_takes_its_steps_again(tmp_path, few_compiler_passes):
    """From the first one, with the records that are there: to the bits of an undisturbed run."""
    run = ELASTIC._replace(overlap_steps=1, alpha=0.25)
    wanted = fixed(tmp_path / "undisturbed", 2, run)
    run = run._replace(islands=("0", "1"), islands_min=2, block_tokens=0)

    def work(m):
        if m == 1:
            killed = an_island(tmp_path / "store", "1", run)
            steps_of(killed, 1, 6)
            killed.leave()
        trainer = an_island(tmp_path / "store", str(m), run)
        state = steps_of(trainer, m, STEPS)
        found = leaves(state.outer), leaves(state.params)
        trainer.close()
        return found

    for own, other in zip(in_threads(work, 2), wanted, strict=True):
        assert all(map(np.array_equal, [*own[0], *own[1]], [*other[0], *other[1]]))


def from_checkpoint(trainer, saved, place, steps):
    """The steps after a checkpoint, which is (step, items, note) as Recorder.save has them."""
    problem = tiny_problem.problem("layers")
    params = problem.named(problem.params)
    trainer.bind(params, jax.tree.map(np.zeros_like, params))
    t, items, note = saved
    reading = trainer.reading(layout_of(note, same_rules=True))
    like = jax.tree.map(lambda x: (x.shape, x.dtype), reading.items)
    assert like == jax.tree.map(lambda x: (x.shape, x.dtype), items)
    state = trainer.join(reading.state_of(items, t=t))
    for t in range(state.t + 1, steps + 1):
        batch = jax.tree.map(lambda x: x[place : place + 1], problem.batch(t, 4))
        state, _ = trainer.step(state, batch)
    return state


@pytest.mark.parametrize(
    ("wire", "feedback", "at"), [("float32", False, 6), ("float4_e3m0", True, 9)]
)
def test_a_fixed_island_goes_on_from_its_checkpoint(
    wire, feedback, at, tmp_path, few_compiler_passes
):
    """Between a send and its merge: to the bits of an undisturbed run."""
    options = dict(num_fragments=2, feedback=feedback)
    run = ELASTIC._replace(overlap_steps=2, alpha=0.25, wire=wire)
    wanted = fixed(tmp_path / "undisturbed", 2, run, **options)
    run = run._replace(islands=("0", "1"), islands_min=2, block_tokens=0)

    def work(m):
        trainer = an_island(tmp_path / "store", str(m), run, **options)
        state = steps_of(trainer, m, at if m else STEPS)
        if m:
            items = jax.tree.map(jnp.copy, trainer.saved_items(state))
            saved = state.t, items, trainer.note(state)
            trainer.leave()
            trainer = an_island(tmp_path / "store", str(m), run, **options)
            state = from_checkpoint(trainer, saved, m, STEPS)
        found = leaves(state.outer), leaves(state.params)
        trainer.close()
        return found

    for own, other in zip(in_threads(work, 2), wanted, strict=True):
        assert all(map(np.array_equal, [*own[0], *own[1]], [*other[0], *other[1]]))
