"""The number that vocab_size=-1 stands for, before anything is built."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from maxdiloco.data import run_tokenizer
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config


def test_the_byte_tokenizer_has_384_rows_and_a_given_number_stays():
    """257 tokens; 3 * 128 = 384. The rows beyond the tokens are padding with masked logits."""
    assert sizes("vocab_size=-1") == (257, 384)
    assert sizes("vocab_size=300") == (300, -1)
    assert sizes("vocab_size=-1", "padded_vocab_size=260") == (257, 260)
    with pytest.raises(ConfigError, match="padded_vocab_size=256 is below vocab_size=257"):
        sizes("vocab_size=-1", "padded_vocab_size=256")


@pytest.fixture
def own(tmp_path):
    """Makes argv of a tokenizer file of so many tokens."""

    def make(tokens):
        vocabulary = {f"w{i}": i for i in range(tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        argv = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path}"]
        return [*argv, "add_bos=false", "add_eos=false"]

    return make


def sizes(*argv):
    """Tokens of the model, and the rows of its embedding, -1: as many."""
    cfg = run_tokenizer.resolved(config.load(argv, {}))
    return cfg.vocab_size, cfg.padded_vocab_size


@pytest.mark.parametrize("given", [["vocab_size=-1"], []])
def test_rows_are_the_tokens_of_ones_own_rounded_up_to_128(own, given):
    """Also where vocab_size is left out, and of a named model without override_model_config;
    everything else is the model's, which has 32,768 rows."""
    found = [sizes(*own(tokens), *given) for tokens in (2, 128, 129)]
    assert found == [(2, 128), (128, -1), (129, 256)]
    argv = ["model_name=35m", *own(1000), *given]
    cfg = run_tokenizer.resolved(config.load(argv, {}))
    assert (cfg.vocab_size, cfg.padded_vocab_size, cfg.base_emb_dim) == (1000, 1024, 512)
    with pytest.raises(ConfigError, match="base_emb_dim=64 .* differs from base_emb_dim=512"):
        config.load([*argv, "base_emb_dim=64"], {})


def test_a_named_model_keeps_its_rows_where_its_tokenizer_or_its_weights_are_used(own, tmp_path):
    """95 % of 32,768 is 31,129.6. Rows of weights that are loaded stay unless another number is
    given; without a tokenizer file only -1 may be."""
    assert sizes("model_name=35m", *own(31130)) == (32768, -1)
    assert sizes("model_name=35m", *own(31129)) == (31129, 31232)
    assert sizes("model_name=35m", *own(32769)) == (32769, 32896)
    weights = "load_parameters_path=/runs/a"
    assert sizes("model_name=35m", weights, *own(1000)) == (32768, -1)
    assert sizes("model_name=35m", weights, *own(1000), "vocab_size=1024") == (1024, -1)
    assert sizes("model_name=35m", "vocab_size=-1") == (257, 384)
    (tmp_path / "mine.yml").write_text("base_emb_dim: 64\n")
    assert sizes(f"model_name={tmp_path}/mine.yml", *own(1000)) == (1000, 1024)
    with pytest.raises(ConfigError, match="vocab_size=1024 .* differs from vocab_size=32768"):
        config.load(["model_name=35m", "vocab_size=1024"], {})


def test_checks_that_need_the_number_are_made_again():
    """There are 257 bytes and the like: none is left for a 258th fragment."""
    streaming = ["enable_streaming_diloco=true", "diloco_sync_period=1000", "steps=1000"]
    many = ["num_diloco_fragments=260", "num_nonlayer_fragments=258"]
    cfg = config.load(["vocab_size=-1", *streaming, *many], {})
    with pytest.raises(ConfigError, match="num_nonlayer_fragments=258 exceeds vocab_size=257"):
        run_tokenizer.resolved(cfg)
