"""What a way to synchronise costs in loss, by the table of losses.yml that is nearest."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from maxdiloco.flags import config
from maxdiloco.models import transformer
from maxdiloco.models.spec import from_config
from maxdiloco.planning.job import KEYS, Choice

LOSSES = pathlib.Path(__file__).parent / "losses.yml"
# Loss of data parallelism with as many tokens as pay: A N^-EXPONENT (2503.09799 Tab. 7), where
# compute grows with N^2. The split of compute is the best one there, so tokens alone lower the loss
# as much as compute does: by EXPONENT / 2 of it for each factor e.
EXPONENT = 0.0953
UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}


class Gap(NamedTuple):
    """Loss above that of data parallelism on as many tokens [nats a token].

    least, most: over the row and its neighbours in size, each with the error of its table.
    parallel: that loss. times_tokens: the tokens that reach it, as a factor of 1 or more.
    row: its size and table, in words. H, replicas: of the table.
    """

    nats: float
    least: float
    most: float
    parallel: float
    times_tokens: float
    row: str
    H: int
    replicas: int


def tables(path: pathlib.Path = LOSSES) -> list[dict[str, Any]]:
    """What losses.yml has by size, with the fields that it names."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))["by_size"]


def parameters(size: str) -> float:
    """'1.3B' -> 1.3e9."""
    return float(size[:-1]) * UNITS[size[-1]]


def of_run(keys: Mapping[str, Any], replicas: int) -> Gap | None:
    """The gap of a stored run, by all of its keys."""
    spec = from_config(config.from_dict(keys), backend="cpu")
    size = transformer.count_parameters(transformer.Model(spec))
    choice = Choice(**{field: keys[key] for key, field in KEYS.items()})
    return nearest(tables(), choice, size=size, replicas=replicas)


def nearest(
    known: list[dict[str, Any]], choice: Choice, *, size: float, replicas: int
) -> Gap | None:
    """The gap of the row that is nearest; None where no table has the outer overlap.

    Far is a factor e of size or of H, or half that of M, whose effect is the largest, or two of
    mode and wire that differ: our choice.
    """

    def distance(table: dict[str, Any], row: str) -> float:
        far = abs(math.log(parameters(row) / size)) + abs(math.log(table["H"] / choice.H))
        far += 2 * abs(math.log(table["replicas"] / replicas))
        return far + ((table["mode"] != choice.mode) + (table["wire"] != choice.wire)) / 2

    alike = [each for each in known if _overlap(each["mode"]) == choice.overlap]
    if not alike:
        return None
    table, row = min(
        ((each, row) for each in alike for row in each["rows"]), key=lambda x: distance(*x)
    )
    sizes = sorted(table["rows"], key=parameters)
    at = sizes.index(row)
    around = [table["rows"][name] for name in sizes[max(0, at - 1) : at + 2]]
    gaps = [loss - parallel for parallel, loss in around]
    parallel, loss = table["rows"][row]
    return Gap(
        nats=loss - parallel,
        least=min(gaps) - table["error"],
        most=max(gaps) + table["error"],
        parallel=parallel,
        times_tokens=math.exp(max(0.0, loss - parallel) / (EXPONENT / 2 * parallel)),
        row=f"{row}, M={table['replicas']}, {table['mode']}, H={table['H']}, {table['wire']}: "
        f"{table['source']}",
        H=table["H"],
        replicas=table["replicas"],
    )


def _overlap(mode: str) -> str:
    return mode if mode == "eager" else "none"
