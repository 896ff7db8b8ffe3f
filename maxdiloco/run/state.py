"""The first state of a run: fresh, or restored from a checkpoint of this or another run."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from maxdiloco import output
from maxdiloco.checkpoint import metadata, parameter_sets, read, saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.cluster import agree
from maxdiloco.config import config
from maxdiloco.config.values import show
from maxdiloco.data import mixture, order
from maxdiloco.engine.trainer import SavedLayout
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import console, out_of_memory
from maxdiloco.run import optimizer, resume
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.assemble import BatchShape, Parts
from maxdiloco.run.remat_choice import memory_remedies
from maxdiloco.run.settings import CheckpointSettings, RunSettings, read_optimizer
from maxdiloco.storage.run_folder import RunFolder, absolute, require_usable

_OF_TOKENIZER = ("tokenizer_type", "add_bos", "add_eos")  # compared with the other keys


class RestorePoint(NamedTuple):
    """The point at which a run starts.

    Attributes:
      step: inner steps already done.
      position: position in the training text.
      origin: one line for the user.
      saved: the checkpoint, without its arrays; None at a fresh start.
    """

    step: int
    position: order.Position
    origin: str
    saved: read.Restored | None

    def since_row(self, t: int) -> dict[str, Any] | None:
        """Return the checkpoint's metrics since the last row before step t. See Recorder.save.

        None at a fresh start, and if an older checkpoint was restored instead.
        """
        return self.saved.meta["since_row"] if self.saved and self.step == t else None


def find_restore_point(
    settings: RunSettings,
    checkpointer: Checkpointer | None,
    shape: BatchShape,
    *,
    text: mixture.TrainingData,
    data: dict[str, str],
) -> RestorePoint:
    """Find the point at which the run starts, before anything is built.

    Args:
      settings: settings of the run.
      checkpointer: reads checkpoints in the run's folder; None if nothing is saved.
      shape: shape of a batch.
      text: the training data.
      data: fingerprints of data.data_fingerprints.

    Raises:
      CheckpointError: no checkpoint can be read, or settings differ that must not change.
    """
    M, B = shape.num_replicas, shape.sequences
    paths, needs = settings.checkpoint, metadata.OF_MODEL
    own = saved = checkpointer and checkpointer.restore(lambda meta: {}, needs=needs)
    if not saved and paths.load_full_state_path:
        saved = read.restore_from(
            paths.load_full_state_path, lambda meta: {}, key="load_full_state_path", needs=needs
        )
    if not saved:
        origin = "a fresh start"
        if paths.load_parameters_path:
            origin += f" with the outer parameters of {paths.load_parameters_path}"
        return RestorePoint(0, text.first_position(M, B), origin, None)
    position = order.Position(**saved.meta["position"])
    # A run that starts from the state of another run may have another batch.
    compared = (M, B) if own else (position.M, position.B)
    refuse_changes(settings, saved, M=compared[0], B=compared[1], data=data)
    metadata.require(saved.meta, metadata.OF_TRAINING, saved.path)
    position = text.next_position(position, saved.step + 1, M, B)
    return RestorePoint(saved.step, position, f"resumed after step {saved.step}", saved)


def read_layout(settings: RunSettings, note: Mapping[str, Any]) -> SavedLayout:
    """Return the layout of the state in a run's checkpoint. note: metadata of the checkpoint."""
    rules = note["config"]["logical_axis_rules"]
    same_rules = rules == settings.config.as_dict()["logical_axis_rules"]
    return saved_state.read_layout(note, same_rules=same_rules)


def restore(
    settings: RunSettings, parts: Parts, point: RestorePoint, checkpointer: Checkpointer | None
) -> Any:
    """Restore the state before the first step of a run onto the mesh.

    Raises:
      CheckpointError: shapes differ, or the checkpoint cannot be read.
      ConfigError: the state does not fit the devices in addition to the loaded parameters.
    """
    if point.saved is None:
        return _with_parameters(settings, parts)
    if checkpointer is not None and agree.from_first_process(point.step in checkpointer.steps()):
        restore_from = checkpointer.restore
    else:  # by its path, since the other run may have saved a newer one meanwhile
        restore_from = functools.partial(
            read.restore_from, point.saved.path, key="load_full_state_path"
        )
    layout = functools.partial(read_layout, settings)
    return saved_state.read_state(restore_from, parts.trainer, layout)[1]


def _with_parameters(settings: RunSettings, parts: Parts) -> Any:
    """Return a fresh state with the outer parameters of another run."""
    path = settings.checkpoint.load_parameters_path
    params, restored = parameter_sets.restore_parameters(
        path,
        lambda meta: parts.params,
        key="load_parameters_path",
        remedy=functools.partial(resume.model_remedy, settings.config.as_dict()),
        needs=metadata.OF_MODEL,
    )
    own = run_tokenizer.open_tokenizer(settings.tokenizer).fingerprint
    if restored.meta["tokenizer"] != own and jax.process_index() == 0:
        output.say(
            f"warning: load_parameters_path={path} was trained with another tokenizer: a row of "
            "its embedding may stand for another text than in this run."
        )
    remedy = memory_remedies(
        settings.config,
        outer_state=settings.batch.enable_diloco,
        remat_policy=settings.model.config.remat_policy,
    )
    with out_of_memory.require_fit(parts.init.name, remedy):
        return jax.block_until_ready(parts.init(params))


def refuse_changes(
    settings: RunSettings, saved: read.Restored, *, M: int, B: int, data: dict[str, str]
) -> None:
    """Raise CheckpointError when config, batch or data differ from the saved run's.

    Args:
      settings: settings of the run.
      saved: the checkpoint.
      M: number of replicas.
      B: sequences of a replica; with data parallelism M B is compared.
      data: fingerprints of data.data_fingerprints.
    """
    cfg = settings.config
    stored, place = saved.meta["config"], saved.meta["position"]
    rows, devices, rows_before, rows_now = "replica", "devices of a mesh position", place["B"], B
    if not settings.batch.enable_diloco:
        rows, devices, rows_before, rows_now = "step", "devices", place["M"] * place["B"], M * B
    same_keys = all(stored[key] == vars(cfg)[key] for key in _OF_TOKENIZER)
    if same_keys and saved.meta["tokenizer"] != data["tokenizer"]:
        raise CheckpointError(
            f"tokenizer_path={cfg.tokenizer_path}: checkpoint {saved.path} has another tokenizer, "
            f"so the same tokens mean another text. Set tokenizer_path="
            f"{saved.path / run_tokenizer.FOLDER}, or another run_name to start from scratch."
        )
    resume.refuse_changes(stored, cfg.as_dict(), checkpoint=str(saved.path))
    if rows_before != rows_now:
        start = "load_parameters_path" if settings.is_island else "load_full_state_path"
        raise CheckpointError(
            f"sequences_per_{rows}={rows_now} (the checkpoint has {rows_before}): a resumed run "
            "must have the batch of the interrupted one. It is per_device_batch_size * "
            f"{devices} / context * gradient_accumulation_steps. Set these keys back, or set "
            f"another run_name to start a new run, with {start}={saved.path}."
        )
    before, now = saved.meta["contents"], data["contents"]
    if before == now:
        return
    given = f"dataset_path={cfg.dataset_path or 'empty'}"
    if sources := mixture.changed_sources(before, now):
        given = f"dataset_mixture, sources {', '.join(sources)}"
    if config.from_dict(stored).holds_out() != cfg.holds_out():
        shown = show(cfg.eval_dataset_path) or "empty"
        raise CheckpointError(
            f"eval_dataset_path={shown} changes the held-out part, so the training text differs "
            f"from the checkpoint of step {saved.step}. Restore the key; to evaluate on another "
            "text in addition to the held-out part, use eval_dataset_path={held_out: , NAME: PATH}."
        )
    raise CheckpointError(
        f"{given}: the text differs from the checkpoint of step {saved.step}, so the position in "
        f"it is not valid. Restore the text, or start a new run with "
        f"load_parameters_path={saved.path}."
    )


def check_paths(
    checkpoint: CheckpointSettings, folder: RunFolder, *, base_output_directory: str, run_name: str
) -> None:
    """Raise CheckpointError if the run's folder or its starting checkpoint cannot be used.

    Nothing is created.
    """
    if jax.process_index() == 0:
        require_usable(base_output_directory, folder.path.name)
    keys = ("load_parameters_path", "load_full_state_path")
    paths = {key: vars(checkpoint)[key] for key in keys if vars(checkpoint)[key]}
    if checkpoint.enable_checkpointing and not paths:
        return
    with read.replace_read_error(folder.path, "base_output_directory"):
        kept = read.steps(folder.checkpoints)
    if kept and not checkpoint.enable_checkpointing:
        raise CheckpointError(
            f"enable_checkpointing=false would start from scratch and drop the rows of "
            f"run_name={run_name}, which has a checkpoint of step {max(kept)}. Leave it out to "
            "resume, or set another run_name."
        )
    for key, path in paths.items():
        if not kept:
            read.newest_meta(absolute(path, key=key), key=key)


def change_lines(
    settings: RunSettings, parts: Parts, point: RestorePoint, *, total_steps: int
) -> list[str]:
    """Return log lines on the differences from the run that wrote the checkpoint."""
    if point.saved is None:
        return []
    meta = point.saved.meta
    lines = resume.change_lines(meta["config"], settings.config.as_dict())
    lines += parts.trainer.restore_plan(read_layout(settings, meta)).lines(point.saved.step)
    if not settings.is_island:  # there the rate follows the log
        lines += rate_lines(
            settings.optimizer,
            read_optimizer(config.from_dict(meta["config"])),
            before=meta["schedule_steps"],
            t=point.saved.step,
            total_steps=total_steps,
        )
    fitted = (part for line in lines for part in console.fit(line, console.WIDTH).split("\n"))
    return [part.replace(resume.KEEP, " ") for part in fitted]


def rate_lines(
    new: optimizer.OptimizerSettings,
    old: optimizer.OptimizerSettings,
    *,
    before: int,
    t: int,
    total_steps: int,
) -> list[str]:
    """Return a log line on the learning rate of step t + 1, if its schedule has changed.

    Args:
      new: settings of this start.
      old: settings of the saved run.
      before: length of the saved schedule.
      t: inner steps done.
      total_steps: length of the run.
    """
    now = optimizer.schedule_steps(new, total_steps)
    old_rate, new_rate = (
        optimizer.learning_rate_schedule(each, length)(t)
        for each, length in ((old, before), (new, now))
    )
    rates = f"step {t + 1} has a rate of {new_rate:.3g}, not {old_rate:.3g}"
    if now != before and new.learning_rate_schedule_steps == -1:
        return [
            f"the learning rate's schedule is {now} steps long, not {before}: {rates}; "
            f"learning_rate_schedule_steps={before} keeps it."
        ]
    return [f"the learning rate's schedule has changed: {rates}."] if old_rate != new_rate else []


def note(
    settings: RunSettings, position: order.Position, data: dict[str, str], *, total_steps: int
) -> dict[str, Any]:
    """Return a checkpoint's metadata on the run, which is added to the trainer's note."""
    return {
        "config": settings.config.as_dict(),
        "position": position.to_dict(),
        **data,
        "schedule_steps": optimizer.schedule_steps(settings.optimizer, total_steps),
        "jax": jax.__version__,
    }
