"""META of a checkpoint: what it says of its run and its arrays, checked before it is used.

A damaged disk and other people write here too. So the file has to fit the seal, and each field that
a reader uses has to have its type: no reader looks at what this file has not checked. The values of
`config` are checked by maxdiloco.config, which knows the keys.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from etils import epath

from maxdiloco import json_text, small_files
from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint.orbax_io import META, META_FILE, shapes
from maxdiloco.diloco.schedule import ROUND_OVERLAPS
from maxdiloco.engine.trainer import OUTER_OF_EACH, OUTER_PARAMS
from maxdiloco.errors import CheckpointError
from maxdiloco.version import __version__

# The format of a checkpoint, raised with each change that an earlier version cannot read.
FORMAT = 1
FILE = f"{META}/{META_FILE}"  # as the seal names it
_LARGEST = 2**63 - 1  # of int64, in which steps, tokens and sequences are counted


class DamagedError(CheckpointError):
    """META of a checkpoint cannot be read, does not fit its seal, or is not what a save writes.

    what: a few words on it.
    """

    def __init__(self, step_folder: epath.Path, what: str):
        super().__init__(
            f"{META} of checkpoint {step_folder} is damaged: {what}. Use another checkpoint."
        )
        self.what = what


class Note(NamedTuple):
    """The content of a checkpoint's META. run: the same in all checkpoints of a run."""

    step: int
    meta: dict[str, Any]
    arrays: dict[str, dict[str, Any]]  # {item: {leaf name: [shape, dtype name]}}
    run: str
    format: int
    version: str  # of maxdiloco


Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """An int64 or any float: a sum over steps that were skipped may be infinite."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= _LARGEST)


def _whole(least: int) -> Check:
    return lambda value: type(value) is int and least <= value <= _LARGEST


def _one_of(*names: str) -> Check:
    return lambda value: isinstance(value, str) and value in names


def _list_of(check: Check, least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


def _table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _fields(required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    """A table with all of `required`, and perhaps those of `optional` and others."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required.keys() <= value.keys()
            and all(check(value[name]) for name, check in required.items())
            and all(check(value[name]) for name, check in optional.items() if name in value)
        )

    return check


_COUNT, _SIZE = _whole(0), _whole(1)
_SOURCES = _fields(
    {"begun": _COUNT, "read": _table_of(_COUNT), "shares": _table_of(_COUNT)},
    {"order": _list_of(_is_text)},  # added after the others
)
# Fields of engine.settings.ExchangeSettings.to_json.
_is_exchange = _fields(
    {
        "num_replicas": _SIZE,
        "sync_period": _SIZE,
        "num_fragments": _SIZE,
        "overlap_steps": _COUNT,
        "alpha": _is_number,
        "round_overlap": _one_of(*ROUND_OVERLAPS),
        "outer_optimizer": _is_text,
        "outer_lr": _or_none(_is_number),
        "outer_momentum": _or_none(_is_number),
        "exchange_dtype": _is_text,
        "error_feedback": _is_bool,
        "aggregation": _is_text,
        "collective": _is_text,
        "transport": _is_text,
        "sequential_layers": _is_bool,
        "num_nonlayer_fragments": _SIZE,
        "offsets": _list_of(_COUNT, least=1),
        "outer_memory": _is_text,
    },
    {},
)
# {field of Note.meta that a reader uses: what it has to be}. A caller of Checkpointer.save may
# write other fields, and leave these out: see `require`.
FIELDS: Mapping[str, Check] = MappingProxyType({
    # of a trainer's state: see engine.trainer.SavedLayout
    "num_replicas": _SIZE,
    "mesh": _table_of(_SIZE),
    "exchange": lambda value: value == {} or _is_exchange(value),  # {}: data parallelism
    "dropped_until": _COUNT,
    "schedule_since": _COUNT,
    "chunk_lengths": _list_of(_COUNT),
    "theta_item": _one_of(OUTER_PARAMS, OUTER_OF_EACH),
    "records": _or_none(_COUNT),
    "specs": _COUNT,
    # of a run of maxdiloco.train: see trainer.start.note and trainer.recorder
    "config": _table_of(lambda value: True),
    "position": _fields({"base": _COUNT, "s0": _SIZE, "M": _SIZE, "B": _SIZE},
                        {"sources": _SOURCES}),
    "tokenizer": _is_text,
    "contents": _is_text,
    "schedule_steps": _COUNT,
    "since_row": lambda value: (
        isinstance(value, dict) and _COUNT(value.get("row"))
        and all(_list_of(_is_number, least=1)(x) for name, x in value.items() if name != "row")
    ),
    "imported": _is_bool,
})  # fmt: skip
# The fields of every trainer's state; of every run and import; and of a run that trained.
OF_STATE = ("num_replicas", "mesh", "exchange", "dropped_until", "schedule_since")
OF_MODEL = ("config", "tokenizer", "num_replicas", "mesh", "position", "contents")
OF_TRAINING = (*OF_MODEL, *OF_STATE, "schedule_steps", "since_row")


def note_of(
    step: int, items: Mapping[str, Any], meta: Mapping[str, Any], *, run: str = ""
) -> dict[str, Any]:
    """The Note of a checkpoint of these items, as a dict for JSON."""
    arrays = {name: shapes(tree) for name, tree in items.items()}
    return Note(step, dict(meta), arrays, run, FORMAT, __version__)._asdict()


def read_note(step_folder: epath.Path) -> Note:
    """Read the Note of a checkpoint.

    Raises:
      DamagedError: the file does not fit the seal, or is not what a save writes.
      CheckpointError: a later version wrote it.
      OSError: the file is not there or cannot be read.
    """
    try:
        content = small_files.read_bytes(step_folder / META / META_FILE)
    except OSError as error:
        if error.errno in small_files.NOT_SMALL_FILE:
            raise DamagedError(step_folder, str(error.strerror)) from error
        raise
    damage = seal.damage_of(step_folder, FILE, content)
    if damage is not None and damage.index != seal.SEAL:
        raise DamagedError(step_folder, damage.what)
    stored = _parsed(step_folder, content)
    if stored["format"] > FORMAT:  # and perhaps with a seal that this version cannot read
        raise CheckpointError(
            f"checkpoint {step_folder} has format {stored['format']}, of maxdiloco "
            f"{stored['version']}; maxdiloco {__version__} reads formats up to {FORMAT}. Use that "
            "version or a later one."
        )
    if damage is not None:
        raise DamagedError(step_folder, damage.what)
    return _checked(step_folder, stored)


def _parsed(step_folder: epath.Path, content: bytes) -> dict[str, Any]:
    """The fields of META, of which `format` and `version` are checked."""
    try:
        stored = json_text.parse(content)
    except ValueError as error:
        raise DamagedError(step_folder, str(error)) from error
    if not _fields({"format": _SIZE, "version": _is_text}, {})(stored):
        raise DamagedError(step_folder, "it has no format and version")
    return stored


def _checked(step_folder: epath.Path, stored: dict[str, Any]) -> Note:
    """The Note with these fields. Raises DamagedError for one that no save writes."""
    if stored.keys() != set(Note._fields):
        raise DamagedError(step_folder, f"it has not the fields {', '.join(Note._fields)}")
    note = Note(**stored)
    arrays = _table_of(_table_of(_is_array))
    of_note = {"step": _COUNT(note.step), "arrays": arrays(note.arrays), "run": _is_text(note.run)}
    wrong = [name for name, right in of_note.items() if not right]
    if isinstance(note.meta, dict):
        wrong += [name for name, x in note.meta.items() if name in FIELDS and not FIELDS[name](x)]
    else:
        wrong.append("meta")
    if wrong:
        raise DamagedError(step_folder, f"{', '.join(wrong)} is not what a save writes")
    return note


def _is_array(value: Any) -> bool:
    """[shape, dtype name]"""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _list_of(_COUNT)(value[0])
        and _is_text(value[1])
    )


def require(meta: Mapping[str, Any], names: Iterable[str], step_folder: epath.PathLike) -> None:
    """Raise CheckpointError unless the meta of a checkpoint has these fields.

    A checkpoint of DiLoCo's library interface lacks those of a run.
    """
    if missing := [name for name in names if name not in meta]:
        raise CheckpointError(
            f"{META} of checkpoint {step_folder} has no {', '.join(missing)}, so it is not of a "
            "run of maxdiloco.train. Use a checkpoint of such a run."
        )
