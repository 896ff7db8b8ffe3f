"""The answers of a plan: figures calculated by hand, and the forecast of the loss."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest

from maxdiloco.config import config, files
from maxdiloco.parallel import mesh
from maxdiloco.planning import forecast, job, rating, recommendation, step_time, table
from maxdiloco.planning.forecast import Case
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

# Two sites of eight H100, 100 Mbit/s and 200 ms between them, 1.3B parameters.
SITES = ("model_name=1b", "compile_topology=h100-8", "compile_topology_num_slices=2")
LABELS = ("mode", "time", "loss", "basis")
TWO_OF_8 = ("hardware=gpu", "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=8")
LAW = forecast.fit(forecast.read_rows())
TWO_SITES = ("model_name=330m", *TWO_OF_8, "step_time=0.5")


def case_of(found, row):
    """The case of a candidate with AdamW, in the run that the plan prints."""
    size = found["num_parameters"]
    (steps,) = (int(x[6:]) for x in found["train_command"] if x.startswith("steps="))
    keys = ("diloco_sync_period", "num_communication_overlapping_steps",
            "diloco_exchange_dtype", "diloco_round_overlap")  # fmt: skip
    values, tokens = [row[key] for key in keys], found["answer"]["tokens"]
    return Case(size, 2, *values, tokens=tokens / size, batch=tokens / steps)


def test_one_screen_answers_all_questions_without_a_gpu(planned):
    """100 columns, 45 rows; only the keys of the question are given."""
    found, run = planned(*SITES, "slice_bandwidth_gbps=0.1", "latency_ms=200")
    lines = run.output.splitlines()
    shown = [line for line in lines if "-m maxdiloco." not in line]
    assert len(lines) <= 45 and max(map(len, shown)) <= table.WIDTH
    first = [line.split("  ")[0] for line in lines if not line.startswith(" ") and line][:4]
    assert tuple(first) == LABELS
    names = [strategy["name"] for strategy in found["answer"]["strategies"]]
    assert names[1:] == ["data parallelism", "one site", "an ideal link"]
    assert len(recommendation.near_rows(LAW, case_of(found, found["candidates"][0]))) == 8
    assert " 8 rows " in " ".join(run.output.split())
    assert found["answer"]["tokens"] == 20 * found["num_parameters"]
    steps = -(-found["answer"]["tokens"] // (2 * 8 * 4 * 1024))
    assert f"steps={steps}" in found["train_command"]


@pytest.mark.parametrize(
    ("topology", "given"),
    [("h100-16", ()), ("h100-16", ("num_slices=2",)), ("h100-16", ("dcn_diloco_parallelism=2",)),
     ("h100-4", ()), ("v5e-16", ())],
)  # fmt: skip
def test_the_command_has_the_number_of_slices_of_the_plan(planned, topology, given):
    """JAX numbers the hosts of GPUs, of eight each, and the slices of TPUs."""
    keys = (f"compile_topology={topology}", "compile_topology_num_slices=2", *given)
    found, _ = planned("model_name=1b", *keys, "step_time=1", "slice_bandwidth_gbps=1")
    argv = found["train_command"][3:]
    on, count = topology.split("-")
    platform, host = ("tpu", int(count)) if on == "v5e" else ("gpu", 8)
    devices = [
        SimpleNamespace(platform=platform, slice_index=k // host) for k in range(2 * int(count))
    ]
    assert (
        mesh.count_slices(run_settings.read_mesh(config.load(argv, {})), devices)
        == found["num_slices"]
        == 2
    )
    assert sum(word.startswith("num_slices=") for word in argv) == (
        platform == "gpu" and given != ("dcn_diloco_parallelism=2",)
    )


def test_hours_bytes_and_money_are_those_of_arithmetic_by_hand(planned):
    """180m, two sites of 8, a step of 0.9 s, 10,000 steps of 65,536 tokens: 9,000 s as one site,
    twice that with one. At 4 Gbit/s a site float32 (184,576,512 * 32 bits) takes 1.4766 s, once in
    30 steps: 9,492.2 s. 2 sites * 333 1/3 periods * 738.3 MB = 492.2 GB."""
    keys = ("model_name=180m", *TWO_OF_8, "step_time=0.9", "slice_bandwidth_gbps=4", "steps=10000",
            "diloco_sync_period=30", "diloco_exchange_dtype=float32",
            "enable_streaming_diloco=false", "diloco_round_overlap=none")  # fmt: skip
    found, run = planned(*keys, "price_per_device_hour=3", "price_per_gb=0.5")
    strategies = {each["name"]: each for each in found["answer"]["strategies"]}
    best = strategies["DiLoCo, H=30"]
    assert best["seconds"] == pytest.approx(9492.2, rel=1e-4)
    assert strategies["an ideal link"]["seconds"] == pytest.approx(9000)
    assert strategies["one site"]["seconds"] == pytest.approx(18000)
    assert best["device_hours"] == pytest.approx(16 * 9492.2 / 3600, rel=1e-4)
    assert strategies["one site"]["device_hours"] == pytest.approx(8 * 5)
    assert best["bytes_between_sites"] == pytest.approx(492.2e9, rel=1e-3)
    assert best["money"] == pytest.approx(3 * 42.19 + 0.5 * 492.2, rel=1e-3)
    # A bfloat16 gradient of each site a step.
    gradients = 2 * 2 * found["num_parameters"] * 10000
    assert strategies["data parallelism"]["bytes_between_sites"] == pytest.approx(gradients)
    assert re.search(r"DiLoCo, H=30 .* 42 +492 GB +373 ", run.output)
    assert re.search(r"\ntime +2.64 h ", run.output) and "steps=10000" in run.output


def test_small_jobs_have_hours_money_and_steps(planned):
    """2.07e7 tokens, 8,192 a step: 2,523.4 steps. 2 devices * 2,523.4 * 0.4 s are 0.56 hours."""
    keys = ("model_name=tiny", "dcn_diloco_parallelism=2", "hardware=cpu", "step_time=0.4")
    found, run = planned(*keys, "slice_bandwidth_gbps=10", "price_per_device_hour=5")
    said = " ".join(run.output.split())
    assert "2,524 steps" in said and "steps=2524" in found["train_command"]
    assert "an ideal link 20,480 16.8 min 16.8 min 0.56 0 B 2.8 0" in said


@pytest.mark.parametrize(("slices", "accumulation"), [(2, 1), (4, 8)])
def test_data_parallelism_has_the_bytes_that_the_trainer_counts(planned, slices, accumulation):
    """On a CPU in float32; the link carries them after each micro-batch, whose backward pass takes
    two thirds of it. At 10 Mbit/s more than 99% of the transfer is exposed."""
    keys = ("model_name=tiny", "hardware=cpu", "max_target_length=64", "steps=1000",
            f"dcn_diloco_parallelism={slices}", f"gradient_accumulation_steps={accumulation}",
            "ici_fsdp_parallelism=1")  # fmt: skip
    found, run = planned(*keys, "step_time=0.01", "slice_bandwidth_gbps=0.01")
    cfg = config.load([*keys, "enable_diloco=false"], {})
    built = mesh.build(run_settings.read_mesh(cfg))
    keys = run_settings.read(cfg, built)
    like = assemble.assemble(keys, built, total_steps=9, on_compile=lambda *_: None)
    sent = like.trainer.bytes_sent(1)
    way = found["answer"]["strategies"][1]
    assert way["bytes_between_sites"] == pytest.approx(1000 * slices * sent)
    assert way["seconds"] == pytest.approx(1000 * sent * 8 / 1e7, rel=0.01)
    *_, row = [line for line in run.output.splitlines() if line.startswith("data parallel ")]
    assert " float32 " in row and f" {2 * found['num_parameters'] / sent:.2g}x " in row


def test_the_strategy_that_reaches_the_loss_first_is_recommended(proposed):
    """Data parallelism, which costs no loss, on a very fast link; DiLoCo on a thin one; one site
    on a link that carries nothing."""
    keys = ("model_name=1b", "hardware=gpu", "dcn_diloco_parallelism=4", "ici_fsdp_parallelism=8",
            "diloco_exchange_dtype=float4_e3m0")  # fmt: skip
    names = []
    for found in proposed(*keys, step_s=1, slice_gbps=(1e5, 1, 1e-4)):
        strategies = recommendation.compare_strategies(found)
        chosen = recommendation.recommend(found, strategies)
        took = [each.seconds_to_loss(found.tokens) or math.inf for each in strategies[:3]]
        assert chosen.seconds_to_loss(found.tokens) == min(took)
        names.append(chosen.name)
    assert (names[0], names[2]) == ("data parallelism", "one site") and "H=" in names[1]


def test_a_smaller_loss_gap_comes_before_a_faster_link_use():
    """Rows by hand: eager is faster by less than its loss costs, and then by more."""
    cfg = config.load(["model_name=1b", "hardware=cpu", "dcn_diloco_parallelism=2"], {})
    planned = job.describe_job(cfg)
    plain = dataclasses.replace(planned.configured, H=100, wire="int8")
    eager = dataclasses.replace(plain, overlap="eager")
    sent = {each: rating.traffic(planned, each) for each in (plain, eager)}
    first, none = {}, forecast.Forecast(0, 0, 0, times_tokens=1, nearest=LAW.rows[0], outside=())
    for factor in (1.1, 1000.0):
        late = dataclasses.replace(none, times_tokens=factor)
        rows = rating.rank(
            planned, [[plain], [eager]], sent=sent, step=rating.Step(1.0), link=rating.Link(0.5),
            loss=lambda each, late=late: late if each == eager else none,
        )  # fmt: skip
        assert rows[0].utilisation != rows[1].utilisation
        first[factor] = rows[0].candidate.mode
    faster = max(rows, key=lambda row: row.utilisation)
    assert faster.candidate == eager
    assert faster.utilisation / min(row.utilisation for row in rows) > 1.1
    assert first == {1.1: "eager", 1000.0: "DiLoCo"}


def test_candidates_are_ordered_by_time_to_the_loss_and_then_by_change(proposed):
    """Within one per cent of the soonest they count as equal; of these the shortest period and
    overlap and the widest wire is first. What is outside of the forecast comes last."""
    keys = ("model_name=180m", "dcn_diloco_parallelism=2", "hardware=cpu", "ici_fsdp_parallelism=8")
    firsts = []
    for found in proposed(*keys, step_s=0.8, slice_gbps=(0.02, 4, 1000)):
        losses = [found.forecast(row.candidate) for row in found.rows]
        took = [
            (len(loss.outside), row.step_seconds * loss.times_tokens)
            for row, loss in zip(found.rows, losses, strict=True)
        ]
        beyond, soonest = min(took)
        equal = [each[0] == beyond and each[1] <= rating.TIE * soonest for each in took]
        assert equal == sorted(equal, reverse=True) and equal[0]
        assert took[sum(equal) :] == sorted(took[sum(equal) :])
        firsts.append(found.rows[0].candidate)
    assert (firsts[2].mode, firsts[2].wire) == ("DiLoCo", "float32")
    assert (firsts[0].mode, firsts[0].wire) == ("overlapped", "float4_e3m0")


def test_the_first_answer_for_8b_on_1_gbit_was_measured(planned):
    """Two H100 boxes: a candidate that was measured, its interval, and what that rests on."""
    keys = ("model_name=llama3-8b", "compile_topology=h100-8", "compile_topology_num_slices=2")
    found, run = planned(*keys, "slice_bandwidth_gbps=1", "tokens=200e9")
    loss, best = found["answer"]["loss"], found["candidates"][0]
    assert run.code == 0 and best["diloco_sync_period"] == 100 and best["mode"] == "overlapped"
    assert not loss["outside"] and loss["least"] < loss["share"] < 0 < loss["most"]
    assert "one row with 2 replicas" in " ".join(run.output.split())
    own, _, alone, _ = found["answer"]["strategies"]
    assert found["answer"]["recommended"] == own["name"] == "overlapped, H=100"
    assert own["seconds_to_same_loss"] < 0.6 * alone["seconds"]
    # On a slower link every measured candidate waits too long: the one beyond is named.
    found, run = planned(*keys, "slice_bandwidth_gbps=0.25")
    assert found["answer"]["recommended"] == "one site" and "H=300" in run.output


def test_a_faster_link_is_slower_by_no_more_than_a_tie(proposed):
    """Of candidates within one per cent that which changes training least is first."""
    keys = ("model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=2")
    took = [
        recommendation.compare_strategies(found)[0].seconds_to_loss(found.tokens)
        for found in proposed(*keys, step_s=0.3, slice_gbps=(0.25, 1, 4, 16, 64))
    ]
    assert all(later <= rating.TIE * before for before, later in zip(took, took[1:], strict=False))
    assert took[0] > 1.2 * took[-1]


def test_only_the_edits_of_a_copy_of_base_yml_are_given_keys(tmp_path, monkeypatch):
    base = (files.config_folder() / "base.yml").read_text(encoding="utf-8")
    (tmp_path / "base.yml").write_text(base.replace("\nsteps: 1000", "\nsteps: 7"))
    monkeypatch.chdir(tmp_path)
    assert config.user_keys(["base.yml"], {}) == {"steps"}
    assert config.user_keys(["configs/base.yml"], {}) == set()


def test_the_answers_use_the_forecast_of_the_first_row(planned):
    """330m on two sites at H=30: its gap, its interval, the tokens that make up for it, its row."""
    found, run = planned(*TWO_SITES, "slice_bandwidth_gbps=4", "diloco_sync_period=30")
    loss, said = found["answer"]["loss"], " ".join(run.output.split())
    of_law = forecast.predict(LAW, case_of(found, found["candidates"][0]))
    assert loss["share"] == pytest.approx(of_law.share, abs=1e-6) and not loss["outside"]
    assert of_law.least < loss["share"] < of_law.most
    assert f"loss {loss['share']:+.1%}" in said
    assert f"{loss['least']:+.1%} and {loss['most']:+.1%}" in said
    nearest = recommendation.show_row(of_law.nearest)
    assert nearest in said and "M=2, H=30" in nearest
    own = found["answer"]["strategies"][0]
    assert own["seconds_to_same_loss"] == pytest.approx(own["seconds"] * loss["times_tokens"])
    # As many tokens once more for each parameter lower it.
    more, _ = planned(*TWO_SITES, "slice_bandwidth_gbps=4", "diloco_sync_period=30",
                         f"tokens={40 * found['num_parameters']}")  # fmt: skip
    assert more["answer"]["loss"]["share"] < loss["share"]


def test_outside_of_the_measured_rows_the_loss_is_unknown(planned):
    """H=400: the loss up to which DiLoCo pays, by hand from the seconds; control above."""
    found, run = planned(*TWO_SITES, "slice_bandwidth_gbps=0.1", "diloco_sync_period=400",
                             "diloco_round_overlap=none")  # fmt: skip
    said, strategies = " ".join(run.output.split()), found["answer"]["strategies"]
    assert "H=400 (10 to 100 measured)" in said and found["answer"]["recommended"] is None
    assert strategies[0]["seconds_to_same_loss"] is None and strategies[2]["seconds_to_same_loss"]
    allowed = math.log(strategies[2]["seconds"] / strategies[0]["seconds"]) * 0.0953 / 2
    assert f" {allowed:.1%} " in said
    (row,) = [line for line in run.output.splitlines() if line.startswith("overlapped, H=400 ")]
    assert row.split()[-1] == "?"
    # A link that carries nothing is worse, whatever the loss.
    found, _ = planned(*TWO_SITES, "slice_bandwidth_gbps=1e-4", "diloco_sync_period=400")
    assert found["answer"]["recommended"] == "one site"


def test_without_a_compiler_a_tpu_step_is_estimated_by_arithmetic(monkeypatch):
    """v5e: 197 TFLOP/s and 800 GB/s. 1b, float32: weights, two moments and gradients pass once each
    way, 32 bytes a parameter over 16 chips; bfloat16 weights, gathered, twice."""
    monkeypatch.setattr(step_time.importlib.util, "find_spec", lambda name: None)
    assert not step_time.can_compile("v5e-16") and not step_time.can_compile("h100-8")
    keys = ["model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=2"]
    cfg = config.load(keys, {})
    planned = job.describe_job(cfg)
    step = step_time.estimate(cfg, planned)
    n, tokens = planned.num_parameters, planned.tokens
    flops = (6 * n + 12 * 24 * 2048 * 1024) * tokens
    memory_s = (32 * n / 16 + 2 * 2 * n) / 800e9
    assert step.seconds == pytest.approx(flops / (0.4 * 197e12 * 32) + memory_s, rel=1e-3)
    assert step.origin.startswith("a guess: 40% of the peak of 197 TFLOP/s")
