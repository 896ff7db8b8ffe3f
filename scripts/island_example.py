"""Train a Flax NNX model of your own on machines that share only a folder or a bucket.

    python scripts/island_example.py STORE NAME [TOKENS]

Run it in two terminals, or on two machines, with the same STORE and two names. Stop and start them
as you like: a program that starts again continues with the log. All end with the same parameters.
docs/howto/use-as-a-library.md explains it.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import maxdiloco

WIDTH, EXAMPLES = 32, 64  # of the model; in a batch
NUM_BLOCKS, BLOCK_STEPS = 1000, 8  # the data: blocks of BLOCK_STEPS batches


class Model(nnx.Module):
    """A small network for a regression."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        """Map [batch, 8] to [batch, 1]."""
        return self.output(nnx.tanh(self.hidden(x)))


def loss_of(model, batch):
    """Return the mean squared error."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batches(block):
    """Yield the batches of a leased block, leaves [1, EXAMPLES, ...]."""
    for number in range(block.start // EXAMPLES, block.stop // EXAMPLES):
        x = np.random.default_rng((block.index, number)).normal(size=(1, EXAMPLES, 8))
        yield {"x": np.float32(x), "y": np.float32(np.sin(x.sum(-1, keepdims=True)))}


def main(store: str, name: str, tokens: str = "400_000") -> None:
    """Train until the islands together have committed this number of examples."""
    graphdef, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adam(3e-3)

    def inner_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    island = maxdiloco.Island(
        inner_step,
        store=store,
        name=name,
        sync_period=20,
        total_tokens=int(tokens),  # an example counts as a token here
        step_tokens=EXAMPLES,
        block_tokens=BLOCK_STEPS * EXAMPLES,
        period_seconds=1,
        dead_seconds=5,
        init_opt_state=optimizer.init,
    )
    params = nnx.to_pure_dict(params)
    state = island.join(params, optimizer.init(params))
    for block in island.blocks(NUM_BLOCKS):
        for batch in batches(block):
            state, metrics = island.step(state, batch)
            if state.t % 200 == 0:
                print(f"step {state.t}: loss {metrics['loss'].item():.4f}", flush=True)
    island.leave()

    outer = island.outer_params(state)
    total = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(outer))
    print(f"{name} has ended after {state.t} steps: sum of |parameters| {total!r}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
