"""Rows of tokens to the devices of their experts and back, by an all-to-all.

A device sends each row once, to the device of its expert, and gets the row's result back. A device
knows the number of its received rows only at run time, so a buffer has room for a part of the worst
case. Rows that do not fit are exchanged in more rounds, and no row is dropped.
"""
# N devices that share the experts  E experts  L = E / N experts of a device
# A rows of a device, sorted by expert  R rows of a device's buffer  D model

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.kernels.grouped_matmul import TILE_ROWS

# Room of a buffer over the rows of a device if all experts are used alike. Values between the
# products of experts are formed for all rows of the buffer; a second round takes as long as the
# first.
ROOM = 1.25
# In the metadata of the loop over further rounds, where planning/hlo/reader.py finds it.
FURTHER_ROUNDS = "further_rounds_of_tokens"


class Slices(NamedTuple):
    """Consecutive rows that a device sends in one exchange: L slices to each device.

    Attributes:
      first_NL: the first row of each slice in the sender's array.
      sizes_NL: numbers of rows.
      there_NL: the first row of each slice in the receiver's array.
    """

    first_NL: jax.Array
    sizes_NL: jax.Array
    there_NL: jax.Array


def buffer_rows(num_rows: int, num_devices: int) -> int:
    """Return R, the rows of a device's buffer, for A rows of each of N devices."""
    rows = math.ceil(num_rows * ROOM)
    if rows > TILE_ROWS:
        rows = -(-rows // TILE_ROWS) * TILE_ROWS
    return min(rows, num_rows * num_devices)


def num_rounds(counts_NE: jax.Array, num_rows: int) -> jax.Array:
    """Return the number of rounds, at least 1, that all devices of the group need.

    Args:
      counts_NE: rows of each device for each expert.
      num_rows: R.
    """
    N = counts_NE.shape[0]
    received_N = jnp.sum(counts_NE.reshape(N, N, -1), axis=(0, 2))
    return jnp.maximum(1, -(-jnp.max(received_N) // num_rows))


def slices_of_round(
    counts_NE: jax.Array, me: jax.Array, number: jax.Array | int, num_rows: int
) -> tuple[Slices, Slices]:
    """Find the rows that one round exchanges.

    All rows of a receiver are in the order of its experts, then of the senders. Round i has the
    rows from i R on.

    Args:
      counts_NE: rows of each device for each expert. Devices have consecutive experts.
      me: number of this device.
      number: i.
      num_rows: R.

    Returns:
      The slices that this device sends from its A rows into buffers, and those that it sends back
      from its buffer.
    """
    N, E = counts_NE.shape
    sizes_NLN = counts_NE.reshape(N, N, E // N).transpose(1, 2, 0)  # receiver, expert, sender
    sizes = sizes_NLN.reshape(N, -1)
    begin_NLN = (jnp.cumsum(sizes, axis=1) - sizes).reshape(sizes_NLN.shape)
    own_NE = jnp.cumsum(counts_NE, axis=1) - counts_NE  # among the A rows of each sender
    own_NLN = own_NE.reshape(N, N, E // N).transpose(1, 2, 0)
    low_NLN = jnp.clip(number * num_rows - begin_NLN, 0, sizes_NLN)
    high_NLN = jnp.clip((number + 1) * num_rows - begin_NLN, 0, sizes_NLN)
    size_NLN = high_NLN - low_NLN
    at_NLN = jnp.clip(begin_NLN + low_NLN - number * num_rows, 0, num_rows)
    from_NLN = own_NLN + low_NLN
    out = Slices(*(x[:, :, me] for x in (from_NLN, size_NLN, at_NLN)))
    back = Slices(*(x[me].T for x in (at_NLN, size_NLN, from_NLN)))
    return out, back


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    x_AD: jax.Array,
    out: Slices,
    back: Slices,
) -> jax.Array:
    """Send slices of rows to other devices. The gradient is the exchange back.

    It is an all-to-all of equal parts, each with room for all rows. jax.lax.ragged_all_to_all sends
    no padding, but with it the estimated step on TPUs is longer than with an all-gather
    (benchmarks/results/experts.md). XLA:CPU of jax 0.10 does not have it.

    Args:
      axes: mesh axes of the N devices, manual here.
      sizes: numbers of rows (A, R) of x and of the result.
      x_AD: rows [A, D] or [A].
      out: the slices that this device sends.
      back: the slices that it would send back: those that it receives.

    Returns:
      [R, D] or [R]; 0 in rows that nobody sent.
    """
    room = min(sizes)
    sent_NRD = x_AD[jnp.minimum(_rows(out, room, beyond=sizes[0]), sizes[0] - 1)]
    got_NRD = jax.lax.all_to_all(sent_NRD, axes, split_axis=0, concat_axis=0, tiled=True)
    rows_NR = _rows(back, room, beyond=sizes[1])
    empty = jnp.zeros((sizes[1], *x_AD.shape[1:]), x_AD.dtype)
    return empty.at[rows_NR].set(got_NRD, mode="drop")


def _rows(slices: Slices, room: int, *, beyond: int) -> jax.Array:
    """[N, room]: rows of the slices of each device, one after the other, then `beyond`."""
    ends_NL = jnp.cumsum(slices.sizes_NL, axis=1)
    slot = jnp.arange(room)
    found = functools.partial(jnp.searchsorted, side="right")
    index_NR = jax.vmap(found, in_axes=(0, None))(ends_NL, slot)
    index_NR = jnp.minimum(index_NR, ends_NL.shape[1] - 1)
    shift_NL = slices.first_NL - (ends_NL - slices.sizes_NL)
    rows_NR = slot + jnp.take_along_axis(shift_NL, index_NR, axis=1)
    return jnp.where(slot < ends_NL[:, -1:], rows_NR, beyond)


exchange.defvjp(
    lambda axes, sizes, x_AD, out, back: (exchange(axes, sizes, x_AD, out, back), (out, back)),
    lambda axes, sizes, slices, d_RD: (
        exchange(axes, sizes[::-1], d_RD, *slices[::-1]),
        None,
        None,
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rounds(one_round: Callable, count: jax.Array, rows: Any, operands: Any) -> Any:
    """Sum the results of all rounds.

    The first round is outside of the loop, and its intermediate values are kept as the remat policy
    has it. The others, which even use of the experts does not need, are computed again for the
    gradient.

    Args:
      one_round: function of (number, rows, operands); it must not close over arrays.
      count: number of rounds, at least 1, equal on all devices of a group.
      rows: pytree of integers, such as the rows of each device for each expert.
      operands: pytree of arrays.

    Returns:
      The sum.
    """
    first = one_round(0, rows, operands)
    return _add_further(count, first, lambda number: one_round(number, rows, operands))


def _add_further(count: jax.Array, first: Any, one_round: Callable) -> Any:
    def body(state):
        number, total = state
        return number + 1, jax.tree.map(jnp.add, total, one_round(number))

    with jax.named_scope(FURTHER_ROUNDS):
        state = (jnp.ones_like(count), first)
        return jax.lax.while_loop(lambda state: state[0] < count, body, state)[1]


def _sum_rounds_forward(one_round, count, rows, operands):
    first, pull = jax.vjp(functools.partial(one_round, 0, rows), operands)
    total = _add_further(count, first, lambda number: one_round(number, rows, operands))
    return total, (pull, count, rows, operands)


def _sum_rounds_backward(one_round, residuals, d):
    pull, count, rows, operands = residuals

    def of_round(number):
        _, pull = jax.vjp(functools.partial(one_round, number, rows), operands)
        return pull(d)[0]

    return None, None, _add_further(count, pull(d)[0], of_round)


sum_rounds.defvjp(_sum_rounds_forward, _sum_rounds_backward)
