"""Which keys of the learning rate's schedule work together; the schedule: test_optimizer.py."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("lr_schedule_type=linear", ["must be one of: cosine, wsd"]),
        ("warmup_steps=-2", ["must be -1 or >= 0 (inner steps)"]),
        ("warmup_steps=1001", ["longer than the schedule of 1000 steps", "Use 1000 or less"]),
        (
            "warmup_steps=9 learning_rate_schedule_steps=8",
            ["warmup_steps=9 is longer than the schedule of 8 steps"],
        ),
        (
            "warmup_steps=10 warmup_steps_fraction=0.1",
            ["warmup_steps=10 and warmup_steps_fraction=0.1 both say", "Leave one of them out"],
        ),
        (
            "wsd_decay_style=cosine",
            ["does nothing with lr_schedule_type=cosine", "Use lr_schedule_type=wsd"],
        ),
        (
            "wsd_decay_steps_fraction=0.2",
            ["does nothing with lr_schedule_type=cosine", "or leave wsd_decay_steps_fraction out"],
        ),
        (
            "lr_schedule_type=wsd warmup_steps_fraction=0.5 wsd_decay_steps_fraction=0.6",
            ["warmup_steps_fraction=0.5 and wsd_decay_steps_fraction=0.6", "Lower one of them"],
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_in_one_line(argv, words):
    with pytest.raises(ConfigError) as caught:
        config.load(argv.split(), {})
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    "argv",
    [
        "warmup_steps=1000",
        "warmup_steps=0",
        "warmup_steps=1001 steps=-1",  # the length of an epoch is not known yet
        "lr_schedule_type=wsd warmup_steps_fraction=0.5 wsd_decay_steps_fraction=0.5",
        "lr_schedule_type=wsd wsd_decay_style=cosine warmup_steps=10",
    ],
)
def test_the_last_schedule_that_works_is_taken(argv):
    """The other side of the limits above."""
    cfg = config.load(argv.split(), {})
    assert all(str(vars(cfg)[key]) == value for key, value in
               (one.split("=") for one in argv.split()))  # fmt: skip
