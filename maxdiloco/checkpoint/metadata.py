"""META of a checkpoint: its run and its arrays, checked before any reader uses them.

A disk can damage a checkpoint, and other people can write one. The file must therefore match the
seal, and each field that a reader uses must have its type. maxdiloco.config, which has the keys,
checks the values of `config`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from etils import epath
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError

from maxdiloco import json_text, small_files
from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint.files import META, META_FILE
from maxdiloco.checkpoint.trees import shapes
from maxdiloco.diloco.schedule import ROUND_OVERLAPS
from maxdiloco.engine.trainer import OUTER_OF_EACH, OUTER_PARAMS
from maxdiloco.errors import CheckpointError
from maxdiloco.version import __version__

# The format of a checkpoint, increased with each change that an earlier version cannot read.
FORMAT = 1
FILE = f"{META}/{META_FILE}"  # as the seal names it
_LARGEST = 2**63 - 1  # largest int64; steps, tokens and sequences are counted in int64


class DamagedError(CheckpointError):
    """META of a checkpoint cannot be read, does not match its seal, or has wrong fields.

    Attributes:
      what: the damage, in a few words.
    """

    def __init__(self, step_folder: epath.Path, what: str):
        """Create the error for the checkpoint in `step_folder`."""
        super().__init__(
            f"{META} of checkpoint {step_folder} is damaged: {what}. Use another checkpoint."
        )
        self.what = what


class Note(NamedTuple):
    """The content of META.

    Attributes:
      step: number of inner steps before the save.
      meta: fields of the caller of Checkpointer.save; _Meta has the ones that a reader uses.
      arrays: {item: {leaf name: [shape, dtype name]}}.
      run: a random name, the same in all checkpoints of a run.
      format: FORMAT of the version that wrote it.
      version: version of maxdiloco that wrote it.
    """

    step: int
    meta: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    run: str
    format: int
    version: str


# -- the types of the fields -----------------------------------------------------------------------


def _fits_int64(value: int | float) -> int | float:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("beyond int64")
    return value


Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Size = Annotated[int, Field(ge=1, le=_LARGEST)]
Number = Annotated[int | float, AfterValidator(_fits_int64)]  # a sum of losses may be infinite


class _Fields(BaseModel):
    """A table that may also have other fields."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Sources(_Fields):
    begun: Count
    read: dict[str, Count]
    shares: dict[str, Count]
    order: list[str] = []


class _Position(_Fields):
    base: Count
    s0: Size
    M: Size
    B: Size
    sources: _Sources = Field(default=None)


class _Exchange(_Fields):
    """Fields of engine.settings.ExchangeSettings.to_json."""

    num_replicas: Size
    sync_period: Size
    num_fragments: Size
    overlap_steps: Count
    alpha: Number
    round_overlap: Literal[ROUND_OVERLAPS]
    outer_optimizer: str
    outer_lr: Number | None
    outer_momentum: Number | None
    exchange_dtype: str
    error_feedback: bool
    aggregation: str
    collective: str
    transport: str
    sequential_layers: bool
    num_nonlayer_fragments: Size
    offsets: Annotated[list[Count], Field(min_length=1)]
    outer_memory: str


class _SinceRow(_Fields):
    __pydantic_extra__: dict[str, Annotated[list[Number], Field(min_length=1)]]

    row: Count


class _Meta(_Fields):
    """The fields of Note.meta that a reader uses, each of which may be absent: see `require`."""

    # A trainer's state: see engine.trainer.SavedLayout.
    num_replicas: Size = 1
    mesh: dict[str, Size] = {}
    exchange: _Exchange | Annotated[dict[str, Any], Field(max_length=0)] = {}
    dropped_until: Count = 0
    schedule_since: Count = 0
    chunk_lengths: list[Count] = []
    outer_item: Literal[OUTER_PARAMS, OUTER_OF_EACH] = OUTER_PARAMS
    records: Count | None = None
    specs: Count = 0
    # A run of maxdiloco.train: see run.state and run.recorder.
    config: dict[str, Any] = {}
    position: _Position = Field(default=None)
    tokenizer: str = ""
    contents: str = ""
    schedule_steps: Count = 0
    since_row: _SinceRow = Field(default=None)
    imported: bool = False


class _Stored(BaseModel):
    """The fields of a Note, with their types."""

    model_config = ConfigDict(strict=True, extra="forbid")

    step: Count
    meta: _Meta
    arrays: dict[str, dict[str, Annotated[tuple[list[Count], str], Strict(False)]]]
    run: str
    format: Size
    version: str


class _Version(_Fields):
    """The fields that every format has."""

    format: Size
    version: str


# Fields of every trainer's state; of every run and every import; of a run that has trained.
OF_STATE = ("num_replicas", "mesh", "exchange", "dropped_until", "schedule_since")
OF_MODEL = ("config", "tokenizer", "num_replicas", "mesh", "position", "contents")
OF_TRAINING = (*OF_MODEL, *OF_STATE, "schedule_steps", "since_row")


# -- writing and reading ---------------------------------------------------------------------------


def note_of(
    step: int, items: Mapping[str, Any], meta: Mapping[str, Any], *, run: str = ""
) -> dict[str, Any]:
    """Return the Note of a checkpoint of these items, as a dict for JSON."""
    arrays = {name: shapes(tree) for name, tree in items.items()}
    return Note(step, dict(meta), arrays, run, FORMAT, __version__)._asdict()


def read_note(step_folder: epath.Path) -> Note:
    """Read the Note of a checkpoint.

    Raises:
      DamagedError: the file does not match the seal, or has fields that no save writes.
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
    try:
        stored = json_text.parse(content)
    except ValueError as error:
        raise DamagedError(step_folder, str(error)) from error
    _check(step_folder, _Version, stored)
    if stored["format"] > FORMAT:  # a later format may have a seal that this version cannot read
        raise CheckpointError(
            f"checkpoint {step_folder} has format {stored['format']}, of maxdiloco "
            f"{stored['version']}; maxdiloco {__version__} reads formats up to {FORMAT}. Use that "
            "version or a later one."
        )
    if damage is not None:
        raise DamagedError(step_folder, damage.what)
    _check(step_folder, _Stored, stored)
    return Note(**stored)


def _check(step_folder: epath.Path, schema: type[BaseModel], stored: Any) -> None:
    """Raise DamagedError with the names of the fields that do not have their types."""
    try:
        schema.model_validate(stored)
    except ValidationError as error:
        places = (error["loc"][:2] for error in error.errors(include_url=False))
        wrong = sorted({".".join(map(str, place)) for place in places if place})
        names = ", ".join(wrong) or "it"
        raise DamagedError(
            step_folder, f"{names} does not have the form that a save writes"
        ) from None


def require(meta: Mapping[str, Any], names: Iterable[str], step_folder: epath.PathLike) -> None:
    """Raise CheckpointError unless the meta of a checkpoint has these fields.

    A checkpoint of DiLoCo's library interface lacks the fields of a run.
    """
    if missing := [name for name in names if name not in meta]:
        raise CheckpointError(
            f"{META} of checkpoint {step_folder} has no {', '.join(missing)}, so it is not of a "
            "run of maxdiloco.train. Use a checkpoint of such a run."
        )
