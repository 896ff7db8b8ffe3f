"""JAX's coordination service: who is in the run, a key-value store, and barriers.

Process 0 runs it. It has no public name; no other file imports from jax._src.
"""

from typing import NamedTuple

from jax._src import distributed


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


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
