"""Train a Flax NNX transformer of your own with Streaming DiLoCo.

    python scripts/library_example.py [FOLDER]

The script runs on eight emulated CPU devices: four replicas, each sharded over two devices. If a
folder is given, the state is saved there after every round, and the next call resumes from it.

The first half is an ordinary model and does not mention DiLoCo. The second half, `main`, trains it.
docs/howto/use-as-a-library.md explains it.
"""

import contextlib
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import maxdiloco

VOCAB, LENGTH, WIDTH, LAYERS = 16, 16, 32, 4
M, H, STEPS = 4, 10, 60  # replicas, inner steps in a round, inner steps in total

# The first dimension of a kernel is sharded over the mesh axis `fsdp`. Flax applies the sharding
# when it creates a parameter, if a mesh is set.
KERNEL = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp",))


class Block(nnx.Module):
    """Causal self-attention and an MLP with dropout."""

    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, WIDTH, kernel_init=KERNEL, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=KERNEL, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=KERNEL, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        """Map activations [batch, length, WIDTH] to activations of the same shape."""
        x = x + self.attend(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    """Embeddings of tokens and positions, the blocks, and an output projection."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        # nnx.vmap stacks the parameters of all blocks along a new first dimension.
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))
        self.output = nnx.Linear(WIDTH, VOCAB, kernel_init=KERNEL, rngs=rngs)

    def __call__(self, tokens):
        """Map tokens [batch, length] to logits [batch, length, VOCAB]."""
        x = self.tokens(tokens) + self.positions(np.arange(tokens.shape[1]))
        x = nnx.scan(Block.__call__, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        return self.output(x)


def loss_of(model, tokens):
    """Return the mean cross-entropy of the tokens after the first, [batch, LENGTH + 1]."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batch_of(t):
    """Return each replica's sequences for inner step t, [M, 32, LENGTH + 1].

    A sequence counts up modulo VOCAB by a stride that the model has to infer.
    """
    start, stride = np.random.default_rng(t).integers(VOCAB, size=(2, M, 32, 1))
    return (start + stride * np.arange(LENGTH + 1)) % VOCAB


# From here on the script is about DiLoCo.


def split(model):
    """Split a model into its structure and two nested dicts: parameters and dropout keys."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def main(folder: str = "", steps: int = STEPS) -> list[float]:
    """Train up to step `steps`; return the replicas' mean loss at the end of each round."""
    mesh = Mesh(np.array(jax.devices()).reshape(M, 2), ("diloco", "fsdp"))
    with jax.set_mesh(mesh):
        graphdef, params, rest = split(Transformer(nnx.Rngs(0)))
    optimizer = optax.adam(1e-2)

    # One replica's training step, as it would be without DiLoCo. The dropout keys are a part of
    # opt_state: `init` gives every replica its own keys, and a checkpoint holds them.
    def inner_step(params, opt_state, tokens):
        def loss_and_rest(params):
            model = nnx.merge(graphdef, params, opt_state["rest"])
            return loss_of(model, tokens), split(model)[2]  # dropout has counted the masks it drew

        (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
        updates, adam = optimizer.update(grads, opt_state["adam"], params)
        params = optax.apply_updates(params, updates)
        return params, {"adam": adam, "rest": rest}, {"loss": loss}

    def layer_axis(path, _):
        """Return the dimension of a parameter that counts layers, or None."""
        return 0 if path[0].key == "blocks" else None

    algorithm = maxdiloco.DiLoCo(
        inner_step,
        num_replicas=M,
        sync_period=H,
        num_fragments=3,  # two fragments of two layers each, and one of the other parameters
        overlap_steps=2,  # an exchange may take two inner steps, and training does not wait for it
        alpha=0.5,
        exchange_dtype="float4_e3m0",  # outer gradients are sent in 4 bits
        layer_axis=jax.tree.map_with_path(layer_axis, params),
        mesh=mesh,
    )
    opt_state = {"adam": optimizer.init(params), "rest": rest}
    sequences = NamedSharding(mesh, P("diloco", "fsdp"))
    losses = []

    # Without a checkpoint, `restore_state` returns None and training starts from `init`.
    saving = maxdiloco.Checkpointer(folder, max_to_keep=2) if folder else contextlib.nullcontext()
    with saving as checkpointer:
        algorithm.bind(params, opt_state)
        state = maxdiloco.restore_state(checkpointer, algorithm) if checkpointer else None
        state = state or algorithm.init(params, opt_state)
        for t in range(state.t + 1, steps + 1):
            state, metrics = algorithm.step(state, jax.device_put(batch_of(t), sequences))
            if t % H == 0:
                losses.append(float(metrics["loss"].mean()))
                print(f"step {t}: loss {losses[-1]:.4f}", flush=True)
                if checkpointer:
                    maxdiloco.save_state(checkpointer, algorithm, state)

    # The result of the training is a model like any other.
    model = nnx.merge(graphdef, algorithm.outer_params(state), rest)
    model.eval()  # turns dropout off
    print(f"outer parameters: loss {loss_of(model, batch_of(0)[0]):.4f} on new sequences")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:2])
