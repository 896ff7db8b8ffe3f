"""When run_local_slices.sh --restart starts a run again, with a stand-in for the trainer."""

import sys

import process_tools as tools
import pytest

# Ends with the code that CODES has for this life and process: "life 0 process 0,...;life 1 ...".
STAND_IN = """#!/usr/bin/env bash
if [ "$2" != maxdiloco.train ]; then exec {python} "$@"; fi
lives=$FOLDER/lives.$JAX_PROCESS_ID
echo >>"$lives"
code=$(cut -d';' -f"$(wc -l <"$lives")" <<<"$CODES" | cut -d, -f"$((JAX_PROCESS_ID + 1))")
if [ "$code" = killed ]; then kill -KILL $$; fi
exit "$code"
"""
NAMED = "run_name=a"
SAYS = "run_local_slices: "


@pytest.fixture
def script(tmp_path):
    """Runs the script for processes that end with these codes: its code, and its own lines."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)

    def run(codes, *arguments):
        command = ["bash", str(tools.ROOT / "scripts" / "run_local_slices.sh"), *arguments]
        environ = {"MAXDILOCO_VENV": str(tmp_path), "FOLDER": str(tmp_path), "CODES": codes}
        process = tools.Process(command, tmp_path / "log", environ)
        code = process.end()
        lines = process.text().splitlines()
        return code, [line for line in lines if line.startswith((SAYS, "ConfigError: "))]

    return run


def test_a_run_that_lost_processes_starts_again_and_ends_with_the_code_of_the_last_life(script):
    codes = "killed,5;143,143;75,75;134,5;0,0"
    code, lines = script(codes, "--restart", "9", "2", NAMED)
    assert code == 0
    assert [line.partition(" of 9: ")[0] for line in lines] == [
        f"{SAYS}restart {n}" for n in (1, 2, 3, 4)
    ]
    assert [line.rpartition(" ")[2] for line in lines[1:3]] == ["(SIGTERM).", "75."]


def test_the_cause_is_told_and_the_restarts_end(script):
    code, lines = script("5;137;5", "--restart", "2", "1", NAMED)
    assert code == 5
    assert lines == [
        f"{SAYS}restart 1 of 2: process 0 ended first, with exit code 5.",
        f"{SAYS}restart 2 of 2: process 0 ended first, with exit code 137 (SIGKILL).",
        f"{SAYS}process 0 ended first, with exit code 5; no restart of 2 is left.",
    ]


@pytest.mark.parametrize(
    "codes, restart",
    [*((codes, ["--restart", "2"]) for codes in ("1,5", "5,2", "3,3", "4,5", "130,130")),
     ("5,5;0,0", [])],
)  # fmt: skip
def test_what_would_come_again_is_not_tried_again_nor_anything_unasked(script, codes, restart):
    """Whichever process ends first. The control: the codes above, which are."""
    code, lines = script(codes, *restart, "2", NAMED)
    assert str(code) in codes.partition(";")[0].split(",")
    assert lines == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["2", "2"], "ConfigError: run_name is not set, but a restart goes on from the last"),
        (["2", "2", NAMED, "enable_checkpointing=false"], "ConfigError: enable_checkpointing=fals"),
        (["2", "2", NAMED, "stepps=3"], "ConfigError: stepps=3"),
        (["2x", "2"], f"{SAYS}--restart 2x is not a number of restarts. usage: bash"),
    ],
)
def test_a_restart_needs_flags_that_can_be_resumed(script, arguments, words):
    """Told once, before any process starts."""
    code, (line,) = script("0,0", "--restart", *arguments)
    assert code == 2
    assert line.startswith(words)
