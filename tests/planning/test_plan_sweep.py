"""The time to the same loss against bandwidth, latency and sites, as rows and as a figure."""

import xml.etree.ElementTree as ET

import pytest

from maxdiloco.planning import sweep

KEYS = ("model_name=180m", "hardware=gpu", "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=8",
        "step_time=0.5", "slice_bandwidth_gbps=1", "steps=1000", "per_device_batch_size=32",
        "diloco_sync_period=100", "diloco_exchange_dtype=int8", "enable_streaming_diloco=false",
        "diloco_outer_overlap=none")  # fmt: skip


@pytest.fixture
def swept(tmp_path, planned):
    """The points by name of the way, what was printed, and the figure."""

    def swept(kind):
        figure = tmp_path / "sweep.svg"
        code, found, said = planned(*KEYS, f"sweep={kind}", f"figure={figure}")
        assert code == 0
        times = zip(*(point["seconds"] for point in found["sweep"]), strict=True)
        by_name = dict(zip(sweep.NAMES, times, strict=True))
        return found, by_name, said.out, ET.fromstring(figure.read_text())

    return swept


def test_more_bandwidth_shortens_what_crosses_the_link_alone(swept):
    """The middle value is the plan's own: its times are those of the answers."""
    found, times, said, figure = swept("bandwidth")
    answers = [way["seconds_to_same_loss"] for way in found["answer"]["ways"]]
    middle = sweep.FACTORS.index(1)
    assert [each[middle] for each in times.values()] == pytest.approx(answers)
    for name in sweep.NAMES[:2]:
        assert list(times[name]) == sorted(times[name], reverse=True) and len(set(times[name])) > 3
    assert set(times["one site"]) == {1000.0} and set(times["all as one"]) == {500.0}
    rows = [line for line in said.splitlines() if "Gbit/s a slice  " in line]
    assert len(rows) == len(sweep.FACTORS) and rows[middle].startswith("1 Gbit/s a slice")
    assert max(map(len, said.splitlines())) <= 100 and "should I" not in said
    # A curve of each way, with every value, inside the figure.
    space = "{http://www.w3.org/2000/svg}"
    curves = [line.get("points").split() for line in figure.iter(f"{space}polyline")]
    curves = [[tuple(map(float, at.split(","))) for at in line] for line in curves]
    curves = [line for line in curves if len(line) == len(sweep.FACTORS)]
    assert len(curves) == len(sweep.NAMES)
    width, height = float(figure.get("width")), float(figure.get("height"))
    assert all(0 < x < width and 0 < y < height for line in curves for x, y in line)
    # Upwards is longer.
    falls = [line for line in curves if line[0][1] < line[-1][1]]
    assert len(falls) == 2


def test_a_latency_is_in_each_step_of_data_parallelism_and_once_a_period_without_overlap(swept):
    """1,000 steps: 1,000 s more with a second of latency, and 10 s for ten periods of DiLoCo; the
    simulator of data parallelism does not wait for the last of 200 steps."""
    found, times, _, _ = swept("latency")
    per_step = times["data parallel"][-1] - times["data parallel"][0]
    assert per_step == pytest.approx(1000 * 199 / 200)
    more = found["answer"]["gap"]["times_tokens"]
    added = times["over the link"][-1] - times["over the link"][0]
    assert added == pytest.approx(10 * more)


def test_more_sites_share_the_tokens(swept):
    """As one, two need half the time of one site, sixteen a sixteenth."""
    _, times, said, _ = swept("sites")
    alone = times["one site"]
    assert set(alone) == {1000.0}
    for sites, seconds in zip(sweep.SITES, times["all as one"], strict=True):
        assert seconds == pytest.approx(1000.0 / sites)
        assert f"\n{sites} sites " in said


def test_a_time_whose_loss_is_outside_of_what_was_measured_is_marked(planned):
    """H=400, which no row has. Control: H=100."""
    for period, is_marked in (("400", True), ("100", False)):
        keys = [key.replace("period=100", f"period={period}") for key in KEYS]
        code, found, said = planned(*keys, "sweep=latency")
        assert code == 0
        assert [bool(point["outside"]) for point in found["sweep"]] == [is_marked] * 7
        assert said.out.count("? ") == 7 * is_marked
        assert ("\n?: the loss is outside of what was measured" in said.out) == is_marked
