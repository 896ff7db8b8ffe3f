"""Keys of the run itself: its length, folder, evaluation, checkpoints, tools and network."""

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from maxdiloco.config import checks
from maxdiloco.config.fields import APART, DIFFER, FREE, PATHS, Group, key
from maxdiloco.config.values import (
    INTEGER,
    TEXT_OR_TABLE,
    Auto,
    Count,
    MinusOne,
    Natural,
    Seed,
    ShareBelowOne,
    show,
)
from maxdiloco.errors import ConfigError


class Run(Group, group="run", title="length, folder and devices"):
    """Length of the run, its folder and its devices."""

    run_name: str = key("", resume=APART, start_here=True)
    """Folder of the run in base_output_directory; the same name resumes it. Empty: a new name."""
    base_output_directory: str = key("runs", resume=APART, hosts=PATHS, start_here=True)
    """Folder of all runs: one that all hosts share, or gs://, s3:// or az://bucket/folder."""
    steps: Count | Literal["all"] = key(1000, unit="inner steps", resume=FREE, start_here=True)
    """Length of the run. all: one epoch of the text."""
    log_period: Count = key(10, unit="inner steps", resume=APART)
    """Interval at which metrics are fetched from the devices, printed and written."""
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = key("auto", resume=FREE, start_here=True)
    """Devices to use. auto: JAX's choice. cpu emulates the devices of the mesh."""
    init_weights_seed: Seed = key(0)
    """Random seed of the initial weights, the same for every replica."""
    # stop: a wrong number is not hidden.
    nan_policy: Literal["stop", "skip"] = key("stop", resume=FREE)
    """At a loss or gradient that is not finite: exit, or skip the update of that step."""

    def _check(self: Any) -> None:
        if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9._-]*)?", self.run_name):
            raise ConfigError(
                f"run_name={self.run_name}: expected letters, digits, '.', '_' and '-', for a "
                "folder in base_output_directory."
            )
        checks.refuse_store("base_output_directory", self.base_output_directory)


class Evaluation(Group, group="evaluation", title="held-out loss during training"):
    """The evaluation during training."""

    eval_interval: Count | MinusOne = key(-1, unit="inner steps", resume=APART, start_here=True)
    """Interval at which the outer parameters are evaluated on held-out text. -1: never."""
    eval_steps: Count | MinusOne = key(10, unit="batches", resume=APART)
    """Length of one evaluation. -1: all of the held-out text."""
    eval_dataset_path: Annotated[str | dict[str, str], TEXT_OR_TABLE] = key(
        "", resume=APART, hosts=PATHS, from_checkpoint=True
    )
    """Held-out text, or {name: path} for several. An empty path: the part that is held out."""
    # A twentieth: our choice.
    eval_fraction: ShareBelowOne = key(0.05, unit="share of the tokens")
    """Part of each source that training leaves out if eval_dataset_path is empty. 0: none."""
    sample_prompt: str = key("", resume=APART)
    """Text that the model continues at each evaluation, into the log. Empty: none."""

    def _check(self: Any) -> None:
        synthetic = self.dataset_type == "synthetic"
        if synthetic:
            for name in ("eval_dataset_path", "sample_prompt"):
                checks.require(self, name, ("", {}), "dataset_type", "it reads no text")
        if self.eval_interval == -1:
            checks.require_default(self, "sample_prompt", "eval_interval")
        elif synthetic and self.eval_steps == -1:
            raise ConfigError(
                "eval_steps=-1 requires text, but dataset_type=synthetic. Set eval_steps."
            )
        elif not synthetic and self.holds_out() and not self.eval_fraction:
            raise ConfigError(
                f"eval_interval={self.eval_interval} requires held-out text. Set eval_dataset_path "
                "or eval_fraction, or use eval_interval=-1."
            )
        for name, path in self.eval_paths().items():
            if not re.fullmatch(r"[A-Za-z0-9_-]*", name):
                raise ConfigError(
                    f"eval_dataset_path={show(self.eval_dataset_path)}: {name}: expected letters, "
                    "digits, '_' and '-' in the name of a text, such as {wiki: /data/wiki}."
                )
            if not synthetic:
                checks.refuse_text_path(checks.eval_key(name), path)


class Checkpoint(Group, group="checkpoint", title="saved state, and the starting point of a run"):
    """Checkpoints."""

    enable_checkpointing: bool = key(True, resume=APART)
    """Save the state of the run, so that the same run_name resumes it."""
    async_checkpointing: bool = key(True, resume=APART)
    """Write a checkpoint while training continues. false: wait for each save."""
    # Five rounds of the default period.
    checkpoint_period: Count = key(500, unit="inner steps", resume=APART, start_here=True)
    """Interval at which the state is saved."""
    # More than one, because the newest may be damaged.
    max_num_checkpoints_to_keep: Count | Literal["all"] = key(3, unit="checkpoints", resume=APART)
    """Number of newest checkpoints to keep."""
    save_checkpoint_on_completion: bool = key(True, resume=APART)
    """Save once more after the last step."""
    load_parameters_path: str = key("", resume=APART)
    """Start from the outer parameters of this run or checkpoint, and from step 0."""
    load_full_state_path: str = key("", resume=APART, from_checkpoint=False)
    """Start a new run from the whole state of this run or checkpoint; the batch may differ."""

    def _check(self: Any) -> None:
        if self.load_parameters_path:
            checks.require(
                self, "load_full_state_path", ("",), "load_parameters_path", "a run has one start"
            )
        checks.refuse_store("load_parameters_path", self.load_parameters_path)
        checks.refuse_store("load_full_state_path", self.load_full_state_path)


class Tools(Group, group="tools", title="TensorBoard, profiles and caches"):
    """Metrics, profiles and caches."""

    enable_tensorboard: bool = key(True, resume=APART, hosts=DIFFER)
    """Write TensorBoard files in addition to metrics.jsonl."""
    enable_wandb: bool = key(False, resume=APART, hosts=DIFFER)
    """Log to Weights & Biases too. Needs the package wandb; WANDB_MODE=offline needs no account."""
    profiler: Literal["", "xplane"] = key("", resume=APART, hosts=DIFFER)
    """Record a profile into the folder of the run. Empty: none."""
    skip_first_n_steps_for_profiler: Natural = key(
        1, unit="inner steps", resume=APART, hosts=DIFFER
    )
    """Steps before the profile starts, so that it does not show compilation."""
    profiler_steps: Count = key(5, unit="inner steps", resume=APART, hosts=DIFFER)
    """Length of the profile."""
    jax_cache_dir: str = key("", resume=APART, hosts=DIFFER)
    """Folder of JAX's compilation cache, of your own user. Empty: JAX_COMPILATION_CACHE_DIR."""
    show_fragments: bool = key(False, resume=APART)
    """Print the table of fragments and exit."""
    show_memory: bool = key(False, resume=APART, hosts=DIFFER)
    """Print the memory of every compiled program."""

    def _check(self: Any) -> None:
        last = self.skip_first_n_steps_for_profiler + self.profiler_steps
        if self.profiler and self.steps != "all" and last > self.steps:
            raise ConfigError(
                f"profiler={self.profiler} would stop after step {last}, but steps={self.steps}. "
                "Lower profiler_steps or skip_first_n_steps_for_profiler."
            )


class Network(Group, group="network", title="messages between the processes of a run"):
    """Messages between the processes of a run."""

    exchange_interface: str = key("", resume=APART, hosts=DIFFER)
    """IP address to bind for messages. Empty: the interface that routes to process 0."""
    exchange_secret_file: str = key("", resume=APART, hosts=DIFFER)
    """File with the secret of the run, the same on all hosts (chmod 600). Empty: JAX shares one."""
    peer_port: Annotated[int, Ge(1), Le(65535), INTEGER] | Auto = key(
        "auto", resume=APART, hosts=DIFFER
    )
    """Port of process 0; process i uses the i-th port after it. auto: a port that is free."""
    # JAX's own.
    peer_timeout_seconds: Count = key(100, unit="seconds", resume=APART)
    """Silence of a process after which the others exit."""
    jax_distributed_initialization_timeout: Count = key(
        300, unit="seconds", resume=APART, hosts=DIFFER
    )
    """How long processes wait for each other at the start."""


class Compile(Group, group="compile", title="slices for maxdiloco.train_compile"):
    """Compilation ahead of time."""

    compile_topology: str = key("", resume=APART, hosts=DIFFER)
    """Slices to compile for, such as v5e-16 or h100-8. Empty: the devices of this machine."""
    compile_topology_num_slices: Count = key(1, unit="slices", resume=APART, hosts=DIFFER)
    """Number of these slices."""
