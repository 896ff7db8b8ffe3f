"""Our Triton kernels on a GPU: their error, and their time beside other ways to the same values.

    PYTHONPATH=. python benchmarks/gpu_kernels.py [head_dim=64] [documents=4] [key=value ...]

Attention forward and backward of packed documents, by triton and by dot_product, and by cuDNN of
whole sequences, which computes no documents; the product of rows by their experts' matrices and
both gradients, by triton and by jax.lax.ragged_dot. Errors are of the whole array, relative to
float32 arithmetic. interpret=true runs the kernels as array code, to try this without a GPU: such
times say nothing. Exit code 1 when an error is above the one of bfloat16.
"""

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.link.command import guarded, help_text
from maxdiloco.errors import ConfigError

OWN = {
    "sequences": "4", "length": "2048", "heads": "32", "kv_heads": "32", "head_dim": "64",
    "documents": "4", "rows": "16384", "experts": "8", "width": "2048", "hidden": "768",
    "steps": "20", "interpret": "false",
}  # fmt: skip
COLUMNS = "{:9}  {:18}  {:>7}  {:>10}  {:>11}"
ALLOWED = 0.02  # relative; that of bfloat16 products is 0.003 to 0.005 (tests, interpreted)


class Row(NamedTuple):
    """One way to a value. error: relative norm, the largest of results and gradients; None where
    it computes something else. milliseconds: median of the steps, nan where it cannot be had."""

    what: str
    way: str
    error: float | None
    milliseconds: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    own = arguments(argv)
    rows: list[Row] = []
    print(COLUMNS.format("what", "by", "error", "ms", "of triton's"))
    for row in itertools.chain(attention(own), experts(own)):
        rows.append(row)
        print(line(row, rows), flush=True)  # at once: the next may take too long
    wrong = [row for row in rows if row.error is not None and not row.error <= ALLOWED]
    for row in wrong:
        print(f"{row.what} by {row.way}: error {row.error:.2g}, {ALLOWED} allowed", file=sys.stderr)
    return 1 if wrong else 0


def arguments(argv: Sequence[str]) -> dict[str, Any]:
    """The values of OWN, whole numbers but for interpret. Raises ConfigError."""
    given = dict(argument.partition("=")[::2] for argument in argv)
    for name in given:
        if name not in OWN:
            raise ConfigError(f"{name} is not known. Use one of {', '.join(OWN)}.")
    found: dict[str, Any] = {}
    for name, value in (OWN | given).items():
        if name == "interpret" and value in ("true", "false"):
            found[name] = value == "true"
        elif name != "interpret" and value.isdecimal() and int(value) > 0:
            found[name] = int(value)
        else:
            kind = "true or false" if name == "interpret" else "a whole number of 1 or more"
            raise ConfigError(f"{name}={value} is not {kind}. Use {name}={OWN[name]}.")
    return found


def attention(own: dict[str, Any]) -> Iterator[Row]:
    """Rows of attention, with the gradients by queries, keys and values."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxdiloco.models import dot_product, triton

    B, L, N, K, H = (own[n] for n in ("sequences", "length", "heads", "kv_heads", "head_dim"))
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.standard_normal((B, L, heads, H)) for heads in (N, K, K, N))
    cuts = np.sort(rng.integers(0, L, (B, own["documents"] - 1)))
    segments = (np.arange(L)[None, :, None] >= cuts[:, None]).sum(-1).astype(np.int32)
    plain = dot_product.Softmax(0.0, 0, "highest")

    def of_whole_sequences(q, k, v, segments):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    ways = {
        "triton": functools.partial(triton.attend, plain, own["interpret"]),
        "dot_product": functools.partial(dot_product.dot_product, plain),
    }
    if not own["interpret"]:
        ways["cudnn, no documents"] = of_whole_sequences

    def with_gradients(way):
        def run(q, k, v, d):
            out, pull = jax.vjp(lambda *qkv: way(*qkv, segments), q, k, v)
            return out, *pull(d)

        return run

    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, d)]
    exact = jax.jit(with_gradients(ways["dot_product"]))(*(x.astype(jnp.float32) for x in arrays))
    for name, way in ways.items():
        if way is not of_whole_sequences:
            yield _row("attention", name, with_gradients(way), arrays, exact, own["steps"])
            continue
        try:
            yield _row("attention", name, with_gradients(way), arrays, None, own["steps"])
        except (NotImplementedError, RuntimeError, ValueError) as error:
            print(f"{name}: {error}".splitlines()[0], file=sys.stderr)
            yield Row("attention", name, None, math.nan)


def experts(own: dict[str, Any]) -> Iterator[Row]:
    """Rows of the product by experts' matrices, with both gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxdiloco.models import triton_ragged

    A, E, D, F = (own[n] for n in ("rows", "experts", "width", "hidden"))
    rng = np.random.default_rng(1)
    sizes = jnp.asarray(rng.multinomial(A, rng.dirichlet(np.ones(E))), jnp.int32)
    x, d = (jnp.asarray(rng.standard_normal((A, n)), jnp.bfloat16) for n in (D, F))
    w = jnp.asarray(rng.standard_normal((E, D, F)), jnp.bfloat16)

    def by_triton(x, w, d):
        product = functools.partial(triton_ragged.rows_by_matrices, interpret=own["interpret"])
        dx = product(d, w, sizes, transposed=True)
        gradient = triton_ragged.matrices_gradient
        return product(x, w, sizes), dx, gradient(x, d, sizes, w.dtype, interpret=own["interpret"])

    def by_xla(x, w, d):
        out, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
        return out, *pull(d)

    with jax.default_matmul_precision("highest"):
        exact = jax.jit(by_xla)(*(a.astype(jnp.float32) for a in (x, w, d)))
    ways = {"triton": by_triton, "ragged_dot": by_xla}
    for name, way in ways.items():
        yield _row("experts", name, way, [x, w, d], exact, own["steps"])


def _row(what: str, name: str, way: Callable, arrays: Any, exact: Any, steps: int) -> Row:
    import jax
    import jax.numpy as jnp

    run = jax.jit(way)
    found = jax.block_until_ready(run(*arrays))
    error = None
    if exact is not None:
        wide = [x.astype(jnp.float32) for x in found]
        norms = [
            jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in zip(wide, exact, strict=True)
        ]
        error = float(max(norms))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        seconds.append(time.perf_counter() - start)
    return Row(what, name, error, 1e3 * statistics.median(seconds))


def line(row: Row, rows: Sequence[Row]) -> str:
    """A row, its time beside that of the same value by triton, which is among the rows."""
    base = next(x.milliseconds for x in rows if (x.what, x.way) == (row.what, "triton"))
    error = "-" if row.error is None else f"{row.error:.2g}"
    ratio = row.milliseconds / base
    return COLUMNS.format(row.what, row.way, error, f"{row.milliseconds:.3f}", f"{ratio:.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
