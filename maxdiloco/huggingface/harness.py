"""A run as a model of the Language Model Evaluation Harness (package lm_eval, extra `eval`).

Importing this module registers the model `maxdiloco`. As a program, it is the harness's own command
line with this model:

    python -m maxdiloco.huggingface.harness --model maxdiloco --model_args run=runs/a --tasks ...

Releases of lm_eval after 0.4.13 find the model by the entry point of setup.py, so that
`lm_eval --model maxdiloco` suffices.

Prompts and truncation follow the harness's model `hf`, so that a run and its export have the same
results. A rolling log-likelihood therefore has the BOS token twice if the tokenizer adds it: as the
harness's prefix, and as the first token of the text.
"""
# B sequences of a batch  L tokens of a sequence

import collections
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
import yaml
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from maxdiloco.checkpoint import read
from maxdiloco.errors import ConfigError
from maxdiloco.models import sampling
from maxdiloco.models.devices import token_shards
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel import replicas
from maxdiloco.run import model as run_model
from maxdiloco.run import settings, startup, stored
from maxdiloco.run import tokenizer as run_tokenizer

BATCH_SIZE = 8  # sequences; with the harness's default of 1, devices of a mesh would be idle
MAX_NEW_TOKENS = 256  # default of the harness's model `hf`
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k")  # supported options
Request = tuple[Any, list[int], list[int]]  # key of the harness's cache, context, continuation


@register_model("maxdiloco")
class HarnessModel(TemplateLM):
    """The parameters of a checkpoint, on all devices of this process."""

    def __init__(
        self,
        run: str,
        *,
        step: int = read.NEWEST,
        parameters: str = "outer",
        base_output_directory: str = "runs",
        batch_size: int | str = BATCH_SIZE,
        device: str | None = None,
        **keys: Any,
    ):
        """Read a checkpoint.

        Args:
          run: name of a run in base_output_directory, its folder, or the folder of a checkpoint.
          step: step of the checkpoint. -1: the newest checkpoint.
          parameters: parameters to evaluate, as the option `parameters` of maxdiloco.evaluate.
          base_output_directory: folder of runs.
          batch_size: sequences of a batch, rounded up to a multiple that the devices can share.
          device: a device of PyTorch, which the harness passes to every model. It is not used,
            because the key `hardware` chooses the devices.
          **keys: keys of maxdiloco.evaluate, such as the sizes of the mesh.

        Raises:
          ConfigError: a value is wrong, or the model has no tokenizer.
          CheckpointError: there is no such checkpoint, or it cannot be read.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size={batch_size}: expected an integer >= 1.")
        folder = read.locate(str(run), base_output_directory=base_output_directory, step=step)
        argv = [f"{name}={value}" for name, value in keys.items()]
        configure = functools.partial(stored.configure, argv=argv, environ=os.environ)
        cfg = configure(read.newest_meta(folder, key="RUN"))
        if (cfg.dataset_type, cfg.tokenizer_type) == ("synthetic", "byte"):
            raise ConfigError(
                f"dataset_type=synthetic of RUN={run}: its tokens are numbers, not text. Use a run "
                "that trained on text."
            )
        with startup.join_processes(cfg) as cluster:
            if cluster is not None:
                raise ConfigError(
                    "tasks: expected one process. Start it without the variables of a cluster, "
                    "with keys of a mesh on its devices."
                )
            mesh = mesh_lib.build(settings.read_mesh(cfg))
            self.checkpoint = stored.load(folder, lambda meta: (configure(meta), mesh), parameters)
        cfg = self.checkpoint.cfg
        self._tokens = run_tokenizer.of_checkpoint(
            settings.read_tokenizer(cfg), self.checkpoint.path
        )
        self.max_length = cfg.max_target_length
        self.model = run_model.build_for_decoding(
            settings.read_model(cfg, mesh), mesh, self.checkpoint.model
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shards, _ = token_shards(self.model.config.rules)
        self._rows = -(-int(batch_size) // shards) * shards
        self._score = self._program(self._log_probabilities)

    def _program(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compile fn(params, batch, None) for the mesh; results are replicated on all devices."""
        return jax.jit(replicas.with_context_mesh(fn, self.checkpoint.mesh))

    def _log_probabilities(self, params, batch, _):
        """Return the log-probability of each next token, and whether it is the likeliest.

        batch: tokens [B, L + 1] and lengths [B, 1]. The results are [B, L].
        """
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        segment_ids_BL = (jnp.arange(tokens_BL.shape[1]) < batch["lengths"]).astype(jnp.int32)
        logits_BLV = self.model.logits(params, tokens_BL, segment_ids_BL)
        logs_BLV = jax.nn.log_softmax(logits_BLV)
        logs_BL = jnp.take_along_axis(logs_BLV, targets_BL[..., None], axis=-1)[..., 0]
        return logs_BL, jnp.argmax(logits_BLV, axis=-1) == targets_BL

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document, or else the token that starts one."""
        return _first(self._tokens.eos, self._tokens.bos, *self._tokens.ends)

    @property
    def prefix_token_id(self) -> int:
        """The token that is used as the context of a text without context."""
        return _first(self._tokens.bos, self._tokens.eos, *self._tokens.ends)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, with the tokenizer's bos unless add_special_tokens=False."""
        encode = self._tokens.encode if add_special_tokens is False else self._tokens.prompt
        return encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations in batches, the longest first. Long contexts lose their start."""
        texts = [(context + rest)[-(self.max_length + 1) :] for _, context, rest in requests]
        for _, _, rest in requests:
            if len(rest) > self.max_length:
                raise ConfigError(
                    f"max_target_length={self.max_length} is less than the {len(rest)} tokens of "
                    f"a continuation. Use a task with shorter ones."
                )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(texts[i]))
        for batch in self._batches(order, "log-likelihoods", disable_tqdm):
            width = min(self.max_length, _power_of_two(len(texts[batch[0]]) - 1))
            tokens = np.zeros((self._rows, width + 1), np.int32)
            lengths = np.ones((self._rows, 1), np.int32)
            for row, i in enumerate(batch):
                tokens[row, : len(texts[i])] = texts[i]
                lengths[row] = len(texts[i]) - 1
            batch_arrays = {"tokens": tokens, "lengths": lengths}
            logs, likeliest = map(
                np.asarray, self._score(self.checkpoint.params, batch_arrays, None)
            )
            for row, i in enumerate(batch):
                key, _, rest = requests[i]
                scored = slice(len(texts[i]) - 1 - len(rest), len(texts[i]) - 1)
                total = float(logs[row, scored].sum(dtype=np.float64))
                found[i] = total, bool(likeliest[row, scored].all())
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, found[i])
        return found

    def _batches(
        self, order: Sequence[int], what: str, disable_tqdm: bool
    ) -> Iterator[Sequence[int]]:
        starts = range(0, len(order), self._rows)
        for start in tqdm(starts, desc=what, disable=disable_tqdm):
            yield order[start : start + self._rows]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of max_target_length tokens."""
        owners, windows = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                owners.append(number)
                windows.append((None, *utils.make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (score, _) in zip(owners, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts up to a stop string, the end of a document, or max_gen_toks tokens.

        All prompts of a batch have the same length and the same options.
        """
        groups: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        prompts: list[list[int]] = []
        for number, request in enumerate(requests):
            text, options = request.args
            options = self._generation(options)
            room = self.max_length - options["max_gen_toks"]
            prompts.append(self.tok_encode(text)[-room:])
            groups[json.dumps(options), len(prompts[-1])].append(number)
        texts = [""] * len(requests)
        for (packed, length), members in groups.items():
            options = json.loads(packed)
            sample = self._program(functools.partial(self._sample, options))
            for batch in self._batches(members, "generation", disable_tqdm):
                tokens = np.zeros((self._rows, length), np.int32)
                tokens[: len(batch)] = [prompts[i] for i in batch]
                made = np.asarray(sample(self.checkpoint.params, tokens, None))
                for row, i in enumerate(batch):
                    text = self._tokens.continuation(prompts[i], made[row])
                    texts[i] = postprocess_generated_text(text, options["until"], None)
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Add defaults to the options of a generation. Raises ConfigError for unsupported ones."""
        options = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        for name in options:
            if name not in GENERATION:
                raise ConfigError(f"{name}: expected one of {', '.join(GENERATION)}.")
        if options["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f"max_gen_toks={options['max_gen_toks']}: expected less than max_target_length="
                f"{self.max_length}."
            )
        return options

    def _sample(self, options, params, tokens_BL, _):
        return sampling.sample(
            self.model,
            params,
            tokens_BL,
            max_new_tokens=options["max_gen_toks"],
            temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
            top_k=options.get("top_k", 0),
            key=jax.random.key(0),
        )


def _first(*tokens: int | None) -> int:
    """Return the first token that is not None. Raises ConfigError if all are None."""
    for token in tokens:
        if token is not None:
            return token
    raise ConfigError(
        "tokenizer_path: the tokenizer has no token that starts or ends a text, and the harness "
        "needs one. Use a tokenizer with a BOS or EOS token."
    )


def _power_of_two(size: int) -> int:
    """Round up to a power of two, so that programs are compiled for few lengths."""
    return 1 << max(0, size - 1).bit_length()


def find_tasks(names: Sequence[str]) -> tuple[list[Any], TaskManager]:
    """Load tasks of the harness with their data.

    Args:
      names: names of tasks, groups or tags, or paths of yml files of tasks.

    Returns:
      The tasks and groups, and their manager.

    Raises:
      ConfigError: a task does not exist, or its data cannot be read.
    """
    manager = TaskManager()
    try:
        found = manager.load(list(names))
    except (KeyError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"tasks={','.join(names)} cannot be loaded: {type(error).__name__}: {error}. Give "
            "tasks of lm_eval (`lm_eval ls tasks` lists them), or the yml file of one; their data "
            "are loaded by the package datasets."
        ) from error
    inside = {child for children in found["group_map"].values() for child in children}
    everything = {**found["groups"], **found["tasks"]}
    return [item for name, item in everything.items() if name not in inside], manager


def evaluate(model: HarnessModel, tasks: Sequence[Any], manager: TaskManager) -> dict[str, Any]:
    """Evaluate a model on tasks; returns the harness's results, without samples."""
    return lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, log_samples=False
    )


def as_text(results: dict[str, Any]) -> list[str]:
    """Return the lines of the harness's tables."""
    tables = [utils.make_table(results)]
    if "groups" in results:
        tables.append(utils.make_table(results, "groups"))
    return [line for table in tables for line in table.splitlines()]


def as_json(results: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each task, fit for JSON."""
    return json.loads(json.dumps(results["results"], default=utils.handle_non_serializable))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
