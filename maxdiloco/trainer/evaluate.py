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


class Evaluation:
    """The evaluation of a run: one program that adds up the losses of a batch [B, L].

    rows: B. num_batches: -1 for all of the text.
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
        # Rows over every batch axis, `diloco` included.
        self._sharding = NamedSharding(mesh, spec(("batch", "length"), rules))
        self._num_batches = num_batches
        self._replicated = NamedSharding(mesh, P())
        self._program = Program(
            "evaluate", self._sums, out_shardings=self._replicated, on_compile=on_compile
        )

    def _sums(self, params, batch, sums):
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            _, aux = self._model.loss(params, batch)
        return sums[0] + aux["cross_entropy"], sums[1] + aux["tokens"]

    def calls(self, params: Any, runs: float) -> list[Call]:
        """The program that adds up a batch.

        params: Trainer.abstract_outer_params. runs: evaluations in a period.
        """
        tokens_BL = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._sharding)
        batch = {"tokens": tokens_BL, "segment_ids": tokens_BL}
        zero = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
        batches = max(1, self._num_batches)  # -1: how many the text has is not known here
        return [Call(self._program, (params, batch, (zero, zero)), runs * batches, BESIDE)]

    def __call__(self, params: Any, dataset: Any) -> float:
        """Cross entropy per token [nats], without the z-loss; NaN when no token counts.

        params: of Trainer.outer_params. dataset: of data.pipeline. The sums stay on the devices
        until the last batch.
        """
        from maxdiloco.data import pipeline  # needs etils, which a benchmark of the step does not

        rows = feeding.local_rows(self._sharding, self._shape)
        sums = jax.device_put((np.float32(0), np.float32(0)), self._replicated)
        with pipeline.eval_batches(
            dataset, batch_size=self._shape[0], num_batches=self._num_batches, rows=rows[0]
        ) as local:
            for batch in feeding.feed(local, rows, self._sharding, self._shape):
                sums = self._program(params, batch, sums)
                if self._mesh.devices.flat[0].platform == "cpu":
                    jax.block_until_ready(sums)  # as in DiLoCo.step
        total, tokens = map(np.asarray, sums)
        return float(total / tokens)
