"""The loss of the outer parameters on held-out sequences.

    # B sequences of one evaluation batch, over all devices  L tokens  V vocabulary
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.data.token_text import bytes_of_tokens
from maxdiloco.data.tokenizer import Keys, build
from maxdiloco.engine.calls import BESIDE, EVALUATION, Call
from maxdiloco.engine.trainer import Trainer
from maxdiloco.flags.config import Config
from maxdiloco.models.loss import next_tokens
from maxdiloco.parallel import feeding, slots
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import Rules, spec


class Totals(NamedTuple):
    """Sums over the targets that count.

    cross_entropy: without the z-loss [nats]. tokens: how many targets. num_bytes: of the text that
    they stand for; 0 when they stand for none. The end of a document is a target without a byte.
    """

    cross_entropy: float
    tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Cross entropy per token [nats]; NaN when no token counts."""
        return self.cross_entropy / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where it is beyond float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(self.loss)))

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy per byte of text [bits]; NaN when the tokens stand for no text."""
        return self.cross_entropy / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def metrics(self, name: str = "") -> dict[str, float]:
        """eval/loss, eval/perplexity, eval/bits_per_byte; of a named set eval/<name>/loss ...

        Tokens that stand for no text have no bits per byte.
        """
        prefix = f"eval/{name}/" if name else "eval/"
        row = {f"{prefix}loss": self.loss, f"{prefix}perplexity": self.perplexity}
        if self.num_bytes:
            row[f"{prefix}bits_per_byte"] = self.bits_per_byte
        return row


class Evaluation:
    """The evaluation of a run: one program that adds up the losses of a batch [B, L].

    rows: B. num_sequences: how many are read, -1 for all of the text. token_bytes: bytes that each
    token stands for, int32 [V] (data.token_text). of_slots: the parameters are those of each slot
    of `diloco`, [slots, ...]. Each slot then evaluates its own on its part of every batch, and the
    loss is the mean over all targets: that of a model drawn anew for each sequence, not that of the
    mean of the models. Nothing of a model's size crosses slices.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        rules: Rules,
        *,
        rows: int,
        length: int,
        num_sequences: int,
        token_bytes: np.ndarray,
        of_slots: bool = False,
        on_compile: Callable,
    ):
        self._model = model
        self._mesh = mesh
        self._shape = (rows, length)
        # Rows over every batch axis, `diloco` included.
        self._sharding = NamedSharding(mesh, spec(("batch", "length"), rules))
        self._num_sequences = num_sequences
        self._bytes_V = token_bytes
        self._replicated = NamedSharding(mesh, P())
        self._of_slots = of_slots
        over = slots.of_each if of_slots else slots.of_all
        self._program = Program(
            "evaluate",
            over(self._sums, mesh),
            out_shardings=NamedSharding(mesh, P("diloco")) if of_slots else self._replicated,
            on_compile=on_compile,
        )

    def _sums(self, params, batch, bytes_V):
        _, aux = self._model.loss(params, batch)
        targets_BL, counts_BL = next_tokens(batch["tokens"], batch["segment_ids"])
        bytes_BL = jnp.where(counts_BL, bytes_V[targets_BL], 0)
        # int32: float32 counts are no longer exact beyond 2^24.
        sums = (
            aux["cross_entropy"],
            jnp.sum(counts_BL, dtype=jnp.int32),
            jnp.sum(bytes_BL, dtype=jnp.int32),
        )
        return tuple(x[None] for x in sums) if self._of_slots else sums

    def calls(self, params: Any, runs: float, *, program: Program | None = None) -> list[Call]:
        """The program that adds up a batch.

        params: Trainer.abstract_eval_params. runs: evaluations in a period. program: see `totals`.
        """
        tokens_BL = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._sharding)
        batch = {"tokens": tokens_BL, "segment_ids": tokens_BL}
        bytes_V = jax.ShapeDtypeStruct(self._bytes_V.shape, jnp.int32, sharding=self._replicated)
        # -1: how many the text has is not known here.
        batches = max(1, -(-self._num_sequences // self._shape[0]))
        args = (params, batch, bytes_V)
        return [Call(program or self._program, args, runs * batches, BESIDE, EVALUATION)]

    def __call__(self, params: Any, dataset: Any) -> Totals:
        """The sums over a data set. params: of Trainer.eval_params. dataset: of data.pipeline."""
        return self.totals(params, dataset)[0]

    def totals(self, params: Any, dataset: Any, *, program: Program | None = None) -> list[Totals]:
        """The sums over a data set of what a program evaluates, [R] of replicas or one.

        program: (params, batch, bytes_V) -> sums of a batch, [] or [R]; None: that of one set of
        parameters.
        A batch is summed in float32 on the devices, the batches in float64 on the host. So another
        mesh or B, which adds in another order, changes the loss by some 1e-7 of itself.
        """
        from maxdiloco.data import pipeline  # needs etils, which a benchmark of the step does not

        rows = feeding.local_rows(self._sharding, self._shape)
        # Not device_put, with which processes would compare it over the slow link.
        bytes_V = jax.make_array_from_callback(
            self._bytes_V.shape, self._replicated, lambda index: self._bytes_V[index]
        )
        ahead = 1 if self._mesh.devices.flat[0].platform == "cpu" else 2  # CPU: as in DiLoCo.step
        on_devices = []
        with pipeline.eval_batches(
            dataset, batch_size=self._shape[0], num_sequences=self._num_sequences, rows=rows[0]
        ) as local:
            for batch in feeding.feed(local, rows, self._sharding, self._shape):
                on_devices.append((program or self._program)(params, batch, bytes_V))
                jax.block_until_ready(on_devices[-ahead:][0])
        if self._of_slots and program is None:
            sums = slots.sums_of_all(on_devices)
            return [Totals(sums[0], int(sums[1]), int(sums[2]))]
        sums_R3 = [np.stack([np.atleast_1d(np.asarray(x, np.float64)) for x in sums], axis=1)
                   for sums in on_devices]  # fmt: skip
        return [
            Totals(math.fsum(losses), int(tokens.sum()), int(num_bytes.sum()))
            for losses, tokens, num_bytes in np.stack(sums_R3, axis=2)
        ]


def of_run(
    cfg: Config, trainer: Trainer, model: Any, *, rows: int, length: int, on_compile: Callable
) -> Evaluation:
    """The evaluation that a config asks for. rows, length: of its batches."""
    return Evaluation(
        model,
        trainer.mesh,
        model.spec.rules,
        rows=rows,
        length=length,
        num_sequences=sequences(cfg, rows),
        token_bytes=token_bytes(cfg),
        of_slots=trainer.evaluates_slots,
        on_compile=on_compile,
    )


def sequences(cfg: Config, rows: int) -> int:
    """Sequences that an evaluation reads of each set; -1: all. rows: of a batch."""
    return cfg.eval_steps if cfg.eval_steps == -1 else cfg.eval_steps * rows


def token_bytes(cfg: Config) -> np.ndarray:
    """Bytes of text that each token of a run stands for, int32 [V]; synthetic data are no text."""
    if cfg.dataset_type == "synthetic":
        return np.zeros(cfg.vocab_size, np.int32)
    return bytes_of_tokens(build(Keys.of(vars(cfg)), cfg.vocab_size), cfg.vocab_size)
