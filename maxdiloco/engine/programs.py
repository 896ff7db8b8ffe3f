"""The compiled programs of a DiLoCo run: a few kinds, whatever the number of fragments is.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2. Which program runs is the host's choice, so no
exchange sits in a conditional; which layers a fragment holds is an argument, so fragments of equal
size share one compile.

    # R replicas  F leaves
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer, slices
from maxdiloco.engine.outer_fragment import OuterFragment
from maxdiloco.engine.state import FragmentPlan, Layout, copies, parts_of
from maxdiloco.exchange import collective
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.replicas import map_fn, reduce_mean
from maxdiloco.parallel.sharding import zeros

# Of merge, synchronise and outer_step: the leaves and the optimizer state. Not the flags: the host
# looks at them later.
DONATED = (0, 1, 2)


@dataclass(frozen=True)
class Rule:
    """What happens at a send and an apply: the outer optimizer, alpha, and the kind of overlap."""

    optimizer: optax.GradientTransformation
    alpha: float
    overlap: str


class Programs:
    """Programs of one layout, made on first use; fragments with equal cuts share theirs."""

    def __init__(self, layout: Layout, inner_step: Callable, rule: Rule, on_compile: Callable):
        self.layout = layout
        self.rule = rule
        self.on_compile = on_compile
        self._by_cuts: dict[tuple, Program] = {}
        step = map_fn(inner_step, mesh=layout.mesh, num_replicas=layout.num_replicas)
        state = layout.state
        lead = NamedSharding(layout.mesh, P("diloco"))
        kept = (_shardings(state.params), _shardings(state.opt_state), lead)
        arrived = NamedSharding(layout.mesh, collective.incoming_spec(layout.mesh))
        self.inner = self._program("inner", step, donate=(0, 1), out_shardings=kept)
        self.inner_exchange = self._program(
            "inner + exchange",
            lambda params, opt, batch, chunk: (
                *step(params, opt, batch),
                collective.carry(chunk, layout.mesh),
            ),
            donate=(0, 1),
            out_shardings=(*kept, arrived),
        )
        self.mean_outer = self._program(
            "outer parameters", self._mean_outer, out_shardings=_shardings(layout.outer_params)
        )

    def _mean_outer(self, outer):
        """The mean over the replicas of theta, where each has its own (eager)."""
        # A TPU computes in device memory only.
        near = jax.device_put(outer, jax.memory.Space.Device)

        def mean(x_S):
            return reduce_mean(jax.lax.all_gather(x_S, "diloco", tiled=True))

        over_slots = jax.shard_map(
            mean,
            mesh=self.layout.mesh,
            in_specs=P("diloco"),
            out_specs=P(),
            axis_names={"diloco"},
            check_vma=False,  # equal on all slots: the gather says so
        )
        return jax.tree.map(over_slots, near)

    def init(self, make: Callable, **options) -> Program:
        """The program from the arguments of `make` to the state before the first step.

        make(*args) -> (params, opt_state) of one replica. One program, so that nothing but the
        state itself is ever held. options: of Program.
        """
        layout, M = self.layout, self.layout.num_replicas
        one = jax.tree.unflatten(
            jax.tree.structure(layout.state.params),
            [NamedSharding(layout.mesh, spec) for spec in layout.specs],
        )

        def init(*args):
            params, opt_state = make(*args)
            params = jax.lax.with_sharding_constraint(params, one)
            theta = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            # theta and the momenta of SGD start as the state before any outer gradient.
            outer_opt = tuple(
                self.rule.optimizer.init(parts_of(jax.tree.leaves(theta), plan))
                for plan in layout.plans
            )
            if self.rule.overlap == "eager":
                theta, outer_opt = copies((theta, outer_opt), M)
            state = layout.state
            empty = replace(state, params=None, opt_state=None, outer=None, outer_opt=())
            return replace(
                jax.tree.map(zeros, empty),
                params=copies(params, M),
                opt_state=copies(opt_state, M),
                outer=theta,
                outer_opt=outer_opt,
            )

        return self._program("init", init, out_shardings=_shardings(layout.state), **options)

    def _program(self, name, fn, **options) -> Program:
        return Program(name, fn, on_compile=self.on_compile, **options)

    def of(self, kind: str, plan: FragmentPlan) -> Program:
        """The program `pack`, `merge`, `synchronise` or `outer_step` for a fragment."""
        key = (kind, plan.cuts)
        if key not in self._by_cuts:
            make = {
                "pack": _pack,
                "merge": _merge,
                "synchronise": _synchronise,
                "outer_step": _outer_step,
            }[kind]
            fn, donate, out_shardings = make(self.layout, plan, self.rule)
            name = f"{kind} [{_label(plan)}]"
            self._by_cuts[key] = self._program(
                name, fn, donate=donate, out_shardings=out_shardings
            )
        return self._by_cuts[key]


def _label(plan: FragmentPlan) -> str:
    layers = len(plan.fragment.layers)
    return f"{layers} layers, {len(plan.cuts)} leaves" if layers else f"{len(plan.cuts)} leaves"


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _pick(leaves: list, plan: FragmentPlan) -> list:
    return [leaves[cut.leaf] for cut in plan.cuts]


def _taken(arrays, plan: FragmentPlan, places, lead: int) -> list[jax.Array]:
    return [
        slices.take(x, cut, place, lead=lead)
        for x, cut, place in zip(arrays, plan.cuts, places, strict=True)
    ]


def _put(arrays, plan: FragmentPlan, places, values, lead: int) -> list[jax.Array]:
    return [
        slices.put(x, cut, place, value, lead=lead)
        for x, cut, place, value in zip(arrays, plan.cuts, places, values, strict=True)
    ]


def _gradient(params_R, theta, lead):
    """Alg. 2 line 7: old minus new, [R, ...] float32."""
    return [
        outer.outer_gradient(o if lead else o[None], x_R)
        for o, x_R in zip(theta, params_R, strict=True)
    ]


def _pack(layout: Layout, plan: FragmentPlan, rule: Rule):
    """Form the fragment's outer gradients and encode them: Alg. 2 lines 6-7, no traffic."""

    def pack(param_leaves, outer_leaves, places):
        theta = OuterFragment(layout, plan, lead=0).take(outer_leaves, places)
        g_R = _gradient(_taken(param_leaves, plan, places, lead=1), theta, 0)
        chunk = layout.chunk_of(plan)
        return collective.send(plan.payload, g_R, num_chunks=plan.num_chunks, chunk=chunk)

    where = NamedSharding(layout.mesh, collective.outgoing_spec(layout.mesh))
    return pack, (), (where,) * plan.num_chunks


def _merged_shardings(layout: Layout, plan: FragmentPlan):
    state = layout.state
    return (
        _shardings(_pick(jax.tree.leaves(state.params), plan)),
        _shardings(_pick(jax.tree.leaves(state.outer), plan)),
        _shardings(state.outer_opt[plan.index]),
        state.bad.sharding,
        _shardings(state.sizes),
    )


def _apply(layout, plan, rule, param_leaves, outer_leaves, outer_opt, bad_RF, places, received):
    """Alg. 2 lines 10-12: the outer step and the merge; nothing changes if a flag is bad."""
    kept = OuterFragment(layout, plan, lead=0)
    theta, opt = kept.take(outer_leaves, places), kept.load_opt(outer_opt)
    new, new_opt = outer.outer_update(rule.optimizer, theta, opt, received.mean)
    finite = ~jnp.any(received.bad_RF)
    new, new_opt = _where(finite, (new, new_opt), (theta, opt))
    x_R = _taken(param_leaves, plan, places, lead=1)
    mixed_R = [
        jnp.where(finite, outer.merge(x, jnp.broadcast_to(n, x.shape), alpha=rule.alpha), x)
        for x, n in zip(x_R, new, strict=True)
    ]
    leaves = jnp.array([cut.leaf for cut in plan.cuts])
    return (
        _put(param_leaves, plan, places, mixed_R, lead=1),
        kept.put(outer_leaves, places, new),
        kept.store_opt(new_opt),
        bad_RF.at[:, leaves].max(received.bad_RF),
        received.sizes,
    )


def _where(condition, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _merge(layout: Layout, plan: FragmentPlan, rule: Rule):
    """Decode, average, outer step, mix into the replicas: no traffic between slices."""

    def merge(param_leaves, outer_leaves, outer_opt, bad_RF, places, incoming):
        received = collective.receive(plan.payload, incoming, num_replicas=layout.num_replicas)
        return _apply(
            layout, plan, rule, param_leaves, outer_leaves, outer_opt, bad_RF, places, received
        )

    return merge, DONATED, _merged_shardings(layout, plan)


def _synchronise(layout: Layout, plan: FragmentPlan, rule: Rule):
    """tau = 0: send, exchange and apply in one program; DiLoCo when the fragment is everything."""
    pack, _, _ = _pack(layout, plan, rule)
    merge, donate, out_shardings = _merge(layout, plan, rule)

    def synchronise(param_leaves, outer_leaves, outer_opt, bad_RF, places):
        # Without the barrier XLA:TPU gathers [1, N] and the payload is padded x2, x4 for bytes.
        chunks = jax.lax.optimization_barrier(pack(param_leaves, outer_leaves, places))
        incoming = [collective.carry(chunk, layout.mesh) for chunk in chunks]
        return merge(param_leaves, outer_leaves, outer_opt, bad_RF, places, incoming)

    return synchronise, donate, out_shardings


def _outer_step(layout: Layout, plan: FragmentPlan, rule: Rule):
    """Send, outer step and merge at send time; the mean is that of the round before.

    arXiv 2502.12996: `delayed` (Algorithm 2) takes it as it is; `eager` (Algorithm 3) puts each
    replica's fresh outer gradient in its own place.
    """
    make = _delayed_step if rule.overlap == "delayed" else _eager_step
    step = make(layout, plan, rule)
    where = NamedSharding(layout.mesh, collective.outgoing_spec(layout.mesh))
    merged = _merged_shardings(layout, plan)
    return step, DONATED, (*merged, (where,) * plan.num_chunks)


def _delayed_step(layout: Layout, plan: FragmentPlan, rule: Rule):
    pack, _, _ = _pack(layout, plan, rule)

    def delayed_step(param_leaves, outer_leaves, outer_opt, bad_RF, places, incoming):
        chunks = pack(param_leaves, outer_leaves, places)
        received = collective.receive(plan.payload, incoming, num_replicas=layout.num_replicas)
        applied = _apply(
            layout, plan, rule, param_leaves, outer_leaves, outer_opt, bad_RF, places, received
        )
        return *applied, chunks

    return delayed_step


def _eager_step(layout: Layout, plan: FragmentPlan, rule: Rule):
    kept = OuterFragment(layout, plan, lead=1)

    def one_replica(finite, x, theta, opt, mean):
        new, new_opt = outer.outer_update(rule.optimizer, theta, opt, mean)
        new, new_opt = _where(finite, (new, new_opt), (theta, opt))
        mixed = [
            jnp.where(finite, outer.merge(i, o, alpha=rule.alpha), i)
            for i, o in zip(x, new, strict=True)
        ]
        return mixed, new, new_opt

    def eager_step(param_leaves, outer_leaves, outer_opt, bad_RF, places, incoming):
        theta_R, opt_R = kept.take(outer_leaves, places), kept.load_opt(outer_opt)
        x_R = _taken(param_leaves, plan, places, lead=1)
        chunks = collective.send(
            plan.payload,
            _gradient(x_R, theta_R, 1),
            num_chunks=plan.num_chunks,
            chunk=layout.chunk_of(plan),
        )
        received, own_bad_RF = collective.receive_with_own(
            plan.payload, incoming, chunks, num_replicas=layout.num_replicas
        )
        finite_R = ~(jnp.any(received.bad_RF) | jnp.any(own_bad_RF, axis=1))
        per_replica = map_fn(one_replica, mesh=layout.mesh, num_replicas=layout.num_replicas)
        mixed_R, new_R, new_opt_R = per_replica(finite_R, x_R, theta_R, opt_R, received.mean)
        leaves = jnp.array([cut.leaf for cut in plan.cuts])
        return (
            _put(param_leaves, plan, places, mixed_R, lead=1),
            kept.put(outer_leaves, places, new_R),
            kept.store_opt(new_opt_R),
            bad_RF.at[:, leaves].max(received.bad_RF),
            received.sizes,
            chunks,
        )

    return eager_step
