"""The schedule of a run: in which inner steps each fragment is sent, transferred and applied.

It uses integers only, no arrays. The source is Streaming DiLoCo (arXiv 2501.18512) sec. 2.2 and
Algorithm 2, lines 6-12. The letters are the paper's. There are P fragments. H is the number of
inner steps between two sends of a fragment, and tau the number from a send to its apply. Inner
steps t count from 1. Fragment p is sent after inner step t when t = t_p (mod H). There are two
differences to the paper. The first send of a fragment may come before step H, so all rounds are
alike. A fragment with t_p = 0 is first sent at H, because steps start at 1.

The sends of a run are numbered 0, 1, 2, ... in the order of their steps. The fragments, sorted by
their first send, repeat in this order in every period. Send k is therefore round k // P + 1 of
fragment k mod P in this order. All methods compute from k in closed form, so a run resumes at any t
without a replay.
"""

import dataclasses
import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

# The exchange that an outer step uses: the one of its round, or (delayed, eager) the previous one.
ROUND_OVERLAPS = ("none", "delayed", "eager")
# all_gather: every slice receives all replicas' outer gradients and averages them. reduce_scatter:
# every slice averages one part of a fragment, and sends the mean of this part to the others.
ALL_GATHER, REDUCE_SCATTER = "all_gather", "reduce_scatter"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER)


class Event(NamedTuple):
    """A scheduled exchange of a fragment, identified by (fragment, round).

    Attributes:
      fragment: index of the fragment.
      round: from 1. An apply of round 0 (delayed and eager) uses the zeros of an unused slot.
      send_step: the inner step after which the outer gradient is computed; <= 0 for round 0.
      slot: the receive slot, which is in use from step send_step + 1. An apply in step send_step
        may still read the chunks of the previous exchange.
    """

    fragment: int
    round: int
    send_step: int
    slot: int


class Action(NamedTuple):
    """One action of the host in a step.

    Attributes:
      name: one of ACTIONS.
      fragment: index of the fragment; None for INNER.
      slot: the receive slot that an arriving chunk is written to, and that MERGE, DELAYED_STEP and
        EAGER_STEP read.
      chunk: the chunk that an inner step carries, from 0.
    """

    name: str
    fragment: int | None = None
    slot: int = 0
    chunk: int = 0


# Lines of Streaming DiLoCo, Algorithm 2, in brackets.
INNER = "inner"  # the inner step [3-5]
INNER_EXCHANGE = "inner + exchange"  # the inner step with a chunk that goes to all slices [8, 10]
INNER_SCATTER = "inner + scatter"  # reduce_scatter: with a chunk for the slice that averages it
PACK = "pack"  # form and encode the outer gradients [7-8]
REDUCE = "reduce"  # reduce_scatter: average the part of this slice [8]
REDUCE_AND_SHARE = "reduce + share"  # reduce and send the means, if no inner step can carry them
MERGE = "merge"  # decode, average, outer step, mix into the replicas [10-12]
SYNCHRONISE = "synchronise"  # tau = 0: pack, exchange and merge in one program [7-12]
DELAYED_STEP = "delayed_step"  # pack, and merge the exchange of the previous round
EAGER_STEP = "eager_step"  # the same, with the replica's own outer gradient of this round
ACTIONS = (
    INNER,
    INNER_EXCHANGE,
    INNER_SCATTER,
    PACK,
    REDUCE,
    REDUCE_AND_SHARE,
    MERGE,
    SYNCHRONISE,
    DELAYED_STEP,
    EAGER_STEP,
)


def offsets(P: int, H: int) -> tuple[int, ...]:
    """Return the offsets t_p = floor(p * H / P) [inner steps]: Streaming DiLoCo sec. 2.2.

    Consecutive sends, also across periods, are floor(H / P) to ceil(H / P) steps apart.
    """
    return tuple(p * H // P for p in range(P))


class Names(NamedTuple):
    """The names of H, P, tau and the round overlap in messages; by default DiLoCo's keywords."""

    H: str = "sync_period"
    P: str = "num_fragments"
    tau: str = "overlap_steps"
    round_overlap: str = "round_overlap"


ARGUMENTS = Names()


def check(*, H: int, P: int, tau: int, offsets: Iterable[int], round_overlap: str) -> None:
    """Raise ValueError as `check_counts`, or unless offsets are P integers distinct mod H.

    Args:
      H: inner steps between two sends of a fragment.
      P: number of fragments.
      tau: inner steps from a send to its apply.
      offsets: one for each fragment [inner steps].
      round_overlap: one of ROUND_OVERLAPS.
    """
    check_counts(H=H, P=P, tau=tau, round_overlap=round_overlap)
    offsets = tuple(offsets)
    if len(offsets) != P or not all(map(is_count, offsets)):
        raise ValueError(
            f"offsets={offsets} must be {P} integers: each of the num_fragments={P} has one, in "
            f"inner steps. Give {P} integers, or leave offsets out."
        )
    if len({offset % H for offset in offsets}) < P:
        raise ValueError(
            f"offsets={offsets} are not distinct modulo sync_period={H}: one fragment is on the "
            f"link at a time. Use offsets that differ modulo {H}."
        )


def is_count(value: Any) -> bool:
    """Tell whether a value is an integer; True and 2.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(*, H: int, P: int, tau: int, round_overlap: str, names: Names = ARGUMENTS) -> None:
    """Raise ValueError for counts without possible offsets, and for tau with a round overlap.

    For H, P, tau and round_overlap see `check`. names: their names in the message.
    """
    if not is_count(H) or H < 1:
        raise ValueError(
            f"{names.H}={H} must be a positive integer: it counts the inner steps between two "
            "sends of a fragment. Use 1 or more."
        )
    if not is_count(P) or not 1 <= P <= H:
        raise ValueError(
            f"{names.P}={P} must be an integer from 1 to {names.H}={H}: at most one fragment is "
            f"sent per inner step. Use 1 to {H}."
        )
    if not is_count(tau) or not 0 <= tau < H:
        raise ValueError(
            f"{names.tau}={tau} must be below {names.H}={H}, an integer from 0: a fragment has to "
            f"be applied before it is sent again. Use 0 to {H - 1}."
        )
    if round_overlap not in ROUND_OVERLAPS:
        raise ValueError(
            f"{names.round_overlap}={round_overlap!r} is unknown: the outer step uses the exchange "
            f"of its own round or of the one before. Use one of {', '.join(ROUND_OVERLAPS)}."
        )
    if round_overlap != "none" and tau > 0:
        raise ValueError(
            f"{names.tau}={tau} cannot be combined with {names.round_overlap}={round_overlap}: "
            f"that exchange already has a whole period. Use {names.tau}=0."
        )


def check_replicas(M: int, axis_size: int, *, name: str, axis_size_name: str) -> None:
    """Raise ValueError unless M is a multiple of the size `axis_size` of the mesh axis `diloco`.

    name, axis_size_name: the names of M and `axis_size` in the message.
    """
    if not is_count(M) or M < 1 or M % axis_size:
        raise ValueError(
            f"{name}={M} must be a multiple of {axis_size_name} {axis_size}: every mesh position "
            f"holds equally many replicas, a whole number. Use a multiple of {axis_size}."
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of a run. The constructor raises ValueError as `check` does.

    Attributes:
      H: inner steps between two sends of a fragment.
      tau: inner steps from a send to its apply.
      offsets: one integer for each fragment, taken mod H.
      round_overlap: 'none' applies a send after tau steps. 'delayed' and 'eager' (arXiv 2502.12996)
        use it at the next send of the fragment, H steps later.
      num_chunks: chunks of each fragment that reach all slices; None: `max_chunks` of each.
      scatter_steps: reduce_scatter: number of steps, the first ones of the `max_chunks`, in which
        the parts of a fragment go to the slices that average them. 0 for all_gather.
      num_scatter_chunks: chunks of each fragment in these steps; None: one a step.
      in_programs: whether the programs of the inner steps carry the chunks (transport xla). If not
        (transport host), no step carries a chunk and no exchange is fused with its sender.
      collective: one of COLLECTIVES.
    """

    H: int
    tau: int
    offsets: tuple[int, ...]
    round_overlap: str = "none"
    num_chunks: tuple[int, ...] | None = None
    scatter_steps: int = 0
    num_scatter_chunks: tuple[int, ...] | None = None
    in_programs: bool = True
    collective: str = ALL_GATHER

    def __post_init__(self):
        """Check the values."""
        check(
            H=self.H,
            P=self.P,
            tau=self.tau,
            offsets=self.offsets,
            round_overlap=self.round_overlap,
        )

    @property
    def P(self) -> int:
        """Number of fragments."""
        return len(self.offsets)

    @property
    def lag(self) -> int:
        """Inner steps from a send to the apply that uses it."""
        return self.tau if self.round_overlap == "none" else self.H

    @functools.cached_property
    def _order(self) -> tuple[tuple[int, int], ...]:
        """Pairs (first send step in 1..H, fragment), sorted by step."""
        return tuple(sorted(((o - 1) % self.H + 1, p) for p, o in enumerate(self.offsets)))

    @functools.cached_property
    def gap(self) -> int:
        """The smallest number of inner steps between two sends, also across periods."""
        firsts = [first for first, _ in self._order]
        return min(b - a for a, b in itertools.pairwise([*firsts, firsts[0] + self.H]))

    @property
    def max_chunks(self) -> int:
        """The most chunks of a fragment: one an inner step, and one fragment at a time."""
        return min(self.lag, self.gap)

    @property
    def share_steps(self) -> int:
        """Number of steps that can carry chunks to all slices; reduce_scatter may leave 0."""
        return self.max_chunks - self.scatter_steps

    @functools.cached_property
    def slots(self) -> int:
        """Number of receive slots: the most exchanges in flight after a step; 0 for tau = 0."""
        # The maximum is reached after a step with a send, and one period has all such steps.
        return max(self._count(t) - self._count(t - self.lag) for t, _ in self._order)

    def _count(self, t: int) -> int:
        """Return the number k of the first send after step t; negative (round <= 0) for t < 0."""
        periods, step = divmod(t, self.H)
        return periods * self.P + bisect_right(self._order, (step, self.P))

    def _event(self, number: int) -> Event:
        periods, index = divmod(number, self.P)
        first, fragment = self._order[index]
        slot = number % self.slots if self.slots else 0
        return Event(fragment, periods + 1, first + periods * self.H, slot)

    def is_sent(self, p: int, t: int) -> bool:
        """Tell whether fragment p is sent after inner step t: Algorithm 2, line 6.

        Line 9 has the same condition for t - tau.
        """
        return (t - self.offsets[p]) % self.H == 0

    def sends(self, t: int) -> tuple[Event, ...]:
        """Return the exchanges that begin after inner step t >= 1: Algorithm 2, lines 6-8."""
        # At most one, because offsets differ; it is the last send up to this step.
        is_one = any(self.is_sent(p, t) for p in range(self.P))
        return (self._event(self._count(t) - 1),) if is_one else ()

    def applies(self, t: int) -> tuple[Event, ...]:
        """Return the exchanges applied after inner step t >= 1: Algorithm 2, lines 9-12.

        The sends of the step come first.

        With delayed and eager a fragment's send of round n and its apply of round n-1 are in the
        same step. In round 1 the outer optimizer is called with the zeros of round 0.
        """
        send_step = t - self.lag
        return () if self.round_overlap == "none" and send_step < 1 else self.sends(send_step)

    def actions(self, t: int, *, dropped_until: int = 0) -> tuple[Action, ...]:
        """Return the host's actions in inner step t >= 1, in order: Algorithm 2, lines 3-12.

        Args:
          t: the inner step.
          dropped_until: exchanges that were in flight after this step are dropped.
        """
        step, *reduces = self._inner_actions(t, dropped_until)
        sends = [action for send in self.sends(t) for action in self._send_actions(send)]
        merges = []
        if self.round_overlap == "none" and self.tau > 0:
            for apply in self.applies(t):
                if apply.send_step > dropped_until:
                    merges.append(Action(MERGE, apply.fragment, apply.slot))
        return (step, *reduces, *sends, *merges)

    def _inner_actions(self, t: int, dropped_until: int) -> Iterator[Action]:
        """Yield the inner step with its chunk, and the reduce after the last scattered chunk."""
        carried = self.carried_chunk(t)
        if carried is None:
            yield Action(INNER)
            return
        send, step = carried
        name, chunk, counts = INNER_EXCHANGE, step - self.scatter_steps, self.num_chunks
        if step < self.scatter_steps:
            name, chunk, counts = INNER_SCATTER, step, self.num_scatter_chunks
        if self.in_programs and (counts is None or chunk < counts[send.fragment]):
            yield Action(name, send.fragment, send.slot, chunk)
        else:
            yield Action(INNER)
        if step == self.scatter_steps - 1 and send.send_step > dropped_until:
            fused = self.in_programs and self.share_steps == 0
            yield Action(REDUCE_AND_SHARE if fused else REDUCE, send.fragment, send.slot)

    def _send_actions(self, send: Event) -> Iterator[Action]:
        """Yield the host's actions for the send of a fragment."""
        if self.round_overlap != "none":
            name = DELAYED_STEP if self.round_overlap == "delayed" else EAGER_STEP
            yield Action(name, send.fragment, send.slot)
        elif self.tau > 0:
            yield Action(PACK, send.fragment)
        elif self.in_programs:
            yield Action(SYNCHRONISE, send.fragment)
        else:
            yield Action(PACK, send.fragment)
            if self.collective == REDUCE_SCATTER:
                yield Action(REDUCE, send.fragment)
            yield Action(MERGE, send.fragment)

    def carried_chunk(self, t: int) -> tuple[Event, int] | None:
        """Return (send, chunk) with t = send.send_step + 1 + chunk, or None without such a send."""
        number = self._count(t - 1) - 1
        if number < 0:
            return None
        send = self._event(number)
        chunk = t - 1 - send.send_step
        return (send, chunk) if chunk < self.max_chunks else None

    def pending(self, t: int, *, dropped_until: int = 0) -> tuple[Event, ...]:
        """Return the sends up to step t that are applied later, oldest first; see `actions`."""
        sends = map(self._event, range(self._count(max(t - self.lag, 0)), self._count(t)))
        return tuple(send for send in sends if send.send_step > dropped_until)

    def ages(self, t: int, *, dropped_until: int = 0) -> tuple[int, ...]:
        """Return the age of each fragment of the outer parameters [inner steps].

        The age is t minus the send step of the last applied exchange; t before the first apply. In
        eager mode a replica's own outer gradient is `lag` steps younger than this. For
        `dropped_until` see `actions`. A fragment has at most one exchange in flight, so after a
        drop the previous exchange counts.
        """
        taken = [0] * self.P
        until = self._count(t - self.lag)
        for number in range(max(until - 2 * self.P, 0), until):
            event = self._event(number)
            if not dropped_until - self.lag < event.send_step <= dropped_until:
                taken[event.fragment] = event.send_step
        return tuple(t - step for step in taken)
