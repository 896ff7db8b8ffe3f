"""What a resumed run says of what it does otherwise."""

import pytest

from maxdiloco.flags import config
from maxdiloco.trainer.start import stretched_lines


def test_a_line_tells_when_more_steps_stretch_the_learning_rate():
    """At step 4 of 4 the cosine has reached 0.05 of the peak. In 8 steps with none of warmup (0.05
    of 8 rounds to 0), step 5 is at 5/8: 0.05 + 0.475 (1 + cos(5 pi / 8)) = 0.343.
    """
    cfg = config.from_dict({"learning_rate": 1.0})
    (line,) = stretched_lines(cfg, 4, 4, total_steps=8)
    assert line == (
        "learning_rate_schedule_steps=-1: the schedule was 4 steps long and now is 8, so the "
        "learning rate of step 5 is 0.343 in place of 0.05. Set learning_rate_schedule_steps=4 to "
        "keep the schedule."
    )


@pytest.mark.parametrize(("given", "before"), [(-1, 8), (8, 4)])
def test_no_line_when_the_length_is_as_before_or_given(given, before):
    cfg = config.from_dict({"learning_rate_schedule_steps": given})
    assert stretched_lines(cfg, before, 4, total_steps=8) == []
