"""Trimmed texts of programs compiled for v5e:2x2, with rounder numbers of cycles."""

import pathlib

BESIDE_LOOP = (pathlib.Path(__file__).parent / "data/beside_loop.txt").read_text()
IN_CONDITIONAL = (pathlib.Path(__file__).parent / "data/in_conditional.txt").read_text()


def changed(text: str, old: str, new: str) -> str:
    """The text with every `old` replaced, of which there has to be one."""
    assert old in text
    return text.replace(old, new)
