"""The loss of the outer parameters on held-out sequences.

    # B sequences of one evaluation batch, over all devices  L tokens
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import Rules, spec
from maxdiloco.trainer import feeding


def rows_sharding(mesh: jax.sharding.Mesh, rules: Rules) -> NamedSharding:
    """Sharding of an evaluation batch [B, L]: rows over every batch axis, `diloco` included."""
    return NamedSharding(mesh, spec(("batch", "length"), rules))


class Evaluation:
    """The evaluation of a run: its batches [B, L] and the one program that reads them.

    rows: sequences of a batch, of all devices together. num_batches: -1 for all of the text.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        rules: Rules,
        *,
        rows: int,
        length: int,
        num_batches: int,
        on_compile: Callable,
    ):
        self._model = model
        self._mesh = mesh
        self._shape = (rows, length)
        self._sharding = rows_sharding(mesh, rules)
        self._num_batches = num_batches
        self._everywhere = NamedSharding(mesh, P())
        self._program = Program(
            "evaluate", self._sums, out_shardings=self._everywhere, on_compile=on_compile
        )

    def _sums(self, params, batch, sums):
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            _, aux = self._model.loss(params, batch)
        return sums[0] + aux["cross_entropy"], sums[1] + aux["tokens"]

    def calls(self, params: Any, runs: float) -> list[Call]:
        """The program that adds up a batch.

        params: ShapeDtypeStructs of DiLoCo.outer_params. runs: evaluations in a period.
        """
        tokens_BL = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._sharding)
        batch = {"tokens": tokens_BL, "segment_ids": tokens_BL}
        zero = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        each = max(1, self._num_batches)  # -1: one batch stands for as many as the text has
        return [Call(self._program, (params, batch, (zero, zero)), runs * each, BESIDE)]

    def __call__(self, params: Any, dataset: Any) -> float:
        """Cross entropy per token [nats] of one replica's parameters, z-loss left out.

        params: as DiLoCo.outer_params gives them. dataset: of data.pipeline. The sums stay on the
        devices until the last batch. NaN when no token counts.
        """
        from maxdiloco.data import pipeline

        rows = feeding.local_rows(self._sharding, self._shape)
        sums = jax.device_put((np.float32(0), np.float32(0)), self._everywhere)
        with pipeline.eval_batches(
            dataset, batch_size=self._shape[0], num_batches=self._num_batches, rows=rows[0]
        ) as local:
            for batch in feeding.feed(local, rows, self._sharding, self._shape):
                sums = self._program(params, batch, sums)
                if self._mesh.devices.flat[0].platform == "cpu":
                    jax.block_until_ready(sums)  # see DiLoCo: no running ahead on CPU
        total, tokens = map(np.asarray, sums)
        return float(total / tokens)
