"""What a resumed run says of its learning rate, how it reads older checkpoints, and a start that
does not fit."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from maxdiloco.checkpoint import read
from maxdiloco.checkpoint.read import Restored
from maxdiloco.data import run_tokenizer
from maxdiloco.engine.trainer import ExchangeSettings
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.flags import config
from maxdiloco.parallel.program import Program
from maxdiloco.trainer import start
from maxdiloco.trainer.resumed import layout, rate_lines, refuse_changes

BEFORE = config.from_dict({"learning_rate": 1.0})


@pytest.mark.parametrize(
    ("before", "keys", "expected"),
    [
        # At step 4 of 4 the cosine has reached 0.05 of the peak. In 8 steps with none of warmup
        # (0.05 of 8 rounds to 0), step 5 is at 5/8: 0.05 + 0.475 (1 + cos(5 pi / 8)) = 0.343.
        (4, {}, ["the learning rate's schedule is 8 steps long, not 4: step 5 has a rate of 0.343, "
                 "not 0.05; learning_rate_schedule_steps=4 keeps it."]),
        (8, {"learning_rate": 0.1}, ["the learning rate's schedule has changed: step 5 has a rate "
                                     "of 0.0343, not 0.343."]),
        (8, {}, []),
        (4, {"learning_rate_schedule_steps": 4}, []),
    ],
)  # fmt: skip
def test_a_line_tells_when_more_steps_or_another_key_change_the_learning_rate(
    before, keys, expected
):
    cfg = config.from_dict({"learning_rate": 1.0} | keys)
    assert rate_lines(cfg, BEFORE, before=before, t=4, total_steps=8) == expected


def test_a_checkpoint_without_its_exchange_settings_has_them_in_its_config():
    cfg = config.from_dict(
        dict(diloco_sync_period=6, enable_streaming_diloco=True, num_diloco_fragments=3,
             num_communication_overlapping_steps=2, diloco_exchange_dtype="int8")
    )  # fmt: skip
    meta = dict(num_replicas=2, mesh={}, dropped_until=4, config=cfg.as_dict())
    found = layout(cfg, Restored(5, {}, meta, epath.Path("a")))
    settings = ExchangeSettings.from_dict(found.exchange)
    assert settings == ExchangeSettings(6, 2, (0, 2, 4), "none", "int8", 1, False)
    assert (found.dropped_until, found.schedule_since) == (4, 0)


def test_a_state_that_does_not_fit_beside_loaded_parameters_is_one_line(monkeypatch):
    """A CPU refuses 2**60 bytes when the program runs, not when it is compiled."""
    state = Program("init", lambda x: jnp.full(2**58, x), on_compile=lambda *_: None)
    found = np.float32(1), types.SimpleNamespace(meta={})
    monkeypatch.setattr(read, "restore_theta", lambda *_, **__: found)
    monkeypatch.setattr(run_tokenizer, "differs", lambda *_: False)
    parts = types.SimpleNamespace(trainer=None, params=None, init_with=state)
    begin = start.Start(0, None, "", None)
    words = "init does not fit the device: Out of memory .* Use more devices in a slice"
    with pytest.raises(ConfigError, match=words):
        start.load(BEFORE, parts, begin, None)


def test_another_part_that_is_held_out_of_the_same_text_is_named_when_a_run_goes_on():
    """Of a checkpoint that is older than eval_fraction; a younger one names the key."""
    cfg, data = config.load([], {}), {"data": "names", "contents": "new"}

    def saved(**keys):
        stored = {name: value for name, value in cfg.as_dict().items() if name != "eval_fraction"}
        meta = {"config": stored | keys, "position": {"B": 2}, "data": "names", "contents": "old"}
        return types.SimpleNamespace(meta=meta, step=4, path="/runs/a/checkpoints/4")

    refuse_changes(cfg, saved(), B=2, data=data | {"contents": "old"})
    with pytest.raises(CheckpointError, match="or what is held out of it .every 20th file before"):
        refuse_changes(cfg, saved(), B=2, data=data)
    with pytest.raises(CheckpointError, match=r"^eval_fraction=0.05 \(the checkpoint has 0.1\)"):
        refuse_changes(cfg, saved(eval_fraction=0.1), B=2, data=data)
