"""Compare logits and gradients of each model type with Hugging Face's transformers.

    PYTHONPATH=. python benchmarks/parity.py [only=gemma]

A random small model of each type is saved by transformers, imported by maxdiloco.hf, and both
compute float32 logits of the same texts: one longer than the window, one padded, three packed into
one row. tests/huggingface/test_parity.py asserts on the same numbers.
"""
# B sequences  L tokens  V vocabulary

import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LENGTH = 40
WINDOW = 7
PADDED = 29  # tokens of the padded text
PACKED = (11, 17, 12)
VOCABULARY = 61
LEFT_OUT = object()  # as an argument: the class's own default
TOLERANCE = 1e-4  # float32: sums of up to 100 products in another order
_SIZES = dict(
    hidden_size=24, num_hidden_layers=3, intermediate_size=40, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, vocab_size=VOCABULARY, max_position_embeddings=64,
    attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=500.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
    original_max_position_embeddings=16,
)  # fmt: skip
_FIRST_GEMMA = dict(
    head_dim=16, num_hidden_layers=2, num_key_value_heads=1, tie_word_embeddings=True
)
_GEMMA = {"query_pre_attn_scalar": 17, "tie_word_embeddings": True}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
_LATENT = dict(
    head_dim=LEFT_OUT, num_key_value_heads=4, q_lora_rank=14, kv_lora_rank=11, qk_nope_head_dim=8,
    qk_rope_head_dim=6, v_head_dim=10, first_k_dense_replace=1, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2, n_group=4, topk_group=2,
)  # fmt: skip
_LITE = dict(  # transformers rotates pairs of a row of 12 + 6 features
    q_lora_rank=None, kv_lora_rank=12, routed_scaling_factor=3.0,
    rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
)  # fmt: skip
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}


class Case(NamedTuple):
    """config: name of transformers' class. changes: of its arguments."""

    config: str
    changes: dict[str, Any]


CASES = {
    "llama": Case("LlamaConfig", {"head_dim": 6, "num_key_value_heads": 4}),
    "llama, stretched": Case(
        "LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}
    ),
    "llama, biases": Case(
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
        },
    ),
    "mistral": Case("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": Case(
        "Qwen2Config", {"head_dim": LEFT_OUT, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "qwen3": Case("Qwen3Config", {}),
    "qwen3, yarn, window": Case(
        "Qwen3Config",
        {
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "olmo2": Case("Olmo2Config", {"head_dim": 6, "num_key_value_heads": 4}),
    "gemma": Case("GemmaConfig", _FIRST_GEMMA),
    "gemma2": Case("Gemma2Config", {"sliding_window": WINDOW, **_GEMMA, **_CAPS}),
    "gemma3_text": Case(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            **_GEMMA,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 5, "sliding_window": WINDOW}),
    "qwen3_moe": Case("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, not normed": Case("Qwen3MoeConfig", _EXPERTS),
    "gpt_oss": Case(
        "GptOssConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "deepseek_v2": Case("DeepseekV2Config", {**_LATENT, **_LITE}),
    "deepseek_v3": Case(
        "DeepseekV3Config",
        {**_LATENT, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "deepseek_v3, one group": Case(
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}


class Found(NamedTuple):
    """The greatest differences; size: the greatest logit. gradient: relative to the greatest."""

    plain: float
    padded: float
    packed: float
    size: float
    gradient: float | None = None

    @property
    def greatest(self) -> float:
        """Of the three texts."""
        return max(self.plain, self.padded, self.packed)


def torch_model(case: Case) -> Any:
    """A model of transformers whose every weight matters: norms off 1, logits of about 1 to 10."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, case.config)(**arguments(case))
    return random_model(config)


def arguments(case: Case) -> dict[str, Any]:
    """Of transformers' class."""
    return {k: v for k, v in (_SIZES | case.changes).items() if v is not LEFT_OUT}


def random_model(config: Any) -> Any:
    """A model of a config of transformers, see torch_model."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.5)
            else:
                weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
        for bias in _routed_biases(model):
            bias.normal_(0, 0.3)
    return model


def _routed_biases(model: Any) -> list[Any]:
    """Buffers, which have no gradient."""
    named = model.named_buffers()
    return [bias for name, bias in named if name.endswith("e_score_correction_bias")]


def imported(model: Any, folder: pathlib.Path, vocab_multiple: int = 1) -> Any:
    """stored.LoadedCheckpoint after save_pretrained, unless model is None, and an import."""
    import jax
    from jax.sharding import Mesh

    from maxdiloco.checkpoint import read
    from maxdiloco.config import config
    from maxdiloco.config.keys import AXES
    from maxdiloco.huggingface import imported as imports
    from maxdiloco.run import stored

    if model is not None:
        model.save_pretrained(folder / "theirs")
    given = (vocab_multiple, [f"max_target_length={LENGTH}"])
    imports.import_model(folder / "theirs", folder / "ours", *given, lambda line: None)

    keys = {"z_loss_multiplier": 0.0, "dtype": "float32", "remat_policy": "none"}
    one_device = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    return stored.load(
        read.locate(str(folder / "ours"), base_output_directory=""),
        lambda meta: (config.from_dict(meta["config"] | keys), one_device),
    )


def texts() -> dict[str, np.ndarray]:
    """Rows: a long text, a padded one, a packed one; int32 [3, LENGTH]."""
    rng = np.random.default_rng(0)
    tokens_BL = rng.integers(0, VOCABULARY, (3, LENGTH), dtype=np.int32)
    segments_BL = np.ones((3, LENGTH), np.int32)
    segments_BL[1, PADDED:] = 0
    segments_BL[2] = np.repeat(range(1, 1 + len(PACKED)), PACKED)
    return {"tokens": tokens_BL, "segment_ids": segments_BL}


def our_logits(found: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Float32 logits [B, L, V] of a training window, with the model's own soft-cap."""
    import jax

    options = {"xla_backend_optimization_level": 0}  # compiles in half the time
    compiled = jax.jit(found.model.logits, compiler_options=options)
    return np.asarray(compiled(found.params, batch["tokens"], batch["segment_ids"]))


def their_logits(model: Any, batch: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """Logits [L, V] of each document of each row, in a batch of its own; none for padding."""
    import torch

    def of(tokens):
        with torch.no_grad():
            return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()

    tokens_BL, segments_BL = batch["tokens"], batch["segment_ids"]
    padded = np.flatnonzero(segments_BL[1])
    mask = torch.tensor(segments_BL[1:2].astype(np.int64))
    with torch.no_grad():
        whole = model(torch.tensor(tokens_BL[1:2].astype(np.int64)), attention_mask=mask)
    documents = np.split(tokens_BL[2], np.cumsum(PACKED)[:-1])
    return [
        [of(tokens_BL[0])],
        [whole.logits[0, padded].float().numpy()],
        [of(document) for document in documents],
    ]


def compare(case: Case, folder: pathlib.Path, *, gradient: bool = False) -> Found:
    """Both models on the same texts."""
    model = torch_model(case)
    found = imported(model, folder)
    batch = texts()
    ours, theirs = our_logits(found, batch), their_logits(model, batch)
    rows = [np.concatenate(documents) for documents in theirs]
    errors = [float(np.abs(ours[i, : len(row)] - row).max()) for i, row in enumerate(rows)]
    size = max(float(np.abs(row).max()) for row in rows)
    worst = gradient_error(model, found, batch) if gradient else None
    return Found(*errors, size, worst)


def gradient_error(model: Any, found: Any, batch: dict[str, np.ndarray]) -> float:
    """Of the summed loss of the first row: the worst tensor's error, relative to its greatest."""
    import jax
    import torch

    from maxdiloco.huggingface import config_json, tensors

    row = {name: value[:1] for name, value in batch.items()}
    options = {"xla_backend_optimization_level": 0}
    of_loss = jax.jit(jax.grad(lambda p: found.model.loss(p, row)[0]), compiler_options=options)
    leaves = {
        ".".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(of_loss(found.params))
    }
    tokens = torch.tensor(row["tokens"].astype(np.int64))
    logits = model(tokens).logits[0, :-1].float()
    torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").backward()
    theirs = their_gradients(model)
    family, worst = config_json.family_of(model.config.model_type), 0.0
    for part in tensors.model_parts(found.model.config, family):
        ours = leaves[part.leaf.path][part.index]
        expected = tensors.to_part(theirs[part.name], part)
        greatest = np.abs(expected).max() or 1.0  # zeros of an expert that no token chose
        worst = max(worst, float(np.abs(ours - expected).max() / greatest))
    return worst


def their_gradients(model: Any) -> dict[str, np.ndarray]:
    """{name as in the files: gradient}; saved as a model, so that experts get their names."""
    import torch
    from safetensors.numpy import load_file

    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
        for bias in _routed_biases(model):
            bias.zero_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(pathlib.Path(folder) / "model.safetensors")


def table(found: dict[str, Found]) -> str:
    """A row for each case, as Markdown."""
    lines = [
        "| model type | longer than the window | padded | packed | greatest logit | gradient |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        gradient = "" if row.gradient is None else f"{row.gradient:.1e}"
        lines.append(
            f"| {name} | {row.plain:.1e} | {row.padded:.1e} | {row.packed:.1e} | {row.size:.1f} | "
            f"{gradient} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Compare all cases, or the cases of a model type; 1 when one is off by more than TOLERANCE."""
    options = dict(argument.split("=", 1) for argument in argv)
    only = options.get("only", "")
    found = {}
    for name, case in CASES.items():
        if not name.startswith(only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = compare(case, pathlib.Path(folder), gradient=True)
        print(name, found[name], flush=True)
    print(table(found))
    return int(any(row.greatest > TOLERANCE for row in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
