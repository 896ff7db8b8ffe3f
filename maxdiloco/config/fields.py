"""Declare keys: `name: type = key(default, tags)`, followed by a docstring."""

import ast
import enum
import functools
import inspect
import itertools
import textwrap
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Resume(enum.Enum):
    """Whether a resumed run may have another value than the run that wrote the checkpoint."""

    FIXED = "fixed"
    SHAPES = "fixed: shapes the parameters"
    FREE = "free"
    DROPS = "drops in-flight"  # in-flight exchanges are dropped, with a log line

    @property
    def tag(self) -> str:
        """The tag in base.yml: `fixed`, `free` or `drops in-flight`."""
        return self.value.partition(":")[0]


class Hosts(enum.Enum):
    """Whether the processes of a run may have different values."""

    SAME = "same"
    PATHS = "paths may differ"  # either all processes have a path, or none of them
    DIFFER = "may differ"


FIXED, SHAPES, FREE, DROPS = Resume
SAME, PATHS, DIFFER = Hosts


class Table(BaseModel):
    """The entries of a key whose value is a table."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


class Group:
    """Keys of one subject, declared as pydantic fields of `keys.Config`, which inherits all groups.

    Attributes:
      group: name of the group, such as `model`. Several classes may have parts of one group. The
        docstring of the first class is the group's title; the others have the headings of parts.
    """

    group: ClassVar[str]

    def __init_subclass__(cls, *, group: str = "") -> None:
        """Read the group from the line of the class statement."""
        cls.group = group

    def _check(self: Any) -> None:
        """Raise ConfigError if the keys of this group cannot be combined with other values.

        `self` is a Config, in which each value is within its own limits.
        """


def key(
    default: Any = ...,
    *,
    example: Any = None,
    unit: str = "",
    resume: Resume = FIXED,
    hosts: Hosts = SAME,
    from_checkpoint: bool | None = None,
    start_here: bool = False,
) -> Any:
    """Declare a key, or an entry of a table.

    Args:
      default: the default value. Without it, an entry is required.
      example: a value, for a required entry.
      unit: unit of the value, such as `inner steps`.
      resume: whether a resumed run may change the key.
      hosts: whether the processes of a run may have different values.
      from_checkpoint: whether evaluate, generate and hf accept the value that a checkpoint stores,
        which another person may have written. By default they do not if the hosts may differ.
      start_here: whether it is one of the keys that most runs set.
    """
    tags = {
        "unit": unit,
        "resume": resume,
        "hosts": hosts,
        "from_checkpoint": hosts is not DIFFER if from_checkpoint is None else from_checkpoint,
        "start_here": start_here,
    }
    examples = None if example is None else [example]
    return Field(default, examples=examples, json_schema_extra=tags)


class Docstrings:
    """The docstrings below the keys of a group or table, read from its source at their first use.

    pydantic can do this for every class at import, but that is half of the import's time.
    """

    def __init__(self, owner: type):
        """Remember the class."""
        self._owner = owner

    @functools.cached_property
    def by_name(self) -> dict[str, str]:
        """{name: docstring, as one line}."""
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(self._owner))).body
        return {
            key.target.id: " ".join(text.value.value.split())
            for key, text in itertools.pairwise(tree.body)
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
