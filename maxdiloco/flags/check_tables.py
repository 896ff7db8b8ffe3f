"""Checks of the entries of a key that is a table, by what base.yml says of each."""

from collections.abc import Iterator
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import Key, Table, show


def entries(key: Key, table: Any) -> Iterator[tuple[Key, Any]]:
    """The entries that a table gives, for a check of their limits.

    Raises ConfigError for one that is missing, and for one that nothing reads beside the others.
    A key without declared entries and an empty table have none.
    """
    if not key.entries or not table:
        return
    written, whole = dict(table), key.whole(table)
    shown = f"{key.name}={show(Table(table))}"
    for name, entry in key.entries.items():
        other, values = entry.read_with
        is_read = not other or whole[other] in values
        if name in written and not is_read:
            raise ConfigError(
                f"{shown}: {name} does nothing with {other}: {show(whole[other])}. Leave it out, "
                f"or use {other}: {' or '.join(values)}."
            )
        if name not in written and is_read and entry.required:
            raise ConfigError(f"{shown} lacks {name}. Add it, such as {name}: {entry.default}.")
        if name in written:
            yield entry, written[name]
