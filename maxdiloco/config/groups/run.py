"""Keys of the run itself: its length, folder, evaluation, checkpoints, tools and network."""

from typing import Annotated, Any, Literal

from maxdiloco.config import checks
from maxdiloco.config.fields import FREE, PATHS, Group, key
from maxdiloco.config.values import NESTED, Count, MinusOne, Seed, ShareBelowOne, TextPath, matching

Name = Annotated[
    str, matching(r"([A-Za-z0-9_][A-Za-z0-9._-]*)?", "letters, digits, '.', '_' and '-'")
]
TextName = Annotated[str, matching(r"[A-Za-z0-9_-]*", "names of letters, digits, '_' and '-'")]


class Run(Group, group="run"):
    """Length, folder and devices."""

    run_name: Name = key("", resume=FREE, start_here=True)
    """Folder of the run in base_output_directory; the same name resumes it. Empty: a new name."""
    base_output_directory: str = key(
        "runs", resume=FREE, hosts=PATHS, from_checkpoint=False, start_here=True
    )
    """Folder of all runs: one that all hosts share, or gs://, s3:// or az://bucket/folder."""
    steps: Count | Literal["all"] = key(1000, unit="inner steps", resume=FREE, start_here=True)
    """Length of the run. all: one epoch of the text."""
    log_period: Count = key(10, unit="inner steps", resume=FREE)
    """Interval at which metrics are fetched from the devices, printed and written."""
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = key("auto", resume=FREE, start_here=True)
    """Devices to use. auto: JAX's choice. cpu emulates the devices of the mesh."""
    init_weights_seed: Seed = key(0)
    """Random seed of the initial weights, the same for every replica."""
    # stop: a wrong number is not hidden.
    nan_policy: Literal["stop", "skip"] = key("stop", resume=FREE)
    """At a loss or gradient that is not finite: exit, or skip the update of that step."""

    def _check(self: Any) -> None:
        checks.refuse_store("base_output_directory", self.base_output_directory)


class Evaluation(Group, group="evaluation"):
    """Held-out loss during training."""

    eval_interval: Count | MinusOne = key(-1, unit="inner steps", resume=FREE, start_here=True)
    """Interval at which the outer parameters are evaluated on held-out text. -1: never."""
    eval_steps: Count | MinusOne = key(10, unit="batches", resume=FREE)
    """Length of one evaluation. -1: all of the held-out text."""
    eval_dataset_path: Annotated[TextPath | dict[TextName, TextPath], NESTED] = key(
        "", resume=FREE, hosts=PATHS
    )
    """Held-out text, or {name: path} for several. An empty path: the part that is held out."""
    # A twentieth: our choice.
    eval_fraction: ShareBelowOne = key(0.05, unit="share of the tokens")
    """Part of each source that training leaves out if eval_dataset_path is empty. 0: none."""
    sample_prompt: str = key("", resume=FREE)
    """Text that the model continues at each evaluation, into the log. Empty: none."""

    def _check(self: Any) -> None:
        synthetic = self.dataset_type == "synthetic"
        if synthetic:
            for name in ("eval_dataset_path", "sample_prompt"):
                checks.require(self, name, ("", {}), "dataset_type", "it reads no text")
        if self.eval_interval == -1:
            return
        if synthetic:
            checks.expect(self, self.eval_steps != -1, "eval_steps", "a number", "dataset_type")
        elif self.holds_out():
            because = "eval_interval eval_dataset_path"
            checks.expect(self, self.eval_fraction, "eval_fraction", "more than 0", because)


class Checkpoint(Group, group="checkpoint"):
    """Saved state, and the starting point of a run."""

    enable_checkpointing: bool = key(True, resume=FREE)
    """Save the state of the run, so that the same run_name resumes it."""
    async_checkpointing: bool = key(True, resume=FREE)
    """Write a checkpoint while training continues. false: wait for each save."""
    # Five rounds of the default period.
    checkpoint_period: Count = key(500, unit="inner steps", resume=FREE, start_here=True)
    """Interval at which the state is saved."""
    # More than one, because the newest may be damaged.
    max_num_checkpoints_to_keep: Count | Literal["all"] = key(3, unit="checkpoints", resume=FREE)
    """Number of newest checkpoints to keep."""
    save_checkpoint_on_completion: bool = key(True, resume=FREE)
    """Save once more after the last step."""
    load_parameters_path: str = key("", resume=FREE)
    """Start from the outer parameters of this run or checkpoint, and from step 0."""
    load_full_state_path: str = key("", resume=FREE, from_checkpoint=False)
    """Start a new run from the whole state of this run or checkpoint; the batch may differ."""

    def _check(self: Any) -> None:
        if self.load_parameters_path:
            checks.require(
                self, "load_full_state_path", ("",), "load_parameters_path", "a run has one start"
            )
        checks.refuse_store("load_parameters_path", self.load_parameters_path)
        checks.refuse_store("load_full_state_path", self.load_full_state_path)
