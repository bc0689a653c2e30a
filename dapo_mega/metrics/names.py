"""Names of the metrics that the console and the plots show, and the rule for all metric names."""

import re

REWARD_MEAN = "rollout/reward_mean"
ACCURACY_REWARD_MEAN = "rollout/accuracy_reward_mean"
ACCURACY_MEAN = "rollout/accuracy_mean"
RESPONSE_LENGTH_MEAN = "rollout/response_length_mean"
MEAN_TOKEN_PROBABILITY = "rollout/mean_token_probability"
TOKENS_PER_S = "rollout/tokens_per_s"
ENTROPY = "policy/entropy"
LOSS = "policy/loss"
KL_TO_OLD = "policy/kl_to_old"
KL_TO_REFERENCE = "policy/kl_to_reference"
GRAD_NORM = "policy/grad_norm"
LOGPROB_DIFFERENCE = "rollout/logprob_abs_diff_mean"
KEPT_SHARE = "groups/kept_share"
ALL_RIGHT_SHARE = "groups/all_right_share"
ALL_WRONG_SHARE = "groups/all_wrong_share"
EVALUATION_REWARD_MEAN = "evaluation/reward_mean"
EVALUATION_AVG_AT_K = "evaluation/avg_at_k"
EVALUATION_PASS_AT_K = "evaluation/pass_at_k"
EVALUATION_RESPONSE_LENGTH_MEAN = "evaluation/response_length_mean"
EVALUATION_TRUNCATED_SHARE = "evaluation/truncated_share"
STEP_SECONDS = "time/step_s"

_NAME = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9][A-Za-z0-9_.@-]*")


def validate_metric_name(name: str) -> None:
    """Check that `name` has the form `stage/name`; raises ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"metric name {name!r} does not have the form 'stage/name', such as 'policy/entropy': "
            "a lower-case stage, one slash, then letters, digits and any of '_.@-'"
        )
