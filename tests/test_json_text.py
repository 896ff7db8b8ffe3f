"""JSON that a stranger wrote never ends in a traceback, whichever file of a run it is."""

import pathlib

import pytest

from maxdiloco import json_text

PACKAGE = pathlib.Path(json_text.__file__).parent
# What these read was written by this program a moment before, or was parsed already.
OWN_WORDS = {
    "json_text.py",
    "cluster/coordination.py",
    "huggingface/harness.py",
    "islands/processes.py",
}


def test_endless_nesting_is_a_value_error_of_the_parser_of_all():
    """json raises RecursionError, which callers that expect a broken text do not catch."""
    assert json_text.parse(b'{"a": [1, null]}') == {"a": [1, None]}
    for text in ("[" * 100_000, '{"a":' * 100_000, b"[" * 100_000):
        with pytest.raises(ValueError, match="nested"):
            json_text.parse(text)
    with pytest.raises(ValueError, match="char 0"):
        json_text.parse("")
    # By every file: tests of each reader show that it catches a ValueError.
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    direct = {path for path, text in texts.items() if "json.load" in text}
    assert {path.relative_to(PACKAGE).as_posix() for path in direct} == OWN_WORDS
    assert sum("json_text.parse(" in text for text in texts.values()) > 9
