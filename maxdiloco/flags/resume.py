"""Which keys may differ between the run that wrote a checkpoint and the run that resumes it.

base.yml says it key by key. A key of which it says nothing may not differ.
"""

from collections.abc import Callable, Mapping
from typing import Any

from maxdiloco.errors import CheckpointError
from maxdiloco.flags.base_yml import SHAPES, Key, as_lists
from maxdiloco.flags.other_names import current

# Values that follow from several keys; a caller puts them into both mappings.
_DERIVED = {
    "sequences_per_replica": (
        "per_device_batch_size * devices of a mesh slot * gradient_accumulation_steps"
    ),
}


def changed_keys(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, new value)} of the keys that differ and must not, in order of name.

    saved: the config in a checkpoint, as JSON gives it back (lists for tuples). A key it lacks
    is younger than the checkpoint and had its default. A key that only saved has is gone from
    the program and counts as changed to None. keys: base.yml's.
    """
    saved = current(saved)
    free = {name for name, key in keys.items() if key.may_change}
    changes = {}
    for name in sorted({*saved, *new} - free):
        default = keys[name].default if name in keys else None
        before, after = saved.get(name, default), new.get(name)
        if as_lists(before) != as_lists(after):
            changes[name] = (before, after)
    return changes


def refuse_changes(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> None:
    """Refuse to resume with keys that alter the result, all named. Arguments: changed_keys.

    Raises CheckpointError.
    """
    changes = changed_keys(saved, new, keys=keys)
    if not changes:
        return
    named = ", ".join(
        f"{key}={after} (the checkpoint has {before})" for key, (before, after) in changes.items()
    )
    meaning = "".join(f" {key} is {_DERIVED[key]}." for key in changes if key in _DERIVED)
    raise CheckpointError(
        f"{named}: a resumed run must compute what the interrupted one would have.{meaning} Set "
        f"{'it' if len(changes) == 1 else 'them'} back, or set another run_name to start anew."
    )


def model_remedy(
    new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> Callable[[Mapping[str, Any]], str]:
    """For restore_from's remedy: names the keys that shape the parameters and differ.

    new: the config of this run, to be compared with the one in a checkpoint's meta. keys:
    base.yml's.
    """
    shapes = [name for name, key in keys.items() if key.resume == SHAPES]

    def remedy(meta: Mapping[str, Any]) -> str:
        saved = {name: meta["config"][name] for name in shapes if name in meta["config"]}
        changes = changed_keys(saved, {name: new[name] for name in shapes}, keys=keys)
        if not changes:
            return "The model keys agree: the checkpoint is of another program."
        return f"Set {', '.join(f'{key}={before}' for key, (before, _) in changes.items())}."

    return remedy
