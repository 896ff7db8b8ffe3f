"""Keys of the mesh, the batch and the inner optimizer."""

import math
from typing import Any, Literal

from maxdiloco.config import checks
from maxdiloco.config.fields import FREE, Group, key
from maxdiloco.config.values import (
    AtLeastTwo,
    Count,
    MinusOne,
    NonNegative,
    Positive,
    Share,
    ShareBelowOne,
)

Size = Count | MinusOne


class Mesh(Group, group="mesh"):
    """Sizes between slices (dcn) and inside one (ici); one of each may be -1: the rest."""

    dcn_diloco_parallelism: Size = key(-1, unit="slices", resume=FREE, start_here=True)
    """Replicas over slices, as DiLoCo has them."""
    dcn_data_parallelism: Size = key(1, unit="slices", resume=FREE)
    """Data parallelism over slices, inside a replica."""
    dcn_fsdp_parallelism: Size = key(1, unit="slices", resume=FREE)
    """Sharded parameters over slices, inside a replica."""
    dcn_expert_parallelism: Size = key(1, unit="slices", resume=FREE)
    """Expert parallelism over slices, inside a replica; the batch is split as well."""
    dcn_context_parallelism: Size = key(1, unit="slices", resume=FREE)
    """Context parallelism over slices; keys and values cross slices in every layer and step."""
    dcn_tensor_parallelism: Size = key(1, unit="slices", resume=FREE)
    """Tensor parallelism over slices, inside a replica."""
    ici_diloco_parallelism: Size = key(1, unit="devices", resume=FREE)
    """Replicas inside one slice, each on a part of its devices."""
    ici_data_parallelism: Size = key(1, unit="devices", resume=FREE)
    """Data parallelism inside a slice."""
    ici_fsdp_parallelism: Size = key(-1, unit="devices", resume=FREE, start_here=True)
    """Sharded parameters inside a slice."""
    ici_expert_parallelism: Size = key(1, unit="devices", resume=FREE)
    """Expert parallelism inside a slice, a divisor of num_experts; the batch is split as well."""
    ici_context_parallelism: Size = key(1, unit="devices", resume=FREE)
    """Context parallelism inside a slice. Twice this size has to divide max_target_length."""
    ici_tensor_parallelism: Size = key(1, unit="devices", resume=FREE)
    """Tensor parallelism inside a slice."""
    num_slices: Size = key(-1, unit="slices", resume=FREE)
    """Slices to emulate on CPU or GPU. -1: the product of the dcn_* sizes, or one a host."""

    def _check(self: Any) -> None:
        for tier in ("dcn", "ici"):
            free = [axis for axis, size in self.sizes(tier).items() if size == -1]
            keys = " ".join(f"{tier}_{axis}_parallelism" for axis in free)
            checks.expect(self, len(free) <= 1, keys, "at most one -1")
        sizes = self.sizes("dcn").values()
        known = math.prod(size for size in sizes if size != -1)
        fits = self.num_slices % known == 0 if -1 in sizes else self.num_slices == known
        what = f"{known}, the product of the dcn_*_parallelism keys"
        what += ", or a multiple of it" if -1 in sizes else ""
        checks.expect(self, self.num_slices == -1 or fits, "num_slices", what)


class Batch(Group, group="batch"):
    """Sequences of one inner step."""

    # A change of the batch is refused through the derived sequences_per_replica.
    per_device_batch_size: Count = key(4, unit="sequences", resume=FREE, start_here=True)
    """Sequences per device and micro-batch. A group of context-parallel devices counts as one."""
    gradient_accumulation_steps: Count = key(1, unit="micro-batches", resume=FREE)
    """Micro-batches whose gradients are summed for one inner step."""
    # arXiv 2501.18512 section 3.2.
    max_target_length: AtLeastTwo = key(1024, unit="tokens", start_here=True)
    """Length of a sequence."""


class Inner(Group, group="inner"):
    """Optimizer of every inner step."""

    # AdamW: arXiv 2311.08105, 2501.18512, 2503.09799.
    opt_type: Literal["adamw", "muon", "sgd"] = key("adamw")
    """Inner optimizer. muon updates the layers' matrices, and Adam the other parameters."""
    optimizer_memory_host_offload: bool = key(False, resume=FREE)
    """Keep the state of the inner optimizer in pinned host memory between steps."""
    # arXiv 2311.08105, table 5, and 2407.07852.
    learning_rate: NonNegative = key(4e-4, resume=FREE, start_here=True)
    """Peak learning rate."""
    # 1,000 steps in arXiv 2311.08105 and 2503.09799, of the 24,000 of 2501.18512, table 1.
    warmup_steps_fraction: Share = key(0.05, unit="fraction", resume=FREE)
    """Part of the schedule in which the learning rate rises from 0."""
    # arXiv 2503.09799 section 3 has a cosine.
    lr_schedule_type: Literal["cosine", "wsd"] = key("cosine", resume=FREE)
    """Decay of the learning rate: cosine after the warmup, or only at the end (wsd)."""
    wsd_decay_steps_fraction: Share = key(0.1, unit="fraction", resume=FREE)
    """Part of the schedule at the end in which wsd decays."""
    wsd_decay_style: Literal["linear", "cosine"] = key("linear", resume=FREE)
    """Shape of that decay."""
    # arXiv 2503.09799 section 3.
    learning_rate_final_fraction: Share = key(0.05, unit="fraction", resume=FREE)
    """Learning rate at the end of the schedule, relative to the peak."""
    learning_rate_schedule_steps: Count | MinusOne = key(-1, unit="inner steps", resume=FREE)
    """Length of the schedule; after it the final rate stays. -1: the steps of the run."""
    # adam_b1, adam_b2 and the clipping: arXiv 2503.09799 section 3.
    adam_b1: ShareBelowOne = key(0.9)
    """Decay of Adam's mean of gradients."""
    adam_b2: ShareBelowOne = key(0.99)
    """Decay of Adam's mean of squared gradients."""
    muon_beta: ShareBelowOne = key(0.95)
    """Decay of Muon's mean of gradients. Smaller values suit small batches of many replicas."""
    mu_dtype: Literal["float32", "bfloat16"] = key("float32")
    """Number format of the mean of gradients of Adam or Muon."""
    adam_eps: Positive = key(1e-8)
    """Added to the square root in Adam."""
    # arXiv 2311.08105, table 5, and 2407.07852.
    adam_weight_decay: NonNegative = key(0.1)
    """Decoupled weight decay, times the learning rate. Norm scales and sgd have none."""
    gradient_clipping_threshold: NonNegative = key(1.0)
    """Largest norm of a replica's gradient. 0: no clipping."""

    def _check(self: Any) -> None:
        if self.lr_schedule_type == "wsd":
            total = self.warmup_steps_fraction + self.wsd_decay_steps_fraction
            fractions = "warmup_steps_fraction wsd_decay_steps_fraction"
            checks.expect(self, total <= 1, fractions, "a sum of at most 1")


class InnerExperts(Group, group="inner"):
    """Mixture of experts."""

    load_balance_loss_weight: NonNegative = key(0.0)
    """Weight of the loss that keeps experts evenly used. With balance_bias none is needed."""
    router_z_loss_weight: NonNegative = key(0.0)
    """Weight of the squared log-partition of the routers' logits in the loss."""
    # arXiv 2412.19437 section 4.2, which lowers it to 0 towards the end of a training.
    routed_bias_update_rate: NonNegative = key(1e-3, resume=FREE)
    """Step of router's balance_bias: up for experts with fewer tokens than the mean, else down."""
