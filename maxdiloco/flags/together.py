"""Keys that do not go together and settings that are seldom meant: the rows of together.yml."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, show


class Row(NamedTuple):
    """A row of together.yml, which says what the fields are."""

    when: Mapping[str, Any] = MappingProxyType({})
    unless: Mapping[str, Any] = MappingProxyType({})
    keys: Sequence[str] = ()
    use: str = ""
    error: str = ""
    warning: str = ""
    note: str = ""

    def counts(self, named: Mapping[str, Any]) -> bool:
        """Whether the row counts; not where it asks for what is not known."""
        if not self.when.keys() | self.unless.keys() <= named.keys():
            return False
        met, kept = (
            [_met(show(wanted), named[name], named) for name, wanted in conditions.items()]
            for conditions in (self.when, self.unless)
        )
        return all(met) and not (kept and all(kept))


def _met(wanted: str, value: Any, named: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return re.fullmatch(f"(?s:{wanted})", value) is not None
    return base_yml.allows(" ".join(str(named.get(word, word)) for word in wanted.split()), value)


def rows() -> list[Row]:
    """The rows of together.yml."""
    return [Row(**entry) for entry in base_yml.read_table("together.yml")]


def named_values(cfg: Any, keys: Mapping[str, Key]) -> dict[str, Any]:
    """What a row may name: keys and what follows from them. Numbers stay; all else is text.

    cfg: a Config within the limits of keys, base.yml's; without keys, no entry of a table is named.
    """
    rounds = cfg.steps // cfg.diloco_sync_period
    named = vars(cfg) | {
        "last_profiled_step": cfg.skip_first_n_steps_for_profiler + cfg.profiler_steps,
        "rounds": rounds,
        "counted": f"{rounds} round{'s' * (rounds != 1)}",
        "most_fragments": cfg.base_num_decoder_layers + cfg.num_nonlayer_fragments,
        "least_fragments": cfg.num_nonlayer_fragments + 1,
        "holds_out": cfg.holds_out(),
        "schedule_fraction": cfg.warmup_steps_fraction + cfg.wsd_decay_steps_fraction,
        "common_heads": math.gcd(cfg.base_num_query_heads, cfg.base_num_kv_heads),
        "larger_head_dim": cfg.head_dim + 1,
        "num_activations": len(cfg.mlp_activations),
        "pattern_layers": len(cfg.attention_pattern),
        "most_dense_layers": cfg.base_num_decoder_layers - 1,
        "expert_devices": cfg.dcn_expert_parallelism * cfg.ici_expert_parallelism,
    }
    for key in keys.values():
        named |= key.whole(named[key.name]) if key.entries else {}
    if keys:
        named |= {
            "larger_rope_dim": named["qk_rope_head_dim"] + 1,
            "latent_head_dim": named["qk_nope_head_dim"] + named["qk_rope_head_dim"],
            "group_size": cfg.num_experts // named["num_groups"],
            "eligible_experts": named["groups_per_token"] * cfg.num_experts // named["num_groups"],
        }
    return {
        name: value if type(value) in (int, float) else show(value) for name, value in named.items()
    }


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for the first row of an error that counts. Arguments: named_values."""
    named = named_values(cfg, keys)
    for row in rows():
        if not (row.warning or row.note) and row.counts(named):
            for line in _said(row, row.error, named, cfg, keys):
                raise ConfigError(line)


def _said(
    row: Row, words: str, named: Mapping[str, Any], cfg: Any, keys: Mapping[str, Key]
) -> Iterator[str]:
    """The line of a row that counts; of a row with keys one for each that has not its default."""
    if not row.keys:
        yield words.format_map(named)
    for name in row.keys:
        if vars(cfg)[name] != keys[name].default:
            given, usual = f"{name}={named[name]}", f"{name}={show(keys[name].default)}"
            beside = " ".join(f"{other}={named[other]}" for other in row.when)
            of_key = {"given": given, "usual": usual, "name": name}
            own = words.format_map({**named, **of_key})
            yield own or f"{given} does nothing with {beside}. Use {usual} or {row.use}."


def lines(cfg: Any, **facts: Any) -> list[str]:
    """Warnings, then notes: of the rows that ask for some of `facts`, or for no such thing.

    facts: what is known when devices and tokenizer are there; num_tokens is the tokenizer's. cfg: a
    Config.
    """
    if "num_tokens" in facts:
        facts["unused_rows"] = 1 - facts["num_tokens"] / cfg.vocab_size
    named, keys, found = named_values(cfg, {}) | facts, base_yml.declared(), []
    for row in rows():
        asks = not facts.keys().isdisjoint(row.when.keys() | row.unless.keys())
        if (row.warning or row.note) and asks == bool(facts) and row.counts(named):
            said = f"warning: {row.warning}" if row.warning else f"note: {row.note}"
            found += _said(row, said, named, cfg, keys)
    return sorted(found, key=lambda line: line.startswith("note: "))
