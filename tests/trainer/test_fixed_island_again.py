"""An island of fixed mode that is killed, and takes its steps again."""

import numpy as np
from test_on_islands import ELASTIC, STEPS, an_island, fixed, in_threads, leaves, steps_of


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
