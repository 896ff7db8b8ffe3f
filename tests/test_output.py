"""What is printed drives no terminal."""

import pytest

from maxdiloco import output


@pytest.mark.parametrize("say", [output.say, output.say_error])
def test_control_characters_are_escaped_but_lines_and_tabs(say, capfd):
    """As of generated text: a title, a cleared screen, a bell, a C1 code, a lone return."""
    say("a\tb\nc \x1b]0;x\x07 \x1b[2J \x9b1m d\re \u2028 \u00e9\U0001f600")
    said = "".join(capfd.readouterr())
    assert said == ("a\tb\nc \\x1b]0;x\\x07 \\x1b[2J \\x9b1m d\\re \\u2028 \u00e9\U0001f600\n")


def test_one_line_escapes_line_feeds_and_tabs_too():
    assert output.one_line("a\tb\nc") == "a\\tb\\nc"


def test_progress_is_lines_where_no_bar_is_shown(monkeypatch):
    """3 GB of 4 GB in parts of 1 GB: nothing at 4 s, 75% at 12 s with 6 s left, nothing at the end.

    1 GB was done before, so 2 GB took the 12 s.
    """
    monkeypatch.setattr(output, "shows_bars", lambda: False)
    lines, now = [], iter([0.0, 4.0, 12.0, 18.0])
    with output.progress(
        "tokenised", 4 * 10**9, lines.append, done=10**9, clock=now.__next__
    ) as advance:
        for _ in range(3):
            advance(10**9)
    (line,) = lines
    assert all(word in line for word in ("tokenised", "75%", "4,000 MB", "6 s"))
