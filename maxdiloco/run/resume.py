"""Compare configurations: of a run and its checkpoint, and of the processes of a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco.config.fields import Hosts, Resume
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import as_json, shorten, show
from maxdiloco.errors import CheckpointError

KEEP = "\N{NO-BREAK SPACE}"
MAX_SHOWN = 60  # characters of a value in a line
MAX_NAMED = 8  # processes named in a line


class Change(NamedTuple):
    """The saved and the new value of a key that differs, and its tag for resuming."""

    before: Any
    after: Any
    resume: Resume


def differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Return the keys that differ, in order of name.

    Args:
      saved: the config in a checkpoint. A key that it lacks is newer, and had the effect of its
        default. A key that only it has counts as changed to None.
      new: the config of the run.
    """
    changes = {}
    for name in sorted({*saved, *new}):
        key = KEYS.get(name)
        before, after = saved.get(name, key and key.default), new.get(name)
        if as_json(before) != as_json(after):
            changes[name] = Change(before, after, key.resume if key else Resume.FIXED)
    return changes


def change_lines(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line about all keys that differ, or none. Arguments: see `differences`.

    Words that must not be split at a line end are joined by KEEP.
    """
    lines = []
    for name, change in differences(saved, new).items():
        before, after = (
            shorten(value, MAX_SHOWN) or "empty" for value in (change.before, change.after)
        )
        lines.append(f"{name} {before} -> {after}".replace(" ", KEEP))
    return [f"changed since the checkpoint: {', '.join(lines)}"] if lines else []


def refuse_changes(saved: Mapping[str, Any], new: Mapping[str, Any], *, checkpoint: str) -> None:
    """Raise CheckpointError if a key has changed that must stay the same in a resumed run.

    Args:
      saved: the config in the checkpoint.
      new: the config of the run.
      checkpoint: folder of the checkpoint, for the message.
    """
    found = differences(saved, new)
    changes = {key: x for key, x in found.items() if x.resume in (Resume.FIXED, Resume.SHAPES)}
    if not changes:
        return
    named = ", ".join(
        f"{key}={change.after} (the checkpoint has {change.before})"
        for key, change in changes.items()
    )
    shaped = any(change.resume is Resume.SHAPES for change in changes.values())
    raise CheckpointError(
        f"{named}: a resumed run must compute the same as the interrupted one. Set "
        f"{'it' if len(changes) == 1 else 'them'} back, or set another run_name to start a new run"
        f"{'' if shaped else f', with load_parameters_path={checkpoint} from its weights'}."
    )


def model_remedy(new: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Describe keys that shape the parameters and differ between a checkpoint and this run.

    Args:
      new: the config of the run.
      meta: the metadata of the checkpoint.
    """
    changes = differences(meta["config"], new)
    shapes = [key for key, change in changes.items() if change.resume is Resume.SHAPES]
    if not shapes:
        return "The model keys agree: another program wrote the checkpoint."
    return f"Set {', '.join(f'{key}={changes[key].before}' for key in shapes)}."


def shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that all processes must share, from the keys and values of a process."""
    found = {}
    for name, value in values.items():
        hosts = KEYS[name].hosts
        if hosts is not Hosts.DIFFER:
            found[name] = _without_paths(value) if hosts is Hosts.PATHS else value
    return found


def _without_paths(value: Any) -> Any:
    """Remove paths from a value, since they may differ between processes.

    A path becomes a flag for its presence, a source loses its path, and a table keeps its names.
    """
    if isinstance(value, list):
        return [{name: part for name, part in entry.items() if name != "path"} for entry in value]
    if isinstance(value, dict):
        return [[name, _without_paths(path)] for name, path in value.items()]
    return "a path" if value else ""


def describe_processes(groups: Mapping[tuple[int, ...], Mapping[str, Any]]) -> str:
    """Return a line about the keys in which processes differ, with each value and the remedy.

    Args:
      groups: {processes: the result of `shared`, with any other values that they compare}.
    """
    differing = []
    for name in dict.fromkeys(name for values in groups.values() for name in values):
        holders: dict[str, list[int]] = {}
        for processes, values in groups.items():
            text = show(values.get(name, "no such key")) or "empty"
            holders.setdefault(text, []).extend(processes)
        if len(holders) > 1:
            parts = [f"{shorten(x, MAX_SHOWN)} in {_processes(of)}" for x, of in holders.items()]
            differing.append(f"{name} is {', '.join(parts)}")
    return (
        f"{'; '.join(differing)}. All processes of a run must have the same keys and versions: "
        "give each the same command, yml file and M_<KEY> variables. configs/base.yml marks the "
        "keys that may differ with `hosts:`."
    )


def _processes(processes: list[int]) -> str:
    """Return `process 0`, `processes 1, 3` or `processes 1, 2, 5 and 90 more`."""
    named = ", ".join(map(str, sorted(processes)[:MAX_NAMED]))
    more = f" and {len(processes) - MAX_NAMED} more" if len(processes) > MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {named}{more}"
