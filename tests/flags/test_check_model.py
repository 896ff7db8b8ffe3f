"""Refusals of a model's keys: one line with key, value, why and remedy."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config

REFUSED = [
    ("attention_pattern=[local, global]", "sliding_window_size=0 gives", "Set sliding_window_size"),
    ("attention_pattern=[near]", "must be one of: local, global"),
    (
        "base_num_decoder_layers=2 attention_pattern=[local,local,global] sliding_window_size=8",
        "attention_pattern=[local, local, global] has 3 entries",
        "Use 2 or fewer",
    ),
    ("sliding_window_size=8 attention_pattern=[global]", "no layer is local", "Leave the pattern"),
    ("local_rope_max_timescale=100", "no layer is local", "Set rope_max_timescale"),
    ("rope_type=yarn rope_factor=8", "original_max_position_embeddings=0", "Set it"),
    ("rope_type=llama3.1", "needs the length of the texts", "Set it"),
    ("rope_factor=8", "does nothing with rope_type=default", "or rope_type=linear or llama3.1 or"),
    ("rope_factor=0.5", "must be >= 1"),
    (
        "rope_type=linear original_max_position_embeddings=4096",
        "does nothing with rope_type=linear",
        "original_max_position_embeddings=0, or rope_type=llama3.1 or yarn",
    ),
    ("rope_truncate=false", "does nothing with rope_type=default", "rope_truncate=true, or rope_t"),
    ("rope_attention_factor=2", "does nothing with", "rope_type=yarn"),
    (
        "rope_low_freq_factor=4 rope_type=llama3.1 original_max_position_embeddings=64",
        "is not below rope_high_freq_factor=4.0",
        "Lower it",
    ),
    (
        "beta_slow=32 rope_type=yarn original_max_position_embeddings=64",
        "is not below beta_fast=32.0",
        "Lower it",
    ),
    ("qk_norm_scope=projection use_qk_norm=false", "does nothing with use_qk_norm=false", "or use"),
    ("attention_type=mla", "head_dim=32 does not fit", "Use head_dim=192"),
    ("attention_type=mla head_dim=192", "base_num_kv_heads=2 does not", "Use base_num_kv_heads=4"),
    ("qk_rope_head_dim=7 attention_type=mla", "is odd", "Use qk_rope_head_dim=8"),
    ("padded_vocab_size=383", "is below vocab_size=384", "Use at least 384, or -1 for none"),
    ("norm_placement=peri", "must be one of: pre, sandwich, post"),
]


@pytest.mark.parametrize("flags, words", [(one[0], one[1:]) for one in REFUSED])
def test_options_that_cannot_work_are_refused_in_one_line(flags, words):
    argv = flags.split(" ") if flags.count("=") > 1 else [flags]
    with pytest.raises(ConfigError) as caught:
        config.load(argv, {})
    line = str(caught.value)
    assert "\n" not in line and argv[0] in line
    for word in words:
        assert word in line
