"""A fragment of the outer state inside a program: from where it is kept to the device, and back."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.state import FragmentPlan, Layout, pick


class OuterFragment:
    """A fragment of theta and of its optimizer state: to the device, and back where it is kept.

    lead: dims before a leaf's own, 1 (R) when every replica has its theta (eager).
    """

    def __init__(self, layout: Layout, plan: FragmentPlan, lead: int):
        self.plan, self.lead = plan, lead
        self.kept = [x.sharding for x in pick(layout.state.outer, plan)]
        self.on_host = self.kept[0].memory_kind == "pinned_host"
        prefix = ("diloco",) if lead else ()
        self.fragment = [
            NamedSharding(layout.mesh, P(*prefix, *s.spec)) for s in plan.payload.shares
        ]

    def take(self, leaves, places) -> list[jax.Array]:
        """The fragment of theta, on the device, laid out like its shares."""
        out = []
        for x, cut, place, _, fragment in self._each(leaves, places):
            if self._moves_data(x, cut):
                x = self._load(x)
            taken = slices.take(x, cut, place, lead=self.lead, load=self._load)
            out.append(jax.lax.with_sharding_constraint(taken, fragment) if self.on_host else taken)
        return out

    def put(self, leaves, places, values) -> list[jax.Array]:
        """The leaves of theta with the fragment replaced by values, where they are kept."""
        out = []
        for (x, cut, place, kept, _), value in zip(
            self._each(leaves, places), values, strict=True
        ):
            if self._moves_data(x, cut):
                new = slices.put(self._load(x), cut, place, value, lead=self.lead)
            else:
                new = slices.put(x, cut, place, value, lead=self.lead, store=self._store)
            out.append(jax.device_put(new, kept) if self.on_host else new)
        return out

    def load_opt(self, outer_opt):
        """The fragment's optimizer state, on the device."""
        return jax.tree.map(self._load, outer_opt)

    def store_opt(self, outer_opt):
        """It again, where it is kept."""
        return jax.tree.map(self._store, outer_opt)

    def _each(self, leaves, places):
        return zip(leaves, self.plan.cuts, places, self.kept, self.fragment, strict=True)

    def _load(self, x):
        return jax.device_put(x, jax.memory.Space.Device) if self.on_host else x

    def _store(self, x):
        return jax.device_put(x, jax.memory.Space.Host) if self.on_host else x

    def _moves_data(self, x, cut) -> bool:
        # A TPU tiles the last two dims. To cut or gather along one of them moves data, which it can
        # do in device memory only.
        tiled = cut.axis + self.lead >= x.ndim - 2
        gathers = cut.pattern == "list" and cut.count > slices.MOST_SINGLE_SLICES
        return self.on_host and cut.pattern != "whole" and (tiled or gathers)
