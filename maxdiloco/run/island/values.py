"""The values of an island, by fragment, as its driver reads and writes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from maxdiloco.diloco import fragments
from maxdiloco.engine.layout import FragmentPlan, Layout, State
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.records import Leaf
from maxdiloco.run.island import processes as island_processes
from maxdiloco.run.island.host_values import HostValues
from maxdiloco.run.island.processes import Processes, Standing


class Values:
    """The island's own values for its driver, by fragment: those of `state`, or newer ones.

    Several processes take and put them together: what process 0 does, the others follow.
    fresh: parameters of one replica -> the inner optimizer's first state.
    """

    def __init__(
        self,
        host: HostValues,
        plans: tuple[FragmentPlan, ...],
        processes: Processes,
        fresh: Callable[[Any], Any],
    ):
        self.host, self._plans, self._processes, self._fresh = host, plans, processes, fresh
        self.state: State | None = None
        self.new: dict[int, np.ndarray] = {}

    def __getitem__(self, fragment: int) -> np.ndarray:
        if fragment in self.new:
            return self.new[fragment]
        self._processes.tell(island_processes.TAKE, fragment)
        return self.host.params(self.state, self._plans[fragment])

    def __setitem__(self, fragment: int, values: np.ndarray) -> None:
        self.new[fragment] = values

    def flushed(self, state: State, driver: Driver) -> State:
        """The state with what is new, and the outer state beside it; it is donated."""
        for fragment in sorted(self.new):
            self._processes.tell(island_processes.PUT, fragment)
            values = self.new.pop(fragment), *driver.outer[fragment]
            state = self.host.put(state, self._plans[fragment], values)
        self.state = state
        return state

    def without_moments(self, state: State) -> State:
        """The state with an inner optimizer that has seen nothing; it is donated."""
        self._processes.tell(island_processes.WITHOUT_MOMENTS)
        return self._anew(state)

    def followed(self, state: State) -> tuple[State, Standing]:
        """In another process than 0: do what that one does, up to where all stand then."""
        while True:
            match self._processes.told():
                case island_processes.TAKE, fragment:
                    self.host.params(state, self._plans[fragment])
                case island_processes.PUT, fragment:
                    state = self.host.put(state, self._plans[fragment], ())
                case island_processes.WITHOUT_MOMENTS, _:
                    state = self._anew(state)
                case _, standing:
                    return state, Standing(*standing)

    def _anew(self, state: State) -> State:
        """Not zeros: muon has its coefficients in its state."""
        like = jax.tree.map(lambda x: x.sharding, state.opt_state)
        for old in jax.tree.leaves(state.opt_state):
            old.delete()  # before there are two
        anew = jax.jit(jax.vmap(self._fresh), out_shardings=like)
        return replace(state, opt_state=anew(state.params))


def leaves_of(layout: Layout, layer_axis: Any) -> tuple[tuple[Leaf, ...], ...]:
    """Of run.json: the leaves of each fragment."""
    like = layout.state.outer
    kinds, leaves = fragments.kinds_of(like, layer_axis), jax.tree.leaves(like)
    found = []
    for plan in layout.plans:
        shapes = [s.shape(leaves[s.leaf].shape) for s in plan.slices]
        of_plan = zip(plan.slices, shapes, strict=True)
        found.append(tuple(_leaf(kinds[s.leaf], shape) for s, shape in of_plan))
    return tuple(found)


def _leaf(kind: Any, shape: tuple[int, ...]) -> Leaf:
    size = int(np.prod(shape))
    if isinstance(kind, fragments.Vocabulary):
        return Leaf(size, 0)
    if isinstance(kind, fragments.Stacked):
        assert kind.axis == 0  # of the models; a tensor's values follow each other
        return Leaf(size, shape[0])
    return Leaf(size, 1)
