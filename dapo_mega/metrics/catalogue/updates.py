"""Metrics of the update: agreement with the engines, the policy, and the packing of its batches."""

from dapo_mega.metrics.catalogue.metric import Metric

UPDATES: tuple[Metric, ...] = (
    Metric(
        "mismatch/logprob_abs_diff_mean",
        "nats",
        "Mean of |trainer's log-prob - engine's log-prob|.",
        "equals `rollout/logprob_abs_diff_mean` when all tokens are fresh; larger otherwise, as the weights have moved",
        "NaN ends the run, unless `rollout.mismatch_stop=null`",
        'see "The log-prob difference rises" above',
    ),
    Metric("mismatch/logprob_abs_diff_max", "nats", "The largest such difference of one token."),
    Metric(
        "mismatch/kl", "nats per token", "Estimate (k3) of KL(engine || trainer).", "near 0", "grows", "as for the mean"
    ),
    Metric(
        "mismatch/importance_weight_mean",
        "ratio",
        "Mean importance weight, before it is capped.",
        "1 within sampling noise",
        "drifts away from 1",
        "as for the mean",
    ),
    Metric(
        "mismatch/importance_weight_max",
        "ratio",
        "Largest importance weight, before it is capped.",
        "near 1 in fp32; no general value in bf16",
        "large without `algorithm.importance_cap`: single tokens may dominate the loss",
        "set `algorithm.importance_cap=2`",
    ),
    Metric(
        "mismatch/effective_sample_share",
        "share",
        "(sum of weights)^2 / (tokens x sum of squared weights): the share of tokens that equally weighted ones would "
        "need to give as precise a mean.",
        "near 1",
        "falls",
        "as for `rollout/logprob_abs_diff_mean`; lower `algorithm.max_staleness`",
    ),
    Metric(
        "mismatch/truncated_share",
        "share",
        "Share of tokens whose weight is above `algorithm.importance_cap`; 0 without a cap.",
        "near 0",
        "grows",
        "as for `rollout/logprob_abs_diff_mean`",
    ),
    Metric(
        "mismatch/masked_response_share",
        "share",
        "Share of responses that `algorithm.sequence_mask` leaves out of the loss; 0 without a mask.",
        "near 0",
        "grows: responses are generated for nothing",
        "as for `rollout/logprob_abs_diff_mean`",
    ),
    Metric(
        "mismatch/fresh_token_share",
        "share",
        "Share of tokens that were sampled from the weights that the step starts from.",
        "1 without surplus groups and partial rollouts",
        "0 in every step: the step trains on older responses only",
        "lower `batch.generation_groups`",
    ),
    # ---- policy ----
    Metric(
        "policy/loss",
        "loss",
        "The objective, KL and entropy terms included. In supervised training the mean negative log-likelihood of a "
        "response token.",
        "does not measure progress in DAPO: no general value. In supervised training it falls",
        "NaN or infinite",
        "the update stops with an error before any weight changes; resume with a lower learning rate",
    ),
    Metric(
        "policy/entropy",
        "nats per token",
        "Mean entropy of the policy at the response tokens, at `rollout.temperature`, with the weights that the step "
        "starts from.",
        "falls at first, then stays or rises slowly (DAPO, figures 2b and 7c); 0.05-0.12 in the quickstart",
        "falls towards 0, or rises steadily",
        'see "The entropy collapses" above',
    ),
    Metric(
        "policy/grad_norm",
        "norm",
        "Norm of the gradient of all weights before clipping; 0 for an empty update.",
        "no general value; steady",
        "jumps to many times its usual value; above `optimizer.clip_grad` the gradient is scaled down",
        "lower `optimizer.learning_rate`; look at the mismatch of the same step",
    ),
    Metric(
        "policy/learning_rate",
        "1",
        "Learning rate of the update.",
        "rises linearly over `optimizer.warmup_steps`, then follows `optimizer.schedule`",
    ),
    Metric(
        "policy/kl_to_old",
        "nats per token",
        "Estimate (k3) of KL(policy || policy at the step's start).",
        "small; exactly 0 with one update per step",
        "jumps",
        "lower `optimizer.learning_rate` or the number of updates per step",
    ),
    Metric(
        "policy/kl_to_reference",
        "nats per token",
        "Estimate (`algorithm.kl.estimator`) of KL(policy || starting model). Only with "
        "`algorithm.kl.coefficient` > 0.",
        "starts at 0 and grows slowly; no general value",
        "grows fast while held-out accuracy falls",
        "raise `algorithm.kl.coefficient`",
    ),
    Metric(
        "policy/ratio_mean",
        "ratio",
        "Mean of policy's probability over that at the step's start.",
        "near 1; exactly 1 with one update per step",
        "drifts away from 1",
        "as for `policy/kl_to_old`",
    ),
    Metric(
        "policy/clip_low_share",
        "share",
        "Share of tokens whose gradient the lower clipping bound removes.",
        "no general value; exactly 0 with one update per step",
        "much larger in later steps",
        "lower `optimizer.learning_rate`",
    ),
    Metric(
        "policy/clip_high_share",
        "share",
        "Share of tokens whose gradient the upper clipping bound removes.",
        "no general value; exactly 0 with one update per step",
        "much larger in later steps",
        "lower `optimizer.learning_rate`",
    ),
    Metric(
        "policy/dual_clip_share",
        "share",
        "Share of tokens with negative advantage whose loss the dual clip bounds; 0 without `algorithm.dual_clip`.",
        "0 or nearly: the ratio of such a token exceeds 10 by default",
        "above 0 in many steps",
        "lower `optimizer.learning_rate`; look at the mismatch",
    ),
    Metric(
        "policy/up_clipped_probability",
        "probability",
        "Mean probability of the tokens that the upper bound clips; updates without such tokens enter the step's mean "
        "as 0.",
        "below 0.2 (DAPO, figure 3a): the upper bound holds back unlikely tokens",
    ),
    Metric(
        "policy/loss_tokens",
        "tokens",
        "Tokens that count in the loss of one update.",
        "about `batch.mini_batch_groups` x `batch.group_size` x `rollout/response_length_mean`",
        "much less",
        "`reward.overlong_filtering` masks truncated responses; read `rollout/truncated_share`",
    ),
    Metric(
        "policy/empty_update_share",
        "share",
        "Share of updates without any token in the loss; they change no weight.",
        "0",
        "above 0",
        "`reward.overlong_filtering` masks whole mini-batches: raise `rollout.max_response_tokens`",
    ),
    Metric(
        "policy/load_balancing_loss",
        "1",
        "Auxiliary loss for equal load of the experts, before its coefficient; mean over layers and micro-batches. "
        "Only with `compute.moe.aux_loss_coefficient` > 0.",
        "about 1 when all experts have the same load (softmax routers)",
        "grows",
        "raise `compute.moe.aux_loss_coefficient`",
    ),
    Metric(
        "policy/router_z_loss",
        "1",
        "Auxiliary loss on the size of the router's logits, before its coefficient; mean over layers and "
        "micro-batches. Only with `compute.moe.z_loss_coefficient` > 0.",
        "no general value",
        "grows",
        "raise `compute.moe.z_loss_coefficient`",
    ),
    Metric(
        "policy/tokens_per_s",
        "tokens/s",
        "Supervised training only: prompt and response tokens of the step over `time/step_s`.",
        "steady; no general value",
    ),
    # ---- batch ----
    Metric(
        "batch/packing_efficiency",
        "share",
        "Tokens / (micro-batches of all ranks x tokens of the longest micro-batch of the same update).",
        "0.98 or more when there are many more samples than micro-batches",
        "low: ranks wait for the longest micro-batch",
        "use more samples per update, or fewer data-parallel ranks",
    ),
    Metric(
        "batch/budget_fill",
        "share",
        "Tokens / (micro-batches of all ranks x `batch.tokens_per_microbatch`).",
        "no general value; higher uses the memory better",
        "low: micro-batches are smaller than they could be",
        "use more samples per update or fewer data-parallel ranks; a smaller budget saves memory",
    ),
    Metric(
        "batch/rank_imbalance",
        "share",
        "Estimated cost of each update's most loaded data-parallel rank over the ranks' mean cost, minus 1.",
        "at most 0.012, the planner's tolerance, when there are many samples",
        "high: the other ranks wait",
        "use more samples per update, or fewer data-parallel ranks",
    ),
    # ---- time ----
)
