"""Which keys may differ: from the run that wrote a checkpoint, and between processes of a run."""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco.errors import CheckpointError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import as_lists
from maxdiloco.flags.maxtext import current

KEEP = "\N{NO-BREAK SPACE}"
MOST_SHOWN = 60  # characters of a value in a line on a change; our choice
LONGEST = 80  # characters of a value in a line on processes that differ; our choice
MOST_NAMED = 8  # processes; our choice
# What a key does that alters no number of the training, as base.yml words it.
_BESIDE = {
    f"{base_yml.MAY_CHANGE}it {does}."
    for does in (
        "only watches the run", "is a tool beside the training", "says where the run writes",
        "says when the state is saved", "says where a run starts",
    )
}  # fmt: skip

# Values that follow from several keys; a caller puts them into both mappings.
_DERIVED = {
    "sequences_per_replica": "per_device_batch_size * devices of a mesh slot / context * "
    "gradient_accumulation_steps",
    "sequences_per_step": "per_device_batch_size * devices / context * gradient_accumulation_steps",
}


class Change(NamedTuple):
    """A key that differs, with the saved and the new value. resume: what base.yml says of it."""

    before: Any
    after: Any
    resume: str


def differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """The keys that differ, in order of name.

    saved: the config in a checkpoint. A key that it lacks is younger and had its default; one that
    it alone has counts as changed to None.
    """
    saved, keys, changes = current(saved), base_yml.declared(), {}
    for name in sorted({*saved, *new}):
        key = keys.get(name)
        before, after = saved.get(name, key and key.default), new.get(name)
        if as_lists(before) != as_lists(after):
            changes[name] = Change(before, after, key.resume if key else "")
    return changes


def change_lines(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines on all keys that differ, with both values: first those that may alter the result.

    KEEP joins words that belong in one line. Arguments: differences.
    """
    training, beside = [], []
    for name, (before, after, resume) in differences(saved, new).items():
        line = f"{name} {_shown(before)} -> {_shown(after)}".replace(" ", KEEP)
        (beside if resume in _BESIDE else training).append(line)
    groups = (("changed since the checkpoint", training), ("changed beside the training", beside))
    return [f"{title}: {', '.join(lines)}" for title, lines in groups if lines]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(as_lists(value))
    text = text or "empty"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def refuse_changes(saved: Mapping[str, Any], new: Mapping[str, Any], *, checkpoint: str) -> None:
    """Raise CheckpointError for keys that alter the result, all named.

    checkpoint: its folder. The other arguments: differences.
    """
    found = differences(saved, new)
    changes = {key: x for key, x in found.items() if not x.resume.startswith(base_yml.MAY_CHANGE)}
    if not changes:
        return
    named = ", ".join(
        f"{key}={change.after} (the checkpoint has {change.before})"
        for key, change in changes.items()
    )
    shaped = any(change.resume == base_yml.SHAPES for change in changes.values())
    weights = "" if shaped else f", with load_parameters_path={checkpoint} from its weights"
    if changes.keys() <= _DERIVED.keys() and new["islands"] == "none":
        weights = f", with load_full_state_path={checkpoint} from its whole state"
    meaning = "".join(f" {key} is {_DERIVED[key]}." for key in changes if key in _DERIVED)
    raise CheckpointError(
        f"{named}: a resumed run must compute what the interrupted one would have.{meaning} Set "
        f"{'it' if len(changes) == 1 else 'them'} back, or set another run_name to start anew"
        f"{weights}."
    )


def model_remedy(new: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Names the keys that shape the parameters and differ in a checkpoint's meta from this run."""
    changes = differences(meta["config"], new)
    shapes = [key for key, change in changes.items() if change.resume == base_yml.SHAPES]
    if not shapes:
        return "The model keys agree: the checkpoint is of another program."
    return f"Set {', '.join(f'{key}={changes[key].before}' for key in shapes)}."


def shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal in all processes: the values without those of a host, and its paths."""
    all_of, keys = {}, base_yml.declared()
    for name, value in values.items():
        hosts = keys[name].hosts
        if not hosts.startswith(base_yml.MAY_DIFFER):
            only_whether = hosts.startswith(base_yml.PATHS_MAY_DIFFER)
            all_of[name] = _without_paths(value) if only_whether else value
    return all_of


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
            value = values.get(name, "no such key")
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
    if len(text) <= LONGEST:
        return text
    start = max(0, min(same, len(text)) - LONGEST // 4)
    end = start + LONGEST
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _who(processes: list[int]) -> str:
    """`process 0`, `processes 1 and 3`, `processes 1, 2, 5 and 90 more`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    named = [str(process) for process in sorted(processes)]
    if len(named) > MOST_NAMED:
        named = [*named[:MOST_NAMED], f"{len(named) - MOST_NAMED} more"]
    return f"processes {', '.join(named[:-1])} and {named[-1]}"
