"""Parameters before they have values: shapes, logical names, and how they begin."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
# Logical name of each dim in an equation of models/product.py.
LETTERS = {
    "b": "batch",
    "l": "length",
    "d": "embed",
    "n": "heads",
    "k": "kv_heads",
    "h": "head_dim",
    "p": "head_dim",  # of latent attention: keys not rotated, beside values
    "o": "head_dim",  # values
    "f": "mlp",
    "r": "lora",  # queries
    "s": "lora",  # keys and values
    "c": "lora",  # the same beside keys rotated
    "e": "router",
    "v": "vocab",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of one layer, or outside of them.

    shape, names: size and logical name of each dim. std: of a truncated normal; 0 where every
    entry begins as `value`. dtype: None is spec.weight_dtype.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    std: float = 0.0
    value: float = 0.0
    dtype: DTypeLike | None = None


def factor(equation: str, *, gain: float = 1.0, **sizes: int) -> Weight:
    """The second factor of an equation, a matrix. sizes: of its dims, by their letters."""
    letters, out = equation.split(",")[1].split("->")
    return Weight(
        tuple(sizes[letter] for letter in letters),
        tuple(LETTERS[letter] for letter in letters),
        spread(math.prod(sizes[letter] for letter in letters if letter not in out), gain),
    )


def spread(fan_in: int, gain: float = 1.0) -> float:
    """Of a truncated normal whose deviation is gain / sqrt(fan_in) (LeCun et al. 1998, 4.6).

    The constant restores the variance that truncation at two standard deviations removes.
    """
    return gain / math.sqrt(fan_in) / 0.87962566103423978


def factors(spec: ModelSpec, equations: dict[str, str], **sizes: int) -> dict[str, Weight]:
    """The second factor of each equation; those that write to the residual stream begin smaller.

    By 1 / sqrt(2 layers), as GPT-2's (Radford et al. 2019, section 2.3): each layer writes twice.
    """
    gain = 1 / math.sqrt(2 * spec.num_layers)
    return {
        name: factor(equation, gain=gain if equation.endswith("->bld") else 1.0, **sizes)
        for name, equation in equations.items()
    }


def initial(spec: ModelSpec, table: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Values of a nested dict of Weights; the n-th matrix draws with fold_in(key, n)."""
    numbers = itertools.count()

    def value(entry):
        if isinstance(entry, dict):
            return {name: value(inner) for name, inner in entry.items()}
        dtype = spec.weight_dtype if entry.dtype is None else entry.dtype
        if not entry.std:
            return jnp.full(entry.shape, entry.value, dtype)
        own_key = jax.random.fold_in(key, next(numbers))
        values = jax.random.truncated_normal(own_key, -2, 2, entry.shape, f32) * entry.std
        return values.astype(dtype)

    return value(table)
