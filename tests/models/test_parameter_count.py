"""Sizes of the papers' ladder, against the formula worked by hand; nothing is allocated."""

import jax
import pytest
import tiny_model

from maxdiloco.config import config
from maxdiloco.models.config import from_keys
from maxdiloco.models.decoder import Decoder
from maxdiloco.models.model import Model, count_parameters

# arXiv 2503.09799 Tab. 3: layers, heads (of 64), width, feed-forward width; vocabulary 32,768.
LADDER = {
    "35m": (6, 8, 512, 2048),
    "90m": (9, 12, 768, 3072),
    "180m": (12, 16, 1024, 4096),
    "330m": (15, 20, 1280, 5120),
    "550m": (18, 24, 1536, 6144),
    "1b": (24, 32, 2048, 8192),
    "4b": (36, 48, 3072, 12288),
    "10b": (48, 64, 4096, 16384),
}

# tiny: 384 * 128 + 4 * (2 * 128^2 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128 + 2 * 32) + 128.
# peer25m: 2 * 32000 * 256 + 8 * (4 * 256^2 + 3 * 256 * 1024 + 2 * 256) + 256.
# The others: the families' authors or the hub's own count of their checkpoints.
FAMILIES = {
    "tiny": 1_033_600,
    "peer25m": 24_776_960,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "mistral-7b": 7_241_732_096,
    "olmo2-1b": 1_484_916_736,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", [*LADDER, *FAMILIES])
def test_model_files_have_the_parameters_of_the_papers_and_of_checkpoints(name):
    """Of the ladder V D (tied embedding) + layers * (4 D^2 + 2 D F + 2 D + 2 * 64) + D: attention,
    plain feed-forward, two norms, query and key norm; last norm."""
    cfg = config.load([f"model_name={name}"], {})
    expected = FAMILIES.get(name)
    if name in LADDER:
        layers, heads, width, hidden = LADDER[name]
        a_layer = 4 * width**2 + 2 * width * hidden + 2 * width + 2 * 64
        expected = 32768 * width + layers * a_layer + width
        assert (cfg.base_num_decoder_layers, cfg.base_num_query_heads) == (layers, heads)
        assert (cfg.head_dim, cfg.vocab_size) == (64, 32768)
    assert count_parameters(Model(from_keys(cfg))) == expected


def test_models_that_differ_only_in_the_remat_policy_share_one_trace(monkeypatch):
    """Control: another width is traced again."""
    made = []

    class Counted(Decoder):
        def __init__(self, config, kernels, **options):
            made.append(config.emb_dim)
            super().__init__(config, kernels, **options)

    monkeypatch.setattr("maxdiloco.models.model.Decoder", Counted)
    for emb_dim, policy in ((40, "auto"), (40, "minimal"), (40, "full"), (48, "full")):
        model = tiny_model.build(base_emb_dim=emb_dim, remat_policy=policy)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        assert jax.tree.map(lambda x: x.shape, model.shapes) == jax.tree.map(
            lambda x: x.shape, shapes
        )
    assert made == [40, 48]
