"""How fast a run is: its step time, and the FLOPs of its model against the device's peak."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxdiloco.models.config import ModelConfig
from maxdiloco.parallel import chips

# Names of our metrics, and names in jax.Device.memory_stats.
_MEMORY = {
    "device/memory_in_use_bytes": "bytes_in_use",
    "device/memory_peak_bytes": "peak_bytes_in_use",
}


def flops_per_token(model: ModelConfig, params: Any, length: int) -> float:
    """Return the model FLOPs of forward and backward for one token, without recomputation.

    The formula is 6 N + 12 L H Q T of PaLM (arXiv 2204.02311) App. B. It counts attention as if it
    were not causal, as other projects do. If values have another dim O than queries, the second
    term is 6 L H (Q + O) T. N counts parameters that take part in a matrix product: a tied
    embedding once, an untied input embedding not at all, and only the experts that a token uses.

    Args:
      model: the model's config.
      params: parameters of one replica, or their shapes.
      length: T, tokens of a sequence.
    """
    matmul = sum(
        math.prod(x.shape) * _active_share(model, path)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if len(x.shape) > 1
    )
    if not model.tied_head:
        matmul -= math.prod(params["embedding"].shape)  # it is looked up
    of_values = model.head_dim if model.latent is None else model.latent.v_head_dim
    attention = model.num_query_heads * (model.head_dim + of_values) * length
    return 6.0 * (matmul + model.num_layers * attention)


def active_parameters(model: ModelConfig, params: Any) -> int:
    """Parameters that one token uses: of the experts num_experts_per_tok in each layer."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return round(sum(math.prod(x.shape) * _active_share(model, path) for path, x in leaves))


def _active_share(model: ModelConfig, path: tuple[Any, ...]) -> float:
    """Which part of a parameter one token uses."""
    names = [entry.key for entry in path]
    of_experts = "moe" in names and names[-1].startswith("w_") and "shared" not in names
    return model.num_experts_per_tok / model.num_experts if of_experts else 1.0


def performance(
    *,
    step_time: float,
    tokens_per_step: float,
    flops_per_token: float,
    num_devices: int,
    device_kind: str,
) -> dict[str, float]:
    """The metrics perf/*; perf/mfu only if the peak of the device is known.

    step_time: seconds per step. tokens_per_step: of all replicas together, padding included.
    perf/mfu relates the model's FLOPs to the bfloat16 peak, also when the run computes in float32.
    """
    tokens_per_second = tokens_per_step / step_time
    flops_per_device = tokens_per_second * flops_per_token / num_devices
    metrics = {
        "perf/step_time": step_time,
        "perf/tokens_per_second": tokens_per_second,
        "perf/tflops_per_device": flops_per_device / 1e12,
    }
    if chip := chips.find_chip(device_kind):
        metrics["perf/mfu"] = flops_per_device / chip.peak_flops
    return metrics


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
    """The metrics device/memory_*, of the fullest jax.Device; none if the backend has none."""
    stats = [device.memory_stats() or {} for device in devices]
    sizes = {name: [of[key] for of in stats if key in of] for name, key in _MEMORY.items()}
    return {name: max(found) for name, found in sizes.items() if found}


class StepClock:
    """perf/step_time: the interval between log points divided by its steps.

    Block on the state before lap() and excluded(), or running steps are timed as zero.
    """

    def __init__(self, step: int, *, clock: Callable[[], float] = time.perf_counter):
        """Start timing after a step.

        Args:
          step: the last one that is not timed.
          clock: returns seconds, monotonic.
        """
        self._clock = clock
        self._restart(step)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Take the time spent inside out of the present interval."""
        started = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - started

    def lap(self, step: int) -> float:
        """Seconds per step since the last log point; this one starts the next interval."""
        seconds = self._clock() - self._started - self._excluded
        steps = step - self._step
        self._restart(step)
        return seconds / steps

    def _restart(self, step: int) -> None:
        self._step, self._started, self._excluded = step, self._clock(), 0.0
