"""Which keys the processes of a run must share, and the line that names those that differ."""

import json
import os
from collections.abc import Mapping
from typing import Any

from maxdiloco.flags.base_yml import MAY_DIFFER, PATHS_MAY_DIFFER, Key

MOST_SHOWN = 80  # characters of a value; our choice
MOST_NAMED = 8  # processes; our choice
_MISSING = "no such key"


def shared(values: Mapping[str, Any], *, keys: Mapping[str, Key]) -> dict[str, Any]:
    """What has to be equal in all processes: the values without those of a host, and its paths.

    values: of Config.as_dict. keys: base.yml's.
    """
    return {
        name: _without_paths(value) if keys[name].hosts.startswith(PATHS_MAY_DIFFER) else value
        for name, value in values.items()
        if not keys[name].hosts.startswith(MAY_DIFFER)
    }


def _without_paths(value: Any) -> Any:
    """Whether there is a path; of dataset_mixture all but the paths, of a table each name."""
    if isinstance(value, list):
        return [{name: part for name, part in entry.items() if name != "path"} for entry in value]
    if isinstance(value, dict):
        return [[name, _without_paths(path)] for name, path in value.items()]
    return "a path" if value else ""


def difference(groups: Mapping[tuple[int, ...], Mapping[str, Any]]) -> str:
    """The line on all that differs, with each value and who has it, and the remedy.

    groups: {processes: what `shared` gives in each of them}, and what else they compare.
    """
    differing = []
    for name in dict.fromkeys(name for values in groups.values() for name in values):
        holders: dict[str, list[int]] = {}
        for processes, values in groups.items():
            value = values.get(name, _MISSING)
            text = value if isinstance(value, str) and value else json.dumps(value)
            holders.setdefault(text, []).extend(processes)
        same = len(os.path.commonprefix(list(holders)))
        who = [f"{_cut(text, same)} in {_who(of)}" for text, of in holders.items()]
        if len(who) > 1:
            differing.append(f"{name} is {', '.join(who)}")
    return (
        f"{'; '.join(differing)}. All processes of a run must have the same keys and versions: "
        f"give each the same command, yml file and M_<KEY> variables. What may be a host's own has "
        f"`Hosts:` in configs/base.yml."
    )


def _cut(text: str, same: int) -> str:
    """The text, or of a long one the part after the `same` characters that all begin with."""
    if len(text) <= MOST_SHOWN:
        return text
    start = max(0, min(same, len(text)) - MOST_SHOWN // 4)
    end = start + MOST_SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _who(processes: list[int]) -> str:
    """`process 0`, `processes 1 and 3`, `processes 1, 2, 5 and 90 more`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    named = [str(process) for process in sorted(processes)]
    if len(named) > MOST_NAMED:
        named = [*named[:MOST_NAMED], f"{len(named) - MOST_NAMED} more"]
    return f"processes {', '.join(named[:-1])} and {named[-1]}"
