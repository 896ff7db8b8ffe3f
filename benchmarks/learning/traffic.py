"""What a replica sends in a run, by the trainer's own schedule and payloads."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco.diloco import quantize
from maxdiloco.flags import config
from maxdiloco.models.transformer import count_parameters
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble

DATA_PARALLEL_BYTES = 2  # a parameter and step: an all-reduce in bfloat16, as the papers count


class Traffic(NamedTuple):
    """Of a replica and a whole run. sent: payload to one other replica; baseline: DP's [bytes]."""

    sent: int
    baseline: int
    parameters: int


def traffic(keys: Mapping[str, Any]) -> Traffic:
    """What the run with these keys sends; a mode without replicas sends the baseline."""
    cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
    mesh = mesh_lib.build(cfg)
    parts = assemble.assemble(cfg, mesh, total_steps=cfg.steps, on_compile=lambda *_: None)
    count = count_parameters(parts.model)
    baseline = DATA_PARALLEL_BYTES * count * cfg.steps
    if not cfg.enable_diloco:
        return Traffic(baseline, baseline, count)
    trainer = parts.trainer
    in_slice = mesh.size // mesh.shape["diloco"]
    each = [
        in_slice * plan.payload.size * quantize.wire_format(plan.payload.wire).dtype.itemsize
        for plan in trainer.layout.plans
    ]
    sends = (send for t in range(1, cfg.steps + 1) for send in trainer.schedule.sends(t))
    sent = sum(each[send.fragment] for send in sends)
    return Traffic(sent if parts.shape.num_replicas > 1 else 0, baseline, count)
