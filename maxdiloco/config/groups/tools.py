"""Keys of the network between processes, of tools, and of compilation ahead of time."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from maxdiloco.config import checks
from maxdiloco.config.fields import DIFFER, FREE, Group, key
from maxdiloco.config.values import INTEGER, Auto, Count, Natural


class Network(Group, group="network"):
    """Messages between the processes of a run."""

    exchange_interface: str = key("", resume=FREE, hosts=DIFFER)
    """IP address to bind for messages. Empty: the interface that routes to process 0."""
    exchange_secret_file: str = key("", resume=FREE, hosts=DIFFER)
    """File with the secret of the run, the same on all hosts (chmod 600). Empty: JAX shares one."""
    peer_port: Annotated[int, Ge(1), Le(65535), INTEGER] | Auto = key(
        "auto", resume=FREE, hosts=DIFFER
    )
    """Port of process 0; process i uses the i-th port after it. auto: a port that is free."""
    # JAX's own.
    peer_timeout_seconds: Count = key(100, unit="seconds", resume=FREE)
    """Silence of a process after which the others exit."""
    jax_distributed_initialization_timeout: Count = key(
        300, unit="seconds", resume=FREE, hosts=DIFFER
    )
    """How long processes wait for each other at the start."""


class Tools(Group, group="tools"):
    """TensorBoard, profiles and caches."""

    enable_tensorboard: bool = key(True, resume=FREE, hosts=DIFFER)
    """Write TensorBoard files in addition to metrics.jsonl."""
    enable_wandb: bool = key(False, resume=FREE, hosts=DIFFER)
    """Log to Weights & Biases too. Needs the package wandb; WANDB_MODE=offline needs no account."""
    profiler: Literal["", "xplane"] = key("", resume=FREE, hosts=DIFFER)
    """Record a profile into the folder of the run. Empty: none."""
    skip_first_n_steps_for_profiler: Natural = key(1, unit="inner steps", resume=FREE, hosts=DIFFER)
    """Steps before the profile starts, so that it does not show compilation."""
    profiler_steps: Count = key(5, unit="inner steps", resume=FREE, hosts=DIFFER)
    """Length of the profile."""
    jax_cache_dir: str = key("", resume=FREE, hosts=DIFFER)
    """Folder of JAX's compilation cache, of your own user. Empty: JAX_COMPILATION_CACHE_DIR."""
    show_fragments: bool = key(False, resume=FREE)
    """Print the table of fragments and exit."""
    show_memory: bool = key(False, resume=FREE, hosts=DIFFER)
    """Print the memory of every compiled program."""

    def _check(self: Any) -> None:
        last = self.skip_first_n_steps_for_profiler + self.profiler_steps
        if self.profiler and self.steps != "all":
            settings = "profiler skip_first_n_steps_for_profiler profiler_steps"
            checks.expect(self, last <= self.steps, "steps", f"at least {last}", settings)


class Compile(Group, group="compile"):
    """Slices for maxdiloco.train_compile."""

    compile_topology: str = key("", resume=FREE, hosts=DIFFER)
    """Slices to compile for, such as v5e-16 or h100-8. Empty: the devices of this machine."""
    compile_topology_num_slices: Count = key(1, unit="slices", resume=FREE, hosts=DIFFER)
    """Number of these slices."""
