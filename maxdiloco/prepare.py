"""Tokenise text once, for many runs: `python -m maxdiloco.prepare SOURCE out=FOLDER key=value`.

The folder is read with dataset_path=FOLDER; docs/data.md describes it.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from maxdiloco.command_line import HELP, end_with, guarded
from maxdiloco.errors import ConfigError
from maxdiloco.processes.output import say

USAGE = """usage: python -m maxdiloco.prepare SOURCE out=FOLDER [file.yml] [key=value ...]

SOURCE: a folder, file or glob of text, .jsonl, .jsonl.gz, .jsonl.zst; with dataset_type=parquet of
.parquet; with dataset_type=hf NAME[:CONFIG[:SPLIT]] of the hub, or a folder.
Keys of base.yml that matter: dataset_type, tokenizer_type, tokenizer_path, add_bos, add_eos,
text_column, max_corrupted_records. A killed command goes on when it is started again.
"""


class Options(NamedTuple):
    """The options beside the keys of base.yml, with their defaults."""

    out: str = ""
    processes: int = 0
    part_mb: int = 0
    check: bool = False


MEANING = {
    "out": "folder to make",
    "processes": "processes that tokenise; 0: one for each core",
    "part_mb": "text in a file of the folder, and what a kill costs a process [MB]; 0: 64 for 2 GB "
    "or more, down to 1 for less, so that all cores have some",
    "check": "true: read a folder that is complete, SOURCE, and compare it with its checksums",
}


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        say(USAGE)
        for name, default in Options()._asdict().items():
            say(f"  {name}={default!r}  {MEANING[name]}")
        return 0
    from maxdiloco.data import shards

    source, options, keys = parse(argv)
    if options.check:
        found = shards.open_shards(source, "SOURCE")
        shards.check_contents(found)
        say(f"{source}: {len(found.lengths):,} documents, {len(found.manifest.parts)} parts: good")
        return 0
    return _prepare(source, options, keys)


def parse(argv: Sequence[str]) -> tuple[str, Options, list[str]]:
    """SOURCE, the options, and the arguments that are keys of base.yml.

    Raises ConfigError for an option without a value that fits.
    """
    source, *rest = argv
    if "=" in source and not os.path.exists(source):
        raise ConfigError(f"{source} is no SOURCE. Give it first, then out=FOLDER and keys.")
    given, keys = {}, []
    for argument in rest:
        name, equals, raw = argument.partition("=")
        if not equals or name not in MEANING:
            keys.append(argument)
        elif name in given:
            raise ConfigError(f"{argument}: {name} is given twice. Give it once.")
        else:
            given[name] = _value(name, raw)
    options = Options(**given)
    if not options.out and not options.check:
        raise ConfigError("out= is missing: the folder to make. Add out=FOLDER.")
    return source, options, keys


def _value(name, raw):
    kind = Options.__annotations__[name]
    least = {"processes": 0, "part_mb": 0}
    if kind is int and not (raw.isdecimal() and int(raw) >= least[name]):
        raise ConfigError(f"{name}={raw} is no whole number >= {least[name]}: {MEANING[name]}.")
    if kind is bool and raw not in ("true", "false"):
        raise ConfigError(f"{name}={raw} is neither true nor false: {MEANING[name]}.")
    return raw == "true" if kind is bool else kind(raw)


def _prepare(source, options, keys):
    from maxdiloco.data import tokenizer
    from maxdiloco.data.prepared.prepare import Work, prepare
    from maxdiloco.data.sources import opening
    from maxdiloco.data.sources.files import left_out_line
    from maxdiloco.flags import config

    cfg = config.load([*_yml_first(keys), f"dataset_path={source}"], os.environ)
    if cfg.dataset_type not in opening.KINDS:
        raise ConfigError(
            f"dataset_type={cfg.dataset_type} needs no preparation. Use one of "
            f"{', '.join(opening.KINDS)}."
        )
    text = opening.open_source(cfg.dataset_type, source, "SOURCE", cfg.text_column)
    if line := left_out_line(cfg.dataset_type, source, "SOURCE"):
        say(line)
    work = Work(
        text,
        tokenizer.of_keys(cfg),
        source,
        allowed=cfg.max_corrupted_records,
        processes=options.processes,
        part_bytes=options.part_mb << 20,
    )
    prepare(work, os.path.abspath(os.path.expanduser(options.out)), say)
    say(f"train with dataset_path={options.out} and the same tokenizer")
    return 0


def _yml_first(keys):
    return sorted(keys, key=lambda argument: "=" in argument)


def cli() -> None:
    """The console entry `maxdiloco-prepare`."""
    end_with(main)


if __name__ == "__main__":
    cli()
