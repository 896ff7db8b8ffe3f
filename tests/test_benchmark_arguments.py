"""What benchmarks do not take, or cannot do here, in one line; their names beside the trainer's."""

import re
import signal
import subprocess

import pytest

from benchmarks import (
    bandwidth_model,
    islands_loss,
    islands_storm,
    link_faults,
    peer_torch,
    peer_torchft,
    quality,
    replica_cost,
    step_time,
    thin_link,
)
from benchmarks.link import arguments, hosts, rows
from maxdiloco.flags import base_yml

REFUSED = {
    bandwidth_model: [
        ("replicas=1", "replicas=1 is no whole number of 2"),
        ("size=1b", "size is unknown"),
    ],
    islands_loss: [
        ("rows=equal,calm", "rows=equal,calm: calm is none. Use some of equal,unlike,storm"),
        ("step_ms=1,,2", "step_ms=1,,2, seeds=3: not numbers. Use 400,200,100 and 3"),
        ("store=a", "store=a: store is no key. Use rows, seeds, step_ms, out"),
    ],
    islands_storm: [
        ("secondz=3", "secondz is no key. Use seconds, faults_per_hour, mbit, boxes"),
        ("step_ms=1,,2", "step_ms=1,,2 is no list of numbers. Use step_ms=50,100,200"),
    ],
    link_faults: [
        ("fault=kill", "fault is no key. Use "),
        ("moments=lunch", "use all, or some of: inner steps, in flight"),
    ],
    peer_torch: [
        ("compile=yes", "compile=yes is neither. Use true or false"),
        ("steps=-1 dataset_type=text", "steps=-1, .* Use steps of 1 or more"),
        ("mlp_activations=[relu] override_model_config=true", "tions=relu: torch's loop"),
    ],
    peer_torchft: [
        ("steps=5", "steps=5: steps is chosen for every row"),
        ("per_device_batch_size=0.5", "per_device_batch_size=0.5 is no whole number.*Use 4, say"),
        ("num_diloco_fragments=5", "num_diloco_fragments=5 does not suit torchft.*1 to 3 for 3"),
        ("diloco_sync_period=18 log_period=18", "diloco_sync_period=18 has to be a multiple"),
        ("num_communication_overlapping_steps=5", "steps=5 must be below .* = 5.*Use 4 or less"),
    ],
    quality: [
        ("scale=big", "scale=big is unknown. Use cpu or gpu"),
        ("rates=0.008", "rates=0.008 is not inner:outer. Use rates=0.008:0.7"),
        ("modes=diloko", "modes='diloko' is unknown. Use all, data parallel; "),
        ("stepz=3", "stepz=3: stepz is no key. Use scale, "),
    ],
    replica_cost: [
        ("replicas=4 per_device_batch_size=6", "batch_size=6 .* Use per_device_batch_size=8"),
    ],
    step_time: [
        ("compare=remat_policy", "compare=remat_policy is not one key.*Write, say, compare="),
        ("compare=dcn_data_parallelism:1,2", "compare=dcn_data_par.*other than.*Write, say"),
        ("steps=-1 dataset_type=text", "steps=-1, enable_diloco=True.*Use steps of 1 or"),
        ("enable_diloco=false", "enable_diloco=False.*leave enable_diloco out"),
    ],
    thin_link: [
        ("modes=eager,fast", "modes=eager,fast: 'fast' is not offered. Use all, or some of data_"),
        ("lines=data_parallel wires=int8", "wires=int8 and lines=data_parallel: .* Leave one of"),
        ("lines=data_parallel carriers=all", "carriers=all and lines=data_parallel: .* Leave one"),
        ("grid=all", "grid=all is not known. Use published"),
        ("rates=10,none", "rates=10,none: every rate is a number of Mbit/s.*or unlimited. Use"),
        ("log_period=7", "log_period=7 does not divide diloco_sync_period=20.*Use log_period=20"),
        ("steps=5", "steps=5: steps is chosen for every row. Use grid, hosts, "),
    ],
}


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """No process is started, and the signals of this one stay as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it runs something"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("benchmark", REFUSED)
def test_what_a_benchmark_does_not_take_is_one_line_and_exit_code_2(benchmark, capsys):
    for given, words in REFUSED[benchmark]:
        assert benchmark.main(given.split()) == 2, given
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ConfigError: ") and re.search(words, line), given


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("benchmark", [islands_storm, link_faults, peer_torchft, thin_link])
def test_a_machine_that_cannot_make_hosts_is_one_line_before_anything_is_made(
    monkeypatch, capsys, tmp_path, benchmark
):
    for user, absent, words in (
        (1000, "", "user id 1000 may not make network namespaces.* Run it as root."),
        (0, "ip", "the command ip is not there.* Install iproute2."),
        (0, "tc", "the command tc is not there.* Install iproute2."),
    ):
        monkeypatch.setattr(hosts.os, "geteuid", lambda user=user: user)
        there = {"ip": "ip", "tc": "tc"} | {absent: None}
        monkeypatch.setattr(hosts.shutil, "which", there.get)
        assert benchmark.main(["out=out"]) == 2
        assert re.fullmatch(f"ConfigError: {words}\n", capsys.readouterr().err)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("benchmark", [arguments, islands_loss, islands_storm, link_faults])
def test_the_names_of_a_benchmark_are_no_keys_of_the_trainer(benchmark):
    keys = set(base_yml.declared(rows.ROOT / "configs" / "base.yml"))
    assert set(benchmark.KEYS) <= keys and arguments.SET_HERE <= keys
    assert not set(benchmark.OWN) & keys
