"""Access JAX's coordination service: this process's number, a key-value store, and barriers.

Process 0 runs the service, before any device is used. JAX has no public interface to it, so this
file imports from jax._src; no other file does.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax._src import distributed

from maxdiloco.errors import ConfigError, LostPeerError

_SEE = "See the end of its own output, and start the run again with the same run_name."

Values = Mapping[str, Any]


class Job(NamedTuple):
    """The number of this process, and the number of processes of the run."""

    process_id: int
    num_processes: int


def job() -> Job:
    """Return the Job found by jax.distributed.initialize, without starting JAX's backends."""
    return Job(distributed.global_state.process_id, distributed.global_state.num_processes)


def address() -> tuple[str, int]:
    """Return the host and port of the service."""
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    return host.strip("[]"), int(port)


def put(key: str, value: str) -> None:
    """Store the value of a key, which must not have a value yet."""
    distributed.global_state.client.key_value_set(key, value)


def get(key: str, *, timeout_s: float) -> str:
    """Wait for the value of a key. Raises JaxRuntimeError after timeout_s seconds."""
    return distributed.global_state.client.blocking_key_value_get(key, _milliseconds(timeout_s))


def wait_for_all(name: str, *, timeout_s: float) -> None:
    """Wait until all processes call this. Raises JaxRuntimeError after timeout_s seconds."""
    distributed.global_state.client.wait_at_barrier(name, _milliseconds(timeout_s))


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def value_of(process: int, key: str, what: str, *, timeout_s: float) -> str:
    """Wait for a value that another process stores.

    Args:
      process: number of the process that stores the value.
      key: key of the value.
      what: description of the value, for the message.
      timeout_s: longest wait [s].

    Raises:
      LostPeerError: the value was not stored in time.
    """
    begun = time.strftime("%H:%M:%S")
    try:
        return get(key, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process {process} has not sent {what} within {timeout_s:g} s of {begun}. {_SEE}"
        ) from error


def barrier(name: str, what: str, *, timeout_s: float) -> None:
    """Wait until all processes have done something.

    Args:
      name: name of the barrier, which can be used only once.
      what: the work before the barrier, such as `compiled its programs`, for the message.
      timeout_s: longest wait [s].

    Raises:
      LostPeerError: a process has not reached the barrier in time.
    """
    begun = time.strftime("%H:%M:%S")
    try:
        wait_for_all(name, timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        late = re.search(r"timed out task names:\s*(\d+)", str(error))
        who = f"process {late[1]}" if late else "a process"
        raise LostPeerError(
            f"{who} has not {what} within {timeout_s:g} s of {begun}. {_SEE}"
        ) from error


def require_equal(
    job: Job,
    values: Values,
    *,
    difference: Callable[[Mapping[tuple[int, ...], Values]], str],
    timeout_s: float,
) -> None:
    """Raise the same ConfigError in all processes unless all of them have the same values.

    Every process must call this, after the failure detector has started.

    Args:
      job: the number of this process, and the number of processes.
      values: the values of this process, fit for JSON.
      difference: called in process 0 with {processes: their values}; returns a description of the
        difference.
      timeout_s: longest wait for the other processes to call this [s].

    Raises:
      ConfigError: the values differ.
      LostPeerError: a process did not call this in time.
    """
    if job.num_processes == 1:
        return
    key, its_keys = "maxdiloco/members", "its keys, as the same version of maxdiloco does"
    put(f"{key}/{job.process_id}", json.dumps(values, sort_keys=True))
    if job.process_id == 0:
        groups: dict[str, list[int]] = {}
        for process in range(job.num_processes):
            text = value_of(process, f"{key}/{process}", its_keys, timeout_s=timeout_s)
            groups.setdefault(text, []).append(process)
        of_all = {tuple(processes): json.loads(text) for text, processes in groups.items()}
        put(f"{key}/line", json.dumps(difference(of_all) if len(groups) > 1 else ""))
    line = json.loads(value_of(0, f"{key}/line", "whether the keys are equal", timeout_s=timeout_s))
    if line:
        raise ConfigError(line)
