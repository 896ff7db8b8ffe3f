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


def case(
    cfg: Config, choice: Choice, *, parameters: int, replicas: int, tokens: float, steps: float
) -> Case:
    """tokens: for each parameter. steps: 0 is not known."""
    return Case(
        parameters, replicas, choice.H, choice.tau, choice.wire, choice.overlap, cfg.opt_type,
        tokens, "mixture of experts" if cfg.num_experts > 1 else "dense", steps / choice.H,
    )  # fmt: skip


def of_run(keys: Mapping[str, Any], replicas: int) -> Gap:
    """The gap of a stored run, by all of its keys, after its steps.

    It may have less or more than TOKENS for each parameter: the law has a term for rounds alone.
    """
    cfg = config.from_dict(keys)
    size = transformer.count_parameters(transformer.Model(from_config(cfg, backend="cpu")))
    choice = Choice(**{field: keys[key] for key, field in KEYS.items()})
    sizes = dict(parameters=size, replicas=replicas, tokens=forecast.TOKENS)
    asked = case(cfg, choice, **sizes, steps=max(0, cfg.steps))
    return forecast.gap(forecast.law(), asked)
