"""Which keys may differ between the run that wrote a checkpoint and the run that resumes it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from maxdiloco.errors import CheckpointError
from maxdiloco.flags.base_yml import MAY_CHANGE, SHAPES, Key, as_lists
from maxdiloco.flags.other_names import current

KEEP = "\N{NO-BREAK SPACE}"
MOST_SHOWN = 60  # characters of a value in a line; our choice
# What a key does that alters no number of the training, as base.yml words it.
_BESIDE = {
    f"{MAY_CHANGE}it {does}."
    for does in (
        "only watches the run", "is a tool beside the training", "says where the run writes",
        "says when the state is saved", "says where a run starts",
    )
}  # fmt: skip

# Values that follow from several keys; a caller puts them into both mappings.
_DERIVED = {
    "sequences_per_replica": "per_device_batch_size * devices of a mesh slot / context * "
    "gradient_accumulation_steps",
}


def changed_keys(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> dict[str, tuple[Any, Any]]:
    """Those of `differences` that must not be."""
    return {
        name: change
        for name, change in differences(saved, new, keys=keys).items()
        if name not in keys or not keys[name].may_change
    }


def differences(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, new value)} of the keys that differ, in order of name.

    saved: the config in a checkpoint. A key that it lacks is younger and had its default; one that
    it alone has counts as changed to None. keys: base.yml's.
    """
    saved = current(saved)
    changes = {}
    for name in sorted({*saved, *new}):
        default = keys[name].default if name in keys else None
        before, after = saved.get(name, default), new.get(name)
        if as_lists(before) != as_lists(after):
            changes[name] = (before, after)
    return changes


def change_lines(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> list[str]:
    """Lines on all keys that differ, with both values: first those that may alter the result.

    KEEP joins words that belong in one line. Arguments: differences.
    """
    training, beside = [], []
    for name, (before, after) in differences(saved, new, keys=keys).items():
        line = f"{name} {_shown(before)} -> {_shown(after)}".replace(" ", KEEP)
        aside = name in keys and keys[name].resume in _BESIDE
        (beside if aside else training).append(line)
    groups = (("changed since the checkpoint", training), ("changed beside the training", beside))
    return [f"{title}: {', '.join(lines)}" for title, lines in groups if lines]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(as_lists(value))
    text = text or "empty"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def refuse_changes(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, keys: Mapping[str, Key], checkpoint: str
) -> None:
    """Raise CheckpointError for keys that alter the result, all named.

    checkpoint: its folder. The other arguments: differences.
    """
    changes = changed_keys(saved, new, keys=keys)
    if not changes:
        return
    named = ", ".join(
        f"{key}={after} (the checkpoint has {before})" for key, (before, after) in changes.items()
    )
    shaped = any(name in keys and keys[name].resume == SHAPES for name in changes)
    weights = "" if shaped else f", with load_parameters_path={checkpoint} from its weights"
    meaning = "".join(f" {key} is {_DERIVED[key]}." for key in changes if key in _DERIVED)
    raise CheckpointError(
        f"{named}: a resumed run must compute what the interrupted one would have.{meaning} Set "
        f"{'it' if len(changes) == 1 else 'them'} back, or set another run_name to start anew"
        f"{weights}."
    )


def model_remedy(
    new: Mapping[str, Any], *, keys: Mapping[str, Key]
) -> Callable[[Mapping[str, Any]], str]:
    """For restore_from: names the keys that shape the parameters and differ in a checkpoint's meta.

    new: the config of this run. keys: base.yml's.
    """
    shapes = [name for name, key in keys.items() if key.resume == SHAPES]

    def remedy(meta: Mapping[str, Any]) -> str:
        saved = {name: meta["config"][name] for name in shapes if name in meta["config"]}
        changes = changed_keys(saved, {name: new[name] for name in shapes}, keys=keys)
        if not changes:
            return "The model keys agree: the checkpoint is of another program."
        return f"Set {', '.join(f'{key}={before}' for key, (before, _) in changes.items())}."

    return remedy
