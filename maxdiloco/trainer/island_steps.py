"""The steps of an island: a table of actions as those of engine/exchanges.py, and its values.

A step is the inner step alone; what an island sends and applies between two of them is decided by
islands/core.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from maxdiloco.diloco import fragments
from maxdiloco.diloco import schedule as names
from maxdiloco.diloco.schedule import Schedule
from maxdiloco.engine import actions
from maxdiloco.engine.actions import Given, Kind
from maxdiloco.engine.calls import Call
from maxdiloco.engine.exchanges import Carrier
from maxdiloco.engine.host_values import HostValues
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import Layout, State
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.records import Leaf
from maxdiloco.trainer import island_processes
from maxdiloco.trainer.island_processes import Processes, Standing


class Steps(Carrier):
    """The table: the inner step, `ready` before it and `stepped` after it.

    sizes: bytes of a message of each fragment.
    """

    def __init__(
        self,
        programs: Programs,
        schedule: Schedule,
        sizes: Sequence[int],
        ready: Callable[[Given, Any], Given],
        stepped: Callable[[Given, Any], Given],
    ):
        super().__init__(programs, schedule, None)
        self._host, self._sizes = HostValues(programs), sizes
        self._running: Any = ()

        def paced(given, _):
            """A host that ran ahead would send at steps that are far from done."""
            jax.block_until_ready(self._running)
            self._running = given.metrics
            return given

        inner = (Kind(ready), actions.INNER, Kind(paced), Kind(stepped))
        self.table = MappingProxyType({names.INNER: inner, names.SYNCHRONISE: ()})

    def calls(self, batch: Any) -> list[Call]:
        """See Carrier; each fragment is taken and replaced once in a period."""
        return [*super().calls(batch), *self._host.calls(1)]

    def fragment_bytes(self, plan: FragmentPlan) -> int:
        """Of a message."""
        return self._sizes[plan.index]


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
