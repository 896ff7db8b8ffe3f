"""A mixture of experts in float64 NumPy, written from the papers, token by token and without
dispatch; it shares no code with the package.

    # L tokens  D model  E experts  K experts of a token
"""

import numpy as np
from model_oracle import mlp


def router_of(cfg):
    """The entries of the router, as docs/howto/mixture-of-experts.md has their defaults."""
    absent = dict(score_function="softmax", normalise_weights=False, scaling_factor=1.0)
    return absent | dict(num_groups=1, groups_per_token=1) | dict(cfg.router)


def scores(logits_E, cfg):
    if router_of(cfg)["score_function"] == "sigmoid":
        return 1 / (1 + np.exp(-logits_E))
    e = np.exp(logits_E - logits_E.max())
    return e / e.sum()


def chosen(rank_E, cfg):
    """The K best experts, best first, of the groups whose two best are best together."""
    eligible = list(range(len(rank_E)))
    groups = router_of(cfg)["num_groups"]
    if groups > 1:
        size = len(rank_E) // groups
        value = [sum(sorted(rank_E[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best_first = sorted(range(len(value)), key=lambda g: -value[g])
        kept = best_first[: router_of(cfg)["groups_per_token"]]
        eligible = [e for e in eligible if e // size in kept]
    return sorted(eligible, key=lambda e: -rank_E[e])[: cfg.num_experts_per_tok]


def layer(x_LD, p, cfg, real_L):
    """(y [L, D], counts [E], mean share [E], mean squared log normaliser, mean entropy)."""
    E = cfg.num_experts
    y, counts, share, z, entropy = np.zeros_like(x_LD), np.zeros(E), np.zeros(E), 0.0, 0.0
    experts = {k: v for k, v in p.items() if k.startswith("w_")}
    for t in range(len(x_LD)):
        if "shared" in p:
            y[t] += mlp(x_LD[t], p["shared"], cfg)
        if not real_L[t]:
            continue
        logits = x_LD[t] @ p["router"] + p.get("router_bias", 0)
        s = scores(logits, cfg)
        best = chosen(s + p.get("routed_bias", 0), cfg)
        total = sum(s[e] for e in best) if router_of(cfg)["normalise_weights"] else 1.0
        for e in best:
            weight = router_of(cfg)["scaling_factor"] * s[e] / total
            y[t] += weight * mlp(x_LD[t], {k: v[e] for k, v in experts.items()}, cfg)
            counts[e] += 1
        part = s / s.sum()
        share += part
        z += np.log(np.exp(logits).sum()) ** 2
        entropy -= (part * np.log(part)).sum()
    n = max(np.sum(real_L), 1)
    return y, counts, share / n, z / n, entropy / n


def losses(counts_E, share_E, z, cfg):
    """Switch (arXiv 2101.03961) eq. 4 with choices per token, and ST-MoE (2202.08906) eq. 5."""
    tokens = counts_E.sum() / cfg.num_experts_per_tok
    balance = cfg.num_experts * np.sum(counts_E / tokens * share_E)
    return cfg.load_balance_loss_weight * balance, cfg.router_z_loss_weight * z
