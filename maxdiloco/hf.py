"""Import and export Hugging Face models: `python -m maxdiloco.hf import SRC DST`, `export RUN DST`.

A run starts from an import; an export loads in transformers. docs/howto/huggingface.md describes
both.
"""

import os
import pathlib
from collections.abc import Sequence
from types import MappingProxyType

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.config import checks
from maxdiloco.errors import ConfigError
from maxdiloco.output import say
from maxdiloco.storage.run_folder import absolute
from maxdiloco.storage.store import is_local

USAGE = """usage: python -m maxdiloco.hf import SRC DST [key=value ...]
       python -m maxdiloco.hf export RUN DST [key=value ...]

SRC: folder of a Hugging Face model with config.json and .safetensors; DST: a folder to make
RUN: name of a run, its folder, or the folder of one of its checkpoints or of an import. SRC, RUN,
like= and the DST of an export may be in a bucket: gs://, s3://, az://

examples:
  python -m maxdiloco.hf import Qwen3-0.6B runs/qwen3
  python -m maxdiloco.hf export laptop laptop-hf dtype=bfloat16

options of import:"""


IMPORT = MappingProxyType({
    "vocab_multiple": Option(
        1, "round the rows for tokens up to a multiple of this; the new rows are zeros", int, 1
    ),
    "max_target_length": Option("", "as for train; used when the import itself is evaluated"),
    "add_bos": Option("", "as for train; empty: as the tokenizer does in transformers"),
    "add_eos": Option("", "as for train; empty: as the tokenizer does in transformers"),
})  # fmt: skip
EXPORT = MappingProxyType({
    "parameters": Option(
        "outer",
        "outer: the outer parameters; replica_0, replica_1, ...: one replica's parameters; mean: "
        "the mean over the replicas",
    ),
    "dtype": Option(
        "stored",
        "float32, bfloat16, or stored: as in the checkpoint; checkpoints of runs have float32",
    ),
    "max_shard_size": Option(
        "5GB", "maximum size of a file of weights; each file has at least one tensor"
    ),
    "like": Option(
        "", "folder of a model with the same keys; its config.json and tokenizer are exported"
    ),
    "step": Option(-1, "step of the checkpoint to export; -1: the newest", int, -1),
    "base_output_directory": Option("runs", "folder that contains the run, if RUN is its name"),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if not argv or argv[0] in HELP:
        say(
            "\n".join([USAGE, *option_lines(IMPORT), "\noptions of export:", *option_lines(EXPORT)])
        )
        return 0
    command, *rest = argv
    if command not in ("import", "export"):
        raise ConfigError(f"{command}: expected import or export as the first argument.")
    is_import = command == "import"
    if len(rest) < 2 or any("=" in path for path in rest[:2]):
        names = "SRC DST" if is_import else "RUN DST"
        raise ConfigError(f"{command}: expected two paths. Use {command} {names} [key=value ...].")
    options, _ = read_options(rest[2:], IMPORT if is_import else EXPORT, command)
    checks.refuse_store("SRC" if is_import else "RUN", rest[0])
    if not is_import:
        checks.refuse_store("DST", rest[1])
        checks.refuse_store("base_output_directory", options.base_output_directory)
    elif not is_local(rest[1]):
        raise ConfigError(f"DST={rest[1]}: expected a local folder. Give one that is mounted.")
    target = pathlib.Path(os.path.expanduser(rest[1])).absolute()
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing is computed, so no accelerator is used
    from maxdiloco.huggingface import folders

    if is_import:
        from maxdiloco.huggingface import imported

        values = {name: vars(options)[name] for name in imported.MAY_SET}
        keys = [f"{name}={value}" for name, value in values.items() if value]
        with folders.replace_read_error(rest[0]):
            folder = folders.folder_at(rest[0], "SRC")
            imported.import_model(folder, target, options.vocab_multiple, keys, say)
        return 0
    from maxdiloco.huggingface import exported

    target = absolute(rest[1], key="DST") if "://" in rest[1] else target
    with folders.replace_read_error(rest[0]):
        exported.export_model(rest[0], target, **vars(options), say=say)
    return 0


if __name__ == "__main__":
    main()
