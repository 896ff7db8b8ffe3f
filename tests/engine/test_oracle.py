"""The float64 oracle against cases worked out by hand: a yardstick is measured first."""

import pathlib
import re

import numpy as np
import oracle
import pytest
from oracle import Oracle, Settings

# --- fragments --------------------------------------------------------------------------------

FIVE = ("layers", 0, (0, 1, 2, 3, 4))
MIXED = [(1,), (1,), (), (2,), (1,)]


@pytest.mark.parametrize(
    ("shapes", "settings", "homes"),
    [
        # Strided behind what is no layer: layer i in 1 + (i mod 2); five do not divide.
        ([(5,), (2,)], dict(num_fragments=3, kinds=(FIVE, None)), [[1, 2, 1, 2, 1], [0, 0]]),
        # Contiguous runs, the longer one first.
        ([(5,), (2,)], dict(num_fragments=3, kinds=(FIVE, None), sequential=True),
         [[1, 1, 1, 2, 2], [0, 0]]),
        # Layers alone, along dim 1, begin at fragment zero.
        ([(2, 5)], dict(num_fragments=3, kinds=(("layers", 1, FIVE[2]),)), [[[0, 1, 2, 0, 1]] * 2]),
        # Repeated blocks follow their layers: 0, 3, 6 and 1, 2, 4, 5 mod 3.
        ([(3,), (4,)],
         dict(num_fragments=3, kinds=(("layers", 0, (0, 3, 6)), ("layers", 0, (1, 2, 4, 5)))),
         [[0, 0, 0], [1, 2, 1, 2]]),
        # k=2: row v in v mod 2, other leaves in 0, layer i in 2 + (i mod (4 - 2)).
        ([(5,), (3,), (2,)],
         dict(num_fragments=4, num_nonlayer=2,
              kinds=(("vocabulary", 0), ("layers", 0, (0, 1, 2)), None)),
         [[0, 1, 0, 1, 0], [2, 3, 2], [0, 0]]),
        # k=1: the rows stay together.
        ([(3,), (3,)],
         dict(num_fragments=3, kinds=(("vocabulary", 0), ("layers", 0, (0, 1, 2)))),
         [[0, 0, 0], [1, 2, 1]]),
        # Without layers leaves are dealt in tree order, a scalar like another; or in runs.
        (MIXED, dict(num_fragments=2), [[0], [1], 0, [1, 1], [0]]),
        (MIXED, dict(num_fragments=2, sequential=True), [[0], [0], 0, [1, 1], [1]]),
        # One fragment holds everything.
        ([(2,), (1,), (2,)],
         dict(num_nonlayer=2, kinds=(("layers", 0, (0, 1)), None, ("vocabulary", 0))),
         [[0, 0], [0], [0, 0]]),
    ],
)  # fmt: skip
def test_the_fragment_of_each_value(shapes, settings, homes):
    s = Settings(num_replicas=1, sync_period=100, **settings)
    oracle.masks(shapes, s)  # fails unless a partition
    assert [home.tolist() for home in oracle.fragment_of_each_value(shapes, s)] == homes


def test_an_empty_fragment_is_refused():
    """The partition check sees it: two layers cannot fill three fragments."""
    s = Settings(1, 100, num_fragments=3, kinds=(("layers", 0, (0, 1)),))
    with pytest.raises(AssertionError, match="fragment 2 is empty"):
        oracle.masks([(2,)], s)


# --- schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "until", "expected"),
    [
        # H=5, P=3: t_p = 0, 1, 3 rounded down; with tau=1 every apply is one step later.
        (dict(sync_period=5, num_fragments=3, overlap_steps=1), 12,
         [([5, 10], [6, 11]), ([1, 6, 11], [2, 7, 12]), ([3, 8], [4, 9])]),
        # Given offsets, mod H=4: -1 is 3 and 9 is 1; tau=3 applies just before the next send.
        (dict(sync_period=4, num_fragments=2, overlap_steps=3, offsets=(-1, 9)), 12,
         [([3, 7, 11], [6, 10]), ([1, 5, 9], [4, 8, 12])]),
        (dict(sync_period=1), 3, [([1, 2, 3], [1, 2, 3])]),
    ],
)  # fmt: skip
def test_the_steps_of_sends_and_applies(settings, until, expected):
    s = Settings(1, **settings)
    for p, (sent, applied) in enumerate(expected):
        assert [t for t in range(1, until + 1) if oracle.is_sent(p, t, s)] == sent
        assert [t for t in range(1, until + 1) if oracle.is_applied(p, t, s)] == applied


# --- the algorithm, one value -----------------------------------------------------------------


def add(leaves, opt_state, batch):
    """An inner step that moves every value by the batch: what follows can be done in the head."""
    return [leaf + batch for leaf in leaves], opt_state + 1, float(batch)


def run(settings, batches, codec=lambda values: values):
    """[(replicas, theta)] after each step, of one leaf with one value; batches [t][m]."""
    simulated = Oracle(settings, add, [np.array([8.0])], 0, codec)
    seen = []
    for batch in batches:
        simulated.step(batch)
        trees = simulated.replicas, simulated.thetas
        seen.append(tuple([leaf.item() for (leaf,) in tree] for tree in trees))
        assert simulated.outer_params()[0].tolist() == [np.mean(seen[-1][1])]
    return seen


STEADY = [(-1.0, -3.0)] * 5  # replica 0 moves by -1 a step, replica 1 by -3
GROWING = [(-1.0, -3.0), (-2.0, -6.0), (-3.0, -9.0)]
HALVES = {"outer_lr": 0.5, "outer_momentum": 0.5}
PLAIN = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}


@pytest.mark.parametrize(
    ("settings", "batches", "expected"),
    [
        # DiLoCo with Nesterov. t=2: x = 6, 2; g = 2, 6; m = 4; theta = 8 - (4 + 2)/2 = 5.
        # t=4: x = 3, -1; g = 2, 6; m = 2 + 4 = 6; theta = 5 - (4 + 3)/2 = 1.5.
        (Settings(2, 2, **HALVES), STEADY[:4],
         [([7, 5], [8]), ([5, 5], [5]), ([4, 2], [5]), ([1.5, 1.5], [1.5])]),
        # tau=1, alpha=1/4 mixes the steps taken meanwhile. Sent at 2: mean 4.
        # t=3: x = 5, -1; theta = 5; x = 5/4 + 15/4, -1/4 + 15/4. t=4: x = 4, 0.5; g = 1, 4.5.
        # t=5: x = 3, -2.5; m = 2 + 2.75; theta = 5 - (2.75 + 2.375)/2.
        (Settings(2, 2, overlap_steps=1, alpha=0.25, **HALVES), STEADY,
         [([7, 5], [8]), ([6, 2], [8]), ([5, 3.5], [5]), ([4, 0.5], [5]),
          ([2.578125, 1.203125], [2.4375])]),
        # The first case with m alone, no look-ahead: theta = 8 - 4/2 = 6, x = 4, 0; g = 2, 6;
        # m = 6; theta = 3.
        (Settings(2, 2, outer="sgd", **HALVES), STEADY[:4],
         [([7, 5], [8]), ([6, 6], [6]), ([5, 3], [6]), ([3, 3], [3])]),
        # Delayed uses the mean of the round before. g = (1, 3), (2, 6): theta = 8 - 0, - 2, - 4.
        (Settings(2, 1, round_overlap="delayed", **PLAIN), GROWING,
         [([8, 8], [8]), ([6, 6], [6]), ([2, 2], [2])]),
        # Eager is fresh in the own slot only: (1 + 0)/2 and (0 + 3)/2; g = 2, 6, so (2 + 3)/2 and
        # (1 + 6)/2; g = 3, 9, so (3 + 6)/2 and (2 + 9)/2.
        (Settings(2, 1, round_overlap="eager", **PLAIN), GROWING,
         [([7.5, 6.5], [7.5, 6.5]), ([5, 3], [5, 3]), ([0.5, -2.5], [0.5, -2.5])]),
        # It merges with its own theta. x = 7, 5; theta = 7.5, 6.5; x = 7.25, 5.75. x = 5.25, -0.25;
        # g = 2.25, 6.75; (2.25 + 3)/2 and (1 + 6.75)/2; theta = 4.875, 2.625.
        (Settings(2, 1, alpha=0.5, round_overlap="eager", **PLAIN), GROWING[:2],
         [([7.25, 5.75], [7.5, 6.5]), ([5.0625, 1.1875], [4.875, 2.625])]),
    ],
)  # fmt: skip
def test_replicas_and_theta_after_each_step(settings, batches, expected):
    assert run(settings, batches) == expected


def test_every_term_passes_the_codec():
    """Rounding down, g = 1.5, 3.5 arrive as 1, 3. Plain: theta = 8 - 2. Eager: 1/2 and 3/2, then
    x = 6, 3; g = 1.5, 3.5 again: (1 + 3)/2 = 2 for both."""
    batches = [(-1.5, -3.5)] * 2
    plain = run(Settings(2, 1, **PLAIN), batches[:1], codec=np.floor)
    assert plain == [([6, 6], [6])]
    eager = run(Settings(2, 1, round_overlap="eager", **PLAIN), batches, codec=np.floor)
    assert [theta for _, theta in eager] == [[7.5, 6.5], [5.5, 4.5]]


@pytest.mark.parametrize(
    ("settings", "batches", "expected"),
    [
        # H=1, M=1, lr 1/2. g = 4: m/0.1 = 4, v/0.001 = 16, step 1/2. Then x = 7.5 + 4, g = -4:
        # m = 0.36 - 0.4 = -0.04 over 0.19, v = 0.031984 over 0.001999 = 16.
        (Settings(1, 1, outer="adam", outer_lr=0.5), [(-4.0,), (4.0,)],
         [7.5, 7.5 + 0.5 * (0.04 / 0.19) / 4]),
        # Delayed calls it with zeros in the first round, which counts. Round 2: g = 2;
        # m = 0.2/(1 - 0.81); v = 0.004/(1 - 0.998001).
        (Settings(2, 1, round_overlap="delayed", outer="adam", outer_lr=1.0), GROWING[:2],
         [8, 8 - (0.2 / 0.19) / (np.sqrt(0.004 / 0.001999) + 1e-8)]),
    ],
)  # fmt: skip
def test_adam_has_bias_corrected_moments(settings, batches, expected):
    found = [theta for _, (theta,) in run(settings, batches)]
    np.testing.assert_allclose(found, expected, rtol=1e-8)


# --- the algorithm, two fragments -------------------------------------------------------------


def test_fragments_have_their_own_steps_and_optimizer_state():
    """Replica 0 moves by 1 a step, replica 1 by 3. H=2, P=2: a after steps 2, 4; b after 1, 3.

    Adam's first step is lr * sign(g), also for a, whose first step comes after b's.
    """

    def started(**settings):
        s = Settings(2, 2, num_fragments=2, **settings)
        return Oracle(s, add, [np.zeros(1), np.zeros(1)], 0)

    plain, adam, seen = started(**PLAIN), started(outer="adam", outer_lr=0.25), []
    for _ in range(4):
        assert plain.step((1.0, 3.0)) == [1.0, 3.0]  # metrics stay with their replica
        seen.append(tuple([r[i].item() for r in plain.replicas] for i in range(2)))
    assert seen == [([1, 3], [2, 2]), ([4, 4], [3, 5]), ([5, 7], [6, 6]), ([8, 8], [7, 9])]
    assert plain.opt_states == [4, 4]
    for _ in range(2):
        adam.step((1.0, 3.0))
    np.testing.assert_allclose(np.concatenate(adam.outer_params()), [0.25, 0.25], rtol=1e-7)


def test_the_oracle_imports_nothing_of_the_package():
    """Positive control: it does import numpy."""
    text = (pathlib.Path(__file__).parents[1] / "oracle.py").read_text()
    names = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    assert "numpy" in names
    assert names <= {"dataclasses", "itertools", "collections", "typing", "numpy"}
