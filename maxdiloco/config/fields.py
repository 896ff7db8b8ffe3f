"""Declare keys: `name: type = key(default, tags)`, followed by a docstring."""

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError


class Resume(enum.Enum):
    """Whether a resumed run may have another value than the run that wrote the checkpoint."""

    FIXED = "fixed"
    SHAPES = "fixed: shapes the parameters"
    FREE = "free"
    APART = "free: does not affect training"
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


FIXED, SHAPES, FREE, APART, DROPS = Resume
PATHS, DIFFER = Hosts.PATHS, Hosts.DIFFER


class Table(BaseModel):
    """The entries of a key whose value is a table."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Group(Table):
    """Keys of one subject. Only `keys.Config`, which has all groups, is instantiated."""

    model_config = ConfigDict(protected_namespaces=(), validate_default=False, defer_build=True)

    group: ClassVar[str]  # such as `model`
    title: ClassVar[str]  # subject of the group, in a few words
    heading: ClassVar[str] = ""  # subject of a part of a group


def key(
    default: Any = ...,
    *,
    example: Any = None,
    unit: str = "",
    resume: Resume = Resume.FIXED,
    hosts: Hosts = Hosts.SAME,
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
        which another person may have written. By default they do if all processes must have the
        same value.
      start_here: whether it is one of the keys that most runs set.
    """
    if from_checkpoint is None:
        from_checkpoint = hosts is Hosts.SAME
    tags = {
        "unit": unit,
        "resume": resume.value,
        "hosts": hosts.value,
        "from_checkpoint": from_checkpoint,
        "start_here": start_here,
    }
    examples = None if example is None else [example]
    return Field(default, examples=examples, json_schema_extra=tags)


def descriptions(table: type[Table]) -> dict[str, str]:
    """Return {name: docstring below its declaration}, from the source of a group or table.

    pydantic can do this for every class at import, but that is half of the import's time.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    return {
        statement.target.id: " ".join(text.value.value.split())
        for statement, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def rule(check: Callable[[Any], None]) -> Any:
    """Make a method of a group a cross-key check, which runs once all values are valid.

    The method can read the keys of all groups, and raises ConfigError. A validation with a context
    only converts values and does not run the checks.
    """

    def validate(self: Any, info: ValidationInfo) -> Any:
        if info.context is None:
            check(self)
        return self

    return model_validator(mode="after")(validate)


def require_default(config: Any, names: str, because: str, remedy: str) -> None:
    """Raise ConfigError for the first key that has no effect but is not at its default.

    Args:
      config: a Config.
      names: the keys that have no effect, separated by spaces.
      because: the key=value for which they have no effect.
      remedy: other settings with which they have an effect.
    """
    for name in names.split():
        value, default = getattr(config, name), type(config).model_fields[name].default
        if value != default:
            raise ConfigError(
                f"{name}={show(value)} has no effect with {because}. Use {name}={show(default)} "
                f"or {remedy}."
            )
