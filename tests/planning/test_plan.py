"""The plan of a link: its candidates, their order, its commands and its refusals. Nothing compiles.

The decoder of configs/models/tiny.yml has 1,033,600 parameters in 4 layers.
"""

import functools
import math

import jax
import pytest
from run import names_key, output_of, refused, run_program

from maxdiloco import output, plan
from maxdiloco import train as train_program
from maxdiloco.config import config
from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.planning import compile_run, forecast, job, program_costs, rating, table, topology
from maxdiloco.planning.forecast import Case
from maxdiloco.run import warnings

TINY = ("model_name=tiny", "max_target_length=256", "dcn_diloco_parallelism=2", "hardware=cpu")
ONE_B = ("model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=2")


@pytest.fixture
def planned(planned):
    """Every row of the table."""
    return functools.partial(planned, "details=true")


def job_of(*argv):
    return job.describe_job(config.load(argv, {}))


@pytest.mark.parametrize("carrier", ["xla", "host"])
@pytest.mark.parametrize(
    "candidate",
    [
        job.Candidate(20, 1, 1, 0, "int8", "none", streaming=False),
        job.Candidate(20, 4, 2, 4, "float4_e3m0", "none", streaming=True),
        job.Candidate(20, 1, 1, 0, "bfloat16", "eager", streaming=False),
        job.Candidate(
            20, 4, 2, 4, "float4_e3m0", "none", streaming=True, collective="reduce_scatter"
        ),
    ],
)
def test_the_bytes_are_those_that_the_trainer_prints(candidate, carrier):
    """The trainer counts them on emulated devices, the plan without devices."""
    argv = [*TINY, "ici_fsdp_parallelism=2", f"diloco_transport={carrier}", "steps=20"]
    sent = rating.traffic(job_of(*argv), candidate)
    argv += [*candidate.arguments(), "show_fragments=true"]
    rows = [line.split() for line in output_of(train_program.main, *argv).splitlines()]
    printed = [int(row[-2].replace(",", "")) for row in rows if row and row[0].isdigit()]
    assert [2 * size for size in sent.fragments] == printed and len(printed) == candidate.P


@pytest.mark.parametrize(
    ("wire", "tau", "P", "milliseconds"),
    [("float32", 0, 1, 330.8), ("float32", 0, 4, 330.8), ("float32", 4, 4, 195.0),
     ("float4_e3m0", 4, 4, 0.0)],
)  # fmt: skip
def test_the_exposure_is_that_of_the_thin_link_s_table(wire, tau, P, milliseconds):
    """benchmarks/results: predicted exposed milliseconds of a step on a thin link at 5 Mbit/s."""
    found = job_of(*TINY)
    candidate = job.Candidate(20, P, 1, tau, wire, "none", streaming=P > 1)
    sent = rating.traffic(found, candidate)
    waited = rating.exposed_seconds(found, candidate, sent, step_s=0.2, link=rating.Link(0.005))
    assert 1e3 * waited / 20 == pytest.approx(milliseconds, abs=0.06)


def test_a_slower_link_gets_overlap_and_then_fewer_bits(planned):
    """Best first: the candidate that fits the link and changes training least."""
    best = []
    for gbps in (1000, 0.2, 0.05):
        found, run = planned(*ONE_B, "step_time=0.8", f"dcn_bandwidth_gbps={gbps}")
        best.append(found["candidates"][0])
        assert (run.code, best[-1]["diloco_sync_period"]) == (0, 30), gbps
    assert (best[0]["mode"], best[0]["diloco_exchange_dtype"]) == ("DiLoCo", "float32")
    taus = [row["num_communication_overlapping_steps"] for row in best]
    assert taus[0] == 0 < taus[1] <= taus[2]
    bits = [WIRES.index(row["diloco_exchange_dtype"]) for row in best]
    assert bits[0] <= bits[1] <= bits[2] and bits[2] > 0
    # A link of a slice and of a host is shared by its devices: 16 chips in hosts of four.
    for link in ("host_bandwidth_gbps=4000", "slice_bandwidth_gbps=16000"):
        found, _ = planned(*ONE_B, "step_time=0.8", link)
        assert found["dcn_bandwidth_gbps"] == 1000 and found["candidates"][0] == best[0]


def test_a_choice_fits_the_link_from_its_least_bandwidth_on(planned):
    """When no candidate fits the link, the exit code is 1."""
    keys = ("step_time=0.2", "diloco_sync_period=20")
    found, _ = planned(*TINY, *keys, "dcn_bandwidth_gbps=0.004")
    row = next(row for row in found["candidates"] if row["mode"] == "overlapped")
    names = ("num_diloco", "num_nonlayer", "num_comm", "diloco_collective")
    given = (f"{key}={value}" for key, value in row.items() if key.startswith(names))
    given = [*TINY, *keys, *given, "enable_streaming_diloco=true"]
    for factor, fits in ((1.002, True), (0.99, False)):
        gbps = factor * row["least_dcn_bandwidth_gbps"]
        again, run = planned(*given, f"dcn_bandwidth_gbps={gbps:.12f}")
        assert (again["candidates"][0]["utilisation"] >= 0.99) == fits == (run.code == 0)
    found, run = planned(*TINY, "step_time=0.2", "host_bandwidth_gbps=1e-5")
    assert run.code == 1
    assert "run it:" not in run.output
    assert found["refused"] == [run.error.removeprefix("refused: ")]
    assert "diloco_sync_period=500" in run.error


def test_a_key_that_is_given_stays_even_with_the_value_of_base_yml(planned):
    """H=100, which base.yml has too, and two fragments; without them the plan chooses others."""
    keys = (*TINY, "step_time=0.2", "dcn_bandwidth_gbps=0.02")
    free, _ = planned(*keys)
    assert free["candidates"][0]["diloco_sync_period"] != 100
    given = ("diloco_sync_period=100", "enable_streaming_diloco=true", "num_diloco_fragments=2")
    found, _ = planned(*keys, *given, "diloco_exchange_dtype=int8")
    for row in found["candidates"]:
        kept = (row["diloco_sync_period"], row["num_diloco_fragments"])
        assert kept == (100, 2) and row["diloco_exchange_dtype"] == "int8"


@pytest.mark.parametrize(("slices", "H", "less"), [(2, 100, 50), (3, 100, 25), (2, 1, 0.5)])
def test_traffic_is_compared_with_bfloat16_gradients_each_step(planned, slices, H, less):
    """float32 once in 100 steps: 100 * 2 bytes / 4; in every step twice bfloat16's bytes."""
    keys = ("step_time=0.2", "dcn_bandwidth_gbps=1", f"diloco_sync_period={H}",
            "num_communication_overlapping_steps=0", "diloco_exchange_dtype=float32",
            "diloco_round_overlap=none", "enable_streaming_diloco=false")  # fmt: skip
    argv = [key for key in TINY if not key.startswith("dcn_")]
    found, run = planned(*argv, f"dcn_diloco_parallelism={slices}", *keys)
    (row,) = found["candidates"]
    assert row["times_less_traffic"] == pytest.approx(less, rel=1e-3)
    waited = (slices - 1) * 1_033_600 * 32 / 1e9
    assert row["exposed_seconds_per_period"] == pytest.approx(waited, rel=1e-3)
    (line,) = [line for line in run.output.splitlines() if line.startswith("DiLoCo ")]
    assert f" {less}x " in line


def test_an_exchange_waits_once_for_the_latency_unless_it_is_hidden(planned):
    """50 ms one way. DiLoCo waits for them; two fragments with an overlap of five steps of 0.2 s do
    not. If every step waits for them, no candidate fits the link."""
    keys = (*TINY, "step_time=0.2", "dcn_bandwidth_gbps=1", "diloco_sync_period=20")
    waits = []
    for more in ([], ["latency_ms=50"]):
        found, _ = planned(*keys, *more)
        waits.append(
            {row["mode"]: row["exposed_seconds_per_period"] for row in found["candidates"]}
        )
    for mode, latency in (("DiLoCo", 0.05), ("overlapped", 0), ("eager", 0)):
        assert waits[1][mode] - waits[0][mode] == pytest.approx(latency, abs=1e-9)
    every = [key for key in keys if "sync_period" not in key] + ["diloco_sync_period=1"]
    found, run = planned(*every, "latency_ms=50", "diloco_round_overlap=none")
    assert run.code == 1 and found["candidates"][0]["least_dcn_bandwidth_gbps"] is None
    assert "50 ms" in run.error


def test_the_step_of_gpus_is_estimated_from_their_peak_flops(planned):
    """40 % of 989 TFLOP/s (parallel/chips.py); 6 FLOPs a parameter and token, and attention."""
    gpus = ("model_name=1b", "compile_topology=h100-8", "compile_topology_num_slices=2")
    found, run = planned(*gpus, "slice_bandwidth_gbps=5")
    tokens = 2 * 8 * 4096
    least = 6 * found["num_parameters"] * tokens / (0.4 * 989e12 * 16)
    assert run.code == 0 and least < found["plain_step_seconds"] < 1.5 * least
    assert "(a guess: 40% of the peak of 989 TFLOP/s" in run.output
    assert names_key(run.output, "step_time")
    found, run = planned(*gpus, "slice_bandwidth_gbps=5", "step_time=0.3")
    assert found["plain_step_seconds"] == 0.3 and "guess" not in run.output


def test_the_train_command_has_the_keys_of_the_best_choice(planned):
    found, run = planned(*ONE_B, "step_time=0.8", "dcn_bandwidth_gbps=0.05", "steps=700")
    python, flag, module, *argv = found["train_command"]
    assert (python, flag, module) == ("python", "-m", "maxdiloco.train")
    assert "hardware=tpu" in argv and not any(a.startswith(("compile_", "dcn_")) for a in argv)
    cfg = config.load(argv, {})
    best = found["candidates"][0]
    kept = {key: value for key, value in best.items() if key in vars(cfg)}
    assert len(kept) == 9 and vars(cfg).items() >= kept.items() and cfg.steps == 700
    assert not any(line.startswith("warning: ") for line in warnings.lines(cfg))
    (line,) = [line for line in run.output.splitlines() if "-m maxdiloco.train " in line]
    assert line.split() == found["train_command"]


def test_the_table_marks_choices_that_need_host_memory(planned):
    """10b in float32: eager's outer parameters, momentum and own outer gradients do not fit v5e in
    addition to 7.6 GB of other state; those of DiLoCo do. Control: every candidate of 1b fits."""
    keys = ("step_time=1.5", "slice_bandwidth_gbps=10", "diloco_exchange_dtype=float32")
    found, run = planned("model_name=10b", *ONE_B[1:], *keys)
    rows = [line for line in run.output.splitlines() if line.startswith(("DiLoCo ", "eager "))]
    marked = {line.split()[0]: " host " in line for line in rows}
    assert marked == {"DiLoCo": False, "eager": True} and "\nhost: " in run.output
    kept = {row["mode"]: row["diloco_outer_memory"] for row in found["candidates"]}
    assert kept["DiLoCo"] == "device" and kept["eager"] == "pinned_host"
    assert "host:" not in planned(*ONE_B, *keys)[1].output


def test_a_compiled_step_too_big_for_the_chip_is_refused(monkeypatch):
    """The state fits, the step does not: the error has the reason of the compiler."""
    too_big = program_costs.ProgramCost(
        "inner", 1, "step", "", 1.0, program_costs.Memory(0, 0, 0, 0, 0), "it needs 40 GiB."
    )
    monkeypatch.setattr(topology, "devices", lambda *_: jax.devices())
    monkeypatch.setattr(compile_run.program_costs, "measure", lambda *_, **__: [too_big])
    argv = ("model_name=tiny", "compile_topology=v5e-4", "compile_topology_num_slices=2",
            "num_slices=2", "dcn_bandwidth_gbps=1", "remat_policy=full")  # fmt: skip
    run = run_program(plan.main, *argv)
    assert run.code == 2
    error = run.errors.splitlines()[-1]
    assert names_key(error, "model_name") and "it needs 40 GiB." in error
    assert names_key(error, "optimizer_memory_host_offload")


def test_a_row_has_the_forecast_loss_or_none_outside_of_it(planned):
    """Rows of losses.csv have H of 10 to 100 with AdamW."""
    given = (*TINY, "step_time=0.2", "dcn_bandwidth_gbps=1", "steps=10000")
    found, run = planned(*given, "diloco_sync_period=20")
    law, size, tau = (
        forecast.fit(forecast.read_rows()),
        found["num_parameters"],
        "num_communication_overlapping_steps",
    )
    for row in found["candidates"]:
        wire, overlap = row["diloco_exchange_dtype"], row["diloco_round_overlap"]
        case = Case(size, 2, 20, row[tau], wire, overlap, tokens=10000 * 2048 / size, batch=2048)
        expected = forecast.predict(law, case)
        assert case.rounds == 500 and row["loss"]["share"] == pytest.approx(expected.share)
        assert not row["loss"]["outside"]
        printed = [line for line in run.output.splitlines() if line.startswith(f"{row['mode']} ")]
        assert any(line.endswith(f" {expected.share:+.1%}") for line in printed)
    found, run = planned(*given, "diloco_sync_period=400")
    assert {row["loss"]["share"] for row in found["candidates"]} == {None}
    outside = {row["loss"]["outside"] for row in found["candidates"]}
    assert outside == {f"H=400 ({least} to 100 measured)" for least in (10, 20)}
    marks = [line.split()[-1] for line in run.output.splitlines() if line.startswith("overlapped ")]
    assert set(marks) == {"?"}


def test_a_mode_has_the_period_that_is_soonest_at_the_loss(planned):
    """With a link that only a period of 500 fits: it stands behind what there is a forecast for,
    in the order of the time to the same loss."""
    given = ("model_name=330m", "hardware=gpu", "dcn_diloco_parallelism=2", "step_time=0.5",
             "slice_bandwidth_gbps=0.006")  # fmt: skip
    found, run = planned(*given)
    rows = found["candidates"]
    assert run.code == 0 and rows[0]["utilisation"] < 0.99
    outside = [bool(row["loss"]["outside"]) for row in rows]
    assert outside == sorted(outside) and not outside[0]
    took = [row["step_seconds"] * math.exp(max(0, row["loss"]["share"]) / (0.0953 / 2))
            for row in rows if not row["loss"]["outside"]]  # fmt: skip
    assert len(took) > 1 and took == sorted(took)


LINK = "dcn_bandwidth_gbps=2"
STEP = f"{LINK} step_time=1"
ON_CPU = f"{STEP} {' '.join(TINY)}"
OF_10B = f"{STEP} model_name=10b compile_topology=v5e-4 compile_topology_num_slices=2"
ON_V6E = f"{STEP} model_name=tiny compile_topology=v6e-4 compile_topology_num_slices=2"
EVERY_STEP = "diloco_sync_period=1 num_communication_overlapping_steps=0"


# Arguments, and the key or option that the error names.
REFUSED = [
    ("model_name=1b step_time=1", "dcn_bandwidth_gbps"),
    (LINK, "compile_topology_num_slices"),
    (f"{STEP} slice_bandwidth_gbps=2", "slice_bandwidth_gbps"),
    (f"{LINK} step_time=0", "step_time"),
    (f"{LINK} step_time=fast", "step_time"),
    (STEP, "dcn_diloco_parallelism"),
    (f"{ON_CPU} tokens=26e12", "tokens"),
    (f"{ON_CPU} diloco_sync_period=100001", "diloco_sync_period"),
    (f"{OF_10B} enable_islands=true islands_store=x island_name=a", "enable_islands"),
    (f"{STEP} compile_topology=v5e-17", "compile_topology"),
    (f"{ON_CPU} enable_diloco=false", "enable_diloco"),
    (f"{ON_CPU} dcn_fsdp_parallelism=2", "dcn_fsdp_parallelism"),
    (OF_10B, "model_name"),
    (f"{ON_V6E} quantization=fp8", "quantization"),
    (f"{ON_CPU} steps=5 tokens=1e9", "tokens"),
    (f"{ON_CPU} price_per_gb=-1", "price_per_gb"),
    (f"{ON_CPU} {EVERY_STEP} enable_streaming_diloco=true", "diloco_sync_period"),
]


@pytest.mark.parametrize(("argv", "key"), REFUSED)
def test_a_refused_plan_names_the_key(argv, key):
    code, line = refused(plan.main, *argv.split())
    assert code == 2 and line.startswith("ConfigError: ") and names_key(line, key)


def test_help_lists_the_examples_options_and_keys(tmp_path, monkeypatch):
    """A recipe of the package is found from any folder, as maxdiloco.train finds it."""
    said = output_of(plan.main, "--help").replace(" \\\n    ", " ")
    assert said.startswith("usage: python -m maxdiloco.plan ")
    examples = [f"\n  python -m maxdiloco.plan {example}\n" for example in plan.EXAMPLES]
    options = [f"\n  {name}=" for name in plan.OPTIONS]
    places = [said.index(words) for words in (*examples, *options, " diloco_sync_period,")]
    assert places == sorted(places) and len(examples) == 2 and said.count("\n") < 120
    for example in plan.EXAMPLES:
        output_of(plan.main, *example.split())
    said = output_of(plan.main, "--help", "tokens", "retention")
    assert "  tokens=" in said and "  max_num_checkpoints_to_keep=3" in said
    path = tmp_path / "run.yml"
    path.write_text("diloco_sync_period: 100\n")
    argv = [str(path), "model_name=tiny"]
    found = config.user_keys(argv, {"M_DILOCO_EXCHANGE_DTYPE": "int8", "HOME": "/"})
    assert found >= {"diloco_sync_period", "model_name", "diloco_exchange_dtype"}
    assert "home" not in found and "steps" not in found
    monkeypatch.chdir(tmp_path)
    assert "diloco_round_overlap" in config.user_keys(["configs/recipes/eager.yml"], {})


def test_only_commands_are_wider_than_a_terminal(planned):
    """Also where a link of 1 Mbit/s makes the times longest, in units that a reader would take."""
    for link in ("slice_bandwidth_gbps=0.001", "slice_bandwidth_gbps=5"):
        _, run = planned(*ONE_B, "step_time=0.8", link)
        lines = [line for line in run.output.splitlines() if "-m maxdiloco." not in line]
        assert max(map(len, lines)) <= table.WIDTH
    waited = [output.span(s) for s in (0, 0.0004, 0.744, 5.906, 408.055, 7200, 3 * 86400)]
    assert waited == ["0 s", "0.4 ms", "744 ms", "5.91 s", "6.8 min", "2 h", "3 days"]


@pytest.mark.parametrize(("memory", "models"), [("pinned_host", 3), ("device", 5)])
def test_a_plan_counts_the_memory_of_what_is_in_flight(memory, models):
    """Eager with float32: one model that is sent and two that arrive; on the device also the outer
    parameters and their momentum."""
    found = job_of(*ONE_B)
    model = 4 * found.num_parameters / 16
    candidate = job.Candidate(100, 1, 1, 0, "float32", "eager", streaming=False, memory=memory)
    sent, link = rating.traffic(found, candidate), rating.Link(25)
    row = rating.rate(found, candidate, sent, step=rating.Step(1.5, 10**9), link=link)
    assert row.memory_bytes - 10**9 == pytest.approx(models * model, rel=0.02)
