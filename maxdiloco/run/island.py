"""Run as an island: build maxdiloco.Island, its data and its run control from the config.

# B sequences of a step  L tokens
"""

import hashlib
from collections.abc import Callable
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.config.keys import KEYS, Config
from maxdiloco.config.values import show
from maxdiloco.data import order
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.pipeline import LEAVES, Batch
from maxdiloco.engine.diloco import InnerStep
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.errors import ConfigError

if TYPE_CHECKING:
    from maxdiloco.islands.island import Island

# One lease request in 16 steps. A step with up to 16 times the tokens still fits into a block.
STEPS_OF_A_BLOCK = 16
_MAX_TEXT = 200  # characters of a value in run.json; longer ones are hashed
# {argument of Island: the key that sets it}.
_KEYS = MappingProxyType({
    "store": "islands_store",
    "name": "island_name",
    "min_members": "islands_min_members",
    "global_batch_size": "islands_global_batch_size",
    "key_file": "islands_key",
    "sync_period": "diloco_sync_period",
    "num_fragments": "num_diloco_fragments",
    "overlap_steps": "num_communication_overlapping_steps",
    "alpha": "communication_overlapping_alpha",
    "exchange_dtype": "diloco_exchange_dtype",
    "aggregation": "diloco_aggregation",
    "outer_optimizer": "diloco_outer_optimizer",
    "outer_lr": "diloco_outer_lr",
    "outer_momentum": "diloco_outer_momentum",
    "step_tokens": "per_device_batch_size",
    "eval_tokens": "eval_interval",
})  # fmt: skip
# Keys that have to be equal on all islands, in addition to the keys of the model.
_OF_FRAGMENTS = (
    "enable_streaming_diloco", "num_diloco_fragments", "num_nonlayer_fragments",
    "use_sequential_layers",
)  # fmt: skip
_OF_DATA = (
    "max_target_length", "enable_data_shuffling", "data_shuffle_seed", "packing",
    "grain_packing_type",
)  # fmt: skip


class RunProperties(NamedTuple):
    """Properties of a run that an island needs in addition to the config.

    Attributes:
      contents: fingerprint of the training data.
      tokenizer: fingerprint of the tokenizer.
      steps: length of the learning rate's schedule [inner steps].
      step_tokens: tokens of an inner step; with a global batch, of all islands together.
      length: tokens of a sequence.
      say: logs a line.
    """

    contents: str
    tokenizer: str
    steps: int
    step_tokens: int
    length: int
    say: Callable[[str], None]


def build(
    step: InnerStep,
    cfg: Config,
    exchange: ExchangeSettings,
    properties: RunProperties | None,
    fresh: Callable[[Any], Any],
    **options: Any,
) -> "Island":
    """Build the island that a config describes.

    Args:
      step: the inner step of a replica.
      cfg: config of the run.
      exchange: settings of the exchange.
      properties: of the run; None if nothing is trained.
      fresh: returns the first state of the inner optimizer, given the parameters.
      **options: mesh, layer_axis and on_compile of Island.
    """
    # Here, not above: other runs start without cryptography.
    from maxdiloco.islands.island import Island

    step_tokens = properties.step_tokens if properties else 1
    settings = {name: value for name, value in vars(exchange).items() if name != "num_replicas"}
    return Island(
        step,
        store=cfg.islands_store,
        name=cfg.island_name,
        total_tokens=properties.steps * step_tokens if properties else 1,
        step_tokens=step_tokens,
        block_tokens=STEPS_OF_A_BLOCK * step_tokens,
        eval_tokens=max(cfg.eval_interval, 0) * step_tokens,
        # Without properties nothing is trained, and a step has one token then.
        global_batch_size=cfg.islands_global_batch_size if properties else None,
        period_seconds=cfg.islands_period_seconds,
        dead_seconds=cfg.islands_dead_seconds,
        min_members=cfg.islands_min_members,
        key_file=cfg.islands_key,
        same=same_settings(cfg, properties),
        init_opt_state=fresh,
        say=properties.say if properties else lambda _: None,
        option_names=_KEYS,
        **settings,
        **options,
    )


def same_settings(cfg: Config, properties: RunProperties | None) -> dict[str, str]:
    """Return the settings that determine the parameters, their fragments and the data.

    They have to be equal on all islands. Long values are hashed.
    """
    group = KEYS["model_name"].group
    names = [name for name, key in KEYS.items() if key.group == group]
    names = [name for name in names if name not in ("model_name", "override_model_config")]
    found = {name: show(vars(cfg)[name]) for name in (*names, *_OF_FRAGMENTS, *_OF_DATA)}
    if entries := list(map(dict, cfg.dataset_mixture)):
        shares = order.shares([Fraction(entry.get("weight", "1")) for entry in entries])
        names = [entry["name"] for entry in entries]
        pairs = sorted(f"{name}:{share}" for name, share in zip(names, shares, strict=True))
        found["dataset_mixture"] = ",".join(pairs)
    if properties is not None:
        found |= {
            "dataset_path": _hash(properties.contents),
            "tokenizer_path": properties.tokenizer,
        }
    return {key: text if len(text) <= _MAX_TEXT else _hash(text) for key, text in found.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class IslandControl:
    """The run control of an island: the log decides the learning rate, the data and the end."""

    def __init__(self, island: "Island", properties: RunProperties | None):
        """Keep the island, and open its store if the island will train.

        Raises:
          ConfigError: the store cannot be used, or max_target_length does not divide its blocks.
        """
        self._island, self._properties = island, properties
        if properties is not None:
            island.open()
            if island.run.block_tokens % properties.length:
                raise ConfigError(
                    f"max_target_length={properties.length} does not divide the blocks of "
                    f"{island.run.block_tokens} tokens of this store. Start the run with an island "
                    "whose steps have whole sequences."
                )

    def join(self, state: Any) -> Any:
        """See RunControl."""
        return self._island.rejoin(state)

    def reads(self, text: TrainingData) -> "LeasedText":
        """Return the blocks of the text that the island leases."""
        return LeasedText(text, self._island, self._properties.length)

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """Return the rate that follows from the tokens of all islands. See RunControl."""
        found = rate(self._island.progress * (self._properties.steps - 1)) * self._island.warmup(t)
        return float(np.float32(found))

    def tokens(self, steps: range, step_tokens: int) -> int:
        """Return the tokens that this island trains on in some steps, as RunControl.tokens."""
        if not self._island.run.global_batch_size:
            return len(steps) * step_tokens
        return self._properties.length * sum(map(self._island.batch_size, steps))

    def evaluates(self, t: int, interval: int) -> bool:
        """See Island.evaluates."""
        return self._island.evaluates

    def ended(self) -> bool:
        """Tell whether all tokens of the run are committed."""
        return self._island.done

    def leave(self) -> None:
        """See Island.leave."""
        self._island.leave()


class LeasedText:
    """A text in the order in which an island leases it, with the methods of TrainingData.

    data.pipeline.batches reads it. The blocks of an epoch follow each other.
    """

    def __init__(self, text: TrainingData, island: "Island", length: int):
        """Keep the text and the island. length: tokens of a sequence."""
        self._text, self._island, self._length = text, island, length
        self.computed = text.computed

    @property
    def requests(self) -> int:
        """Return the number of requests of the text."""
        return self._text.requests

    def check_size(self, position: order.Position) -> None:
        """Check the text."""
        self._text.check_size(position)

    def sequences(self, step: int) -> list[tuple[int, int]]:
        """Return (first, count) of the sequences of the text that a step reads. Waits for them."""
        block, length = self._island.run.block_tokens, self._length
        return [
            (((part.block - 1) * block + part.start) // length, (part.stop - part.start) // length)
            for part in self._island.leased(step)
        ]

    def read(
        self, position: order.Position, step: int, replicas: ArrayLike, rows: ArrayLike
    ) -> Batch:
        """Return rows of the replica as leaves [*rows.shape, L].

        Rows after the sequences of the step have segment 0, which has no loss.
        """
        start, rows_B = 0, np.asarray(rows)
        batch = {name: np.zeros((*rows_B.shape, self._length), np.int32) for name in LEAVES}
        for first, count in self.sequences(step):
            here = order.Position(first, 1, 1, count, position.sources)
            own_B = (rows_B >= start) & (rows_B < start + count)
            part = self._text.read(here, 1, np.zeros_like(rows_B[own_B]), rows_B[own_B] - start)
            for name, leaf in part.items():
                batch[name][own_B] = leaf
            start += count
        return batch

    def metrics(self, position: order.Position, step: int) -> dict[str, Any]:
        """Return learning/tokens, the number of tokens that all islands have committed."""
        return {"learning/tokens": self._island.committed_tokens}
