"""How a run begins: from nothing, from where it stopped, or from another run's checkpoint.

# R replicas
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from maxdiloco import output
from maxdiloco.checkpoint import metadata, read, saved_state, theta
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.cluster import agree, coordination
from maxdiloco.config import checks, config, resume
from maxdiloco.config.keys import Config
from maxdiloco.config.values import show
from maxdiloco.data import mixture, order, tokenizer_base
from maxdiloco.engine.trainer import SavedLayout
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import compiles, console
from maxdiloco.metrics import history as history_lib
from maxdiloco.run import data as run_data
from maxdiloco.run import optimizer
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.assemble import BatchShape, Parts
from maxdiloco.run.remat_choice import make_room
from maxdiloco.storage.run_folder import RunFolder, absolute, require_place

# Until all have compiled: large programs take many minutes, cached ones seconds. Our choice.
PATIENCE_S = 2 * 3600.0
_SAY_AFTER_S = 10.0  # of waiting; our choice
_OF_TOKENIZER = ("tokenizer_type", "add_bos", "add_eos")  # compared with the other keys


class Start(NamedTuple):
    """Where a run begins. step: inner steps already done; origin: one line for the user."""

    step: int
    position: order.Position
    origin: str
    saved: read.Restored | None

    def since_row(self, t: int) -> dict[str, Any] | None:
        """What the checkpoint of step t notes of the time since the last row (Recorder.save).

        None at a fresh start, and where an older checkpoint took the place of the one looked at.
        """
        return self.saved.meta["since_row"] if self.saved and self.step == t else None


def look(
    cfg: Config,
    checkpointer: Checkpointer | None,
    shape: BatchShape,
    *,
    text: mixture.TrainingData,
    data: dict[str, str],
) -> Start:
    """Find where the run begins, before anything is built. Raises as refuse_changes."""
    M, B = shape.num_replicas, shape.sequences
    needs = metadata.OF_MODEL
    own = saved = checkpointer and checkpointer.restore(lambda meta: {}, needs=needs)
    if not saved and cfg.load_full_state_path:
        saved = read.restore_from(
            cfg.load_full_state_path, lambda meta: {}, key="load_full_state_path", needs=needs
        )
    if not saved:
        origin = "a fresh start"
        if cfg.load_parameters_path:
            origin += f" with the outer parameters of {cfg.load_parameters_path}"
        return Start(0, text.first_position(M, B), origin, None)
    position = order.Position(**saved.meta["position"])
    # A run that starts from the state of another may read another batch.
    compared = (M, B) if own else (position.M, position.B)
    refuse_changes(cfg, saved, M=compared[0], B=compared[1], data=data)
    metadata.require(saved.meta, metadata.OF_TRAINING, saved.path)
    position = text.next_position(position, saved.step + 1, M, B)
    return Start(saved.step, position, f"resumed after step {saved.step}", saved)


def refuse_changes(
    cfg: Config, saved: read.Restored, *, M: int, B: int, data: dict[str, str]
) -> None:
    """Raise CheckpointError when config, batch or agreed_data differ from the saved run's.

    The batch is B, of a replica; of data parallelism that of all, M B.
    """
    stored, place = saved.meta["config"], saved.meta["position"]
    rows, before, now = "sequences_per_replica", place["B"], B
    if not checks.has_replicas(cfg):
        rows, before, now = "sequences_per_step", place["M"] * place["B"], M * B
    same_keys = all(stored[key] == vars(cfg)[key] for key in _OF_TOKENIZER)
    if same_keys and saved.meta["tokenizer"] != data["tokenizer"]:
        raise CheckpointError(
            f"tokenizer_path={cfg.tokenizer_path}: the tokenizer is not that of checkpoint "
            f"{saved.path}, so the same tokens mean another text. Set tokenizer_path="
            f"{saved.path / run_tokenizer.FOLDER}, or set another run_name to start anew."
        )
    resume.refuse_changes(
        stored | {rows: before},
        cfg.as_dict() | {rows: now},
        checkpoint=str(saved.path),
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
            f"eval_dataset_path={shown} decides what is held out, so the text is not that of the "
            f"checkpoint of step {saved.step}. Set it back; beside the held-out part a text is "
            "eval_dataset_path={held_out: , NAME: PATH}."
        )
    raise CheckpointError(
        f"{given}: the text is not that of the checkpoint of step {saved.step}, so its "
        f"place in it means nothing. Restore the text, or start a new run with "
        f"load_parameters_path={saved.path}."
    )


def _layout(cfg: Config, saved: read.Restored) -> SavedLayout:
    """How the state in a checkpoint of the trainer is laid out."""
    rules = saved.meta["config"]["logical_axis_rules"]
    same_rules = rules == cfg.as_dict()["logical_axis_rules"]
    return saved_state.layout_of(saved.meta, same_rules=same_rules)


def check_places(cfg: Config, folder: RunFolder) -> None:
    """Raise CheckpointError where the folder of a run or what it starts from cannot be had.

    Makes nothing.
    """
    if jax.process_index() == 0:
        require_place(cfg.base_output_directory, folder.path.name)
    keys = ("load_parameters_path", "load_full_state_path")
    paths = {key: vars(cfg)[key] for key in keys if vars(cfg)[key]}
    if cfg.enable_checkpointing and not paths:
        return
    with read.reading(folder.path, "base_output_directory"):
        kept = read.steps(folder.checkpoints)
    if kept and not cfg.enable_checkpointing:
        raise CheckpointError(
            f"enable_checkpointing=false starts anew, and run_name={cfg.run_name} has a "
            f"checkpoint of step {max(kept)} whose rows it would drop. Leave it out to go on, "
            "or set another run_name."
        )
    for key, path in paths.items():
        if not kept:
            read.newest_meta(absolute(path, key=key), key=key)


def agreed_data(text: mixture.TrainingData, tokenizer: tokenizer_base.Tokenizer) -> dict[str, str]:
    """What a checkpoint says of the training data. Raises DataError as run_data.agreed."""
    return {
        "contents": run_data.agreed(text.contents, "dataset_path"),
        "tokenizer": run_data.agreed(tokenizer.fingerprint, "tokenizer_path", "tokenizers"),
    }


def load(cfg: Config, parts: Parts, start: Start, checkpointer: Checkpointer | None) -> Any:
    """The state before the first step of this start, which is not a fresh one, on the mesh.

    Raises CheckpointError when shapes differ or the checkpoint cannot be read, ConfigError when
    the state does not fit the devices beside parameters that are loaded.
    """
    trainer = parts.trainer
    if start.saved is None:
        params, restored = theta.restore_parameters(
            cfg.load_parameters_path,
            lambda meta: parts.params,
            key="load_parameters_path",
            remedy=functools.partial(resume.model_remedy, cfg.as_dict()),
            needs=metadata.OF_MODEL,
        )
        is_another = restored.meta["tokenizer"] != run_tokenizer.open_tokenizer(cfg).fingerprint
        if is_another and jax.process_index() == 0:
            output.say(
                f"warning: load_parameters_path={cfg.load_parameters_path} is of a run with "
                f"another tokenizer: a row of its embedding may stand for another text than here."
            )
        room = make_room(cfg, outer_state=checks.has_replicas(cfg))
        with compiles.fitting(parts.init.name, room):
            return jax.block_until_ready(parts.init(params))
    layout = _layout(cfg, start.saved)

    def abstract_of(meta):
        return saved_state.abstract_items(trainer, layout)

    if checkpointer is not None and agree.from_first_process(start.step in checkpointer.steps()):
        restored = checkpointer.restore(abstract_of)
    else:
        # By its path: the other run may have saved a newer checkpoint meanwhile.
        restored = read.restore_from(start.saved.path, abstract_of, key="load_full_state_path")
    return trainer.restore_plan(layout).state_of(restored.items, t=restored.step)


def meet(state: Any, say: Callable[[str], None]) -> int:
    """Wait until all processes have compiled their programs and have their state; its step.

    From here on a process that is silent for long is lost. Raises LostPeerError.
    """
    if jax.process_count() == 1:
        return state.t
    line = "waiting for the other processes, which compile or read their state"
    note = threading.Timer(_SAY_AFTER_S, say, (line,))
    note.daemon = True
    note.start()
    what = "compiled its programs and made its state"
    try:
        coordination.barrier("maxdiloco/ready", what, timeout_s=PATIENCE_S)
    finally:
        note.cancel()
    return state.t


def changes(
    cfg: Config, parts: Parts, start: Start, checkpointer: Checkpointer | None, *, total_steps: int
) -> list[str]:
    """Lines for the user: what differs from the run that wrote the checkpoint; a disk too small."""
    lines = checkpointer.shortage(saved_state.nbytes(parts.trainer)) if checkpointer else []
    if saved := start.saved:
        stored, before = saved.meta["config"], saved.meta["schedule_steps"]
        old = config.from_dict(stored)
        lines += resume.change_lines(stored, cfg.as_dict())
        lines += parts.trainer.restore_plan(_layout(cfg, saved)).lines(saved.step)
        if not checks.is_island(cfg):  # there the rate goes by the log
            lines += rate_lines(cfg, old, before=before, t=saved.step, total_steps=total_steps)
    parts = (part for line in lines for part in console.fit(line, console.WIDTH).split("\n"))
    return [part.replace(resume.KEEP, " ") for part in parts]


def rate_lines(
    cfg: Config, saved_cfg: Config, *, before: int, t: int, total_steps: int
) -> list[str]:
    """The line on the rate of step t + 1, if its schedule, of length `before`, has changed."""
    now = optimizer.schedule_steps(cfg, total_steps)
    old, new = (
        optimizer.learning_rate_schedule(each, length)(t)
        for each, length in ((saved_cfg, before), (cfg, now))
    )
    rates = f"step {t + 1} has a rate of {new:.3g}, not {old:.3g}"
    if now != before and cfg.learning_rate_schedule_steps == -1:
        return [
            f"the learning rate's schedule is {now} steps long, not {before}: {rates}; "
            f"learning_rate_schedule_steps={before} keeps it."
        ]
    return [f"the learning rate's schedule has changed: {rates}."] if old != new else []


def history_of(
    folder: RunFolder, parts: Parts, *, done: int, total: int
) -> AbstractContextManager[history_lib.History | None]:
    """Adds a line for this start to history.jsonl, and one when the context is left."""
    if jax.process_index() != 0:
        return nullcontext()
    trainer, H = parts.trainer, parts.trainer.period
    # A steady state: an exchange of the period before the first H steps is under way.
    period = range(2 * H + 1, 2 * H + 1 + min(H, history_lib.MAX_STEPS))
    facts = {
        "step": done,
        "until": total,
        "processes": jax.process_count(),
        "devices": parts.mesh.size,
        "replicas": trainer.num_replicas,
        "reduce_scatter": trainer.description.reduce_scatter,
        "bytes_sent": [trainer.bytes_sent(t) for t in period],
    }
    return history_lib.History(folder, facts)


def note(
    cfg: Config, position: order.Position, data: dict[str, str], *, total_steps: int
) -> dict[str, Any]:
    """What a checkpoint says of the run beside the trainer's note. data: of agreed_data."""
    return {
        "config": cfg.as_dict(),
        "position": position.to_dict(),
        **data,
        "schedule_steps": optimizer.schedule_steps(cfg, total_steps),
        "jax": jax.__version__,
    }
