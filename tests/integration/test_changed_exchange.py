"""A run that continues with another schedule, partition, mode or wire: the oracle that switches."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
from oracle import Oracle, OuterState, masks
from test_against_oracle import OUTER, TOLERANCE, Case, library, oracle_settings
from tiers import corner
from tiny_problem import numpy_inner_step, problem

from maxdiloco.checkpoint import saved_state
from maxdiloco.engine.trainer import SavedLayout

pytestmark = pytest.mark.usefixtures("programs")
TINY = problem("mixed")


def partition_of(s):
    return s.num_fragments, s.num_nonlayer, s.sequential


class Switching(Oracle):
    """An oracle that goes on with other settings; what is in flight then is never applied."""

    dropped_until = 0

    def switch(self, s):
        if s == dataclasses.replace(self.s, alpha=s.alpha):
            self.s = s  # the in-flight exchange is merged with the new alpha
            return
        was, now = (len(self.thetas), s.num_replicas if s.round_overlap == "eager" else 1)
        if was > now:
            self.thetas = [self.outer_params()]
            first, second = (
                [np.mean(leaf, axis=0) for leaf in zip(*moment, strict=True)]
                for moment in zip(*((o.first, o.second) for o in self.outer_states), strict=True)
            )
            self.outer_states = [OuterState(first, second, self.outer_states[0].count)]
        if was < now:
            self.thetas, self.outer_states = (
                [copy.deepcopy(one) for _ in range(now)]
                for (one,) in (self.thetas, self.outer_states)
            )
        if partition_of(s) != partition_of(self.s):  # the outer optimizer starts from scratch
            zeros = [np.zeros_like(leaf) for leaf in self.thetas[0]]
            self.outer_states = [
                OuterState(copy.deepcopy(zeros), copy.deepcopy(zeros), [0] * s.num_fragments)
                for _ in range(now)
            ]
        self.s, self.dropped_until = s, self.t
        self.masks = masks([leaf.shape for leaf in self.thetas[0]], s)
        self.sent = [
            [[np.zeros(mask.sum()) for mask in fragment] for _ in range(s.num_replicas)]
            for fragment in self.masks
        ]

    def _apply(self, p, means):
        if self.s.round_overlap == "none":
            sent = self.t - self.s.overlap_steps
            if self.dropped_until and sent <= self.dropped_until:
                return
        super()._apply(p, means)


def switched_library(before, after, at, steps):
    """(replicas, theta) after every step of the class, restored from its own items at step `at`."""
    params = TINY.named(TINY.params)
    algorithm = library(before, TINY)
    state = algorithm.init(params, jax.tree.map(np.zeros_like, params))
    for t in range(1, steps + 1):
        state, _ = algorithm.step(state, TINY.batch(t, before.M))
        trees = algorithm.replica_params(state), algorithm.outer_params(state)
        yield [[np.array(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees]
        if t == at:
            items, note = algorithm.checkpoint(state)[0], algorithm.checkpoint(state)[1]
            algorithm = library(after, TINY)
            algorithm.bind(params, jax.tree.map(np.zeros_like, params))
            layout = SavedLayout(**note, same_rules=True)
            wanted = saved_state.abstract_items(algorithm, layout)
            read = {name: items[name] for name in wanted}
            state = algorithm.restore_plan(layout).state_of(read, t=t)


def switched_oracle(before, after, at, steps):
    zeros = [np.zeros_like(leaf) for leaf in TINY.params]
    oracle = Switching(oracle_settings(before), numpy_inner_step, TINY.params, zeros)
    for t in range(1, steps + 1):
        oracle.step(TINY.targets[t - 1][: before.M])
        replicas = [np.stack(leaf_R) for leaf_R in zip(*oracle.replicas, strict=True)]
        yield replicas, oracle.outer_params()
        if t == at:
            oracle.switch(oracle_settings(after))


def difference(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


BASE = Case(2, "mixed", 1, 3, 6, 2, "none", 0.25, "nesterov", "even", "strided")
CASES = {
    # Sends of H=6, P=3 at 2, 4, 6 and tau 2: after step 8 fragment 1 is in flight.
    "H_P_tau": (BASE, BASE._replace(H=7, P=4, tau=1, k=2), 8),
    "H_tau": (BASE, BASE._replace(H=7, tau=1), 8),
    "alpha": (BASE, BASE._replace(alpha=0.75), 8),
    "one_fragment": (BASE, BASE._replace(P=1, tau=0), 9),
    "layout": (BASE._replace(tau=0), BASE._replace(P=4, layers="sequential", tau=0), 7),
    "to_eager": (BASE, BASE._replace(overlap="eager", tau=0), 8),
    "from_eager": (BASE._replace(overlap="eager", tau=0), BASE, 11),
    "from_eager_P": (BASE._replace(overlap="eager", tau=0), BASE._replace(P=2), 11),
    "eager_P": (*(BASE._replace(overlap="eager", tau=0, P=P) for P in (3, 2)), 11),
    "from_delayed": (BASE._replace(overlap="delayed", tau=0), BASE, 8),
    "adam": (*(BASE._replace(outer="adam", tau=0, P=P) for P in (2, 4)), 12),
}


def steps_of(before, after, at):
    return before, after, at, at + 2 * after.H + 1


KEPT = ["H_P_tau", "H_tau", "to_eager", "from_eager", "eager_P"]


@pytest.mark.parametrize("name", corner(CASES, KEPT))
def test_a_changed_run_equals_the_oracle_that_switches_there(name):
    """After every step: the new schedule, outer parameters, nothing in flight; the momentum where
    the fragments are the same."""
    case = steps_of(*CASES[name])
    both = zip(switched_library(*case), switched_oracle(*case), strict=True)
    apart = [difference(ours, theirs) for ours, theirs in both]
    assert max(apart) <= TOLERANCE, f"step {1 + int(np.argmax(np.array(apart) > TOLERANCE))}"


@pytest.mark.parametrize("name", ["H_tau", "from_eager"])
def test_an_oracle_that_does_not_switch_or_forgets_the_momentum_shows(name):
    """Control of the comparison above."""
    before, after, at, steps = steps_of(*CASES[name])
    assert OUTER["sgd"][0]["outer_momentum"] == 0
    right, same, forgetful = (
        list(switched_oracle(before, other, at, steps))[-1]
        for other in (after, before, after._replace(outer="sgd"))
    )
    assert difference(same, right) > 1e-3
    assert difference(forgetful, right) > 1e-3
