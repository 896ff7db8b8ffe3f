"""Read JSON that another program or person may have written."""

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for too deeply nested values."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def fields(text: str | bytes) -> dict[str, Any]:
    """Return the object in a JSON text; {} if there is none, as in a line cut by a kill."""
    try:
        found = parse(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
