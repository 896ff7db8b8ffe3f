"""Compiled programs that JAX keeps serve a run that goes on with another length."""

import re

import jax
import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")


def test_a_run_with_more_steps_takes_every_program_from_the_cache(tmp_path, capfd):
    """Nothing of the schedule's length is in a program. Another batch size is the control: it
    compiles. All programs are compiled, and counted, before the first step."""
    requests, hits = [], []

    def note(event, **_):
        requests.append(event) if event.endswith("requests_use_cache") else None
        hits.append(event) if event.endswith("/cache_hits") else None

    def programs(name, **keys):
        """Of a run: how many its line counts, how many from the cache, and lines of compiles."""
        del requests[:], hits[:]
        capfd.readouterr()
        assert tools.run(tmp_path, name, learning_rate_schedule_steps=-1, **keys) == 0
        lines = capfd.readouterr().out.splitlines()
        (ready,) = (i for i, line in enumerate(lines) if " programs ready after " in line)
        stretched = any("step 6 has a rate of " in line for line in lines)
        assert stretched == (keys["steps"] == 9)
        compiled = [i for i, line in enumerate(lines) if line.startswith("compiled ")]
        number, kept = re.match(
            r"(\d+) programs ready after \S+ s(?:, (\d+) of them from)?", lines[ready]
        ).groups(default="0")
        assert len(compiled) == int(number) and max(compiled) < ready
        return int(number), int(kept), len(requests) - len(hits)

    jax.monitoring.register_event_listener(note)
    try:
        number, *_ = programs("longer", steps=5)
        number_then, kept, missed = programs("longer", steps=9, per_device_batch_size=2)
        other = programs("other", steps=5, per_device_batch_size=3)
    finally:
        jax.monitoring.unregister_event_listener(note)
    assert number_then == number - 1  # the program that makes the first state is not run
    assert missed == 0 and kept > 0  # this process still has the rest
    assert other[1] < other[0] and other[2] > 0
