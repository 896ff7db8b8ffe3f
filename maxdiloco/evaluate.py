"""The loss of the outer parameters on held-out sequences.

    # B sequences of one evaluation batch, over all devices  L tokens
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from maxdiloco import feeding
from maxdiloco.assemble import Parts
from maxdiloco.config import Config
from maxdiloco.data import pipeline
from maxdiloco.parallel.replicas import fetch
from maxdiloco.parallel.sharding import Rules, spec


def rows_sharding(mesh: jax.sharding.Mesh, rules: Rules) -> NamedSharding:
    """Sharding of an evaluation batch [B, L]: rows over every batch axis, `diloco` included."""
    return NamedSharding(mesh, spec(("batch", "length"), rules))


class Evaluation:
    """The held-out text of a run and the program that reads it; compiled at the first call."""

    def __init__(self, cfg: Config, parts: Parts, dataset: pipeline.Dataset):
        self._cfg = cfg
        self._parts = parts
        self._dataset = dataset
        self._add = jax.jit(self._sums)

    def _sums(self, params, batch, sums):
        with jax.sharding.use_abstract_mesh(self._parts.mesh.abstract_mesh):
            _, aux = self._parts.model.loss(params, batch)
        return sums[0] + aux["cross_entropy"], sums[1] + aux["tokens"]

    def __call__(self, params: Any) -> float:
        """Cross entropy per token [nats] of one replica's parameters, z-loss left out.

        params: as DiLoCo.outer_params gives them. The sums stay on the devices until the last
        batch. NaN when no token counts.
        """
        parts, cfg = self._parts, self._cfg
        sharding = rows_sharding(parts.mesh, parts.rules)
        shape = (parts.num_replicas * parts.batch_size, cfg.max_target_length)
        rows = feeding.local_rows(sharding, shape)
        sums = (jnp.zeros(()), jnp.zeros(()))
        with pipeline.eval_batches(
            self._dataset, batch_size=shape[0], num_batches=cfg.eval_steps, rows=rows[0]
        ) as local:
            for batch in feeding.feed(local, rows, sharding, shape):
                sums = self._add(params, batch, sums)
                if parts.mesh.devices.flat[0].platform == "cpu":
                    jax.block_until_ready(sums)  # see DiLoCo: no running ahead on CPU
        total, tokens = fetch(sums, parts.mesh)
        return float(total / tokens)
