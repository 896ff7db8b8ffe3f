"""The benchmark of a step: what it prints and checks, and that it needs few packages."""

import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import step_time

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = ROOT / "benchmarks" / "step_time.py"
SMALL = (
    "hardware=cpu model_name=tiny override_model_config=true base_emb_dim=16 base_mlp_dim=16 "
    "base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 vocab_size=64 "
    "max_target_length=32 per_device_batch_size=2 dtype=float32 steps=2 "
    "opt_type=sgd"
).split()

# Packages a GPU machine with a bare JAX does not have.
WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"grain", "orbax", "tensorboardX", "tqdm", "etils"}:
            raise ModuleNotFoundError(f"{name} is absent", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without_packages(program, *argv):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, str(program), *argv],
        cwd=ROOT,
        # Less work for the compiler; figures do not matter here.
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_both_trainers_side_by_side_without_the_packages_of_the_trainer():
    """Two emulated slices; the plain step costs no more than data parallelism on one slice."""
    ran = without_packages(PROGRAM, *SMALL, "dcn_diloco_parallelism=2")
    lines = ran.stdout.splitlines()
    assert ran.stderr == "" and ran.returncode == 0
    assert any(line.split() == ["data", "parallel", "DiLoCo"] for line in lines)
    for name in ("tokens/s", "TFLOP/s a device", "compile [s]", "CPU time of a step, median [s]"):
        assert len([line for line in lines if line.startswith(name)]) == 1, name
    check = lines[-1]
    assert check.startswith("DiLoCo / data parallel on one slice: FLOPs ")
    assert check.endswith("no more than 2% above")


def test_the_absent_packages_are_absent():
    """Positive control: what the trainer imports fails in the same way."""
    ran = without_packages(ROOT / "maxdiloco" / "trainer/training.py")
    assert ran.returncode == 1 and "ModuleNotFoundError: etils is absent" in ran.stderr


@pytest.mark.parametrize(
    ("flops", "bytes_accessed", "fine"),
    [(102.0, 90.0, True), (103.0, 100.0, False), (100.0, 103.0, False)],
)
def test_costs_above_the_tolerance(flops, bytes_accessed, fine):
    """2 % of 100 is 2: 102 is no more, 103 is; each of the two counts, and less is welcome."""
    alone = step_time.Cost(100.0, 100.0)
    assert step_time.is_no_more(step_time.Cost(flops, bytes_accessed), alone) is fine


def test_compared_values_become_configs_and_flags_win_over_the_benchmark_s_defaults():
    found = step_time.configs(["dtype=float32", "compare=remat_policy:full,none"])
    assert [(label, cfg.remat_policy) for label, cfg in found] == [
        ("full", "full"), ("none", "none")
    ]
    cfg = found[0][1]
    assert (cfg.dtype, cfg.model_name, cfg.max_target_length) == ("float32", "peer25m", 512)


@pytest.mark.full
def test_both_trainers_take_the_policy_that_fits_diloco(monkeypatch, capsys, devices):
    """A device of known memory: the compiled step is the one that counts, and compiled once."""
    monkeypatch.setattr(step_time.remat_choice, "device_memory", lambda mesh: 2**40)
    [(label, cfg)] = step_time.configs([*SMALL, "dcn_diloco_parallelism=1"])
    assert cfg.remat_policy == "auto"
    pair = step_time.make_pair(label, cfg, step_time.mesh_lib.build(cfg))
    assert [case.cfg.remat_policy for case in pair] == ["minimal", "minimal"]
    assert capsys.readouterr().out.count("remat_policy=auto: minimal; ") == 1
    for case in pair:
        step_time.warm_up(case, step_time.make_batch(case.cfg, case.parts))
        assert len(case.compiles) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("diloco_sync_period=4", "diloco_sync_period=4: one of the 4 steps has.*fewer steps"),
        ("num_diloco_replicas=2", "num_diloco_replicas=2: several replicas.*Leave it out"),
    ],
)
def test_steps_that_would_not_compare_are_refused(keys, message):
    """WARM_UP 2 and steps=2 are four steps; the fourth has the exchange."""
    [(label, cfg)] = step_time.configs([*SMALL, "ici_fsdp_parallelism=1", keys])
    with pytest.raises(step_time.ConfigError, match=message):
        step_time.make_pair(label, cfg, step_time.mesh_lib.build(cfg))
