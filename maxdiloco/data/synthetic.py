"""Compute endless synthetic sequences, for benchmarks and for tests of learning.

    # N windows to read  L tokens  V tokens of the vocabulary

A sequence is a Markov chain: each token is the previous one plus one of a few strides, modulo V.
The strides depend on the seed; window i is a pure function of (seed, split, i).
"""

import dataclasses

import numpy as np

from maxdiloco.data import order

# Probabilities of the strides. Their entropy, 0.91 nats per token, is the lowest possible loss.
CHANCES = (0.7, 0.15, 0.1, 0.05)
_SPLITS = ("train", "eval")
_UNIT = 2.0**-53


@dataclasses.dataclass(frozen=True)
class SyntheticWindows:
    """Windows of the chain. num_windows is None, because their number is not limited."""

    seed: int
    split: str
    vocab_size: int
    length: int
    num_windows: None = None
    padded: bool = False
    requests: int = 0

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and segment ids, int32 [N, L]. A window is one document of segment 1."""
        strides = self.strides()
        limits = np.cumsum(self.chances())[:-1]
        key = np.array([self.seed % 2**64, _SPLITS.index(self.split)], np.uint64)
        # Philox counts in the first two words, so each window has 2**128 numbers of its own.
        counters = [np.array([0, 0, int(window), 0], np.uint64) for window in windows_N]
        generators = [np.random.Philox(key=key, counter=counter) for counter in counters]
        raw_NL = np.stack([generator.random_raw(self.length) for generator in generators])
        draws_NL = (raw_NL[:, 1:] >> np.uint64(11)) * _UNIT
        steps_NL = strides[np.searchsorted(limits, draws_NL, side="right")]
        first_N1 = (raw_NL[:, :1] % np.uint64(self.vocab_size)).astype(np.int64)
        path_NL = np.cumsum(np.concatenate([first_N1, steps_NL], axis=1), axis=1)
        tokens_NL = (path_NL % self.vocab_size).astype(np.int32)
        return tokens_NL, np.ones_like(tokens_NL)

    def strides(self) -> np.ndarray:
        """Return the distinct strides, int64, most likely first: four, unless V is smaller."""
        count = min(len(CHANCES), self.vocab_size)
        return order.permute(np.arange(count), size=self.vocab_size, seed=self.seed, epoch=0)

    def chances(self) -> np.ndarray:
        """Return the probability of each stride; they sum to 1."""
        chances = np.array(CHANCES[: self.vocab_size])
        return chances / chances.sum()

    def contents(self) -> str:
        """Return a text that is equal for equal data, for comparisons between runs."""
        return f"synthetic-{self.seed}-{self.split}-{self.vocab_size}-{self.length}"
