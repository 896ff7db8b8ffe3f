"""What a run or a choice is to the forecast of its loss."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.flags import base_yml, config
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


def of_run(
    keys: Mapping[str, Any], baseline: Mapping[str, Any], *, replicas: int, steps: float
) -> Gap | None:
    """The gap of a stored run to one of data parallelism after so many steps, by all their keys.

    None where the two are of other models or inner optimizers. Raises ConfigError for keys that
    this version does not have, and for a model that a CPU cannot run. It may have less or more than
    TOKENS for each parameter: the law has a term for rounds alone.
    """
    compared = (key.name for key in base_yml.declared().values() if key.group.startswith("model:"))
    names = {"opt_type", *compared} - {"model_name", "override_model_config"}
    if any(keys[name] != baseline[name] for name in names):
        return None
    cfg = config.from_dict({**keys, "attention": "autoselected"})  # a kernel has no parameters
    size = transformer.count_parameters(transformer.Model(from_config(cfg, backend="cpu")))
    choice = Choice(**{field: keys[key] for key, field in KEYS.items()})
    sizes = dict(parameters=size, replicas=replicas, tokens=forecast.TOKENS)
    return forecast.gap(forecast.law(), case(cfg, choice, **sizes, steps=steps))
