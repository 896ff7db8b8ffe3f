"""The hints on language: which sentences they name, which they leave, and in which lines."""

import subprocess

import pytest
from test_documents import script

language = script("plain_language")


def patterns(name, content):
    return [found.pattern for found in language.findings(name, content)]


@pytest.mark.parametrize(
    ("pattern", "caught", "left"),
    [
        ("clause for a noun", "This is what crosses the link.", "What does it cost?"),
        ("of without its noun", "Of a state; the rest.", "The loss of a state."),
        ("preposition", "It runs beside the step.", "It runs concurrently with the step."),
        ("word after its noun", "Process 0 alone writes.", "A stand-alone program."),
        ("negated noun", "It is no folder.", "It is no longer a folder."),
        ("negated noun", "It is no folder.", "There is no folder."),
        ("personified software", "A line says so.", "The log has a line."),
        ("all-purpose verb", "The run goes on.", "The run continues."),
        ("private noun", "The mean of theta.", "The mean of the outer parameters (theta)."),
        ("private noun", "The mean of theta.", "The step: theta = 8 - 2."),
        ("distant reference", "It has so many rows.", "It has ten rows."),
        ("long sentence", "A word" + " more" * 24 + ".", "A word" + " more" * 23 + "."),
        ("long sentence", "A word" + " more" * 24 + ".", "A sum:" + " 2 +" * 24 + " 2."),
        ("long sentence", "A word" + " more" * 24 + ".", "name" + " name" * 30),
    ],
)
def test_a_pattern_is_found_in_every_kind_of_prose(pattern, caught, left):
    for name, frame in (
        ("page.md", "# Title\n\n* {}\n"),
        ("module.py", '"""{}"""\n'),
        ("module.py", 'def f():\n    """Title.\n\n    {}\n    """\n'),
        ("module.py", "x = 1  # {}\n"),
        ("module.py", 'raise ValueError("{}")\n'),
        ("script.sh", "# {}\n"),
    ):
        assert patterns(name, frame.format(caught)) == [pattern], name
        assert patterns(name, frame.format(left)) == [], name


def test_code_in_markdown_is_not_prose():
    code = "```\nwhat crosses\n```\nThe `theta` of [it](theta.md).\n\n    beside\n"
    assert patterns("page.md", code) == []
    assert patterns("page.md", code + "\nbeside\n") == ["preposition"]


def test_the_cells_of_a_table_and_the_comments_of_lines_are_texts_of_their_own():
    """Thirteen words each: two of them would be a long sentence."""
    words = "a cell" + " more" * 11
    assert patterns("module.py", f'"""Table.\n\n{words}  {words}\n{words}  beside\n"""\n') == [
        "preposition"
    ]
    assert patterns("module.py", f"x = 1  # {words}\ny = 2  # {words}\n") == []
    assert patterns("module.py", f"# {words}\n# {words}\n") == ["long sentence"]


def test_a_command_in_a_comment_is_not_prose():
    words = "a word" + " more" * 11
    comment = f"# {words}\n# python -m beside\n# {words}\n"
    assert patterns("recipe.yml", comment) == []
    assert patterns("recipe.yml", comment.replace("python -m ", "")) == [
        "preposition",
        "long sentence",
    ]


def test_the_name_of_an_argument_is_not_a_clause():
    assert patterns("module.py", '"""Title.\n\nArgs:\n  what: a name.\n"""\n') == []


def test_an_item_of_a_list_is_read_to_its_end():
    """A continued line may be indented like code, and may contain a number with a full stop."""
    item = "10. A part of version 1. It runs\n    beside the step.\n"
    (found,) = language.findings("page.md", item)
    assert (found.first, found.last, found.sentence) == (1, 2, "It runs beside the step.")


def test_only_changed_lines_are_printed_and_the_exit_code_is_0(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    page = tmp_path / "page.md"
    page.write_text("It runs beside the step.\n\nA sentence.\n")
    git("init", "-b", "main")
    git("add", ".")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    git(*author, "commit", "-m", "page")
    monkeypatch.chdir(tmp_path)
    assert language.main([]) == 0 and capsys.readouterr().out == ""
    page.write_text("It runs beside the step.\n\nA sentence of theta.\n")
    (tmp_path / "new.py").write_text("# What it holds.\n")
    assert language.main([]) == 0
    printed = capsys.readouterr().out
    assert "page.md:3: private noun" in printed and "new.py:1: clause for a noun" in printed
    assert "preposition" not in printed
