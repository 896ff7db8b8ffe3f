"""The parameters of a stored checkpoint, on any mesh, without the state of the inner optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath
from jax.sharding import Mesh

from maxdiloco.checkpoint import read
from maxdiloco.evaluation import on_mesh
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.models.transformer import Model


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
    build the model with. parameters: of checkpoint.theta. Raises ConfigError, CheckpointError.
    """
    built: list[Any] = []

    def abstract_of(meta):
        cfg = configure(meta)
        mesh = mesh_of(cfg)
        model = on_mesh.build(cfg, mesh)
        built[:] = cfg, mesh, model
        return on_mesh.parameters(model, mesh)

    params, found = read.restore_parameters(folder, abstract_of, key=key, parameters=parameters)
    return Stored(found.step, found.path, found.meta, *built, params)
