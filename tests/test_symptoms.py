"""Short runs: the trainer accepts each, the table and the figures say what they are."""

import json

import pytest

from benchmarks import symptoms
from benchmarks.learning import draw_cases
from benchmarks.learning.cases import FIRST_HOUR, GROUPS, SYMPTOMS
from maxdiloco.flags import config


def series(steps, loss, **more):
    return [{"step": t, "learning/loss": loss, "eval/loss": loss + 1 / t} | more for t in steps]


def found_of(cases):
    more = {"diloco/outer_grad_cosine": 0.4, "diloco/outer_update_ratio": 0.1}
    more |= {"diloco/drift": 1e-3, "eval/loss_replica_0": 2.0, "eval/loss_replica_1": 2.2}
    return {case.name: series((100, case.keys.get("steps", 200)), 2.0, **more) for case in cases}


@pytest.mark.parametrize("case", [*SYMPTOMS, *FIRST_HOUR], ids=lambda case: case.name)
def test_every_case_is_a_run_that_the_trainer_accepts(case, tmp_path):
    keys = symptoms.keys_of(case, {}, tmp_path)
    cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
    replicas = cfg.num_diloco_replicas if cfg.enable_diloco else 1
    assert replicas * cfg.per_device_batch_size == 16


def test_every_symptom_is_drawn_beside_a_run_that_lacks_it():
    found = found_of(SYMPTOMS)
    for case in filter(lambda case: case.metric, SYMPTOMS):
        text = draw_cases.figure(case, found[case.name], found[case.beside], found)
        assert case.metric in text and case.beside in text and text.count("<polyline") > 10


@pytest.mark.parametrize("group", GROUPS)
def test_the_table_compares_with_data_parallelism_of_as_many_steps(group):
    """2 + 1/200 is what all runs of 200 steps have."""
    lines = symptoms.table(GROUPS[group], found_of(GROUPS[group])).splitlines()
    assert len(lines) == 2 + len(GROUPS[group])
    compared = [line for line in lines[2:] if "data parallel" not in line and "text" not in line]
    assert len(compared) >= 4 and all("+0.0%" in line for line in compared)
    assert not any("%" in line for line in lines[2:] if line not in compared)
    assert "| 0.4 | 0.1 | 0.001 |" in lines[3]


def test_a_case_that_is_there_is_not_run_again(tmp_path):
    case = SYMPTOMS[0]
    folder = tmp_path / symptoms.folder_name(case) / "run"
    folder.mkdir(parents=True)
    rows = series((100, 200), 2.0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert symptoms.rows_of(case, {}, tmp_path) == rows
