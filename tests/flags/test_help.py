"""What --help, --version and `python -m maxdiloco` print."""

import pathlib
import re

from maxdiloco import __main__, train
from maxdiloco.flags import base_yml, help
from maxdiloco.version import __version__

KEYS = base_yml.declared()
ROOT = pathlib.Path(__file__).parents[2]


def table(text):
    """{key: (its group, its text in one line)} of what --help prints."""
    group, name, found = "", "", {}
    for line in text.splitlines():
        if re.match(r"\w+: ", line):
            group = line
        elif match := re.match(r"  (\w+)=(.*)", line):
            name = match[1]
            found[name] = (group, match[2])
        elif name and line.startswith("      "):
            found[name] = (group, f"{found[name][1]} {line.strip()}")
    return found


def test_help_lists_every_key_under_its_group_with_default_and_meaning():
    text = help.help_text("maxdiloco.train")
    assert text.splitlines()[0] == "usage: python -m maxdiloco.train [file.yml] [key=value ...]"
    assert "Model names: default, 10b, " in text
    found = table(text)
    assert list(found) == list(KEYS)
    for name, key in KEYS.items():
        assert found[name][0] == key.group
        assert found[name][1].startswith(f"{base_yml.show(key.default)}  {key.meaning}")
    assert found["num_communication_overlapping_steps"][1].endswith(
        "(tau). [>= 0; inner steps; may change on resume]"
    )
    for program in ("train", "train_compile"):
        lines = help.help_text(f"maxdiloco.{program}").splitlines()
        assert max(map(len, lines)) <= help.WIDTH


def test_help_of_a_group_a_key_and_a_part_of_a_name(capsys):
    of_group = table(help.help_text("maxdiloco.train", ["diloco"]))
    assert list(of_group) == [key.name for key in KEYS.values() if key.group.startswith("diloco:")]
    some = table(help.help_text("maxdiloco.train", ["momentum", "run_name"]))
    assert list(some) == ["run_name", "diloco_outer_momentum"]
    assert train.main(["steps=5", "--help", "steps"]) == 0
    assert list(table(capsys.readouterr().out)) == ["steps"]
    assert train.main(["--help", "colour"]) == 2
    line = capsys.readouterr().err
    assert re.match("ConfigError: --help colour: no group.*Groups: run, checkpoint", line)


def test_every_program_says_its_version(capsys):
    """That of setup.py."""
    assert train.main(["steps=5", "--version"]) == 0
    assert capsys.readouterr().out == f"maxdiloco {__version__}\n"
    assert f'version="{__version__}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_package_lists_its_programs_and_what_they_do(capsys):
    assert __main__.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= help.WIDTH
    for name in ("train", "train_compile", "generate", "evaluate", "prepare", "tokenizer"):
        (line,) = [line for line in lines if f" -m maxdiloco.{name} " in line]
        assert re.search(rf"maxdiloco\.{name} +[A-Z]\w* .+", line)
    assert __main__.main(["train"]) == 2
    assert "Run `python -m maxdiloco.train`" in capsys.readouterr().err
