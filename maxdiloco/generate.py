"""Sample text from a trained model: `python -m maxdiloco.generate RUN prompt="..."`.

Samples from the outer parameters of a checkpoint, on one device, with a KV cache. The text is
printed to standard output with control characters escaped, and written unchanged to a file with
output=. The step of the checkpoint is printed to standard error.
"""

import json
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace

from maxdiloco import small_files
from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.config import checks
from maxdiloco.errors import ConfigError
from maxdiloco.output import say, say_error

USAGE = """usage: python -m maxdiloco.generate RUN [key=value ...]

RUN: name of a run, its folder, or the folder of one of its checkpoints

examples:
  python -m maxdiloco.generate laptop prompt="Once upon a time"
  python -m maxdiloco.generate runs/laptop prompts_file=prompts.txt output=texts.jsonl seed=1

options:"""
OPTIONS = MappingProxyType({
    "prompt": Option("\n", "text to continue"),
    "prompts_file": Option("", "file with one prompt a line, instead of prompt"),
    "output": Option("", "file to write, with a JSON object of prompt and text on each line; "
                     "empty: print the texts"),
    "max_new_tokens": Option(200, "maximum number of tokens of a continuation; it stops earlier at "
                             "the end of a document", int, most=2**20),
    "add_bos": Option("", "true: start the prompt with the BOS token; false: do not; empty: as in "
                      "training, and for an import as its tokenizer does in transformers"),
    "temperature": Option(0.8, "divides the logits before sampling; 0: use the likeliest token",
                          float),
    "top_k": Option(40, "sample from the k likeliest tokens; 0: from all", int),
    "seed": Option(0, "random seed of the sampling", int, 0),
    "step": Option(-1, "step of the checkpoint to use; -1: the newest", int, -1),
    "base_output_directory": Option("runs", "folder that contains the run, if RUN is its name"),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    run, (options, _) = argv[0], read_options(argv[1:], OPTIONS, "generate")
    checks.refuse_store("RUN", run)
    checks.refuse_store("base_output_directory", options.base_output_directory)
    if options.add_bos not in ("", "true", "false"):
        raise ConfigError(f"add_bos={options.add_bos}: expected true or false.")
    prompts = read_prompts(options)
    from maxdiloco.storage import output_file

    output_file.check_path("output", options.output)
    texts = _continued(run, options, prompts)
    if options.output:
        rows = zip(prompts, texts, strict=True)
        lines = [json.dumps({"prompt": prompt, "text": text}) + "\n" for prompt, text in rows]
        output_file.write_whole("output", options.output, "".join(lines).encode())
    else:
        say("\n".join(texts))
    return 0


def read_prompts(options: SimpleNamespace) -> list[str]:
    """Return the prompts, at least one. Raises ConfigError if their file cannot be used."""
    path = options.prompts_file
    if not path:
        return [options.prompt]
    try:
        text, wrong = small_files.read_bytes(path).decode("utf-8"), "is empty"
    except OSError as error:
        text, wrong = "", f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        text, wrong = "", "cannot be read: it is not UTF-8 text"
    if not text:
        raise ConfigError(f"prompts_file={path} {wrong}. Give a text file, one prompt a line.")
    return text.removesuffix("\n").split("\n")


def _continued(run: str, options: SimpleNamespace, prompts: Sequence[str]) -> list[str]:
    """Return each prompt with its continuation by the model of a run."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from maxdiloco.checkpoint import read
    from maxdiloco.config import config
    from maxdiloco.config.keys import AXES
    from maxdiloco.models import sampling
    from maxdiloco.run import settings, stored
    from maxdiloco.run import tokenizer as run_tokenizer

    base = options.base_output_directory
    folder = read.locate(run, base_output_directory=base, step=options.step)
    one_device = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)

    def configure(meta):
        # Decoding needs no attention kernel, and the run's kernel may not be available here.
        changes = {"attention": "dot_product", "num_diloco_replicas": "auto"}
        if options.add_bos:
            changes["add_bos"] = options.add_bos == "true"
        cfg = config.from_checkpoint(meta["config"] | changes)
        if (cfg.dataset_type, cfg.tokenizer_type) == ("synthetic", "byte"):
            raise ConfigError(
                f"dataset_type=synthetic of RUN={run}: its tokens are numbers, not text, and have "
                "no tokenizer. Use a run that trained on text, or import the model again with its "
                "tokenizer.json or tokenizer.model in the folder of the weights."
            )
        return cfg, one_device

    found = stored.load(folder, configure)
    tokenizer = run_tokenizer.of_checkpoint(settings.read_tokenizer(found.cfg), found.path)
    texts = []
    for prompt in prompts:
        given = tokenizer.prompt(prompt)
        tokens = sampling.sample(
            found.model,
            found.params,
            np.array([given], np.int32),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            key=jax.random.key(options.seed),
        )
        texts.append(prompt + tokenizer.continuation(given, np.asarray(tokens[0])))
    say_error(f"step {found.step} of {found.path.parent.parent}")
    return texts


if __name__ == "__main__":
    main()
