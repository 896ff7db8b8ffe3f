"""Runs of several processes prepare their text, with a cache that they share and without one."""

import json

import pytest
from run import assert_exit_codes, output_of, start_cluster, train
from run_files import metrics_rows

from maxdiloco import plan, train_compile

pytestmark = pytest.mark.usefixtures("programs")

# A trainer that takes DELAY seconds for its first part: more than JAX waits at a start.
SLOW = """
import os
import time
from maxdiloco import train
from maxdiloco.data.prepared import part
make_part = part.make_part
def slow(*arguments):
    time.sleep(float(os.environ.pop("DELAY", "0")))
    return make_part(*arguments)
part.make_part = slow
train.main()
"""


@pytest.fixture
def text(tmp_path):
    """Keys of a run on a text."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "many words " * n}) + "\n" for n in range(1, 90)))
    return dict(dataset_type="text", dataset_path=path, vocab_size=257, steps=2, eval_interval=2)


def prepared(folder):
    return sorted(path.name for path in folder.iterdir())


def losses(run):
    return [row["learning/loss"] for row in metrics_rows(run)]


@pytest.mark.parametrize("shared", [True, False])
def test_processes_prepare_a_text_once_for_each_cache(tmp_path, text, shared):
    """~ is another folder for each process, unless HOME is the same. The second process takes 12 s,
    and JAX waits for 10 at a start."""
    homes = [tmp_path / "home0", tmp_path / ("home0" if shared else "home1")]
    for home in homes:
        home.mkdir(exist_ok=True)
    environs = [{"HOME": str(home)} for home in homes]
    environs[1 - shared]["DELAY"] = "12"
    # With one device in a slice both cases share compiled programs.
    keys = text | dict(data_cache_directory="~/cache", ici_fsdp_parallelism=1)
    keys |= dict(jax_distributed_initialization_timeout=10)
    processes = start_cluster(
        2, tmp_path / "run", environs=environs, program=None if shared else SLOW, **keys
    )
    assert_exit_codes(processes, 0, 0)
    (name,) = {name for home in homes for name in prepared(home / "cache")}
    assert all((home / "cache" / name / "manifest.json").exists() for home in homes)
    assert train(tmp_path / "alone", **text).code == 0
    assert prepared(tmp_path / "prepared") == [name]


def test_processes_with_other_texts_are_refused(tmp_path, text):
    """Their files have one path and other contents, as on two hosts."""
    homes = [tmp_path / "home0", tmp_path / "home1"]
    for home in homes:
        home.mkdir()
        (home / "text.txt").write_text(f"text of {home.name} " * 400)
    keys = text | dict(data_cache_directory="~/cache", dataset_path="~/text.txt")
    environs = [{"HOME": str(home)} for home in homes]
    processes = start_cluster(2, tmp_path / "run", environs=environs, **keys)
    assert_exit_codes(processes, 3, 3)


def test_a_plan_and_a_compilation_prepare_nothing(tmp_path, text):
    keys = dict(base_output_directory=tmp_path / "runs", model_name="tiny", hardware="cpu")
    keys |= text | dict(max_target_length=16, vocab_size=384)
    words = [f"{key}={value}" for key, value in keys.items()]
    slices = ("dcn_diloco_parallelism=2", "num_diloco_replicas=2")
    output_of(plan.main, *words, "dcn_bandwidth_gbps=1", "step_time=1", *slices)
    output_of(train_compile.main, *words)
    assert not (tmp_path / "runs").exists()
    assert train(tmp_path / "runs" / "run", **text).code == 0
    assert prepared(tmp_path / "runs" / "prepared")
