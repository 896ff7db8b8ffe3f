"""What a resumed run may do otherwise than the one that wrote the checkpoint: refused, or told."""

import textwrap
from collections.abc import Iterable
from typing import Any

from maxdiloco.checkpoint import theta
from maxdiloco.checkpoint.read import Restored
from maxdiloco.data import mixture
from maxdiloco.diloco import schedule
from maxdiloco.engine.trainer import ExchangeSettings, SavedLayout, Trainer
from maxdiloco.errors import CheckpointError
from maxdiloco.flags import base_yml, config, eval_paths, resume
from maxdiloco.flags.config import Config
from maxdiloco.trainer import optimizer

WIDTH = 100  # columns of a line; our choice


def refuse_changes(cfg: Config, saved: Restored, *, B: int, data: dict[str, str]) -> None:
    """Raise CheckpointError when config, B or data differ from the saved run's in what counts.

    data: of start.agreed_data.
    """
    rows = "sequences_per_replica"
    resume.refuse_changes(
        saved.meta["config"] | {rows: saved.meta["position"]["B"]},
        cfg.as_dict() | {rows: B},
        keys=base_yml.declared(),
        checkpoint=str(saved.path),
    )
    before, now = saved.meta["data"], data["data"]  # names and lengths of the documents
    same_path = saved.meta["config"]["dataset_path"] == cfg.dataset_path
    if "contents" in saved.meta:
        before, now, same_path = saved.meta["contents"], data["contents"], True
    if before == now and same_path:
        return
    given = f"dataset_path={cfg.dataset_path or 'empty'}"
    if sources := mixture.changed_sources(before, now):
        given = f"dataset_mixture, sources {', '.join(sources)}"
    holds_out = eval_paths.holds_out(cfg)
    if eval_paths.holds_out(config.from_dict(saved.meta["config"])) != holds_out:
        shown = base_yml.show(cfg.eval_dataset_path) or "empty"
        given = f"eval_dataset_path={shown} decides what is held out"
    elif holds_out and "eval_fraction" not in saved.meta["config"]:
        given += ", or what is held out of it (every 20th file before eval_fraction, of any size)"
    raise CheckpointError(
        f"{given}: the text is not that of the checkpoint of step {saved.step}, so its "
        f"place in it means nothing. Restore the text, or start a new run with "
        f"load_parameters_path={saved.path}."
    )


def layout(cfg: Config, saved: Restored) -> SavedLayout:
    """How the state in a checkpoint of the trainer is laid out."""
    meta = saved.meta
    return SavedLayout(
        num_replicas=meta["num_replicas"],
        mesh=meta["mesh"],
        same_rules=meta["config"]["logical_axis_rules"] == cfg.as_dict()["logical_axis_rules"],
        exchange=meta["exchange"] if "exchange" in meta else _exchange(meta["config"]),
        dropped_until=meta["dropped_until"],
        schedule_since=meta["schedule_since"] if "schedule_since" in meta else 0,
        chunk_pieces=meta["chunk_pieces"] if "chunk_pieces" in meta else None,
        theta_item=theta.item_of(meta),
    )


def _exchange(stored: dict[str, Any]) -> dict[str, Any]:
    """ExchangeSettings of a checkpoint that has them in its config alone."""
    cfg = config.from_dict(stored)
    fragments = cfg.num_diloco_fragments if cfg.enable_streaming_diloco else 1
    return ExchangeSettings(
        sync_period=cfg.diloco_sync_period,
        overlap_steps=cfg.num_communication_overlapping_steps,
        offsets=schedule.offsets(fragments, cfg.diloco_sync_period),
        outer_overlap=cfg.diloco_outer_overlap,
        exchange_dtype=cfg.diloco_exchange_dtype,
        num_nonlayer_fragments=cfg.num_nonlayer_fragments,
        sequential_layers=cfg.use_sequential_layers,
    ).to_dict()


def lines(cfg: Config, trainer: Trainer, saved: Restored, *, total_steps: int) -> list[str]:
    """What differs from the run that wrote the checkpoint, to be wrapped; none if nothing does.

    total_steps: what learning_rate_schedule_steps=-1 means now.
    """
    stored, keys = saved.meta["config"], base_yml.declared()
    return [
        *resume.change_lines(stored, cfg.as_dict(), keys=keys),
        *trainer.restore_lines(layout(cfg, saved), saved.step),
        *rate_lines(
            cfg,
            config.from_dict(stored),
            before=saved.meta["schedule_steps"],
            t=saved.step,
            total_steps=total_steps,
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
