"""The benchmark beside torchft: its arguments, what is checked of torchft, the table's arithmetic.

torch is no dependency: its process runs only in the benchmark, in an environment of its own.
"""

import json
import pathlib
import subprocess
import sys
import types

import pytest
from thin_link_rows import measured

from benchmarks import peer_torchft
from benchmarks.link import torchft_process, torchft_rows
from benchmarks.link.rows import Row, RowError
from maxdiloco.errors import ConfigError

# -- arguments ----------------------------------------------------------------------------------


def test_turns_alternate_between_the_trainers_and_begin_and_end_with_both_plain_steps():
    _, turns, _ = peer_torchft.arguments(["rates=unlimited,5"])
    plain, again = Row("plain"), Row("plain", turn=1)
    at_rates = [
        (trainer, Row("overlapped", wire, carrier, rate))
        for rate in ("unlimited", "5")
        for trainer, wire, carrier in (
            ("maxdiloco", "float32", "host"),
            ("torchft", "float32", "gloo"),
            ("maxdiloco", "float4_e3m0", "host"),
        )
    ]
    assert turns == [
        ("maxdiloco", plain), ("torchft", plain), *at_rates,
        ("maxdiloco", again), ("torchft", again),
    ]  # fmt: skip


def test_the_keys_of_the_model_are_the_trainers_and_torchft_gets_them():
    setup, turns, out = peer_torchft.arguments(["periods=3", "vocab_size=1000"])
    plain, job = (
        torchft_rows.job(1, ["10.77.0.1", "10.77.0.2"], row, setup, out / "logs")
        for _, row in turns[1:3]
    )
    assert job["exchange"] and not plain["exchange"]
    # 2 periods before the window, 3 in it, 1 for the checks, of 20 steps.
    assert (job["steps"], job["replicas"], job["fast_ms"]) == (6 * 20, 2, 120.0)
    assert set(job["spec"]) == set(torchft_rows.SPEC)
    assert (job["spec"]["vocab_size"], job["spec"]["base_mlp_dim"]) == (1000, 544)
    assert json.loads(json.dumps(job)) == job


# -- torchft's environment and process ----------------------------------------------------------


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """What is run to make an environment; `says` is pip's last word, and its failure."""
    found = types.SimpleNamespace(ran=[], says="")

    def run(command, *, stdout, **_):
        found.ran.append(command)
        (tmp_path / "venv").mkdir(exist_ok=True)
        failed = "pip" in command and found.says
        print(found.says if failed else "", file=stdout, flush=True)
        return subprocess.CompletedProcess(command, int(bool(failed)))

    monkeypatch.setattr(torchft_rows.subprocess, "run", run)
    return found


def test_an_environment_that_is_there_is_used_again_and_one_of_other_versions_is_not(tmp_path, pip):
    wanted = torchft_rows.REQUIREMENTS
    python = torchft_rows.environment(tmp_path, wanted)
    assert python == tmp_path / "venv" / "bin" / "python"
    assert [command[:3] for command in pip.ran] == [
        [sys.executable, "-m", "venv"], [str(python), "-m", "pip"],
    ]  # fmt: skip
    assert torchft_rows.environment(tmp_path, wanted) == python and len(pip.ran) == 2
    torchft_rows.environment(tmp_path, ("torchft==0.0.1",))
    assert pip.ran[3][-1] == "torchft==0.0.1"


def test_an_environment_that_pip_cannot_make_is_refused_with_pips_last_line(tmp_path, pip):
    pip.says = "ERROR: No matching distribution found for torchft==0.2.0"
    words = f"out={tmp_path}: .* found for torchft==0.2.0 .*pip.log.*needs a package index"
    with pytest.raises(ConfigError, match=words):
        torchft_rows.environment(tmp_path, torchft_rows.REQUIREMENTS)


def test_the_process_of_torchft_runs_as_a_file_without_torch_or_a_package_of_ours():
    """Its functions import torch; -I as in the benchmark: no path but the standard library's."""
    path = pathlib.Path(torchft_process.__file__)
    code = f"import runpy; runpy.run_path({str(path)!r}, run_name='driver')"
    command = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


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


def test_models_of_different_size_are_not_compared(both):
    peer_torchft.same_model(both)
    both[1]["parameters"] += 64
    with pytest.raises(RowError, match="the models have 1000000 and 1000064 parameters"):
        peer_torchft.same_model(both)
