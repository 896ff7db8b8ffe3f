"""What a run or a choice is to the forecast of its loss."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.models import transformer
from maxdiloco.models.spec import from_config
from maxdiloco.planning import forecast
from maxdiloco.planning.forecast import Case, Gap
from maxdiloco.planning.job import KEYS, Choice


def case(cfg: Config, choice: Choice, *, parameters: int, replicas: int, tokens: float) -> Case:
    """tokens: for each parameter."""
    return Case(
        parameters, replicas, choice.H, choice.tau, choice.wire, choice.overlap, cfg.opt_type,
        tokens, "mixture of experts" if cfg.num_experts > 1 else "dense",
    )  # fmt: skip


def of_run(keys: Mapping[str, Any], replicas: int) -> Gap:
    """The gap of a stored run, by all of its keys, after TOKENS for each parameter."""
    cfg = config.from_dict(keys)
    size = transformer.count_parameters(transformer.Model(from_config(cfg, backend="cpu")))
    choice = Choice(**{field: keys[key] for key, field in KEYS.items()})
    asked = case(cfg, choice, parameters=size, replicas=replicas, tokens=forecast.TOKENS)
    return forecast.gap(forecast.law(), asked)
