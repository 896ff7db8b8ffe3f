"""The answers of a plan: figures calculated by hand, and the forecast of the loss."""

import math
import re
from types import SimpleNamespace

import pytest

from maxdiloco.config import config, files
from maxdiloco.parallel import mesh
from maxdiloco.planning import compile_run, forecast, job, rating, recommendation, table
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

# Two sites of eight H100, 100 Mbit/s and 200 ms between them, 1.3B parameters.
SITES = ("model_name=1b", "compile_topology=h100-8", "compile_topology_num_slices=2")
QUESTIONS = ("should I", "how", "how long", "what price", "how good", "how sure")
TWO_OF_8 = ("hardware=gpu", "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=8")
TWO_SITES = ("model_name=330m", *TWO_OF_8, "step_time=0.5")


def rounds_of(found, H):
    """Of the run that the plan prints."""
    (steps,) = (word[6:] for word in found["train_command"] if word.startswith("steps="))
    return int(steps) / H


def test_one_screen_answers_all_questions_without_a_gpu(planned):
    """100 columns, 45 rows; only the keys of the question are given."""
    found, run = planned(*SITES, "slice_bandwidth_gbps=0.1", "latency_ms=200")
    lines = run.output.splitlines()
    shown = [line for line in lines if "-m maxdiloco." not in line]
    assert len(lines) <= 45 and max(map(len, shown)) <= table.WIDTH
    for question in QUESTIONS:
        (line,) = [line for line in lines if line.startswith(question.ljust(recommendation.LABEL))]
        assert line[recommendation.LABEL :].strip()
    assert "8 rows" in " ".join(run.output.split())
    names = [way["name"] for way in found["answer"]["ways"]]
    assert names[1:] == ["data parallel", "one site alone", "both sites as one"]
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
    ways = {way["name"]: way for way in found["answer"]["ways"]}
    best = ways["DiLoCo, H=30"]
    assert best["seconds"] == pytest.approx(9492.2, rel=1e-4)
    assert ways["both sites as one"]["seconds"] == pytest.approx(9000)
    assert ways["one site alone"]["seconds"] == pytest.approx(18000)
    assert best["device_hours"] == pytest.approx(16 * 9492.2 / 3600, rel=1e-4)
    assert ways["one site alone"]["device_hours"] == pytest.approx(8 * 5)
    assert best["bytes_between_sites"] == pytest.approx(492.2e9, rel=1e-3)
    assert best["money"] == pytest.approx(3 * 42.19 + 0.5 * 492.2, rel=1e-3)
    # A bfloat16 gradient of each site a step.
    gradients = 2 * 2 * found["num_parameters"] * 10000
    assert ways["data parallel"]["bytes_between_sites"] == pytest.approx(gradients)
    assert re.search("373: 127 .*42 .*246 .*492 GB", run.output)
    assert re.search(r"\nhow long +2.64 h .*steps=10000", run.output)


def test_small_jobs_have_hours_money_and_steps(planned):
    """2.07e7 tokens, 8,192 a step: 2,523.4 steps. 2 devices * 2,523.4 * 0.4 s are 0.56 hours."""
    keys = ("model_name=tiny", "dcn_diloco_parallelism=2", "hardware=cpu", "step_time=0.4")
    found, run = planned(*keys, "slice_bandwidth_gbps=10", "price_per_device_hour=5")
    said = " ".join(run.output.split())
    assert "2,524 steps" in said and "steps=2524" in found["train_command"]
    assert "what price 2.8: 2.8 for 0.56 " in said
    assert "both sites as one 20,480 16.8 min 16.8 min 0.56 0 B 2.8 0" in said


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
    way = found["answer"]["ways"][1]
    assert way["bytes_between_sites"] == pytest.approx(1000 * slices * sent)
    assert way["seconds"] == pytest.approx(1000 * sent * 8 / 1e7, rel=0.01)
    *_, row = [line for line in run.output.splitlines() if line.startswith("data parallel ")]
    assert " float32 " in row and f" {2 * found['num_parameters'] / sent:.2g}x " in row


def test_the_strategy_that_reaches_the_loss_first_is_recommended(planned):
    """Data parallelism, which costs no loss, on a very fast link; DiLoCo on a thin one; one site
    on a link that carries nothing."""
    keys = ("model_name=1b", "hardware=gpu", "dcn_diloco_parallelism=4", "ici_fsdp_parallelism=8",
            "step_time=1", "diloco_exchange_dtype=float4_e3m0")  # fmt: skip
    for gbps, verdict, first in ((1e5, "no: ", "data parallel"), (1, "yes: ", None),
                                 (1e-4, "no: ", "one site alone")):  # fmt: skip
        found, _ = planned(*keys, f"slice_bandwidth_gbps={gbps}")
        assert found["answer"]["should"].startswith(verdict)
        took = [way["seconds_to_same_loss"] or math.inf for way in found["answer"]["ways"][:3]]
        soonest = found["answer"]["ways"][took.index(min(took))]
        assert soonest["name"] == first or first is None and "H=" in soonest["name"]


def test_a_smaller_loss_gap_comes_before_a_faster_link_use():
    """Rows by hand: eager is faster by less than its loss costs, and then by more."""
    cfg = config.load(["model_name=1b", "hardware=cpu", "dcn_diloco_parallelism=2"], {})
    planned = job.of(cfg)
    plain = planned.asked._replace(H=100, wire="int8")
    eager = plain._replace(overlap="eager")
    step = rating.Step(1.0)
    first, none = {}, forecast.Gap(0, 0, 0, times_tokens=1, nearest="")
    for gap in (1.1, 1000.0):
        late = none._replace(times_tokens=gap)
        families, link = [[plain], [eager]], dict(step=step, gbps=0.5)
        rows = rating.ranked(
            planned, families, **link, busy=rating.utilisations(planned, families, **link),
            gap=lambda choice, late=late: late if choice == eager else none,
        )  # fmt: skip
        assert rows[0].utilisation != rows[1].utilisation
        first[gap] = rows[0].choice.mode
    faster = max(rows, key=lambda row: row.utilisation)
    assert faster.choice == eager and faster.utilisation / min(r.utilisation for r in rows) > 1.1
    assert first == {1.1: "eager", 1000.0: "DiLoCo"}


def test_rows_are_ordered_by_time_to_the_loss_and_then_by_change(planned):
    """Within one per cent of the soonest they count as equal; of these the shortest period and
    overlap and the widest wire is first. What is outside of the forecast comes last."""
    law = forecast.law()

    def late(found, row):
        keys = ("diloco_sync_period", "num_communication_overlapping_steps",
                "diloco_exchange_dtype", "diloco_round_overlap")  # fmt: skip
        values, rounds = [row[key] for key in keys], rounds_of(found, row["diloco_sync_period"])
        case = forecast.Case(found["num_parameters"], 2, *values, of_rounds=rounds)
        gap = forecast.gap(law, case)
        return gap.num_beyond, row["step_seconds"] * gap.times_tokens

    keys = ("model_name=180m", "dcn_diloco_parallelism=2", "hardware=cpu", "ici_fsdp_parallelism=8",
            "step_time=0.8", "details=true")  # fmt: skip
    firsts = []
    for gbps in (0.02, 4, 1000):
        found, run = planned(*keys, f"slice_bandwidth_gbps={gbps}")
        took = [late(found, row) for row in found["choices"]]
        beyond, soonest = min(took)
        equal = [each[0] == beyond and each[1] <= rating.TIE * soonest for each in took]
        assert run.code == 0 and equal == sorted(equal, reverse=True) and equal[0]
        assert took[sum(equal) :] == sorted(took[sum(equal) :])
        firsts.append(found["choices"][0])
    modes = [(row["mode"], row["diloco_exchange_dtype"]) for row in firsts]
    assert modes[2] == ("DiLoCo", "float32") and modes[0] == ("overlapped", "float4_e3m0")


def test_the_first_answer_for_8b_on_1_gbit_has_a_loss(planned):
    """Two H100 boxes: a choice within what was measured, its interval, and what that rests on."""
    keys = ("model_name=llama3-8b", "compile_topology=h100-8", "compile_topology_num_slices=2")
    found, run = planned(*keys, "slice_bandwidth_gbps=1")
    gap, best = found["answer"]["gap"], found["choices"][0]
    assert run.code == 0 and best["diloco_sync_period"] == 100 and best["mode"] == "overlapped"
    assert not gap["outside"] and gap["least"] < gap["share"] < 0 < gap["most"]
    assert "one row (2503.09799)" in " ".join(run.output.split())
    assert found["answer"]["ways"][0]["seconds_to_same_loss"] is not None
    # On a slower link every measured choice waits too long: the one beyond is named.
    found, _ = planned(*keys, "slice_bandwidth_gbps=0.25")
    assert found["answer"]["should"].startswith("no: ")
    assert "H=300" in found["answer"]["should"]


@pytest.mark.parametrize("topology", ["h100-8", "v5e-16"])
def test_a_faster_link_is_slower_by_no_more_than_a_tie(planned, topology):
    """Of choices within one per cent that which changes training least is first."""
    keys = ("model_name=1b", f"compile_topology={topology}", "compile_topology_num_slices=2",
            "step_time=0.3")  # fmt: skip
    took = []
    for gbps in (0.25, 1, 4, 16, 64):
        found, _ = planned(*keys, f"slice_bandwidth_gbps={gbps}")
        took.append(found["answer"]["ways"][0]["seconds_to_same_loss"])
    assert all(later <= rating.TIE * before for before, later in zip(took, took[1:], strict=False))


def test_only_the_edits_of_a_copy_of_base_yml_are_given_keys(tmp_path, monkeypatch):
    base = (files.config_folder() / "base.yml").read_text(encoding="utf-8")
    (tmp_path / "base.yml").write_text(base.replace("\nsteps: 1000", "\nsteps: 7"))
    monkeypatch.chdir(tmp_path)
    assert config.names_given(["base.yml"], {}) == {"steps"}
    assert config.names_given(["configs/base.yml"], {}) == set()


def test_the_answers_use_the_forecast_of_the_first_row(planned):
    """330m on two sites at H=30: its gap, its interval, the tokens that make up for it, its row."""
    found, run = planned(*TWO_SITES, "slice_bandwidth_gbps=4", "diloco_sync_period=30")
    gap, said = found["answer"]["gap"], " ".join(run.output.split())
    best = found["choices"][0]
    wire, tau = best["diloco_exchange_dtype"], best["num_communication_overlapping_steps"]
    case = forecast.Case(found["num_parameters"], 2, 30, tau, wire, of_rounds=rounds_of(found, 30))
    of_law = forecast.gap(forecast.law(), case)
    assert gap["share"] == pytest.approx(of_law.share, abs=1e-6) and not gap["outside"]
    assert gap["nearest"] == of_law.nearest and of_law.least < gap["share"] < of_law.most
    assert f"how good {gap['share']:+.1%}" in said
    assert f"{gap['least']:+.1%} to {gap['most']:+.1%}" in said and gap["nearest"] in said
    assert "M=2, H=30" in gap["nearest"] and f"{forecast.law().error:.1%}" in said
    way = found["answer"]["ways"][0]
    assert way["seconds_to_same_loss"] == pytest.approx(way["seconds"] * gap["times_tokens"])
    # As many tokens once more for each parameter lower it.
    more, _ = planned(*TWO_SITES, "slice_bandwidth_gbps=4", "diloco_sync_period=30",
                         f"tokens={40 * found['num_parameters']}")  # fmt: skip
    assert more["answer"]["gap"]["share"] < gap["share"]


def test_outside_of_the_measured_rows_the_loss_is_unknown(planned):
    """H=400: the loss up to which DiLoCo pays, by hand from the seconds; control above."""
    found, run = planned(*TWO_SITES, "slice_bandwidth_gbps=0.1", "diloco_sync_period=400",
                             "diloco_round_overlap=none")  # fmt: skip
    said, ways = " ".join(run.output.split()), found["answer"]["ways"]
    assert "H=400 (10 to 100 measured)" in said
    assert ways[0]["seconds_to_same_loss"] is None and ways[2]["seconds_to_same_loss"]
    allowed = math.log(ways[2]["seconds"] / ways[0]["seconds"]) * 0.0953 / 2
    assert found["answer"]["should"].startswith(f"not known: {ways[0]['name']} ")
    assert f" {allowed:.1%} " in said
    assert " ? " in said.split(ways[0]["name"])[-1].split("data parallel")[0]
    # A link that carries nothing is worse, whatever the loss.
    found, _ = planned(*TWO_SITES, "slice_bandwidth_gbps=1e-4", "diloco_sync_period=400")
    assert found["answer"]["should"].startswith("no: ")


def test_the_plan_reports_whether_a_latency_is_hidden(planned):
    """200 ms: five steps of 0.8 s hide it, DiLoCo waits for it once a period."""
    keys = ("model_name=1b", *TWO_OF_8, "step_time=0.8", "slice_bandwidth_gbps=5",
            "diloco_exchange_dtype=int8", "link_latency_ms=200")  # fmt: skip
    for more, words in (
        (("num_communication_overlapping_steps=5", "enable_streaming_diloco=true"),
         "200 ms is hidden"),
        (("enable_streaming_diloco=false", "diloco_round_overlap=none"),
         "adds 200 ms"),
    ):  # fmt: skip
        _, run = planned(*keys, *more)
        assert words in " ".join(run.output.split())


def test_without_a_compiler_a_tpu_step_is_estimated_by_arithmetic(monkeypatch):
    """v5e: 197 TFLOP/s and 800 GB/s. 1b, float32: weights, two moments and gradients pass once each
    way, 32 bytes a parameter over 16 chips; bfloat16 weights, gathered, twice."""
    monkeypatch.setattr(compile_run.importlib.util, "find_spec", lambda name: None)
    assert not compile_run.can_compile("v5e-16") and not compile_run.can_compile("h100-8")
    keys = ["model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=2"]
    cfg = config.load(keys, {})
    planned = job.of(cfg)
    step = compile_run.estimated_step(cfg, planned)
    n, tokens = planned.num_parameters, planned.tokens
    flops = (6 * n + 12 * 24 * 2048 * 1024) * tokens
    memory_s = (32 * n / 16 + 2 * 2 * n) / 800e9
    assert step.seconds == pytest.approx(flops / (0.4 * 197e12 * 32) + memory_s, rel=1e-3)
    assert step.origin.startswith("a guess: 40% of the peak of 197 TFLOP/s")
