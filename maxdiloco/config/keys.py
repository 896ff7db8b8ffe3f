"""All keys: the class Config, which has every group, and the table KEYS."""

import dataclasses
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from maxdiloco.config import checks, values
from maxdiloco.config.fields import Docstrings, Group, Hosts, Resume, Table
from maxdiloco.config.groups import data, diloco, model, run, tools, training
from maxdiloco.errors import ConfigError

# In the order of base.yml and of --help.
GROUPS = tuple(
    found
    for module in (run, model, training, diloco, data, tools)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Group) and found is not Group
)
# Axes of the mesh, in order. Each has a size between slices (dcn) and a size inside a slice (ici).
AXES = ("diloco", "data", "fsdp", "expert", "context", "tensor")


# pydantic collects the fields of the last base first.
class Config(*reversed(GROUPS), BaseModel):
    """The value of every key, as frozen attributes.

    Lists are stored as tuples. Tables are dicts without the entries that are at their default.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def check_keys(self) -> None:
        """Raise ConfigError if values cannot be combined."""
        for (name, value), unused in checks.WITHOUT_EFFECT.items():
            if vars(self)[name] == value:
                checks.require_default(self, unused, name)
        try:
            for group in GROUPS:
                group._check(self)
        except ValueError as error:  # of the checks that the library shares
            raise ConfigError(str(error)) from None

    def as_dict(self) -> dict[str, Any]:
        """Return {key: value} of all keys, fit for JSON, as `config.from_dict` accepts it."""
        return {name: values.as_json(vars(self)[name]) for name in KEYS}

    def sizes(self, tier: str) -> dict[str, int]:
        """Return the sizes of the mesh axes between slices (tier=dcn) or inside one (tier=ici)."""
        return {axis: vars(self)[f"{tier}_{axis}_parallelism"] for axis in AXES}

    def eval_paths(self) -> dict[str, str]:
        """Return {name: path} of eval_dataset_path, with the text of the metric eval/loss first.

        This is the text without a name, or else the first one. An empty path is the held-out part
        of the training text.
        """
        given = self.eval_dataset_path
        if not isinstance(given, dict):
            return {"": given}
        return dict(sorted(given.items(), key=lambda entry: entry[0] != "")) or {"": ""}

    def holds_out(self) -> bool:
        """Whether a part of the text is held out of training for evaluation (eval_fraction)."""
        return "" in self.eval_paths().values()


@dataclasses.dataclass(frozen=True)
class Key:
    """The declaration of a key, or of an entry of a table.

    Attributes:
      name: the key.
      field: its declaration for pydantic.
      docstrings: the descriptions of all keys of its class.
      unit, resume, hosts, from_checkpoint, start_here: the arguments of `fields.key`.
      group: its group, such as `model`.
      title: subject of the group.
      heading: the part of the group, such as `sizes`; empty if the group has no parts.
    """

    name: str
    field: FieldInfo
    docstrings: Docstrings
    unit: str
    resume: Resume
    hosts: Hosts
    from_checkpoint: bool
    start_here: bool
    group: str = ""
    title: str = ""
    heading: str = ""

    @property
    def default(self) -> Any:
        """The default value; None for a required entry."""
        return None if self.field.is_required() else self.field.default

    @property
    def description(self) -> str:
        """The effect of the key, as its docstring describes it."""
        return self.docstrings.by_name[self.name]

    @property
    def entry_table(self) -> type[Table] | None:
        """The class of the entries if the value is a table or a list of tables; otherwise None."""
        kind = values.element(self.field.annotation)
        return kind if isinstance(kind, type) and issubclass(kind, Table) else None

    @property
    def entries(self) -> dict[str, "Key"]:
        """{name: entry} if the value is a table or a list of tables."""
        table = self.entry_table
        if table is None:
            return {}
        docstrings, fields = Docstrings(table), table.model_fields
        return {n: Key(n, x, docstrings, **x.json_schema_extra) for n, x in fields.items()}

    @property
    def example(self) -> Any:
        """A value, also of a required entry."""
        return self.field.examples[0] if self.field.examples else self.default

    def expected(self, *, brief: bool = False) -> str:
        """Describe the accepted values, such as `an integer >= 1`; brief: only their limits."""
        return values.expected(self.field.annotation, self.field.metadata, brief=brief)

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words; empty if the key accepts other values."""
        return values.choices(self.field.annotation)


def _keys() -> Iterator[Key]:
    group, title = "", ""
    for owner in GROUPS:
        docstrings, subject = Docstrings(owner), " ".join(owner.__doc__.split()).rstrip(".")
        title, heading = (title, subject) if owner.group == group else (subject, "")
        group = owner.group
        for name in owner.__annotations__:
            field = Config.model_fields[name]
            about = dict(group=group, title=title, heading=heading)
            yield Key(name, field, docstrings, **field.json_schema_extra, **about)


KEYS = MappingProxyType({key.name: key for key in _keys()})
# Keys that an evaluation of a checkpoint accepts, since they do not change the computation.
EVALUATION_KEYS = (
    "hardware", "base_output_directory", "dataset_path", "eval_dataset_path", "add_bos",
    "text_column", "eval_steps", "per_device_batch_size", "dtype", "attention", "remat_policy",
    "matmul_precision", "quantization", "logical_axis_rules", "show_memory", "jax_cache_dir",
    "jax_distributed_initialization_timeout", "peer_timeout_seconds", "peer_port",
    "exchange_interface", "exchange_secret_file",
    *(name for name, key in KEYS.items() if key.group == "mesh"),
)  # fmt: skip
