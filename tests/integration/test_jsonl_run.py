"""Runs on .jsonl text: what a restart reads, and what it says of text that changed."""

import json
import os

import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")


def test_a_restart_reads_no_jsonl_file_through_and_trusts_no_changed_line(capfd, tmp_path):
    """The index is in the run's folder. Lines changed behind it end the run with 3, in one line."""
    line = json.dumps({"text": "in the beginning there was a byte, and it was even."}) + "\n"
    text = tmp_path / "text.jsonl"
    text.write_text(line * 60)
    keys = dict(dataset_type="text", dataset_path=text, vocab_size=257)
    keys |= dict(eval_interval=2, eval_steps=2)

    assert tools.run(tmp_path, "run", steps=1, **keys) == 0
    assert capfd.readouterr().out.count("reading 1 .jsonl files through") == 1
    assert (tmp_path / "run" / "line_index").exists()

    assert tools.run(tmp_path, "run", steps=2, **keys) == 0
    out = capfd.readouterr().out
    assert "resumed after step 1" in out and ".jsonl" not in out.replace(str(text), "")

    before = os.stat(text)
    text.write_text(("x" * (len(line) - 1) + "\n") * 60)
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tools.run(tmp_path, "run", steps=3, **keys) == 3
    (error,) = capfd.readouterr().err.strip().splitlines()
    assert error.startswith(f"DataError: {text} has changed since the run began")
