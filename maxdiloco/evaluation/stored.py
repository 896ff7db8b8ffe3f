"""The parameters of a stored checkpoint, on any mesh, without the state of the inner optimizer.

    # R replicas
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from maxdiloco.checkpoint import read, theta
from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.checkpoint.theta import Wanted
from maxdiloco.errors import ConfigError
from maxdiloco.evaluation import on_mesh
from maxdiloco.flags import checks, config
from maxdiloco.flags.config import Config
from maxdiloco.models.transformer import Model

REPLICAS = "params"  # the item of a checkpoint with the replicas' own parameters, [R, ...]


class Stored(NamedTuple):
    """What was read. path: of the checkpoint. meta: what it says of its run; cfg: see `load`."""

    step: int
    path: epath.Path
    meta: dict[str, Any]
    cfg: Config
    mesh: Mesh
    model: Model
    params: Any


def config_of(meta: dict[str, Any]) -> Config:
    """The config of the run that wrote a checkpoint."""
    return config.from_dict(meta["config"])


def load(
    folder: epath.Path,
    *,
    key: str,
    configure: Callable[[dict[str, Any]], Config],
    mesh_of: Callable[[Config], Mesh],
    parameters: str = "outer",
) -> Stored:
    """Read the newest undamaged checkpoint of a run, or one checkpoint; all processes call it.

    folder: of checkpoint.find. key: what gave it, for messages. configure: meta -> the config to
    build the model with. parameters: outer, theta (in eager mode the mean of the replicas'
    thetas); replica_0 and so on, the parameters of one replica; mean, of all replicas.
    Raises ConfigError, CheckpointError.
    """
    built: list[Any] = []

    def abstract_of(meta):
        cfg = configure(meta)
        mesh = mesh_of(cfg)
        model = on_mesh.build(cfg, mesh)
        abstract = on_mesh.parameters(model, mesh)
        wanted = _wanted(parameters, abstract, meta)
        built[:] = cfg, mesh, model, abstract, wanted
        return {wanted.item: wanted.abstract}

    found = read.restore_from(folder, abstract_of, key=key, cast=True)
    cfg, mesh, model, abstract, wanted = built
    params = theta.picked(wanted, found.items[wanted.item], abstract)
    return Stored(found.step, found.path, found.meta, cfg, mesh, model, params)


def _wanted(parameters: str, abstract: Any, meta: dict[str, Any]) -> Wanted:
    if parameters == "outer":
        return theta.wanted(abstract, meta)
    R = meta["num_replicas"]
    given = re.fullmatch(r"replica_([0-9]{1,9})", parameters)
    if not given and parameters != "mean":
        raise ConfigError(
            f"parameters={parameters} must be outer, mean, or replica_0 to replica_{R - 1}."
        )
    if not checks.has_replicas(config_of(meta)):
        raise ConfigError(
            f"parameters={parameters}: the run had enable_diloco=false and so no replicas. Use "
            f"parameters=outer."
        )
    if not given:
        return Wanted(REPLICAS, theta.of_replicas(abstract, R), _mean)
    number = int(given[1])
    if number >= R:
        raise ConfigError(f"parameters={parameters}: the run had {R} replicas. Use 0 to {R - 1}.")
    one = jax.tree.map(
        lambda x: Cycled(x, stored=R, first=number),
        theta.of_replicas(abstract, 1),
    )
    return Wanted(REPLICAS, one, lambda params: jax.tree.map(lambda x: x[0], params))


def _mean(params):
    # float32: sums of R bfloat16 values drift.
    return jax.tree.map(lambda x: x.astype(np.float32).mean(0).astype(x.dtype), params)
