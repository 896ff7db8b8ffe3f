"""Whether the processes of a run agree on what must be equal in all, before anything is compiled.

Process 0 compares hashes; only where they differ do the values follow. All of it goes through JAX's
key-value store: it is there first, and needs neither devices nor equal meshes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import coordination
from maxdiloco.processes.coordination import Job

KEY = "maxdiloco/members"
_EQUAL = "equal"

Values = Mapping[str, Any]


def require_equal(
    job: Job,
    values: Values,
    *,
    difference: Callable[[Mapping[tuple[int, ...], Values]], str],
    timeout_s: float,
) -> None:
    """Raise ConfigError in all processes unless all of them have the same values.

    Enter it in every process, once its peers are watched. values: what JSON takes. difference:
    gets {processes: their values} in process 0 and says in words what differs. timeout_s: until
    the others have come so far. Raises LostPeerError.
    """
    if job.num_processes == 1:
        return
    me, text = job.process_id, json.dumps(values, sort_keys=True)
    coordination.put(f"{KEY}/hash/{me}", hashlib.sha256(text.encode()).hexdigest())
    if me == 0:
        groups: dict[str, list[int]] = {}
        for process in range(job.num_processes):
            found = _get(f"hash/{process}", "the keys", process, timeout_s=timeout_s)
            groups.setdefault(found, []).append(process)
        # The first process of each hash sends its values.
        asked = [processes[0] for processes in groups.values()]
        coordination.put(f"{KEY}/asked", _EQUAL if len(groups) == 1 else json.dumps(asked))
    answer = _get("asked", "the comparison of the keys", 0, timeout_s=timeout_s)
    if answer == _EQUAL:
        return
    if me in json.loads(answer):
        coordination.put(f"{KEY}/values/{me}", text)
    if me == 0:
        of_all = {
            tuple(processes): json.loads(
                _get(f"values/{processes[0]}", "the keys", processes[0], timeout_s=timeout_s)
            )
            for processes in groups.values()
        }
        coordination.put(f"{KEY}/line", json.dumps(difference(of_all)))
    raise ConfigError(json.loads(_get("line", "the difference", 0, timeout_s=timeout_s)))


def _get(key: str, what: str, process: int, *, timeout_s: float) -> str:
    begun = time.strftime("%H:%M:%S")
    try:
        return coordination.get(f"{KEY}/{key}", timeout_s=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"{what} of process {process} have not come since {begun} "
            f"(peer_timeout_seconds={timeout_s:g}). See the end of its own output, and that it "
            f"runs the same version of maxdiloco."
        ) from error
