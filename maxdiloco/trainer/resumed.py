"""What a resumed run may do otherwise than the one that wrote the checkpoint: refused, or told."""

import textwrap
from collections.abc import Iterable

from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.read import Restored
from maxdiloco.data import mixture
from maxdiloco.engine.trainer import SavedLayout, Trainer
from maxdiloco.errors import CheckpointError
from maxdiloco.flags import base_yml, config, eval_paths, resume
from maxdiloco.flags.config import Config
from maxdiloco.trainer import optimizer

WIDTH = 100  # columns of a line; our choice


def refuse_changes(cfg: Config, saved: Restored, *, B: int, data: dict[str, str]) -> None:
    """Raise CheckpointError when config, B or data differ from the saved run's in what counts.

    data: of start.agreed_data.
    """
    rows, stored = "sequences_per_replica", saved.meta["config"]
    resume.refuse_changes(
        stored | {rows: saved.meta["position"]["B"]},
        cfg.as_dict() | {rows: B},
        keys=base_yml.declared(),
        checkpoint=str(saved.path),
    )
    before, now = saved.meta["contents"], data["contents"]
    if before == now:
        return
    given = f"dataset_path={cfg.dataset_path or 'empty'}"
    if sources := mixture.changed_sources(before, now):
        given = f"dataset_mixture, sources {', '.join(sources)}"
    if eval_paths.holds_out(config.from_dict(stored)) != eval_paths.holds_out(cfg):
        shown = base_yml.show(cfg.eval_dataset_path) or "empty"
        given = f"eval_dataset_path={shown} decides what is held out"
    raise CheckpointError(
        f"{given}: the text is not that of the checkpoint of step {saved.step}, so its "
        f"place in it means nothing. Restore the text, or start a new run with "
        f"load_parameters_path={saved.path}."
    )


def layout(cfg: Config, saved: Restored) -> SavedLayout:
    """How the state in a checkpoint of the trainer is laid out."""
    rules = saved.meta["config"]["logical_axis_rules"]
    same_rules = rules == cfg.as_dict()["logical_axis_rules"]
    return saved_state.layout_of(saved.meta, same_rules=same_rules)


def lines(cfg: Config, trainer: Trainer, saved: Restored, *, total_steps: int) -> list[str]:
    """What differs from the run that wrote the checkpoint, to be wrapped; none if nothing does.

    total_steps: what learning_rate_schedule_steps=-1 means now.
    """
    stored, before = saved.meta["config"], saved.meta["schedule_steps"]
    return [
        *resume.change_lines(stored, cfg.as_dict(), keys=base_yml.declared()),
        *trainer.restore_lines(layout(cfg, saved), saved.step),
        *rate_lines(
            cfg, config.from_dict(stored), before=before, t=saved.step, total_steps=total_steps
        ),
    ]


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines in at most WIDTH columns; what goes on is indented."""
    options = dict(subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [
        part.replace(resume.KEEP, " ")
        for line in lines
        for part in textwrap.wrap(line, WIDTH, **options)
    ]


def rate_lines(
    cfg: Config, saved_cfg: Config, *, before: int, t: int, total_steps: int
) -> list[str]:
    """The line on the learning rate of the next step, if its schedule has changed.

    before: length of the saved run's schedule, after step t [inner steps].
    """
    now = optimizer.schedule_steps(cfg, total_steps)
    old, new = (
        optimizer.learning_rate(optimizer.learning_rate_schedule(each, length), t)
        for each, length in ((saved_cfg, before), (cfg, now))
    )
    rates = f"step {t + 1} has a rate of {new:.3g}, not {old:.3g}"
    if now != before and cfg.learning_rate_schedule_steps == -1:
        return [
            f"the learning rate's schedule is {now} steps long, not {before}: {rates}; "
            f"learning_rate_schedule_steps={before} keeps it."
        ]
    return [f"the learning rate's schedule has changed: {rates}."] if old != new else []
