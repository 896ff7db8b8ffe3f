"""Keys of a model, of experts, of the schedule and of an exchange that do not go together."""

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config

YARN = "rope_type=yarn original_max_position_embeddings=64"
LLAMA = "rope_type=llama3.1 original_max_position_embeddings=64"

# key=value and others, then why and the remedy that the line has to hold.
REFUSED = [
    # layers and attention
    ("attention_pattern=[local, global]", "sliding_window_size=0 gives", "Set sliding_window_size"),
    ("attention_pattern=[near]", "must be one of: local, global"),
    (
        "attention_pattern=[local,local,global] base_num_decoder_layers=2 sliding_window_size=8",
        "attention_pattern=[local, local, global] has 3 entries",
        "Use 2 or fewer",
    ),
    ("sliding_window_size=8 attention_pattern=[global]", "no layer is local", "Leave the pattern"),
    ("local_rope_max_timescale=100", "no layer is local", "Set rope_max_timescale"),
    ("rope_type=yarn rope_factor=8", "original_max_position_embeddings=0", "Set it"),
    ("rope_type=llama3.1", "needs the length of the texts", "Set it"),
    ("rope_factor=8", "does nothing with rope_type=default", "or rope_type=linear or llama3.1 or"),
    ("rope_factor=0.5", "must be >= 1"),
    ("original_max_position_embeddings=9 rope_type=linear", "does nothing", "rope_type=llama3.1"),
    ("rope_truncate=false", "does nothing with rope_type=default", "rope_truncate=true, or rope_t"),
    ("rope_attention_factor=2", "does nothing with", "rope_type=yarn"),
    (f"rope_low_freq_factor=4 {LLAMA}", "is not below rope_high_freq_factor=4.0", "Lower it"),
    (f"beta_slow=32 {YARN}", "is not below beta_fast=32.0", "Lower it"),
    ("qk_norm_scope=projection use_qk_norm=false", "does nothing with use_qk_norm=false", "or use"),
    ("attention_type=mla", "head_dim=32 does not fit", "Use head_dim=192"),
    ("attention_type=mla head_dim=192", "base_num_kv_heads=2 does not", "Use base_num_kv_heads=4"),
    ("qk_rope_head_dim=7 attention_type=mla", "is odd", "Use qk_rope_head_dim=8"),
    ("padded_vocab_size=383", "is below vocab_size=384", "Use at least 384, or -1 for none"),
    # experts
    ("num_experts_per_tok=2", "does nothing with num_experts=1, a dense", "or set num_experts"),
    ("dcn_expert_parallelism=2", "num_experts=1, a dense", "Use dcn_expert_parallelism=1"),
    ("num_experts_per_tok=5 num_experts=4", "more than num_experts=4", "Use 4 or fewer"),
    ("first_num_dense_layers=4 num_experts=4", "leaves none of base_num_decoder", "Use 3 or fewer"),
    ("capacity_factor=0 num_experts=4", "must be -1 or > 0", "capacity_factor=-1"),
    ("topk_routing_group=2 num_experts=4", "a choice of groups needs both", "Set n_routing_groups"),
    ("n_routing_groups=2 num_experts=4", "a choice of groups needs both", "Set topk_routing_group"),
    (
        "n_routing_groups=3 num_experts=4 topk_routing_group=1",
        "does not divide num",
        "divisor of 4",
    ),
    ("topk_routing_group=3 num_experts=4 n_routing_groups=2", "is more than", "Use 2 or fewer"),
    (
        "num_experts_per_tok=3 num_experts=4 n_routing_groups=2 topk_routing_group=1",
        "exceeds topk_routing_group 1 * 2 experts",
        "or use 2 or fewer",
    ),
    ("num_experts=8 ici_expert_parallelism=3", "num_experts=8 does not divide by", "divisor of 8"),
    # the schedule of the learning rate
    ("warmup_steps=1001", "longer than the schedule of 1000 steps", "Use 1000 or less"),
    ("warmup_steps=9 learning_rate_schedule_steps=8", "is longer than the schedule of 8 steps"),
    ("warmup_steps=10 warmup_steps_fraction=0.1", "both say", "Leave one of them out"),
    ("wsd_decay_style=cosine", "does nothing with lr_schedule_type=cosine", "lr_schedule_type=wsd"),
    ("wsd_decay_steps_fraction=0.2", "does nothing", "or leave wsd_decay_steps_fraction out"),
    (
        "warmup_steps_fraction=0.5 lr_schedule_type=wsd wsd_decay_steps_fraction=0.6",
        "warmup_steps_fraction=0.5 and wsd_decay_steps_fraction=0.6",
        "Lower one of them",
    ),
    # what an exchange carries
    ("diloco_error_feedback=always", "diloco_exchange_dtype=float32", "Use ", "=auto or"),
    ("diloco_merge=rda diloco_outer_overlap=eager", "does not go with", "Use diloco_m"),
    ("diloco_error_feedback=never enable_diloco=false", "does nothing", "=auto or"),
    ("diloco_merge=rda enable_diloco=false", "does nothing", "diloco_merge=mean or"),
]


@pytest.mark.parametrize("flags, words", [(one[0], one[1:]) for one in REFUSED])
def test_what_does_not_go_together_is_refused_in_one_line(flags, words):
    argv = flags.split(" ") if flags.count("=") > 1 else [flags]
    with pytest.raises(ConfigError) as caught:
        config.load(argv, {})
    line = str(caught.value)
    assert "\n" not in line and argv[0].partition("=")[0] in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    "flags",
    [
        "num_experts=8 num_experts_per_tok=2 n_routing_groups=4 topk_routing_group=2 "
        "first_num_dense_layers=1 capacity_factor=1.25 ici_expert_parallelism=2",
        "warmup_steps=1000",
        "warmup_steps=1001 steps=-1",  # the length of an epoch is not known yet
        "lr_schedule_type=wsd warmup_steps_fraction=0.5 wsd_decay_steps_fraction=0.5",
        "lr_schedule_type=wsd wsd_decay_style=cosine warmup_steps=10",
        "diloco_error_feedback=always diloco_exchange_dtype=int8",
        "diloco_merge=rda diloco_outer_overlap=delayed",
    ],
)
def test_the_last_values_that_go_together_are_taken(flags):
    """The other side of the limits above."""
    cfg = config.load(flags.split(), {})
    for name, value in (one.split("=") for one in flags.split()):
        assert str(vars(cfg)[name]) == value
