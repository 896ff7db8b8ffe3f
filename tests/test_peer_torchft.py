"""The benchmark beside torchft: its environment, what is checked of torchft, the table by hand.

torch is no dependency: its process runs only in the benchmark, in an environment of its own.
"""

import subprocess

import pytest
from thin_link_rows import measured

from benchmarks import peer_torchft
from benchmarks.link import torchft_rows
from benchmarks.link.rows import RowError
from maxdiloco.errors import ConfigError


def test_an_environment_that_pip_cannot_make_is_refused_with_pips_last_line(tmp_path, monkeypatch):
    words = "ERROR: No matching distribution found for torchft==0.2.0"

    def run(command, *, stdout, **_):
        (tmp_path / "venv").mkdir(exist_ok=True)
        print(words, file=stdout, flush=True)
        return subprocess.CompletedProcess(command, int("pip" in command))

    monkeypatch.setattr(torchft_rows.subprocess, "run", run)
    words = f"out={tmp_path}: .* found for torchft==0.2.0 .*pip.log.*needs a package index"
    with pytest.raises(ConfigError, match=words):
        torchft_rows.environment(tmp_path, torchft_rows.REQUIREMENTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commits": 11}, "made 11 exchanges of 12 among 2 replicas"),
        ({"participants": 1}, "among 1 replicas of 2"),
        ({"exchanged": [[0, 21, 500]]}, r"of fragments \[0\] of 2"),
        ({"exchanged": [[0, 21, 500], [1, 22, 601]]}, "fragment 1 has 2 values .* and 2 after it"),
        ({"exchanged": [[0, 11, 500], [1, 22, 600]]}, "fragment 0 has 1 values on 2 replicas"),
    ],
)
def test_a_torchft_that_does_not_exchange_is_found(changes, message):
    """120 steps, one of two fragments every 10, of two replicas."""
    job = {"steps": 120, "replicas": 2}
    job["spec"] = {"num_diloco_fragments": 2, "diloco_sync_period": 20}
    one, other = (
        {"commits": 12, "participants": 2, "exchanged": [[0, value, 500], [1, value + 1, 600]]}
        for value in (11, 21)
    )
    torchft_rows.check_exchanges([one, other], job)
    with pytest.raises(RowError, match=message):
        torchft_rows.check_exchanges([one, other | changes], job)


# -- figures ------------------------------------------------------------------------------------


def test_payload_of_a_ring_over_float32():
    """M=2: every host sends the model once a period; M=4: 2 * 3 / 4 of it."""
    keys = {"diloco_sync_period": "20"}
    report = {"parameters": 1000}
    assert torchft_rows.payload(report, {"hosts": 2, "keys": keys}) == 4000 / 20
    assert torchft_rows.payload(report, {"hosts": 4, "keys": keys}) == 6000 / 20


@pytest.fixture
def both():
    """Plain 200 and 100 ms; at 10 Mbit/s 250 and 400. 1,000 bytes of payload a step for both."""
    plain = dict(wire="", carrier="", rate="unlimited", sent_per_step=[100.0, 100.0])
    theirs = {"trainer": "torchft", "versions": {"torchft": "0.2.0", "torch": "2.13.0"}}
    carried = dict(sent_per_step=[1150.0, 1150.0], claimed_per_step=1000.0)
    return [
        measured("plain", 198.0, trainer="maxdiloco", **plain),
        measured("plain", 100.0, **theirs, **plain),
        measured("overlapped", 250.0, trainer="maxdiloco", **carried),
        measured("overlapped", 400.0, **theirs, **carried),
        measured("plain", 202.0, trainer="maxdiloco", **plain),
    ]


def test_each_trainer_is_compared_with_its_own_plain_step(both):
    setup, _, _ = peer_torchft.arguments([])
    lines = torchft_rows.table(both, setup).splitlines()
    assert "plain step maxdiloco 198.0 and 202.0 ms, torchft 100.0 ms" in lines[0]
    assert "torchft 0.2.0, torch 2.13.0, bucketization off" in lines[0]
    # 200 / 250, 250 - 200; 100 / 400, 400 - 100; (1,150 - 100) / 1,000 bytes.
    assert lines[4] == "| maxdiloco | float32 | 10 | 250.0 | 80.0% | 50.0 | 1.1 | 1.050 | 9.5 |"
    assert lines[5] == "| torchft | float32 | 10 | 400.0 | 25.0% | 300.0 | 1.1 | 1.050 | 9.5 |"


def test_bytes_other_than_the_payload_end_with_code_one(both, tmp_path, capsys):
    setup, _, _ = peer_torchft.arguments([])
    assert peer_torchft.report(tmp_path, setup, both) == 0
    assert (tmp_path / "table.md").read_text() == torchft_rows.table(both, setup)
    both[3]["claimed_per_step"] = 2000.0  # (1,150 - 100) / 2,000
    assert peer_torchft.report(tmp_path, setup, both) == 1
    assert "bytes: torchft float32 at 10 Mbit/s: 0.525 of the payload" in capsys.readouterr().out
