"""Which exits run_local_slices.sh --restart starts again, with a stand-in for the trainer."""

import os
import re
import signal
import sys
import time

import pytest
from run import ROOT, Process, session_members

# Ends with the code that CODES has for this life and process: "life 0 process 0,...;life 1 ...".
STAND_IN = """#!/usr/bin/env bash
if [ "$2" != maxdiloco.train ]; then exec {python} "$@"; fi
lives=$FOLDER/lives.$JAX_PROCESS_ID
echo >>"$lives"
code=$(cut -d';' -f"$(wc -l <"$lives")" <<<"$CODES" | cut -d, -f"$((JAX_PROCESS_ID + 1))")
if [ "$code" = killed ]; then kill -KILL $$; fi
exit "$code"
"""
SAYS = "run_local_slices: "
# Codes of each life's processes; arguments; the code it ends with, which may be any process's; and
# its own lines.
CASES = [
    # It starts again, and ends with the code of the last life.
    (
        "killed,5;143,143;75,75;134,5;0,0",
        "--restart 9 2 run_name=a",
        "0",
        [
            SAYS + "restart 1 of 9: .*",
            SAYS + r"restart 2 of 9: .* \(SIGTERM\).",
            SAYS + "restart 3 of 9: .* 75.",
            SAYS + "restart 4 of 9: .*",
        ],
    ),
    # The cause is told, and the restarts end.
    (
        "5;137;5",
        "--restart 2 1 run_name=a",
        "5",
        [
            SAYS + "restart 1 of 2: process 0 ended first, with exit code 5.",
            SAYS + r"restart 2 of 2: process 0 ended first, with exit code 137 \(SIGKILL\).",
            SAYS + "process 0 ended first, with exit code 5; no restart of 2 is left.",
        ],
    ),
    # What would come again is not tried again, whichever process ends first; nor anything unasked.
    *(
        (codes, "--restart 2 2 run_name=a", codes, [])
        for codes in ("1,5", "5,2", "3,3", "4,5", "130,130")
    ),
    ("5,5;0,0", "2 run_name=a", "5", []),
    # Flags that cannot be resumed: told once, before any process starts.
    ("0,0", "--restart 2 2", "2", ["ConfigError: run_name is not set, .*"]),
    *(
        ("0,0", f"--restart 2 2 run_name=a {flag}", "2", [f"ConfigError: {flag}.*"])
        for flag in ("enable_checkpointing=false", "stepps=3")
    ),
    ("0,0", "--restart 2x 2", "2", [SAYS + "--restart 2x is not a number of restarts. usage: .*"]),
]


@pytest.mark.parametrize("codes, arguments, code, lines", CASES)
def test_a_run_starts_again_where_that_may_help(tmp_path, codes, arguments, code, lines):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "run_local_slices.sh"), *arguments.split()]
    environ = {"MAXDILOCO_VENV": str(tmp_path), "FOLDER": str(tmp_path), "CODES": codes}
    process = Process(command, environ)
    assert str(process.wait_for_exit()) in code.split(",")
    told = process.output.splitlines()
    told = [line for line in told if line.startswith((SAYS, "ConfigError: "))]
    assert len(told) == len(lines)
    for line, words in zip(told, lines, strict=True):
        assert re.fullmatch(words, line)


WAITS = """#!/usr/bin/env bash
if [ "$2" != maxdiloco.train ]; then exec {python} "$@"; fi
trap 'echo told' INT TERM HUP
echo begun
while :; do sleep 1; done
"""


def test_processes_do_not_outlive_a_script_that_was_killed(tmp_path):
    """Nothing tells a script of SIGKILL, or its processes: they notice, and end within seconds."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(WAITS.format(python=sys.executable))
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "run_local_slices.sh"), "2", "run_name=a"]
    process = Process(command, {"MAXDILOCO_VENV": str(tmp_path)})
    try:
        for index in range(2):
            process.wait_for_output(f"[{index}] begun")
        os.kill(process.popen.pid, signal.SIGKILL)
        # Not yet waited for: a zombie is gone, too.
        limit = time.monotonic() + 15
        while len(left := session_members(process.popen.pid)) > 0:
            assert time.monotonic() < limit, left
            time.sleep(0.05)
    finally:
        process.kill_session()
