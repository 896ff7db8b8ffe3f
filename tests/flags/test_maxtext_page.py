"""docs/maxtext.md says what the code does with MaxText's keys, and what base.yml's defaults are."""

import pathlib
import re

from maxdiloco.flags import base_yml, config, maxtext
from maxdiloco.flags.other_names import OTHER_NAMES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/maxtext.md").read_text(encoding="utf-8")
KEYS = base_yml.declared()
FOREIGN = maxtext.foreign_keys()


def section(title):
    """The text under a heading."""
    (found,) = re.findall(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE)
    return found


def rows(title):
    """Cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    assert len(lines) > 2, title
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(text):
    return re.findall(r"`(\w+)`", text)


def test_our_column_of_defaults_is_base_yml():
    """Positive control of the comparison: the columns of MaxText differ from ours in every row."""
    table = rows("The same with another default")
    ours = {names(key)[0]: here for key, _, here, _ in table}
    assert ours == {name: base_yml.show(KEYS[name].default) or "empty" for name in ours}
    assert all(theirs != here for _, theirs, here, _ in table)
    assert {"learning_rate", "adam_b2", "diloco_sync_period", "diloco_outer_lr"} <= set(ours)


def test_a_key_stands_in_one_of_the_tables_of_defaults():
    same = names(section("The same, default included"))
    other = [names(row[0])[0] for row in rows("The same with another default")]
    assert len(same) == len(set(same)) > 50
    assert set(same) <= set(KEYS)
    assert not set(same) & set(other)


def test_the_other_names_are_those_of_the_code():
    assert {names(old)[0]: names(new)[0] for old, new in rows("Other names")} == OTHER_NAMES


def test_the_other_values_are_those_of_the_code():
    table = {tuple(re.search(r"`(\w+)=([\w-]+)`", cell[0]).groups()): cell[1]
             for cell in rows("Other values")}  # fmt: skip
    assert table.keys() == maxtext.VALUES.keys() | maxtext.REFUSED.keys()
    for where, (own, _) in maxtext.VALUES.items():
        assert table[where].startswith(f"`{own}`")
    for where in maxtext.REFUSED:
        assert table[where].startswith("refused")


def test_what_the_page_calls_not_needed_is_dropped_whatever_its_value():
    """Positive control: a key of the other table is refused with such a value."""
    listed = [name for row in rows("Not needed") for name in names(row[0])]
    given = {name: config.Given("strange", "here") for name in listed}
    notes = []
    assert maxtext.taken(given, KEYS, notes.append) == {}
    assert len(notes) == 1
    assert not re.fullmatch(maxtext.foreign("quantization", FOREIGN).harmless, "strange")


def test_what_the_page_calls_not_here_is_refused_with_a_value_of_its_own():
    for row in rows("Not here"):
        for name in names(row[0]):
            assert not re.fullmatch(maxtext.foreign(name, FOREIGN).harmless, "strange"), name


def test_every_entry_of_the_code_is_on_the_page():
    listed = {name for title in ("Not needed", "Not here") for row in rows(title)
              for name in names(row[0])}  # fmt: skip
    for entry in FOREIGN:
        assert any(maxtext.foreign(name, FOREIGN) is entry for name in listed), entry.names
