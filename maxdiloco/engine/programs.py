"""The compiled programs of a DiLoCo run: a few kinds, for any number of fragments.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2. The host chooses which program runs, so no
exchange sits in a conditional. Which layers a fragment holds is an argument.

    # R replicas  F leaves
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer, slices
from maxdiloco.engine.fragment_arrays import FragmentArrays, FragmentView, arrays_of
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.state import Layout, fragment_leaves
from maxdiloco.engine.trainer import ThetaView
from maxdiloco.exchange import collective
from maxdiloco.parallel import chips, offload
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.replicas import broadcast, map_fn, mean_of_all, mean_of_each_slot
from maxdiloco.parallel.sharding import shardings_of, zeros

Definition = dict[str, Any]  # of a program: its function, what it donates, its results' shardings
NOTHING = collective.Sent(())  # by a program that only receives
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclass(frozen=True)
class Rule:
    """The outer optimizer, alpha, and which exchange the outer step uses: none, delayed, eager.

    kinds: of the leaves, fragments.kinds_of, for outer.radial_directional_mean; None: plain mean.
    """

    optimizer: optax.GradientTransformation
    alpha: float
    overlap: str
    kinds: Sequence[Any] | None = None


class Programs:
    """Programs of one layout, made on first use; fragments of equal form share theirs."""

    def __init__(self, layout: Layout, inner_step: Callable, rule: Rule, on_compile: Callable):
        self.layout = layout
        self.rule = rule
        self._program = functools.partial(Program, on_compile=on_compile)
        self._by_form: dict[tuple, Program] = {}
        state = layout.state
        step = map_fn(inner_step, mesh=layout.mesh)
        step = offload.with_state_on_device(step, state.opt_state)
        lead = NamedSharding(layout.mesh, P("diloco"))
        kept = (shardings_of(state.params), shardings_of(state.opt_state), lead)
        options = {"compiler_options": chips.step_options(layout.mesh.devices.flat[0].device_kind)}
        self.inner = self._program("inner", step, donate=(0, 1), out_shardings=kept, **options)

        def beside_chunks(name, pieces, move, spec):
            arrived = NamedSharding(layout.mesh, spec)
            labels = [""] if len(pieces) < 2 else [" [short chunk]", " [long chunk]"]
            return [
                self._program(
                    f"inner + {name}{label}",
                    lambda params, opt, batch, chunk, _: (
                        *step(params, opt, batch),
                        *(move(piece, layout.mesh) for piece in chunk),
                    ),
                    donate=(0, 1, 4),  # what arrives takes the memory of what it replaces
                    keep_unused=True,
                    out_shardings=(*kept, *(arrived,) * num_pieces),
                    **options,
                )
                for num_pieces, label in enumerate(labels, start=1)
            ]

        to_all = collective.all_gather_chunk, collective.incoming_spec(layout.mesh)
        to_owners = collective.all_to_all_chunk, collective.outgoing_spec(layout.mesh)
        name = "share" if layout.part_pieces else "exchange"
        self._inner_exchanges = beside_chunks(name, layout.pieces, *to_all)
        self._inner_scatters = beside_chunks("scatter", layout.part_pieces, *to_owners)
        one_theta = [NamedSharding(layout.mesh, spec) for spec in layout.specs]
        self._one_theta = jax.tree.unflatten(jax.tree.structure(state.params), one_theta)
        slots, is_eager = layout.mesh.shape["diloco"], layout.per_replica_outer
        on_device = jax.tree.map(lambda x: offload.moved(x, None), state.outer)
        as_it_is = ThetaView(on_device, lambda state: state.outer, of_slots=is_eager)
        self.exported = self._means("outer parameters", mean_of_all) if is_eager else as_it_is
        self.evaluated = self.exported
        if is_eager and slots > 1:
            on_host = offload.on_host(jax.tree.leaves(state.outer)[0])
            one_each = slots == layout.num_replicas and not on_host
            means = "outer parameters of a slice", mean_of_each_slot
            self.evaluated = as_it_is if one_each else self._means(*means, of_slots=True)

    def init(self, make: Callable, **options) -> Program:
        """See Trainer.init_program. One program, so no second copy of the state is in memory.

        Typed PRNG keys in opt_state differ between the replicas, as their dropout masks then do.
        """
        layout = self.layout

        def all_replicas(tree):
            return jax.tree.map(lambda x: broadcast(x, layout.num_replicas), tree)

        def own_keys(x, copies_R):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return _folded(x, layout.num_replicas) if is_key else copies_R

        def init(*args):
            params, opt_state = make(*args)
            params = jax.lax.with_sharding_constraint(params, self._one_theta)
            theta = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            outer_opt = tuple(self.rule.optimizer.init(_values(theta, p)) for p in layout.plans)
            if layout.per_replica_outer:
                theta, outer_opt = all_replicas((theta, outer_opt))
            state = layout.state
            empty = replace(state, params=None, opt_state=None, outer=None, outer_opt=())
            return replace(
                jax.tree.map(zeros, empty),
                params=all_replicas(params),
                opt_state=jax.tree.map(own_keys, opt_state, all_replicas(opt_state)),
                outer=theta,
                outer_opt=outer_opt,
            )

        return self._program("init", init, out_shardings=shardings_of(layout.state), **options)

    def _means(self, name: str, means: Callable, *, of_slots: bool = False) -> ThetaView:
        """The view of means of the replicas' thetas: of all, or of each of several slots."""
        mesh, lead = self.layout.mesh, ("diloco",) if of_slots else ()
        out = jax.tree.map(lambda s: NamedSharding(mesh, P(*lead, *s.spec)), self._one_theta)
        mean = self._program(name, functools.partial(means, mesh=mesh), out_shardings=out)
        like = mean.out_shapes(self.layout.state.outer)
        return ThetaView(like, lambda state: state.outer, mean, of_slots)

    def inner_exchange(self, plan: FragmentPlan) -> Program:
        """The inner step beside a chunk of a fragment, which takes the place of an old one."""
        return self._inner_exchanges[plan.num_pieces - 1]

    def inner_scatter(self, plan: FragmentPlan) -> Program:
        """The inner step beside a chunk whose parts go to their owners."""
        return self._inner_scatters[plan.scattered[1] - 1]

    def of(self, kind: str, plan: FragmentPlan) -> Program:
        """A program for a fragment: `pack`, `reduce`, `reduce and share`, `merge`, `synchronise` or
        `outer_step`.
        """
        replacing, step = self._replacing, f"{self.rule.overlap}_step"
        definitions = {
            "pack": self._pack,
            "reduce": functools.partial(self._reduce, shares=False),
            "reduce and share": functools.partial(self._reduce, shares=True),
            "merge": functools.partial(replacing, "merge", sends=False),
            "synchronise": functools.partial(replacing, "synchronise", sends=True),
            "outer_step": functools.partial(replacing, step, sends=True, keeps=True),
        }
        return self.defined(kind, plan, definitions[kind])

    def defined(
        self, kind: str, plan: FragmentPlan, define: Callable[[FragmentPlan], Definition]
    ) -> Program:
        """A program for a fragment, of this kind and definition."""
        key = (kind, plan.form)
        if key not in self._by_form:
            layers, leaves = len(plan.fragment.layers), len(plan.slices)
            label = f"{layers} layers, {leaves} leaves" if layers else f"{leaves} leaves"
            self._by_form[key] = self._program(f"{kind} [{label}]", **define(plan))
        return self._by_form[key]

    # -- what is compiled for a fragment ---------------------------------------------------------

    def _pack(self, plan) -> Definition:
        """Form the outer gradients and encode them: lines 7-8, no traffic over `diloco`."""
        view, state = FragmentView(self.layout, plan), self.layout.state

        def pack(leaves, starts, residual=()):
            sent = self._send(plan, view.take(leaves._replace(residual=residual), starts))
            residual = view.residual.put(residual, starts, sent.residual)
            return sent._replace(chunks=self._moved(sent.chunks, HOST), residual=residual)

        kept = shardings_of((fragment_leaves(state.residual, plan), state.residual_norm_R))
        sent = collective.Sent(self._kept(len(self.layout.first_lengths(plan))), *kept)
        return dict(fn=pack, donate=(2,) if kept[0] else (), out_shardings=sent)  # the residual

    def _reduce(self, plan, *, shares: bool) -> Definition:
        """The mean of the parts that this slot owns, encoded; shares: and sent to all at once."""
        layout, lengths = self.layout, self.layout.lengths(plan) * plan.num_chunks

        def reduce(parts):
            chunks = self._reduced(plan, self._moved(parts, DEVICE))
            if shares:
                chunks = self._gathered(chunks)
            return self._moved(chunks, HOST)

        spec = (collective.incoming_spec if shares else collective.outgoing_spec)(layout.mesh)
        return dict(fn=reduce, out_shardings=self._kept(len(lengths), spec))

    def _reduced(self, plan, parts):
        lengths, M = self.layout.lengths(plan) * plan.num_chunks, self.layout.num_replicas
        return collective.reduce(plan.payload, parts, lengths, num_replicas=M)

    def _gathered(self, chunks):
        # Without the barrier XLA:TPU gathers [1, N] and pads the payload x2, x4 for bytes.
        chunks = jax.lax.optimization_barrier(chunks)
        return tuple(collective.all_gather_chunk(chunk, self.layout.mesh) for chunk in chunks)

    def _replacing(self, name, plan, *, sends: bool, keeps: bool = False) -> Definition:
        """The program that replaces a fragment's values after an exchange, of one of three kinds.

        merge: decode, average, outer step, mix into the replicas: lines 10-12, no traffic over
          `diloco`.
        synchronise: tau = 0: lines 7-12 in one program; DiLoCo when the fragment is everything.
        outer_step: send, outer step and merge at send time; the mean is that of the round before.
          arXiv 2502.12996: `delayed` (Algorithm 2) takes it as it is; `eager` (Algorithm 3) puts
          each replica's fresh outer gradient in its own place.
        sends: whether it encodes outer gradients; keeps: whether their chunks are a result. Chunks
        that have arrived are an argument; without them it brings what it sends itself. The last one
        is of eager with owners: the chunks of the send before.
        """
        layout, state = self.layout, self.layout.state
        view = FragmentView(layout, plan)
        update = functools.partial(outer_step_and_merge, self.rule)
        if layout.per_replica_outer:
            update = map_fn(update, mesh=layout.mesh)

        def program(leaves, bad_RF, starts, incoming=None, before=()):
            values = view.take(leaves, starts)
            sent = self._send(plan, values) if sends else NOTHING
            if incoming is None:
                chunks = sent.chunks
                if plan.payload.owned:
                    parts = jax.lax.optimization_barrier(chunks)
                    parts = [collective.all_to_all_chunk(part, layout.mesh) for part in parts]
                    chunks = self._reduced(plan, parts)
                arrived = self._gathered(chunks)
            else:
                arrived = self._moved(incoming, DEVICE)
            fresh, before = sent.chunks if keeps else (), self._moved(before, DEVICE)
            received, finite = self._receive(plan, arrived, fresh, before)
            new, update_ratio = update(finite, values._replace(residual=()), received.mean)
            new = new._replace(residual=sent.residual)
            touched = jnp.array([s.leaf for s in plan.slices])
            bad_RF = bad_RF.at[:, touched].max(received.bad_RF)
            chunks = self._moved(sent.chunks, HOST) if keeps else ()
            sent = sent._replace(residual=(), chunks=chunks)
            return view.put(leaves, starts, new), bad_RF, received.sizes, update_ratio, sent

        program.__name__ = name  # of the compiled module
        kept = arrays_of(state, plan)
        kept = kept if sends else kept._replace(residual=())
        norm = shardings_of(state.residual_norm_R) if sends else ()
        chunks = self._kept(len(layout.first_lengths(plan))) if keeps else ()
        sent = collective.Sent(chunks, (), norm)
        # The leaves alone are donated. Not the flags: the host looks at them later.
        reported = shardings_of((state.bad, state.sizes, state.update_ratio))
        return dict(fn=program, donate=(0,), out_shardings=(shardings_of(kept), *reported, sent))

    def _send(self, plan: FragmentPlan, values: FragmentArrays) -> collective.Sent:
        """Algorithm 2, lines 7-8: the outer gradients, encoded, in chunks."""
        one_theta = not self.layout.per_replica_outer
        theta = [o[None] for o in values.theta] if one_theta else values.theta
        g_R = outer.outer_gradient(theta, values.params)
        return collective.send(plan.payload, g_R, self.layout.first_lengths(plan), values.residual)

    def _receive(
        self,
        plan: FragmentPlan,
        incoming: Sequence[jax.Array],
        fresh: Sequence[jax.Array],
        before: Sequence[jax.Array],
    ) -> tuple[collective.Received, jax.Array]:
        """Algorithm 2, line 10: the mean, and whether all of it is finite; eager: of each replica.

        fresh, before: chunks that are sent at the same time, and those of `incoming`.
        """
        kinds = self.rule.kinds and [self.rule.kinds[s.leaf] for s in plan.slices]
        own, M = fresh if self.layout.per_replica_outer else (), self.layout.num_replicas
        receive = functools.partial(collective.receive, num_replicas=M, kinds=kinds)
        received = receive(plan.payload, incoming, own, before)
        bad = jnp.any(received.bad_RF)
        return received, ~(bad | jnp.any(received.own_bad_RF, axis=1) if own else bad)

    def _kept(self, count: int, spec: P | None = None) -> tuple[NamedSharding, ...]:
        """Of chunks in the memory in which the state keeps them; None: of those to send."""
        mesh, memory = self.layout.mesh, self.layout.chunk_memory
        spec = collective.outgoing_spec(mesh) if spec is None else spec
        return (NamedSharding(mesh, spec, memory_kind=memory),) * count

    def _moved(self, chunks: Sequence[jax.Array], space: jax.memory.Space) -> Any:
        """Chunks from and to the memory in which the state keeps them."""
        return jax.device_put(chunks, space) if self.layout.chunk_memory else chunks


def _values(theta: Any, plan: FragmentPlan) -> list[jax.Array]:
    """A fragment's values of one theta."""
    leaves = fragment_leaves(theta, plan)
    return [slices.take(*each) for each in zip(leaves, plan.slices, plan.starts, strict=True)]


def outer_step_and_merge(
    rule: Rule, finite: jax.Array, values: FragmentArrays, mean: list[jax.Array]
) -> tuple[FragmentArrays, jax.Array]:
    """Algorithm 2, lines 11-12, on a fragment; nothing changes where `finite` is false.

    values: params of one replica with its theta (eager), or [R, ...] with the theta of them all.
    mean: of the outer gradients. Returns the new values, and outer.update_ratio.
    """
    x, theta, opt, _ = values
    new, new_opt = outer.outer_update(rule.optimizer, theta, opt, mean)
    new, new_opt = _where(finite, (new, new_opt), (theta, opt))
    spread = [jnp.broadcast_to(n, i.shape) for n, i in zip(new, x, strict=True)]
    mixed = _where(finite, outer.merge(x, spread, alpha=rule.alpha), x)
    return FragmentArrays(mixed, new, new_opt), outer.update_ratio(theta, new)


def _where(condition, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _folded(keys: jax.Array, num_replicas: int) -> jax.Array:
    """The keys of each replica [R, ...]: those of one, with the replica's number folded in."""

    def of_replica(number):
        return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.ravel())

    return jax.vmap(of_replica)(jnp.arange(num_replicas)).reshape(num_replicas, *keys.shape)
