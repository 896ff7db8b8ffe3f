"""DiLoCo around a training step of your own: two replicas, each sharded over data and fsdp (HSDP).

    python scripts/library_example.py [FOLDER]   # eight emulated CPU devices, about ten seconds

With a folder the state is saved there, and the next call goes on from it.
"""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import maxdiloco

M, H, STEPS = 2, 10, 40


def main(folder: str = "", steps: int = STEPS) -> list[float]:
    """Fit a small network to a sine; returns the mean loss of the replicas at every round."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("diloco", "data", "fsdp"))
    optimizer = optax.adamw(1e-2)

    def inner_step(params, opt_state, batch):  # one replica's view, as without DiLoCo
        def loss_of(params):
            hidden = jax.nn.gelu(batch["x"] @ params["w_in"])
            return jnp.mean((hidden @ params["w_out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    keys = jax.random.split(jax.random.key(0))
    params = {"w_in": jax.random.normal(keys[0], (8, 64)) / 3, "w_out": jnp.zeros((64, 8))}
    layout = {"w_in": P(None, "fsdp"), "w_out": P("fsdp", None)}
    params = {k: jax.device_put(v, NamedSharding(mesh, layout[k])) for k, v in params.items()}
    opt_state = optimizer.init(params)

    algorithm = maxdiloco.DiLoCo(inner_step, num_replicas=M, sync_period=H, mesh=mesh)
    rows = NamedSharding(mesh, P("diloco", ("data", "fsdp")))
    losses = []
    with contextlib.ExitStack() as stack:
        saver = folder and stack.enter_context(maxdiloco.Checkpointer(folder, max_to_keep=2))
        algorithm.bind(params, opt_state)  # ShapeDtypeStructs will do
        state = maxdiloco.restore_state(saver, algorithm) if saver else None
        state = state or algorithm.init(params, opt_state)
        for t in range(state.t + 1, steps + 1):
            x = np.random.default_rng(t).uniform(-1, 1, size=(M, 32, 8)).astype(np.float32)
            batch = jax.device_put({"x": x, "y": np.sin(x)}, rows)
            state, metrics = algorithm.step(state, batch)
            if t % H == 0:
                algorithm.check_finite(state)  # waits for the step
                losses.append(float(metrics["loss"].mean()))
                print(f"step {t}: loss {losses[-1]:.4f}")
                if saver:
                    maxdiloco.save_state(saver, algorithm, state)
    theta = algorithm.outer_params(state)
    print("theta:", {k: (v.shape, str(v.sharding.spec)) for k, v in theta.items()})
    return losses


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:2])
