"""Whether the processes of a run agree on what must be equal in all, before anything is compiled.

Process 0 compares hashes; only where they differ do the values follow. All of it goes through JAX's
key-value store: it is there first, and needs neither devices nor equal meshes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.processes import coordination
from maxdiloco.processes.coordination import Job

KEY = "maxdiloco/members"
_EQUAL = "equal"
_KEYS = "its keys, as the same version of maxdiloco does"

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

    def get(key: str, what: str, process: int) -> str:
        return coordination.value_of(process, f"{KEY}/{key}", what, timeout_s=timeout_s)

    me, text = job.process_id, json.dumps(values, sort_keys=True)
    coordination.put(f"{KEY}/hash/{me}", hashlib.sha256(text.encode()).hexdigest())
    if me == 0:
        groups: dict[str, list[int]] = {}
        for process in range(job.num_processes):
            groups.setdefault(get(f"hash/{process}", _KEYS, process), []).append(process)
        # The first process of each hash sends its values.
        asked = [processes[0] for processes in groups.values()]
        coordination.put(f"{KEY}/asked", _EQUAL if len(groups) == 1 else json.dumps(asked))
    answer = get("asked", "whether the keys are equal", 0)
    if answer == _EQUAL:
        return
    if me in json.loads(answer):
        coordination.put(f"{KEY}/values/{me}", text)
    if me == 0:
        of_all = {
            tuple(processes): json.loads(get(f"values/{processes[0]}", _KEYS, processes[0]))
            for processes in groups.values()
        }
        coordination.put(f"{KEY}/line", json.dumps(difference(of_all)))
    raise ConfigError(json.loads(get("line", "which keys differ", 0)))
