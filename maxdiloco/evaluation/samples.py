"""A sample of text from theta at each evaluation of a run.

    # B copies of the prompt, one for each part of a batch  L tokens of the prompt  V vocabulary
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import BESIDE, EVALUATION, Call
from maxdiloco.models import sampling
from maxdiloco.models.devices import token_shards
from maxdiloco.parallel import replicas
from maxdiloco.parallel.program import Program

# Those of maxdiloco.generate, but for a shorter text. Our choice.
NEW_TOKENS = 100
TEMPERATURE = 0.8
TOP_K = 40
SEED = 0


class Sampler:
    """Continues a prompt on the mesh of a run; every process has to call it.

    of_slots: the parameters are those of each slot of `diloco`; the text is by the first ones that
    this process holds, in process 0 those of slot 0.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        tokenizer: Any,
        prompt: str,
        *,
        of_slots: bool,
        on_compile: Callable,
    ):
        self._model, self._tokenizer, self._prompt = model, tokenizer, prompt
        self._tokens = tokenizer.prompt(prompt)
        over = replicas.of_each_slot if of_slots else replicas.of_whole_mesh
        self._program = Program(
            "sample",
            over(self._sample, mesh),
            out_shardings=NamedSharding(mesh, P("diloco") if of_slots else P()),
            on_compile=on_compile,
        )

    def _sample(self, params, *_):
        """Tokens [1, T]."""
        # One prompt cannot be divided: each part of a batch continues a copy, the first counts.
        B, _ = token_shards(self._model.spec.rules)
        return sampling.sample(
            self._model,
            params,
            jnp.tile(jnp.array(self._tokens, jnp.int32), (B, 1)),
            max_new_tokens=NEW_TOKENS,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            key=jax.random.key(SEED),
        )[:1]

    def calls(self, params: Any, runs: float) -> list[Call]:
        """The program. params: abstract. runs: evaluations in a period."""
        return [Call(self._program, (params, None, None), runs, BESIDE, EVALUATION)]

    def __call__(self, params: Any) -> str:
        """The prompt and its continuation. params: of Trainer.eval_params."""
        tokens = replicas.first_here(self._program(params, None, None))
        return self._prompt + self._tokenizer.continuation(self._tokens, tokens)
