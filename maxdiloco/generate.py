"""Text from a trained model: `python -m maxdiloco.generate RUN prompt="..."`.

Samples from the outer parameters of a checkpoint, on one device, with a KV cache.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from maxdiloco.command_line import HELP, end_with, guarded
from maxdiloco.errors import ConfigError
from maxdiloco.flags import checks
from maxdiloco.processes.output import say

if TYPE_CHECKING:
    from maxdiloco.data.tokenizer import Tokenizer


class Options(NamedTuple):
    """The options that may follow RUN as key=value, with their defaults."""

    prompt: str = "\n"
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


MEANING = {
    "prompt": "text to continue",
    "max_new_tokens": "length of the continuation [tokens]",
    "temperature": "0 takes the likeliest token, 1 samples as the model says",
    "top_k": "sample from the k likeliest tokens; 0: from all",
    "seed": "of the sampling",
}


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        say(
            "usage: python -m maxdiloco.generate RUN [key=value ...]\n\n"
            "RUN: folder of a run, or of one checkpoint in it\n"
        )
        for name, default in Options()._asdict().items():
            say(f"  {name}={default!r}  {MEANING[name]}")
        return 0
    run, options = argv[0], parse(argv[1:])
    checks.refuse_store("RUN", run)
    say(text(run, options))
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Options from key=value. Raises ConfigError for an unknown key or a value of another type."""
    given = {}
    for argument in arguments:
        name, equals, raw = argument.partition("=")
        if name in given:
            raise ConfigError(f"{argument}: {name} is given twice. Give it once.")
        if not equals or name not in MEANING:
            raise ConfigError(
                f"{argument} is not an option of generate. Use key=value with one of "
                f"{', '.join(MEANING)}."
            )
        kind = Options.__annotations__[name]
        try:
            given[name] = kind(raw)
        except ValueError:
            raise ConfigError(f"{name}={raw} is not {kind.__name__}. {MEANING[name]}.") from None
    options = Options(**given)
    if not math.isfinite(options.temperature):
        raise ConfigError(f"temperature={options.temperature} is not finite. Use 0 to 1.")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"seed={options.seed} is out of range. Use 0 to 2**63 - 1.")
    return options


def text(run: str, options: Options) -> str:
    """The prompt and its continuation by the model of a run.

    Raises CheckpointError when `run` holds no checkpoint, ConfigError for options out of range.
    """
    import jax
    import numpy as np

    from maxdiloco.checkpoint import read
    from maxdiloco.engine.trainer import OUTER_PARAMS
    from maxdiloco.flags import config
    from maxdiloco.models import sampling, transformer
    from maxdiloco.trainer import run_tokenizer, start

    # Decoding uses no attention kernel, and that of the run may not exist here.
    saved = start.saved_config(run, key="RUN")
    cfg = config.from_dict(saved.as_dict() | {"attention": "dot_product"})
    model = transformer.build(cfg, backend=jax.default_backend())
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one_device),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    restored = read.restore_from(run, lambda meta: {OUTER_PARAMS: abstract}, key="RUN", cast=True)
    tokenizer = run_tokenizer.of_checkpoint(cfg, restored.path)
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    prompt = [*before, *tokenizer.encode(options.prompt)]
    tokens = sampling.sample(
        model,
        restored.items[OUTER_PARAMS],
        np.array([prompt], np.int32),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        key=jax.random.key(options.seed),
    )
    return options.prompt + continuation(tokenizer, prompt, np.asarray(tokens[0]).tolist())


def continuation(tokenizer: "Tokenizer", prompt: list[int], tokens: list[int]) -> str:
    """Text of tokens that follow those of a prompt, up to the first that ends a document."""
    if tokenizer.eos in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos)]
    # Decoded together: the space in front of a first word may not be part of its text.
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]


def cli() -> None:
    """The console entry `maxdiloco-generate`."""
    end_with(main)


if __name__ == "__main__":
    cli()
