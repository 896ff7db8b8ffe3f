"""The number that vocab_size=-1 stands for, before anything is built."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.trainer import run_tokenizer


def test_the_byte_tokenizer_has_384_rows_and_a_given_number_stays():
    """257 tokens; 3 * 128 = 384."""
    assert run_tokenizer.resolved(config.load(["vocab_size=-1"], {})).vocab_size == 384
    assert run_tokenizer.resolved(config.load(["vocab_size=300"], {})).vocab_size == 300


@pytest.mark.parametrize(("tokens", "rows"), [(1, 128), (128, 128), (129, 256)])
def test_rows_are_the_tokens_rounded_up_to_128(tokens, rows, tmp_path):
    vocabulary = {f"w{i}": i for i in range(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    argv = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path}", "vocab_size=-1"]
    cfg = config.load([*argv, "add_bos=false", "add_eos=false"], {})
    assert run_tokenizer.resolved(cfg).vocab_size == rows


def test_checks_that_need_the_number_are_made_again():
    """Of 384 rows none is left for a 385th fragment."""
    streaming = ["enable_streaming_diloco=true", "diloco_sync_period=1000", "steps=1000"]
    many = ["num_diloco_fragments=387", "num_nonlayer_fragments=385"]
    cfg = config.load(["vocab_size=-1", *streaming, *many], {})
    with pytest.raises(ConfigError, match="num_nonlayer_fragments=385 exceeds vocab_size=384"):
        run_tokenizer.resolved(cfg)
