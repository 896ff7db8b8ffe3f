"""JAX's coordination service: who is in the run, a key-value store, and barriers.

Process 0 runs it. It has no public name; no other file imports from jax._src.
"""

import re
import time
from typing import NamedTuple

import jax
from jax._src import distributed

from maxdiloco.errors import LostPeerError

_SEE = "See the end of its own output, and start the run again with the same run_name."


class Job(NamedTuple):
    """This process among those of the run."""

    process_id: int
    num_processes: int


def job() -> Job:
    """What jax.distributed.initialize has found out; does not start JAX's backends."""
    return Job(distributed.global_state.process_id, distributed.global_state.num_processes)


def address() -> tuple[str, int]:
    """Host and port of the service."""
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    return host.strip("[]"), int(port)


def put(key: str, value: str) -> None:
    """Store a value once."""
    distributed.global_state.client.key_value_set(key, value)


def get(key: str, *, timeout_s: float) -> str:
    """Wait for the value of a key. Raises JaxRuntimeError."""
    return distributed.global_state.client.blocking_key_value_get(key, _milliseconds(timeout_s))


def barrier(name: str, *, timeout_s: float) -> None:
    """Wait until all processes are here. Raises JaxRuntimeError."""
    distributed.global_state.client.wait_at_barrier(name, _milliseconds(timeout_s))


def value_of(process: int, key: str, what: str, *, timeout_s: float) -> str:
    """`get` of what a process puts there. what: it is, in words. Raises LostPeerError."""
    begun = time.strftime("%H:%M:%S")
    try:
        return get(key, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process {process} has not sent {what} since {begun}, for {timeout_s:g} s at most. "
            f"{_SEE}"
        ) from error


def meet(name: str, what: str, *, timeout_s: float) -> None:
    """`barrier` of processes that have done something. what: it is, in words, as `compiled its
    programs`. Raises LostPeerError."""
    begun = time.strftime("%H:%M:%S")
    try:
        barrier(name, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        late = re.search(r"timed out task names:\s*(\d+)", str(error))
        who = f"process {late[1]}" if late else "a process"
        raise LostPeerError(
            f"{who} has not {what} since {begun}, for {timeout_s:g} s at most. {_SEE}"
        ) from error


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
