"""From the keys to the run that islands agree on, and what is said where they do not agree."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from maxdiloco.config import checks
from maxdiloco.config.keys import KEYS, Config
from maxdiloco.config.values import show
from maxdiloco.data import order
from maxdiloco.errors import ConfigError
from maxdiloco.islands.records import Run
from maxdiloco.islands.rules import Pace

# Our choice: one request for a lease in so many steps, and a step of sixteen times the tokens fits.
STEPS_OF_A_BLOCK = 16
SNAPSHOT_EVERY = 64  # records; our choice
_MOST_TEXT = 240  # characters of a text in run.json
# The key that a field of run.json comes from.
_KEYS = MappingProxyType({
    "wire": "diloco_exchange_dtype",
    "wire_down": "diloco_exchange_dtype",
    "aggregation": "diloco_aggregation",
    "outer_optimizer": "diloco_outer_optimizer",
    "outer_lr": "diloco_outer_lr",
    "outer_momentum": "diloco_outer_momentum",
    "sync_period": "diloco_sync_period",
    "overlap_steps": "num_communication_overlapping_steps",
    "alpha": "communication_overlapping_alpha",
    "tokenizer": "tokenizer_path",
    "fragments": "num_diloco_fragments",
    "islands_min": "islands_min_members",
    "eval_tokens": "eval_interval",
})  # fmt: skip
_OF_FRAGMENTS = (
    "enable_streaming_diloco", "num_diloco_fragments", "num_nonlayer_fragments",
    "use_sequential_layers",
)  # fmt: skip
_OF_DATA = (
    "max_target_length", "enable_data_shuffling", "data_shuffle_seed", "packing",
    "grain_packing_type",
)  # fmt: skip
_OTHERS = "all"  # a word that is no key: a fingerprint of the keys that did not fit
_REMEDY_OF_OTHERS = (
    "These are fingerprints of more keys than fit here: set those of the model and the data, after "
    "the ones that are equal, as the others have them"
)
# The mean of a record is sent in eight bits at least, as with reduce-scatter.
_DOWN = MappingProxyType(dict.fromkeys(("float4_e3m0", "int2", "topk"), "int8"))
_CORRECTED = ("int2", "topk")  # wires that need error feedback, as diloco.quantize has it
# What the first island of a run decides for all, as they may differ in batch and steps.
_OF_THE_FIRST = ("tokens", "block_tokens")


class Facts(NamedTuple):
    """What is known beside the keys. contents, tokenizer: fingerprints; steps: of the schedule.

    step_tokens: of an inner step; length: of a sequence.
    """

    contents: str
    tokenizer: str
    steps: int
    step_tokens: int
    length: int
    say: Callable[[str], None]


class Settings(NamedTuple):
    """An island. run: without its fragments. feedback: of errors. facts: None: it cannot join.
    key: the path of that to sign with, or "".
    """

    url: str
    name: str
    run: Run
    pace: Pace
    feedback: bool
    facts: Facts | None
    key: str = ""


def of(cfg: Config, facts: Facts | None) -> Settings:
    """The island that the keys describe; facts: None where nothing is trained."""
    wire, step_tokens = cfg.diloco_exchange_dtype, facts.step_tokens if facts else 0
    run = Run(
        model=_text(_words(cfg)),
        tokenizer=facts.tokenizer if facts else "",
        data=_text(_data(cfg, facts)),
        wire=wire,
        wire_down=_DOWN.get(wire, wire),
        aggregation=cfg.diloco_aggregation,
        outer_optimizer=cfg.diloco_outer_optimizer,
        outer_lr=cfg.diloco_outer_lr,
        outer_momentum=cfg.diloco_outer_momentum,
        fragments=(),
        islands_min=cfg.islands_min_members,
        sync_period=cfg.diloco_sync_period,
        overlap_steps=cfg.num_communication_overlapping_steps,
        alpha=cfg.communication_overlapping_alpha,
        tokens=facts.steps * step_tokens if facts else 1,
        block_tokens=STEPS_OF_A_BLOCK * step_tokens,
        eval_tokens=max(cfg.eval_interval, 0) * step_tokens,
        snapshot_every=SNAPSHOT_EVERY,
        keys=(),
    )
    feedback = checks.FEEDBACK[cfg.diloco_error_feedback]
    feedback = wire in _CORRECTED if feedback is None else feedback
    store, key = cfg.islands_store, cfg.islands_key
    return Settings(store, cfg.island_name, run, _pace(cfg), feedback, facts, key)


def _pace(cfg: Config) -> Pace:
    """Shorter times where the keys ask for short ones; those of a minute are the defaults."""
    usual, dead = Pace(), cfg.islands_dead_seconds
    period, scale = cfg.islands_period_seconds, min(1.0, cfg.islands_period_seconds / usual.period)
    return Pace(
        period=period,
        dead=dead,
        grace=usual.grace * scale,
        aside=usual.aside * scale,
        beat=min(usual.beat, dead / 10),
        roll=min(usual.roll, dead / 10),
        poll=usual.poll * scale,
        most_poll=usual.most_poll * scale,
    )


def _words(cfg: Config) -> dict[str, object]:
    """What shapes the model and its fragments, as far as it is not the default."""
    declared = KEYS
    group = declared["model_name"].group
    named = [name for name, key in declared.items() if key.group == group]
    named = [name for name in named if name not in ("model_name", "override_model_config")]
    values = {name: vars(cfg)[name] for name in (*named, *_OF_FRAGMENTS)}
    return {name: value for name, value in values.items() if value != declared[name].default}


def _data(cfg: Config, facts: Facts | None) -> dict[str, object]:
    """What says which place of the data has which text."""
    words = {name: vars(cfg)[name] for name in _OF_DATA}
    if entries := list(map(dict, cfg.dataset_mixture)):
        names = [entry["name"] for entry in entries]
        share_K = order.shares([Fraction(entry.get("weight", "1")) for entry in entries])
        by_share = sorted(f"{name}:{share}" for name, share in zip(names, share_K, strict=True))
        words["dataset_mixture"] = ",".join(by_share)
    if facts is None:
        return words
    return words | {"dataset_path": hashlib.sha256(facts.contents.encode()).hexdigest()[:16]}


def _text(values: Mapping[str, object]) -> str:
    """key=value words, fit for run.json."""
    shown = {name: show(value).replace(" ", "") for name, value in values.items()}
    text = " ".join(f"{name}={value}" for name, value in shown.items()) or "default"
    if len(text) <= _MOST_TEXT:
        return text
    whole = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: _MOST_TEXT - 40].rpartition(' ')[0]} {_OTHERS}={whole}"


def adopted(own: Run, stored: Run, url: str, step_tokens: int) -> Run:
    """The run of a store as this island takes part in it. Raises ConfigError where it cannot.

    step_tokens: of a step of this island.
    """
    own = own._replace(keys=stored.keys)  # keys.of_run says whose they are
    both = own.eval_tokens and stored.eval_tokens
    names = (*_OF_THE_FIRST, "eval_tokens") if both else _OF_THE_FIRST
    own = own._replace(**{name: stored._asdict()[name] for name in names})
    for key, mine, other in _differences(own, stored, step_tokens):
        remedy = _REMEDY_OF_OTHERS if key == _OTHERS else f"Set {key}={other}"
        raise ConfigError(
            f"{key}={mine} here, and {other} in the run of islands_store={url}. {remedy}, or use "
            "another islands_store."
        )
    return own


def _differences(own: Run, stored: Run, step_tokens: int) -> Iterator[tuple[str, str, str]]:
    """Keys with both values."""
    for field, mine, other in zip(own._fields, own, stored, strict=True):
        if mine == other:
            continue
        if field in ("model", "data"):
            yield from _of_words(mine, other)
        if field == "eval_tokens":
            mine, other = (max(n // step_tokens, 1) if n else -1 for n in (mine, other))
        yield _KEYS.get(field, field), show(mine), show(other)


def _of_words(mine: str, other: str) -> Iterator[tuple[str, str, str]]:
    words = [dict(word.partition("=")[::2] for word in text.split()) for text in (mine, other)]
    declared = KEYS
    for name in sorted(words[0].keys() | words[1].keys(), key=lambda name: (name == _OTHERS, name)):
        usual = show(declared[name].default) if name in declared else "default"
        values = [found.get(name, usual) for found in words]
        if values[0] != values[1]:
            yield name, *values


def require_block(run: Run, facts: Facts) -> None:
    """Raise ConfigError where a step of this island does not fit the run's blocks of the data."""
    if facts.step_tokens <= run.block_tokens and run.block_tokens % facts.length == 0:
        return
    raise ConfigError(
        f"a step of this island reads {facts.step_tokens:,} tokens, and the islands of this store "
        f"lease blocks of {run.block_tokens:,}: per_device_batch_size is too large. Lower it, or "
        "start the run with the largest island."
    )
