"""JSON that somebody else may have written."""

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for a value that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
