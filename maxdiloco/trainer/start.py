"""How a run begins: from nothing, from where it stopped, or from another run's checkpoint.

    # R replicas
"""

import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from maxdiloco.checkpoint import read, saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.read import Restored
from maxdiloco.data import mixture
from maxdiloco.data.order import Position
from maxdiloco.data.pipeline import TrainingData
from maxdiloco.engine.trainer import OUTER_PARAMS, SavedLayout
from maxdiloco.errors import CheckpointError, DataError
from maxdiloco.flags import base_yml, resume
from maxdiloco.flags.config import Config
from maxdiloco.metrics.history import MOST_STEPS, History
from maxdiloco.processes import output
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.storage import shared_folder
from maxdiloco.storage.run_folder import RunFolder
from maxdiloco.trainer import optimizer, run_tokenizer
from maxdiloco.trainer.assemble import (
    BatchShape,
    Parts,
    initial_state,
    state_with,
)


class Start(NamedTuple):
    """Where a run begins. step: inner steps already done; origin: one line for the user."""

    step: int
    position: Position
    origin: str
    saved: Restored | None

    def is_fresh(self, cfg: Config) -> bool:
        """Whether the parameters are drawn at random, not read from a checkpoint."""
        return self.saved is None and not cfg.load_parameters_path

    def since_row(self, t: int) -> dict[str, Any] | None:
        """What the checkpoint of step t notes of the time since the last row (Recorder.save).

        None at a fresh start, and where an older checkpoint took the place of the one looked at.
        """
        if self.saved is None or self.step != t:
            return None
        return self.saved.meta.get("since_row")


def look(
    cfg: Config,
    checkpointer: Checkpointer | None,
    shape: BatchShape,
    *,
    text: TrainingData,
    data: str,
) -> Start:
    """Find where the run begins, before anything is built.

    text: the training data. data: their fingerprint.
    Raises CheckpointError for keys that differ from the saved run's and alter its result.
    """
    M, B, _ = shape
    saved = checkpointer and checkpointer.restore(lambda meta: {})
    if not saved and cfg.load_full_state_path:
        saved = read.restore_from(
            cfg.load_full_state_path, lambda meta: {}, key="load_full_state_path"
        )
    if not saved:
        origin = "a fresh start"
        if cfg.load_parameters_path:
            origin += f" with the outer parameters of {cfg.load_parameters_path}"
        return Start(0, text.first_position(M, B), origin, None)
    run_tokenizer.refuse_another(cfg, saved.meta, saved.path)
    refuse_changes(cfg, saved, B=B, data=data)
    position = Position.from_dict(saved.meta["position"])
    position = text.next_position(position, saved.step + 1, M, B)
    return Start(saved.step, position, f"resumed after step {saved.step}", saved)


def agreed_fingerprint(data: str, *, key: str = "dataset_path") -> str:
    """The fingerprint of the data. Raises DataError unless it is the same in all processes.

    key: what gave the data, for the message.
    """
    shared_folder.meet()  # the first process may still wait for the lock of the run's folder
    if _differs_between_processes(data):
        raise DataError(
            f"{key}: process {jax.process_index()} and others have different text. Give "
            f"every host the same files; the built-in text differs with the version of Python."
        )
    return data


def agreed_tokenizer(fingerprint: str) -> str:
    """The fingerprint of the tokenizer. Raises DataError unless all processes have the same."""
    if _differs_between_processes(fingerprint):
        raise DataError(
            f"tokenizer_path: process {jax.process_index()} and others have different tokenizers. "
            f"Give every host the same files."
        )
    return fingerprint


def _differs_between_processes(text: str) -> bool:
    checksum = zlib.crc32(text.encode()) >> 1  # fits a signed 32-bit integer
    return in_any_process(from_first_process(checksum) != checksum)


def refuse_changes(cfg: Config, saved: Restored, *, B: int, data: str) -> None:
    """Raise CheckpointError when config, B or data differ from the saved run's in what counts."""
    rows = "sequences_per_replica"
    resume.refuse_changes(
        saved.meta["config"] | {rows: saved.meta["position"]["B"]},
        cfg.as_dict() | {rows: B},
        keys=base_yml.declared(),
    )
    if saved.meta["data"] != data:
        given = f"dataset_path={cfg.dataset_path or 'empty'}"
        if sources := mixture.changed_sources(saved.meta["data"], data):
            given = f"dataset_mixture, sources {', '.join(sources)}"
        raise CheckpointError(
            f"{given}: the text is not that of the checkpoint of step {saved.step}, so its "
            f"place in it means nothing. Restore the text, or start a new run with "
            f"load_parameters_path."
        )


def load(cfg: Config, parts: Parts, start: Start, checkpointer: Checkpointer | None) -> Any:
    """The state before the first step of this start, on the mesh.

    Raises CheckpointError when shapes differ or the checkpoint cannot be read.
    """
    trainer = parts.trainer
    if start.is_fresh(cfg):
        return initial_state(parts, cfg.init_weights_seed)
    if start.saved is None:
        remedy = resume.model_remedy(cfg.as_dict(), keys=base_yml.declared())
        restored = read.restore_from(
            cfg.load_parameters_path,
            lambda meta: {OUTER_PARAMS: parts.params},
            key="load_parameters_path",
            remedy=remedy,
            cast=True,
        )
        if run_tokenizer.differs(cfg, restored.meta) and jax.process_index() == 0:
            output.say(
                f"warning: load_parameters_path={cfg.load_parameters_path} is of a run with "
                f"another tokenizer: a row of its embedding may stand for another text than here."
            )
        return state_with(parts, restored.items[OUTER_PARAMS])
    layout = _saved_layout(cfg, start.saved)

    def abstract_of(meta):
        return saved_state.abstract_items(trainer, layout)

    if checkpointer is not None and from_first_process(start.step in checkpointer.steps()):
        restored = checkpointer.restore(abstract_of)
    else:
        # By its path: the other run may have saved a newer checkpoint meanwhile.
        restored = read.restore_from(
            start.saved.path, abstract_of, key="load_full_state_path"
        )
    return trainer.restored(restored.items, layout, t=restored.step)


def changes(cfg: Config, parts: Parts, start: Start, *, total_steps: int) -> list[str]:
    """Lines for the user: what differs from the run that wrote the checkpoint."""
    if start.saved is None:
        return []
    layout = _saved_layout(cfg, start.saved)
    return [
        *parts.trainer.dropped_lines(layout, start.step),
        *stretched_lines(cfg, start.saved.meta["schedule_steps"], start.step, total_steps),
    ]


def stretched_lines(cfg: Config, before: int, t: int, total_steps: int) -> list[str]:
    """The line on a learning-rate schedule whose length has changed, if it has.

    before: its length in the saved run, after step t [inner steps]; total_steps: what -1 means now.
    """
    if cfg.learning_rate_schedule_steps != -1 or before == total_steps:
        return []
    old, new = (
        optimizer.learning_rate(optimizer.learning_rate_schedule(cfg, length), t)
        for length in (before, total_steps)
    )
    return [
        f"learning_rate_schedule_steps=-1: the schedule was {before} steps long and now is "
        f"{total_steps}, so the learning rate of step {t + 1} is {new:.3g} in place of {old:.3g}. "
        f"Set learning_rate_schedule_steps={before} to keep the schedule."
    ]


def _saved_layout(cfg: Config, saved: Restored) -> SavedLayout:
    meta = saved.meta
    return SavedLayout(
        num_replicas=meta["num_replicas"],
        mesh=meta["mesh"],
        same_rules=meta["config"]["logical_axis_rules"] == cfg.as_dict()["logical_axis_rules"],
        dropped_until=meta["dropped_until"],
    )


def history_of(
    folder: RunFolder, parts: Parts, *, done: int, total: int
) -> AbstractContextManager[History | None]:
    """Adds a line for this start to history.jsonl, and one when the context is left.

    done, total: inner steps before this start, and of the whole run.
    """
    if jax.process_index() != 0:
        return nullcontext()
    trainer, H = parts.trainer, parts.trainer.period
    # A steady state: an exchange of the period before the first H steps is under way.
    period = range(2 * H + 1, 2 * H + 1 + min(H, MOST_STEPS))
    facts = {
        "step": done,
        "until": total,
        "processes": jax.process_count(),
        "devices": parts.mesh.size,
        "replicas": trainer.num_replicas,
        "bytes_sent": [trainer.bytes_sent(t) for t in period],
    }
    return History(folder, facts)


def note(
    cfg: Config, position: Position, data: str, *, tokenizer: str, total_steps: int
) -> dict[str, Any]:
    """What a checkpoint says of the run, besides the trainer's note on the state.

    data, tokenizer: their fingerprints.
    """
    return {
        "config": cfg.as_dict(),
        "position": position.to_dict(),
        "data": data,
        "tokenizer": tokenizer,
        "schedule_steps": optimizer.schedule_steps(cfg, total_steps),
        "jax": jax.__version__,
    }
