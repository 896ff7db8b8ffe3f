"""JSON that somebody else may have written."""

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for a value that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def fields(text: str | bytes) -> dict[str, Any]:
    """The object of a JSON text; {} where it is none, such as half a line of a killed process."""
    try:
        found = parse(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
