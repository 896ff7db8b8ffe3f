"""Evaluate the outer parameters: losses on held-out sequences, and a sample of text.

# R replicas  B sequences of one evaluation batch, over all devices  L tokens  V vocabulary
"""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import EVALUATION, OUTSIDE, Call
from maxdiloco.models import sampling
from maxdiloco.models.devices import token_shards
from maxdiloco.models.loss import next_tokens
from maxdiloco.models.model import Model
from maxdiloco.parallel import global_batch, replicas
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import spec

# The defaults of maxdiloco.generate, except for a shorter text.
SAMPLING = MappingProxyType({"max_new_tokens": 100, "temperature": 0.8, "top_k": 40})
SEED = 0


class Totals(NamedTuple):
    """Sums over the targets that count. The end of a document counts as a target without bytes.

    Attributes:
      cross_entropy: without the z-loss [nats].
      num_bytes: bytes of the text; 0 if the tokens do not stand for text.
    """

    cross_entropy: float
    tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Return the cross entropy per token [nats]; NaN if no token counts."""
        return self.cross_entropy / self.tokens if self.tokens else math.nan

    def metrics(self, name: str = "") -> dict[str, float]:
        """Return eval/loss, eval/perplexity and eval/bits_per_byte; eval/NAME/... for a name."""
        prefix, rates = f"eval/{name}/" if name else "eval/", self.rates().items()
        return {prefix + of: rate for of, rate in rates if self.num_bytes or of != "bits_per_byte"}

    def rates(self) -> dict[str, float]:
        """Return the loss, its exponential, and the cross entropy per byte of text [bits].

        perplexity is infinite if float64 cannot hold it. bits_per_byte is NaN without text.
        """
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(np.float64(self.loss)))
        of_byte = self.cross_entropy / math.log(2) / self.num_bytes if self.num_bytes else math.nan
        return {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": of_byte}


class Evaluation:
    """The evaluation of a run: one program that adds up the losses of a batch [B, L].

    With `per_position`, each mesh position of `diloco` evaluates its own parameters on its part of
    every batch. The loss is the mean over all targets. It is the expected loss of a model drawn at
    random for each sequence, not the loss of the mean of the models. No data of a model's size
    cross slices.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        rows: int,
        length: int,
        num_sequences: int,
        token_bytes: np.ndarray,
        per_position: bool = False,
        on_compile: Callable,
    ):
        """Build the program, without compiling it.

        Args:
          model: the model.
          mesh: mesh of the run.
          rows: B.
          length: L.
          num_sequences: number of sequences to read, -1 for the whole text.
          token_bytes: bytes that each token stands for, int32 [V].
          per_position: whether the parameters have a dim of mesh positions, [S, ...].
          on_compile: see Program.
        """
        self.model, self._mesh = model, mesh
        self._shape, self._num_sequences = (rows, length), num_sequences
        # The rows are sharded over every batch axis, `diloco` included.
        self._sharding = NamedSharding(mesh, spec(("batch", "length"), model.config.rules))
        self._bytes_V, self._replicated = token_bytes, NamedSharding(mesh, P())
        self._per_position = per_position
        self._program = _program_of("evaluate", self._sums, mesh, per_position, on_compile)

    def _sums(self, params, batch, bytes_V):
        """Return cross entropy, number of counted targets, and their bytes; scalars, or [1]."""
        _, aux = self.model.loss(params, batch)
        targets_BL, counts_BL = next_tokens(batch["tokens"], batch["segment_ids"])
        bytes_BL = jnp.where(counts_BL, bytes_V[targets_BL], 0)
        # int32: float32 counts are no longer exact beyond 2^24.
        counts = (jnp.sum(x_BL, dtype=jnp.int32) for x_BL in (counts_BL, bytes_BL))
        sums = (aux["cross_entropy"], *counts)
        return tuple(x[None] for x in sums) if self._per_position else sums

    def calls(self, params: Any, runs: float) -> list[Call]:
        """Return the program of a batch. params: abstract. runs: evaluations in a period."""
        tokens_BL = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._sharding)
        batch = {"tokens": tokens_BL, "segment_ids": tokens_BL}
        bytes_V = jax.ShapeDtypeStruct(self._bytes_V.shape, jnp.int32, sharding=self._replicated)
        # With -1, the number of sequences of the text is not known here.
        batches = max(1, -(-self._num_sequences // self._shape[0]))
        args = (params, batch, bytes_V)
        return [Call(self._program, args, runs * batches, OUTSIDE, EVALUATION)]

    def __call__(self, params: Any, dataset: Any) -> Totals:
        """Return the sums over a data set. params: of Trainer.evaluated.

        A batch is summed in float32 on the devices, and the batches in float64 on the host. Another
        mesh or B adds in another order, which changes the loss by about 1e-7 of its value.
        """
        batches = self._sums_by_batch(params, dataset)
        if self._per_position:
            cross_entropy, *counts = replicas.sum_over_batches(batches)
            return Totals(cross_entropy, *map(int, counts))
        losses, tokens, num_bytes = np.transpose([[float(x) for x in sums] for sums in batches])
        return Totals(math.fsum(losses), int(tokens.sum()), int(num_bytes.sum()))

    def _sums_by_batch(self, params: Any, dataset: Any) -> list[Any]:
        """Run the program on each batch of a data set."""
        from maxdiloco.data import pipeline  # needs etils, which a benchmark of the step does not

        rows = global_batch.local_rows(self._sharding, self._shape)
        # device_put would make the processes compare the value over the slow link.
        bytes_V = jax.make_array_from_callback(
            self._bytes_V.shape, self._replicated, lambda index: self._bytes_V[index]
        )
        ahead = 1 if self._mesh.devices.flat[0].platform == "cpu" else 2  # CPU: as in DiLoCo.step
        sums = []
        with pipeline.eval_batches(
            dataset, batch_size=self._shape[0], num_sequences=self._num_sequences, rows=rows[0]
        ) as local:
            for batch in global_batch.assemble(local, rows, self._sharding, self._shape):
                sums.append(self._program(params, batch, bytes_V))
                jax.block_until_ready(sums[-ahead:][0])
        return sums


class Sampler:
    """Continues a prompt on the mesh of a run. Every process has to call it."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        tokenizer: Any,
        prompt: str,
        *,
        per_position: bool,
        on_compile: Callable,
    ):
        """Tokenise the prompt and build the program.

        Args:
          model: the model.
          mesh: mesh of the run.
          tokenizer: the run's tokenizer.
          prompt: text to continue.
          per_position: see Evaluation. The first mesh position of this process produces the text.
          on_compile: see Program.
        """
        self._model, self._tokenizer, self._prompt = model, tokenizer, prompt
        self._tokens = tokenizer.prompt(prompt)
        self._program = _program_of("sample", self._sample, mesh, per_position, on_compile)

    def _sample(self, params, *_):
        """Return the tokens [1, T]."""
        # One prompt cannot be divided. Each part of a batch continues a copy; the first is used.
        B, _ = token_shards(self._model.config.rules)
        return sampling.sample(
            self._model,
            params,
            jnp.tile(jnp.array(self._tokens, jnp.int32), (B, 1)),
            key=jax.random.key(SEED),
            **SAMPLING,
        )[:1]

    def calls(self, params: Any, runs: float) -> list[Call]:
        """Return the program. params: abstract. runs: evaluations in a period."""
        return [Call(self._program, (params, None, None), runs, OUTSIDE, EVALUATION)]

    def __call__(self, params: Any) -> str:
        """Return the prompt and its continuation. params: of Trainer.evaluated."""
        tokens = replicas.first_local(self._program(params, None, None))
        return self._prompt + self._tokenizer.continuation(self._tokens, tokens)


def _program_of(name, fn, mesh, per_position, on_compile):
    """Build the program fn(params, batch, shared) on the mesh, or on each position of `diloco`."""
    wrap = replicas.map_positions if per_position else replicas.with_context_mesh
    where = NamedSharding(mesh, P("diloco") if per_position else P())
    return Program(name, wrap(fn, mesh), out_shardings=where, on_compile=on_compile)
