"""Published algorithms as settings of the section `algorithm`."""

from collections.abc import Mapping
from typing import Any

_PLAIN: Mapping[str, Any] = {"clip_high": 0.2, "dual_clip": None, "dynamic_sampling": False}
"""PPO's symmetric clipping, and none of DAPO's other parts."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {},
    # DeepSeekMath, arXiv 2402.03300, eq. 3 and 4.
    "grpo": {**_PLAIN, "aggregation": "sequence_mean_token_mean", "kl": {"coefficient": 0.04, "estimator": "k3"}},
    # arXiv 2503.20783.
    "dr_grpo": {**_PLAIN, "advantage": "group_mean", "aggregation": "sequence_mean_constant"},
    # The advantage of arXiv 2402.14740, with PPO's ratio and clipping as in public code.
    "rloo": {**_PLAIN, "advantage": "leave_one_out"},
    # Williams 1992.
    "reinforce": {
        **_PLAIN, "advantage": "reward", "policy_loss": "reinforce", "aggregation": "sequence_mean_token_sum",
    },
    # arXiv 2501.03262: PPO's loss without a critic, KL (k1) in the reward, advantages normalised over the step.
    "reinforce_pp": {
        **_PLAIN, "advantage": "reward", "normalize_advantages": True,
        "kl": {"coefficient": 0.01, "estimator": "k1", "placement": "reward"},
    },
    # The same paper's variant for several responses per prompt: KL (k2) in the loss.
    "reinforce_pp_baseline": {
        **_PLAIN, "advantage": "group_mean", "normalize_advantages": True,
        "kl": {"coefficient": 0.01, "estimator": "k2"},
    },
    # Open-Reasoner-Zero, arXiv 2503.24290: gamma = lambda = 1, no KL, a critic.
    "ppo": {**_PLAIN, "advantage": "gae", "normalize_advantages": True},
    # arXiv 2310.10505.
    "remax": {
        **_PLAIN, "advantage": "greedy_baseline", "policy_loss": "reinforce", "aggregation": "sequence_mean_token_sum",
    },
    # arXiv 2501.12599, section 2.3.2; its length reward is reward.length_weight.
    "kimi": {
        **_PLAIN, "advantage": "group_mean", "policy_loss": "mirror_descent", "aggregation": "sequence_mean_token_sum",
    },
    # arXiv 2507.18071, with the bounds of its experiments.
    "gspo": {
        **_PLAIN, "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean",
    },
    # arXiv 2506.13585: no lower bound, DAPO's dynamic sampling; the upper bound as in ScaleRL (arXiv 2510.13786).
    "cispo": {**_PLAIN, "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "dynamic_sampling": True},
    # arXiv 2511.20347.
    "sapo": {**_PLAIN, "policy_loss": "sapo", "aggregation": "sequence_mean_token_mean"},
    # arXiv 2503.14286: rewards +1 and -1 without a baseline; ratios to the policy that sampled.
    "topr": {
        **_PLAIN, "advantage": "reward", "policy_loss": "topr", "old_policy": "engine",
        "aggregation": "sequence_mean_token_sum",
    },
    # arXiv 2505.22617, section 4.2, with the settings of its authors' scripts; the share of kl_cov is that for 7B.
    "clip_cov": {**_PLAIN, "policy_loss": "clip_cov", "clip_low": 1.0, "clip_high": 1.0, "dynamic_sampling": True},
    "kl_cov": {**_PLAIN, "policy_loss": "kl_cov", "covariance_share": 2e-3, "dynamic_sampling": True},
    # AReaL, arXiv 2505.24298, eq. 5, with its code's bound on the weight between proximal and behaviour policy.
    "decoupled": {**_PLAIN, "importance_cap": 5.0, "token_mask": (0.0, 5.0), "max_staleness": 4},
}  # fmt: skip
"""The changes of each `Preset` to `AlgorithmConfig`'s defaults, which are DAPO."""
