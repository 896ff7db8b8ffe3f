"""Compute the bytes that a replica sends, by the trainer's own schedule and payloads."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from maxdiloco.config import config
from maxdiloco.engine.payload import Payload
from maxdiloco.models.model import count_parameters
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

DATA_PARALLEL_BYTES = 2  # a parameter and step: an all-reduce in bfloat16, as the papers count


class Traffic(NamedTuple):
    """Bytes of a replica in a run. sent: payload to one other replica; baseline: DP's."""

    sent: int
    baseline: int
    parameters: int


def traffic(keys: Mapping[str, Any]) -> Traffic:
    """Return the bytes of the run with these keys; a mode without replicas sends the baseline."""
    cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    parts = assemble.assemble(
        run_settings.read(cfg, mesh), mesh, total_steps=cfg.steps, on_compile=lambda *_: None
    )
    count = count_parameters(parts.model)
    baseline = DATA_PARALLEL_BYTES * count * cfg.steps
    if not cfg.enable_diloco:
        return Traffic(baseline, baseline, count)
    trainer = parts.trainer
    replicas = parts.shape.num_replicas
    each = [_of_exchange(plan.payload, mesh, replicas) for plan in trainer.layout.plans]
    sends = (send for t in range(1, cfg.steps + 1) for send in trainer.schedule.sends(t))
    sent = sum(each[send.fragment] for send in sends)
    return Traffic(sent if replicas > 1 else 0, baseline, count)


def _of_exchange(sent: Payload, mesh: Mesh, replicas: int) -> int:
    """Bytes of one replica to one other, each on a slice of its own."""
    in_slice = mesh.size // mesh.shape["diloco"]
    if not sent.parts:
        return in_slice * sent.size * sent.dtype.itemsize
    both = sent.sent_size * sent.sent_dtype.itemsize + sent.size * sent.dtype.itemsize
    return in_slice * both * mesh.shape["diloco"] // replicas
