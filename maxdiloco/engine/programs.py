"""The compiled programs of a DiLoCo run: a few of them, for any number of fragments.

Streaming DiLoCo (arXiv 2501.18512), Algorithm 2. The functions `pack`, `merge`, `synchronise`,
`delayed_step`, `eager_step` and `reduce` are the algorithm. They compute on the values of one
fragment. Class Programs compiles them for the leaves of a state.

The host chooses the program of each step, so no exchange is inside a conditional. The layers of a
fragment are an argument of its programs.

    # R replicas  F leaves
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer
from maxdiloco.engine import collective
from maxdiloco.engine.collective import Chunks, Received, Sent
from maxdiloco.engine.fragment_values import (
    FragmentArrays,
    FragmentView,
    arrays_of,
    initial_outer_opt,
)
from maxdiloco.engine.layout import FragmentPlan, Layout, fragment_leaves
from maxdiloco.engine.trainer import OuterParamsView
from maxdiloco.parallel import chips, offload
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.replicas import (
    broadcast,
    fold_in_replica,
    map_fn,
    mean_over_replicas,
    mean_per_position,
)
from maxdiloco.parallel.sharding import shardings_of, zeros

NOTHING_SENT = Sent(())


# -- the algorithm, on the values of one fragment --------------------------------------------------


@dataclass(frozen=True)
class OuterRule:
    """The rule of an outer step, the same for all fragments of a run.

    Attributes:
      optimizer: the outer optimizer.
      alpha: weight of a replica's own values.
      leaf_axes: fragments.leaf_axes_of the parameters, for the radial-directional
        mean; None for the plain mean.
    """

    optimizer: optax.GradientTransformation
    alpha: float
    leaf_axes: Sequence[Any] | None = None


class Merged(NamedTuple):
    """The result of an outer step.

    Attributes:
      values: the new values of the fragment.
      received: the decoded exchange.
      update_ratio: see outer.update_ratio; eager: [R].
      sent: the result of `pack`, if the same program sends.
    """

    values: FragmentArrays
    received: Received
    update_ratio: jax.Array
    sent: Sent = NOTHING_SENT


def pack(plan: FragmentPlan, values: FragmentArrays) -> Sent:
    """Form the outer gradients and encode them: Algorithm 2, lines 7-8. No traffic.

    Args:
      plan: the fragment's plan.
      values: the fragment's values; outer_opt is not used.
    """
    eager = values.outer_params[0].ndim == values.params[0].ndim
    outer_params = values.outer_params if eager else [x[None] for x in values.outer_params]
    g_R = outer.outer_gradient(outer_params, values.params)
    return collective.send(plan.payload, g_R, plan.packed, values.residual)


def exchange(plan: FragmentPlan, chunks: Chunks) -> Chunks:
    """Bring the chunks of all replicas to all slices inside this program: line 8.

    Args:
      plan: the fragment's plan.
      chunks: the chunks of `pack`, sharded by collective.outgoing_spec.

    Returns:
      The chunks of all replicas, sharded by collective.incoming_spec. With reduce-scatter they are
      the means of all slices.
    """
    # Without the barrier XLA:TPU gathers [1, N] and pads the payload x2, x4 for bytes.
    chunks = jax.lax.optimization_barrier(chunks)
    mesh = plan.payload.mesh
    if plan.payload.parts:
        return reduce_and_share(plan, [collective.all_to_all_chunk(c, mesh) for c in chunks])
    return tuple(collective.all_gather_chunk(chunk, mesh) for chunk in chunks)


def reduce(plan: FragmentPlan, parts: Sequence[jax.Array]) -> Chunks:
    """Reduce-scatter: average the part of this slice, and encode the mean: line 8. No traffic."""
    return collective.reduce(plan.payload, parts, plan.gather)


def reduce_and_share(plan: FragmentPlan, parts: Sequence[jax.Array]) -> Chunks:
    """Reduce, and bring the means of all slices to all slices inside this program: line 8."""
    chunks = jax.lax.optimization_barrier(reduce(plan, parts))
    return tuple(collective.all_gather_chunk(chunk, plan.payload.mesh) for chunk in chunks)


def merge(plan: FragmentPlan, rule: OuterRule, values: FragmentArrays, incoming: Chunks) -> Merged:
    """Decode, average, take the outer step, mix into the replicas: lines 10-12. No traffic.

    Args:
      plan: the fragment's plan.
      rule: the optimizer and alpha.
      values: the fragment's values; the residual is not used.
      incoming: chunks as `exchange` returns them. Zeros have a mean of zero.

    Returns:
      The new values. They equal the old ones if an outer gradient was not finite.
    """
    leaf_axes = None if rule.leaf_axes is None else [rule.leaf_axes[s.leaf] for s in plan.slices]
    received = collective.receive(plan.payload, incoming, leaf_axes=leaf_axes)
    finite = ~jnp.any(received.bad_RF)
    new, update_ratio = outer_step_and_merge(rule, finite, values, received.mean)
    return Merged(new, received, update_ratio)


def synchronise(plan: FragmentPlan, rule: OuterRule, values: FragmentArrays) -> Merged:
    """Send, exchange and merge in one program, for tau = 0: lines 7-12.

    It is DiLoCo (arXiv 2311.08105, Algorithm 1) when the fragment is the whole model. For the
    arguments and the result see `merge`; the residual is used.
    """
    sent = pack(plan, values)
    merged = merge(plan, rule, values, exchange(plan, sent.chunks))
    return merged._replace(sent=sent._replace(chunks=()))


def delayed_step(
    plan: FragmentPlan, rule: OuterRule, values: FragmentArrays, incoming: Chunks
) -> Merged:
    """Send, and merge the exchange of the previous round: arXiv 2502.12996, Algorithm 2.

    For the arguments and the result see `merge`. `incoming` are the chunks of the previous round,
    zeros in round 1. `sent` of the result has the chunks of this round.
    """
    sent = pack(plan, values)
    return merge(plan, rule, values, incoming)._replace(sent=sent)


def eager_step(
    plan: FragmentPlan, rule: OuterRule, values: FragmentArrays, incoming: Chunks
) -> Merged:
    """Send, and merge the previous round with the replica's own outer gradient of this round.

    Eager updates (arXiv 2502.12996), Algorithm 3. Every replica has its own outer parameters and
    its own state of the outer optimizer, leaves [R, ...]. For the arguments and the result see
    `delayed_step`.
    """
    sent = pack(plan, values)
    received = collective.receive_eager(plan.payload, incoming, sent.chunks)
    bad = jnp.any(received.bad_RF)
    finite_R = ~(bad | jnp.any(received.own_bad_RF, axis=1))
    update = map_fn(functools.partial(outer_step_and_merge, rule), mesh=plan.payload.mesh)
    new, update_ratio_R = update(finite_R, values._replace(residual=()), received.mean)
    return Merged(new, received, update_ratio_R, sent)


def outer_step_and_merge(
    rule: OuterRule, finite: jax.Array, values: FragmentArrays, mean: list[jax.Array]
) -> tuple[FragmentArrays, jax.Array]:
    """Take the outer step and mix its result into the replicas: Algorithm 2, lines 11-12.

    Args:
      rule: the optimizer and alpha.
      finite: whether the exchange was finite; if not, nothing changes.
      values: the fragment's values, params [R, ...] with shared outer parameters; eager: the values
        of one replica.
      mean: the mean outer gradient.

    Returns:
      (the new values, outer.update_ratio).
    """
    x, outer_params, opt, _ = values
    new, new_opt = outer.outer_update(rule.optimizer, outer_params, opt, mean)
    new, new_opt = _where(finite, (new, new_opt), (outer_params, opt))
    spread = [jnp.broadcast_to(n, i.shape) for n, i in zip(new, x, strict=True)]
    mixed = _where(finite, outer.merge(x, spread, alpha=rule.alpha), x)
    return FragmentArrays(mixed, new, new_opt), outer.update_ratio(outer_params, new)


def _where(condition, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


# -- the programs ----------------------------------------------------------------------------------


class Programs:
    """The programs of one layout, made on first use; fragments of equal form share theirs.

    Attributes:
      layout: the run's layout.
      inner: the inner step of every replica.
      inner_exchange: the inner step, and one chunk that goes to all slices.
      inner_scatter: the inner step, and one chunk with a part for each slice.
      exported, evaluated: views of the outer parameters.
    """

    def __init__(
        self,
        layout: Layout,
        inner_step: Callable,
        leaf_axes: Sequence[Any] | None,
        on_compile: Callable[[str, float, jax.stages.Compiled], None],
    ):
        """Create the programs of the inner step, which are compiled on first use.

        Args:
          layout: the run's layout.
          inner_step: one replica's training step.
          leaf_axes: see OuterRule.
          on_compile: see Program.
        """
        self.layout = layout
        settings = layout.settings
        self._rule = OuterRule(settings.make_outer_optimizer(), settings.alpha, leaf_axes)
        self._program = functools.partial(Program, on_compile=on_compile)
        self._by_form: dict[tuple, Program] = {}
        state, mesh = layout.state, layout.mesh
        step = map_fn(inner_step, mesh=mesh)
        step = offload.with_state_on_device(step, state.opt_state)
        replica_sharding = NamedSharding(mesh, P("diloco"))
        kept = (shardings_of(state.params), shardings_of(state.opt_state), replica_sharding)
        options = {"compiler_options": chips.step_options(mesh.devices.flat[0].device_kind)}
        self.inner = self._program("inner", step, donate=(0, 1), out_shardings=kept, **options)

        def with_chunk(name, move, spec):
            def inner_and_move(params, opt_state, batch, chunk, replaced):
                del replaced  # donated: the memory of the chunk that arrives
                return *step(params, opt_state, batch), move(chunk, mesh)

            return self._program(
                name,
                inner_and_move,
                donate=(0, 1, 4),
                keep_unused=True,
                out_shardings=(*kept, NamedSharding(mesh, spec)),
                **options,
            )

        gathered, outgoing = collective.incoming_spec(mesh), collective.outgoing_spec(mesh)
        self.inner_exchange = with_chunk("inner + exchange", collective.all_gather_chunk, gathered)
        self.inner_scatter = with_chunk("inner + scatter", collective.all_to_all_chunk, outgoing)
        one_replica = [NamedSharding(mesh, spec) for spec in layout.specs]
        self._one_replica = jax.tree.unflatten(jax.tree.structure(state.params), one_replica)
        self.exported, self.evaluated = self._outer_params_views()

    def _outer_params_views(self) -> tuple[OuterParamsView, OuterParamsView]:
        """Return the views for an export and for an evaluation, which sends nothing."""
        layout, outer_params = self.layout, self.layout.state.outer
        is_eager, num_slices = layout.settings.is_eager, layout.mesh.shape["diloco"]
        on_device = jax.tree.map(lambda x: offload.move_to_memory(x, None), outer_params)
        stored = OuterParamsView(on_device, lambda state: state.outer, per_position=is_eager)
        if not is_eager:
            return stored, stored
        exported = self._mean_view("outer parameters", mean_over_replicas)
        if num_slices == 1:
            return exported, exported
        if num_slices == layout.num_replicas and not offload.on_host(
            jax.tree.leaves(outer_params)[0]
        ):
            return exported, stored
        name = "outer parameters of a slice"
        return exported, self._mean_view(name, mean_per_position, per_position=True)

    def _mean_view(
        self, name: str, means: Callable, *, per_position: bool = False
    ) -> OuterParamsView:
        """Return the view of a mean of the replicas' outer parameters."""
        mesh, leading = self.layout.mesh, ("diloco",) if per_position else ()
        out = jax.tree.map(lambda s: NamedSharding(mesh, P(*leading, *s.spec)), self._one_replica)
        mean = self._program(name, functools.partial(means, mesh=mesh), out_shardings=out)
        like = mean.out_shapes(self.layout.state.outer)
        return OuterParamsView(like, lambda state: state.outer, mean, per_position)

    def init(self, make: Callable, **options) -> Program:
        """See Trainer.init_program. It is one program, so that memory holds one copy of the state.

        Each replica gets different typed PRNG keys in opt_state, so that dropout masks differ.
        """
        layout = self.layout

        def all_replicas(tree):
            return jax.tree.map(lambda x: broadcast(x, layout.num_replicas), tree)

        def own_keys(x_R):
            if not jnp.issubdtype(x_R.dtype, jax.dtypes.prng_key):
                return x_R
            x_R = jax.device_put(x_R, jax.memory.Space.Device)
            return fold_in_replica(x_R, jnp.arange(layout.num_replicas))

        def init(*args):
            params, opt_state = make(*args)
            params = jax.lax.with_sharding_constraint(params, self._one_replica)
            outer_params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            outer_opt = initial_outer_opt(layout, outer_params)
            if layout.settings.is_eager:
                outer_params, outer_opt = all_replicas((outer_params, outer_opt))
            state = layout.state
            empty = replace(state, params=None, opt_state=None, outer=None, outer_opt=())
            return replace(
                jax.tree.map(zeros, empty),
                params=all_replicas(params),
                opt_state=jax.tree.map(own_keys, all_replicas(opt_state)),
                outer=outer_params,
                outer_opt=outer_opt,
            )

        return self._program("init", init, out_shardings=shardings_of(layout.state), **options)

    # -- of one fragment -------------------------------------------------------------------------

    def pack(self, plan: FragmentPlan) -> Program:
        """Compile `pack`.

        The program is (arrays without outer_opt and residual; starts; residual and the chunks of
        the last send, donated) -> Sent.
        """

        def program(leaves, starts, residual, replaced):
            del replaced  # its memory is used for the new chunks
            sent = pack(plan, view.read(leaves._replace(residual=residual), starts))
            return sent._replace(residual=view.residual.write(residual, starts, sent.residual))

        view, out = FragmentView(self.layout, plan), self._sent_shardings(plan)
        return self.of_fragment("pack", plan, program, donate=(2, 3), out_shardings=out)

    def reduce(self, plan: FragmentPlan) -> Program:
        """Compile `reduce`.

        The program is (parts that have arrived; the chunks of the last send, donated) -> chunks to
        send to all slices.
        """

        def program(parts, replaced):
            del replaced  # its memory is used for the new chunks
            return reduce(plan, parts)

        out = shardings_of(plan.outgoing_chunks)
        return self.of_fragment("reduce", plan, program, donate=(1,), out_shardings=out)

    def reduce_and_share(self, plan: FragmentPlan) -> Program:
        """Compile `reduce_and_share`: parts that have arrived -> chunks of all slices."""

        def program(parts):
            return reduce_and_share(plan, parts)

        out = shardings_of(plan.incoming_chunks)
        return self.of_fragment("reduce + share", plan, program, out_shardings=out)

    def merge(self, plan: FragmentPlan) -> Program:
        """Compile `merge`, see `_outer_step`; the arrays come without the residual."""
        return self._outer_step(merge, plan, NOTHING_SENT)

    def synchronise(self, plan: FragmentPlan) -> Program:
        """Compile `synchronise`, see `_outer_step`; it has no chunks."""
        return self._outer_step(synchronise, plan, self._sent_shardings(plan)._replace(chunks=()))

    def delayed_step(self, plan: FragmentPlan) -> Program:
        """Compile `delayed_step`, see `_outer_step`."""
        return self._outer_step(delayed_step, plan, self._sent_shardings(plan))

    def eager_step(self, plan: FragmentPlan) -> Program:
        """Compile `eager_step`, see `_outer_step`."""
        return self._outer_step(eager_step, plan, self._sent_shardings(plan))

    def _outer_step(self, fn: Callable[..., Merged], plan: FragmentPlan, sent: Sent) -> Program:
        """Compile an outer step for whole leaves.

        The program is (arrays; State.bad; starts; chunks of the last send; *chunks that have
        arrived) -> (arrays without the residual; bad; sizes; update_ratio; Sent). Arrays and chunks
        of the last send are donated.

        Args:
          fn: merge, synchronise, delayed_step or eager_step.
          plan: the fragment's plan.
          sent: shardings of the Sent.
        """

        def program(leaves, bad_RF, starts, replaced, *chunks):
            del replaced  # its memory is used for the new chunks
            merged = fn(plan, self._rule, view.read(leaves, starts), *chunks)
            touched = jnp.array([s.leaf for s in plan.slices])
            bad_RF = bad_RF.at[:, touched].max(merged.received.bad_RF)
            residual = view.residual.write(leaves.residual, starts, merged.sent.residual)
            leaves = view.write(leaves._replace(residual=()), starts, merged.values)
            sent = merged.sent._replace(residual=residual)
            return leaves, bad_RF, merged.received.sizes, merged.update_ratio, sent

        view, state = FragmentView(self.layout, plan), self.layout.state
        program.__name__ = fn.__name__  # of the compiled module
        like = arrays_of(state, plan)._replace(residual=())
        # The flags are not donated: the host reads them later.
        out = shardings_of((like, state.bad, state.sizes, state.update_ratio))
        out = (*out, sent)
        return self.of_fragment(fn.__name__, plan, program, donate=(0, 3), out_shardings=out)

    def of_fragment(self, name: str, plan: FragmentPlan, fn: Callable, **options: Any) -> Program:
        """Return the program of this name for fragments of this form. options: see Program."""
        key = (name, plan.form)
        if key not in self._by_form:
            layers, leaves = len(plan.fragment.layers), len(plan.slices)
            label = f"{layers} layers, {leaves} leaves" if layers else f"{leaves} leaves"
            # An argument that is only donated would be dropped.
            options["keep_unused"] = True
            self._by_form[key] = self._program(f"{name} [{label}]", fn, **options)
        return self._by_form[key]

    def _sent_shardings(self, plan: FragmentPlan) -> Sent:
        """Return the shardings of the result of `pack`."""
        state = self.layout.state
        residual = fragment_leaves(state.residual, plan)
        return shardings_of(Sent(plan.packed_chunks, residual, state.residual_norm_R))
