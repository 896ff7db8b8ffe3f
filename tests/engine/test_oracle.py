"""The float64 oracle against cases worked out by hand: a yardstick is measured first."""

import ast
import pathlib

import numpy as np
import oracle
import pytest
from oracle import Oracle, Settings

TESTS = pathlib.Path(__file__).parents[1]


def add(leaves, opt_state, batch):
    """An inner step that moves every value by the batch: what follows can be done in the head."""
    return [leaf + batch for leaf in leaves], opt_state + 1, float(batch)


def run(settings, batches, start=8.0, codec=lambda values: values):
    """[(replicas, theta)] after each step, of one leaf with one value; batches [t][m]."""
    simulated = Oracle(settings, add, [np.array([start])], 0, codec)
    seen = []
    for batch in batches:
        simulated.step(batch)
        seen.append(
            (
                [replica[0].item() for replica in simulated.replicas],
                [theta[0].item() for theta in simulated.thetas],
            )
        )
    return seen


def owners(shapes, **settings):
    """The fragment of each value, as nested lists."""
    s = Settings(num_replicas=1, sync_period=100, **settings)
    oracle.masks(shapes, s)  # fails unless a partition
    return [home.tolist() for home in oracle.fragment_of_each_value(shapes, s)]


def sends(H, P, tau=0, until=12, **settings):
    """{fragment: (steps of its sends, steps of its applies)}."""
    s = Settings(1, H, num_fragments=P, overlap_steps=tau, **settings)
    steps = range(1, until + 1)
    return {
        p: (
            [t for t in steps if oracle.is_sent(p, t, s)],
            [t for t in steps if oracle.is_applied(p, t, s)],
        )
        for p in range(P)
    }


# --- fragments --------------------------------------------------------------------------------


def test_layers_are_strided_behind_the_nonlayer_fragment():
    """Fragment 0 is the non-layer part; layer i is in 1 + (i mod 2): five layers do not divide."""
    kinds = (("layers", 0, (0, 1, 2, 3, 4)), None)
    assert owners([(5,), (2,)], num_fragments=3, kinds=kinds) == [[1, 2, 1, 2, 1], [0, 0]]


def test_layers_in_contiguous_runs_are_longer_first():
    """Five layers over two fragments: three and two."""
    kinds = (("layers", 0, (0, 1, 2, 3, 4)), None)
    homes = owners([(5,), (2,)], num_fragments=3, kinds=kinds, sequential=True)
    assert homes == [[1, 1, 1, 2, 2], [0, 0]]


def test_layers_alone_begin_at_fragment_zero():
    kinds = (("layers", 1, (0, 1, 2, 3, 4)),)
    row = [0, 1, 2, 0, 1]
    assert owners([(2, 5)], num_fragments=3, kinds=kinds) == [[row, row]]


def test_a_leaf_of_repeated_blocks_follows_its_layers():
    """Layers 0, 3, 6 and 1, 2, 4, 5 of seven over three: mod 3 they are 0, 0, 0 and 1, 2, 1, 2."""
    kinds = (("layers", 0, (0, 3, 6)), ("layers", 0, (1, 2, 4, 5)))
    assert owners([(3,), (4,)], num_fragments=3, kinds=kinds) == [[0, 0, 0], [1, 2, 1, 2]]


def test_vocabulary_rows_are_spread_over_two_nonlayer_fragments():
    """k=2: row v in v mod 2, other non-layer leaves in 0, layer i in 2 + (i mod (4 - 2))."""
    kinds = (("vocabulary", 0), ("layers", 0, (0, 1, 2)), None)
    homes = owners([(5,), (3,), (2,)], num_fragments=4, num_nonlayer=2, kinds=kinds)
    assert homes == [[0, 1, 0, 1, 0], [2, 3, 2], [0, 0]]


def test_vocabulary_rows_stay_together_with_one_nonlayer_fragment():
    kinds = (("vocabulary", 0), ("layers", 0, (0, 1, 2)))
    assert owners([(3,), (3,)], num_fragments=3, kinds=kinds) == [[0, 0, 0], [1, 2, 1]]


@pytest.mark.parametrize(
    ("sequential", "homes"),
    [(False, [[0], [1], 0, [1, 1], [0]]), (True, [[0], [0], 0, [1, 1], [1]])],
)
def test_without_layers_whole_leaves_are_dealt_in_tree_order(sequential, homes):
    """Five leaves over two fragments, one of them a scalar."""
    shapes = [(1,), (1,), (), (2,), (1,)]
    assert owners(shapes, num_fragments=2, sequential=sequential) == homes


def test_one_fragment_holds_everything():
    kinds = (("layers", 0, (0, 1)), None, ("vocabulary", 0))
    assert owners([(2,), (1,), (2,)], num_nonlayer=2, kinds=kinds) == [[0, 0], [0], [0, 0]]


def test_an_empty_fragment_is_refused():
    """The partition check sees it: two layers cannot fill three fragments."""
    with pytest.raises(AssertionError, match="fragment 2 is empty"):
        owners([(2,)], num_fragments=3, kinds=(("layers", 0, (0, 1)),))


# --- schedule ---------------------------------------------------------------------------------


def test_offsets_are_the_floor_of_even_parts():
    """H=5, P=3: t_p = 0, 1, 3; with tau=1 every apply is one step later."""
    assert sends(5, 3, tau=1) == {
        0: ([5, 10], [6, 11]),
        1: ([1, 6, 11], [2, 7, 12]),
        2: ([3, 8], [4, 9]),
    }


def test_given_offsets_are_taken_mod_the_period():
    """H=4: -1 is 3 and 9 is 1; tau=3 applies just before the next send."""
    assert sends(4, 2, tau=3, offsets=(-1, 9)) == {
        0: ([3, 7, 11], [6, 10]),
        1: ([1, 5, 9], [4, 8, 12]),
    }


def test_a_period_of_one_sends_after_every_step():
    assert sends(1, 1, until=3) == {0: ([1, 2, 3], [1, 2, 3])}


# --- the algorithm, one value -----------------------------------------------------------------

STEADY = [(-1.0, -3.0)] * 5  # replica 0 moves by -1 a step, replica 1 by -3


def test_diloco_with_nesterov():
    """H=2, lr=b=1/2. t=2: x = 6, 2; g = 2, 6; m = 4; theta = 8 - (4 + 2)/2 = 5.
    t=4: x = 3, -1; g = 2, 6; m = 2 + 4 = 6; theta = 5 - (4 + 3)/2 = 1.5."""
    seen = run(Settings(2, 2, outer_lr=0.5, outer_momentum=0.5), STEADY[:4])
    assert seen == [([7, 5], [8]), ([5, 5], [5]), ([4, 2], [5]), ([1.5, 1.5], [1.5])]


def test_overlap_mixes_the_steps_taken_meanwhile():
    """tau=1, alpha=1/4. Sent at 2: mean 4. t=3: x = 5, -1; theta = 5; x = 5/4 + 15/4, -1/4 + 15/4.
    t=4: x = 4, 0.5; g = 1, 4.5. t=5: x = 3, -2.5; m = 2 + 2.75; theta = 5 - (2.75 + 2.375)/2."""
    seen = run(
        Settings(2, 2, overlap_steps=1, alpha=0.25, outer_lr=0.5, outer_momentum=0.5), STEADY
    )
    assert seen[1] == ([6, 2], [8])
    assert seen[2] == ([5, 3.5], [5])
    assert seen[3] == ([4, 0.5], [5])
    assert seen[4] == ([2.578125, 1.203125], [2.4375])


def test_sgd_is_without_the_look_ahead():
    """As the first case with m alone: theta = 8 - 4/2 = 6, then x = 4, 0; g = 2, 6; m = 6; 3."""
    seen = run(Settings(2, 2, outer="sgd", outer_lr=0.5, outer_momentum=0.5), STEADY[:4])
    assert [theta for _, theta in seen] == [[8], [6], [6], [3]]


GROWING = [(-1.0, -3.0), (-2.0, -6.0), (-3.0, -9.0)]
PLAIN = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


def test_delayed_uses_the_mean_of_the_round_before():
    """H=1, plain SGD lr 1. g = (1, 3), (2, 6), (3, 9): theta = 8 - 0, - 2, - 4."""
    seen = run(Settings(2, 1, outer_overlap="delayed", **PLAIN), GROWING)
    assert seen == [([8, 8], [8]), ([6, 6], [6]), ([2, 2], [2])]


def test_delayed_calls_the_optimizer_with_zeros_in_the_first_round():
    """Adam counts that call. Round 2: g = 2; m = 0.2/(1 - 0.81); v = 0.004/(1 - 0.998001)."""
    settings = Settings(2, 1, outer_overlap="delayed", outer="adam", outer_lr=1.0)
    (_, first), (_, second) = run(settings, GROWING[:2])
    assert first == [8]
    expected = 8 - (0.2 / 0.19) / (np.sqrt(0.004 / 0.001999) + 1e-8)
    np.testing.assert_allclose(second, [expected], rtol=1e-12)


def test_eager_is_fresh_in_the_own_slot_only():
    """H=1, plain SGD lr 1. Round 1: (1 + 0)/2 and (0 + 3)/2; round 2: g = 2, 6, so (2 + 3)/2 and
    (1 + 6)/2; round 3: g = 3, 9, so (3 + 6)/2 and (2 + 9)/2."""
    seen = run(Settings(2, 1, outer_overlap="eager", **PLAIN), GROWING)
    assert [theta for _, theta in seen] == [[7.5, 6.5], [5, 3], [0.5, -2.5]]
    assert [replicas for replicas, _ in seen] == [[7.5, 6.5], [5, 3], [0.5, -2.5]]


def test_eager_merges_with_the_own_outer_parameters():
    """alpha=1/2, round 1: x = 7, 5; theta = 7.5, 6.5; x = 7.25, 5.75. Round 2: x = 5.25, -0.25;
    g = 2.25, 6.75; (2.25 + 3)/2 and (1 + 6.75)/2; theta = 4.875, 2.625."""
    seen = run(Settings(2, 1, alpha=0.5, outer_overlap="eager", **PLAIN), GROWING[:2])
    assert seen == [([7.25, 5.75], [7.5, 6.5]), ([5.0625, 1.1875], [4.875, 2.625])]


def test_eager_reports_the_mean_of_the_replicas_outer_parameters():
    simulated = Oracle(Settings(2, 1, outer_overlap="eager", **PLAIN), add, [np.array([8.0])], 0)
    simulated.step(GROWING[0])
    assert simulated.outer_params()[0].tolist() == [7.0]  # of 7.5 and 6.5


def test_every_term_passes_the_codec():
    """Rounding down, g = 1.5, 3.5 arrive as 1, 3. Plain: theta = 8 - 2. Eager: 1/2 and 3/2, then
    x = 6, 3; g = 1.5, 3.5 again: (1 + 3)/2 = 2 for both."""
    batches = [(-1.5, -3.5)] * 2
    plain = run(Settings(2, 1, **PLAIN), batches[:1], codec=np.floor)
    assert plain == [([6, 6], [6])]
    eager = run(Settings(2, 1, outer_overlap="eager", **PLAIN), batches, codec=np.floor)
    assert [theta for _, theta in eager] == [[7.5, 6.5], [5.5, 4.5]]


def test_adam_has_bias_corrected_moments():
    """H=1, M=1, lr 1/2. g = 4: m/0.1 = 4, v/0.001 = 16, step 1/2. Then x = 7.5 + 4, g = -4:
    m = 0.36 - 0.4 = -0.04 over 0.19, v = 0.031984 over 0.001999 = 16."""
    (_, first), (_, second) = run(Settings(1, 1, outer="adam", outer_lr=0.5), [(-4.0,), (4.0,)])
    np.testing.assert_allclose(first, [7.5], rtol=1e-8)
    np.testing.assert_allclose(second, [7.5 + 0.5 * (0.04 / 0.19) / 4], rtol=1e-8)


# --- the algorithm, two fragments -------------------------------------------------------------


def two_leaves(settings, steps):
    """Leaves a and b from 0; replica 0 moves by 1 a step, replica 1 by 3. [(a of m, b of m)]."""
    simulated = Oracle(settings, add, [np.zeros(1), np.zeros(1)], 0)
    seen = []
    for _ in range(steps):
        simulated.step((1.0, 3.0))
        seen.append(tuple([r[i].item() for r in simulated.replicas] for i in range(2)))
    return simulated, seen


def test_fragments_are_averaged_at_their_own_steps():
    """H=2, P=2: a after steps 2, 4; b after 1, 3, the first time one step after the start."""
    _, seen = two_leaves(Settings(2, 2, num_fragments=2, **PLAIN), 4)
    assert seen == [([1, 3], [2, 2]), ([4, 4], [3, 5]), ([5, 7], [6, 6]), ([8, 8], [7, 9])]


def test_outer_optimizer_state_is_kept_per_fragment():
    """Adam's first step is lr * sign(g), also for a, whose first step comes after b's."""
    settings = Settings(2, 2, num_fragments=2, outer="adam", outer_lr=0.25)
    simulated, _ = two_leaves(settings, 2)
    np.testing.assert_allclose(np.concatenate(simulated.outer_params()), [0.25, 0.25], rtol=1e-7)


def test_inner_optimizer_state_and_metrics_stay_with_their_replica():
    simulated = Oracle(Settings(2, 3), add, [np.zeros(1)], 0)
    assert simulated.step((1.0, 3.0)) == [1.0, 3.0]
    simulated.step((1.0, 3.0))
    assert simulated.opt_states == [2, 2]


def test_the_oracle_imports_nothing_of_the_package():
    """Positive control: it does import numpy."""
    tree = ast.parse((TESTS / "oracle.py").read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "numpy" in names
    assert names <= {"dataclasses", "itertools", "collections", "typing", "numpy"}
