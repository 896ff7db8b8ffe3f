"""Tokenise text once, for many runs: `python -m maxdiloco.prepare SOURCE out=FOLDER key=value`.

The folder is read with dataset_path=FOLDER; docs/reference/data.md describes it.
"""

import os
from collections.abc import Sequence
from types import MappingProxyType

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.output import say
from maxdiloco.storage.store import is_local

USAGE = """usage: python -m maxdiloco.prepare SOURCE out=FOLDER [file.yml] [key=value ...]

SOURCE: a folder, file or glob of text, .jsonl, .jsonl.gz or .jsonl.zst. With dataset_type=parquet
it has .parquet files. With dataset_type=hf it is NAME[:CONFIG[:SPLIT]] of the hub, or a folder.
These keys of base.yml matter: dataset_type, tokenizer_type, tokenizer_path, add_bos, add_eos,
text_column, max_corrupted_records. A command that was killed resumes when it is started again.

examples:
  python -m maxdiloco.prepare /data/text out=/data/shards
  python -m maxdiloco.prepare /data/text out=/data/shards tokenizer_type=huggingface \\
    tokenizer_path=tok.json
  python -m maxdiloco.prepare /data/shards check=true

options:"""


# Options in addition to the keys of base.yml.
OPTIONS = MappingProxyType({
    "out": Option("", "folder to make, also in a bucket: gs://, s3://, az://"),
    "processes": Option(0, "number of processes that tokenise; 0: one for each core", int, 0),
    "part_mb": Option(
        0,
        "text in each file of the folder [MB]; a killed process tokenises at most this much again. "
        "0: 64 for 2 GB or more, down to 1 for less text, so that all cores have work",
        int,
        0,
    ),
    "check": Option(
        False,
        "true: compare SOURCE, a complete folder of this program, with its checksums",
        bool,
    ),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    from maxdiloco.config import checks, config
    from maxdiloco.data import registry, shards, tokenizer
    from maxdiloco.data.prepared.prepare import Work, prepare

    source, *rest = argv
    if "=" in source and is_local(source) and not os.path.exists(source):
        raise ConfigError(f"{source}: expected SOURCE. Give it first, then out=FOLDER and keys.")
    options, keys = read_options(rest, OPTIONS, "prepare", keys=True)
    if options.check:
        found = shards.open_shards(source, "SOURCE")
        shards.check_contents(found)
        say(f"{source}: {len(found.lengths):,} documents, {len(found.manifest.parts)} parts: good")
        return 0
    if not options.out:
        raise ConfigError("out is empty: expected the folder to make. Add out=FOLDER.")
    checks.refuse_store("out", options.out)
    yml_first = sorted(keys, key=lambda argument: "=" in argument)
    cfg = config.load([*yml_first, f"dataset_path={source}"], os.environ)
    work = Work(
        registry.open_for_user(registry.Source(cfg.dataset_type, source, cfg.text_column)),
        tokenizer.build(vars(cfg)),
        source,
        allowed=cfg.max_corrupted_records,
        processes=options.processes,
        part_bytes=options.part_mb << 20,
    )
    prepare(work, options.out, say)
    say(f"train with dataset_path={options.out} and the same tokenizer")
    return 0


if __name__ == "__main__":
    main()
