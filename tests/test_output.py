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
