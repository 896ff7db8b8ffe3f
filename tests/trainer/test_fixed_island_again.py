"""An island of fixed mode that is killed, and takes its steps again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from test_on_islands import ELASTIC, STEPS, first_values, fixed, steps_of, trained

from maxdiloco.checkpoint.saved_state import layout_of


def require_undisturbed(tmp_path, run, work, **options):
    """Two islands of which the second one does `work` end with the bits of an undisturbed run."""

    def both(make, m):
        return (work if m else trained)(make, m)

    wanted = fixed(tmp_path / "undisturbed", 2, run, **options)
    found = fixed(tmp_path / "store", 2, run, both, **options)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))


def test_a_fixed_island_that_was_killed_takes_its_steps_again(tmp_path, few_compiler_passes):
    """From the first one, with the records that are there."""

    def killed_once(make, m):
        killed = make()
        steps_of(killed, m, 6)
        killed.leave()
        return trained(make, m)

    run = ELASTIC._replace(overlap_steps=1, alpha=0.25)
    require_undisturbed(tmp_path, run, killed_once)


@pytest.mark.parametrize(
    ("wire", "feedback", "at"), [("float32", False, 6), ("float4_e3m0", True, 9)]
)
def test_a_fixed_island_goes_on_from_its_checkpoint(
    wire, feedback, at, tmp_path, few_compiler_passes
):
    """Between a send and its merge; a checkpoint is what Recorder.save has of it."""

    def saved_and_restored(make, m):
        first = make()
        state = steps_of(first, m, at)
        items, note = jax.tree.map(jnp.copy, first.saved_items(state)), first.note(state)
        first.leave()
        trainer = make()
        trainer.bind(*first_values(tiny_problem.problem("layers")))
        reading = trainer.reading(layout_of(note, same_rules=True))
        like, there = (
            jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (reading.items, items)
        )
        assert like == there
        state = trainer.join(reading.state_of(items, t=at))
        return trainer, steps_of(trainer, m, STEPS, state=state)

    run = ELASTIC._replace(overlap_steps=2, alpha=0.25, wire=wire)
    require_undisturbed(tmp_path, run, saved_and_restored, num_fragments=2, feedback=feedback)
