"""Describes every metric that a run records: unit, meaning, healthy values, warning signs and what to do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose name has a part in angle brackets.

    `healthy` is empty if no value is good or bad in general. `members` gives the meaning of each value that the part
    in angle brackets can have; without members the part is a whole number.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    warning: str = ""
    action: str = ""
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    def names(self) -> list[str]:
        """All names that the entry describes. A family of numbers is one name, with its angle brackets."""
        return [re.sub("<.*>", member, self.name) for member in self.members] or [self.name]

    def describes(self, name: str) -> bool:
        """Whether `name`, as recorded, is this metric or one of the family."""
        pattern = "|".join(re.sub("<.*>", r"\\d+", known) for known in self.names())
        return bool(re.fullmatch(pattern, name))


def describe(name: str) -> Metric | None:
    """The entry of a recorded metric; None if there is none."""
    return next((metric for metric in CATALOGUE if metric.describes(name)), None)


PREFIXES: Mapping[str, str] = {
    "evaluation": "In the records of steps with a held-out evaluation. The model answers each prompt "
    "`evaluation.samples_per_prompt` (k) times. Responses that no engine could generate are left out.",
    "rollout": "What the engines generated, and how well they agree with the trainer. Means are over all responses "
    "that were scored in this step, also those of groups that the filter then drops. They are missing from a step that "
    "needed no new responses. `requests_*` and `failed_calls*` exist with SGLang engines only; they count since the "
    "last record, evaluations included.",
    "groups": "How the dynamic-sampling filter judged the groups that were completed in this step. A group is all "
    "responses to one prompt.",
    "buffer": "Groups that passed the filter and wait for a step. Staleness is the number of steps "
    "since the oldest token of a group was sampled.",
    "reward": "Responses of this step whose verification ended in an unusual way. Each counts as wrong.",
    "mismatch": "Compares the engines' log-probs with the trainer's over all response tokens that the step trains on, "
    "also those sampled from older weights. A token's importance weight is the trainer's probability, with the weights "
    "that the step starts from, over the engine's probability at sampling.",
    "policy": "The policy update. Unless stated otherwise a value is the mean over the step's optimizer updates, and "
    "each update's value is a mean over the tokens that count in its loss. Supervised training records `loss`, "
    "`grad_norm`, `learning_rate`, `empty_update_share`, `tokens_per_s`, the router losses and `time/step_s`.",
    "batch": "How well the step's samples fill the micro-batches.",
    "time": "Wall-clock seconds of rank 0. A stage includes waiting for other processes. The stages of a record add "
    "up to nearly `time/step_s`.",
    "weight_sync": "The update of the SGLang engines after the step. Missing with embedded engines.",
    "fleet": "The SGLang engines. Counts are since the last record; states are those at the moment of the record. "
    "Missing with embedded engines.",
}
"""What the metrics of each prefix have in common, in the order in which they are documented."""


CATALOGUE: tuple[Metric, ...] = (
    Metric(
        "evaluation/avg_at_k",
        "share",
        "Mean over prompts of the share of the prompt's k responses that are correct.",
        "rises; its standard error from sampling is at most 0.5 / sqrt(prompts x k)",
        "flat or falling while `rollout/accuracy_mean` rises",
        'see "Accuracy stays flat" above',
    ),
    Metric(
        "evaluation/pass_at_k",
        "share",
        "Share of prompts with at least one correct response among the k.",
        "at least avg@k; the distance between the two is what sampling can still find",
        "falls while avg@k rises: the policy loses variety",
        "read `policy/entropy`",
    ),
    Metric(
        "evaluation/maj_at_k",
        "share",
        "Share of prompts whose most frequent answer is correct; a response without an answer does not vote.",
        "usually above avg@k",
        "below avg@k: the model agrees on wrong answers",
        "look at the prompts; the ground truth may be wrong or have another form",
    ),
    Metric(
        "evaluation/pass_at_<k>",
        "share",
        "Unbiased estimate of the chance that at least one of 2, 4, 8, ... responses is correct: "
        "1 - C(n-c, k) / C(n, k), mean over prompts. Recorded for powers of two "
        "below the fewest responses of a prompt.",
        "rises with k",
    ),
    Metric("evaluation/k", "responses", "The k of this evaluation: `evaluation.samples_per_prompt`.", "constant"),
    Metric(
        "evaluation/failed",
        "responses",
        "Responses that could not be generated.",
        "0",
        "above 0: the other values are over fewer responses",
        "read `rollout/failed_calls_<cause>`",
    ),
    Metric(
        "evaluation/response_length_mean",
        "tokens",
        "Mean length of the responses.",
        "no general value; in DAPO's run lengths grow with accuracy, with pauses",
        "at `rollout.max_response_tokens`, or near 0",
        "as for `rollout/response_length_mean`",
    ),
    Metric(
        "evaluation/truncated_share",
        "share",
        "Share of responses that ended at `rollout.max_response_tokens`.",
        "near 0",
        "high: accuracy is limited by the length limit",
        "raise `rollout.max_response_tokens`",
    ),
    # ---- rollout: what was generated ----
    Metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of a response, length punishment included.",
        "rises; from `reward.incorrect` - 1 to `reward.correct` (-2 to 1 by default)",
        "far below `rollout/accuracy_reward_mean`: many responses are too long",
        "read `rollout/truncated_share`",
    ),
    Metric(
        "rollout/accuracy_reward_mean",
        "reward",
        "Mean reward for correctness alone: `reward.correct` or `reward.incorrect`.",
        "rises",
        "as for `rollout/accuracy_mean`",
    ),
    Metric(
        "rollout/accuracy_mean",
        "share",
        "Share of responses that are correct.",
        "rises; the DAPO paper finds it a poor guide to held-out accuracy",
        "0 or 1 from the start",
        "0: check template, ground truth and `reward.extraction`; 1: use harder prompts",
    ),
    Metric(
        "rollout/response_length_mean",
        "tokens",
        "Mean length of a response.",
        "no general value; in DAPO's run it grows with accuracy, with pauses",
        "runs into `rollout.max_response_tokens`, or shrinks to a few tokens while accuracy falls",
        "too long: raise the limit or keep `reward.overlong_punishment`; too short: check the reward",
    ),
    Metric("rollout/response_length_max", "tokens", "The longest response.", "at most `rollout.max_response_tokens`"),
    Metric(
        "rollout/truncated_share",
        "share",
        "Share of responses that ended at `rollout.max_response_tokens`.",
        "low; no general value",
        "grows",
        "raise `rollout.max_response_tokens`, or keep `reward.overlong_punishment` with a larger "
        "`reward.overlong_cache_tokens`; check that the model emits its end token",
    ),
    Metric(
        "rollout/partial_share",
        "share",
        "Share of responses with tokens of more than one weight version.",
        "0 unless `weight_sync.in_flight=continue`",
    ),
    Metric(
        "rollout/mean_token_probability",
        "probability",
        "Mean probability of a generated token when it was sampled.",
        "moves against entropy; no general value",
        "near 1",
        "as for `policy/entropy`",
    ),
    Metric("rollout/tokens", "tokens", "Generated tokens of the responses that were scored in this step."),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "`rollout/tokens` over the seconds of collecting, verification and waiting included.",
        "steady; no general value",
        "falls while lengths do not grow",
        'see "A step gets much slower" above',
    ),
    Metric(
        "rollout/end_to_end_tokens_per_s",
        "tokens/s",
        "`rollout/tokens` over `time/step_s`.",
        "steady; no general value",
        "falls",
        "compare the `time/` metrics",
    ),
    Metric(
        "rollout/generation_rounds",
        "rounds",
        "Prompts asked in this step over `batch.generation_groups`, rounded up. Groups left from earlier steps make it "
        "smaller.",
        "about `batch.groups_per_step` / (`batch.generation_groups` x `groups/kept_share`)",
        "near `algorithm.max_generation_rounds`: the run will end as starved",
        'see "Dynamic sampling is starved" above',
    ),
    Metric(
        "rollout/dropped_groups",
        "groups",
        "Groups given up because a request failed `rollout.max_attempts` times.",
        "0",
        "above 0",
        "read `rollout/failed_calls_<cause>`",
    ),
    Metric(
        "rollout/groups_in_flight",
        "groups",
        "Groups still being generated when the step has all that it needs.",
        "0 without `rollout.partial`; with it at most what the next step can use",
    ),
    Metric(
        "rollout/groups_expired_in_flight",
        "groups",
        "Groups given up before they were complete, because their oldest tokens exceed `algorithm.max_staleness`.",
        "0 or few",
        "a large share of `groups/offered`: generated tokens are wasted",
        "raise `algorithm.max_staleness` or lower `batch.generation_groups`",
    ),
    # ---- rollout: agreement with the trainer ----
    Metric(
        "rollout/logprob_abs_diff_mean",
        "nats",
        "Mean of |trainer's log-prob - engine's log-prob| over tokens sampled from the weights that the step starts "
        "from. Missing when the step has no such token.",
        "below 0.001 if both compute in fp32, else below 0.05 (the defaults of `rollout.mismatch_warning`)",
        "above the limit (the run warns), or grows; `rollout.mismatch_stop` (0.5) ends the run",
        'see "The log-prob difference rises" above',
    ),
    Metric(
        "rollout/logprob_abs_diff_max",
        "nats",
        "The largest such difference of one token.",
        "1e-6 or less in the recorded fp32 run of `tests/integration/golden/`; no general value in bf16",
    ),
    Metric(
        "rollout/kl_to_policy",
        "nats per token",
        "Estimate (k3) of KL(engine || trainer) over the same tokens.",
        "about half the mean squared log-prob difference; near 0",
        "grows",
        "as for `rollout/logprob_abs_diff_mean`",
    ),
    # ---- rollout: the requests of a fleet ----
    Metric("rollout/requests_submitted", "requests", "New requests; one for each response."),
    Metric("rollout/requests_answered", "requests", "Requests that ended with a response.", "most of the submitted"),
    Metric(
        "rollout/requests_failed",
        "requests",
        "Requests given up after `rollout.max_attempts` calls.",
        "0",
        "above 0",
        "read `rollout/failed_calls_<cause>`",
    ),
    Metric(
        "rollout/requests_cancelled",
        "requests",
        "Requests that the trainer itself gave up, such as the others of a dropped group.",
        "0, or few with `rollout.partial`",
        "many",
        "read `rollout/dropped_groups` and `rollout/groups_expired_in_flight`",
    ),
    Metric(
        "rollout/requests_open",
        "requests",
        "Requests without an end at the moment of the record. Since the start of the trainer: submitted = answered + "
        "failed + cancelled + open.",
        "0 without `rollout.partial`",
    ),
    Metric("rollout/requests_in_flight", "requests", "Open requests that an engine works on at that moment."),
    Metric("rollout/requests_waiting", "requests", "Open requests that no engine works on at that moment."),
    Metric(
        "rollout/requests_moved",
        "calls",
        "Calls given up because their engine left; the request goes to another engine.",
        "0",
        "above 0: engines die or hang",
        "read `fleet/engines_dead` and `fleet/engines_hung`",
    ),
    Metric(
        "rollout/requests_taken_back",
        "calls",
        "Calls interrupted by a weight update and continued afterwards.",
        "0 unless `weight_sync.in_flight=continue` with `weight_sync.pause=abort`",
    ),
    Metric(
        "rollout/failed_calls",
        "calls",
        "Calls of an engine that gave no usable response; the sum of the metrics below.",
        "0; a few when an engine dies",
        "in every step",
        "find the cause below, and the engine in the trainer's warnings",
    ),
    Metric(
        "rollout/failed_calls_<cause>",
        "calls",
        "Failed calls by cause.",
        "0",
        "above 0 in every step",
        "read the engine's log",
        members={
            "unreachable": "no connection could be made; does not count as an attempt",
            "disconnected": "the connection broke before the response was complete",
            "timeout": "the call took longer than `rollout.fleet.request_timeout_s`",
            "refused": "the engine answered with an HTTP error",
            "aborted": "the engine ended the response by itself",
            "malformed": "the answer has another form than SGLang's",
            "token_count": "the answer names another number of tokens than it has",
            "vocabulary": "a token id is outside of the vocabulary",
            "logprobs": "log-probs are missing or impossible",
            "version": "the tokens come from weights that the engine was not given",
        },
    ),
    # ---- groups, buffer, reward ----
    Metric("groups/offered", "groups", "Complete groups that were scored, all of them."),
    Metric(
        "groups/kept_share",
        "share",
        "Share of these groups with at least one correct and one wrong response; with "
        "`algorithm.dynamic_sampling=false` every group is kept.",
        "above `batch.groups_per_step` / (`batch.generation_groups` x `algorithm.max_generation_rounds`), 0.1 by "
        "default; with equal accuracy p it is 1 - p^G - (1-p)^G",
        "falls towards that limit",
        'see "Dynamic sampling is starved" above',
    ),
    Metric(
        "groups/all_right_share",
        "share",
        "Share of these groups in which every response is correct.",
        "rises during training (DAPO, figure 3b)",
        "most groups",
        "add harder prompts, or raise `batch.group_size`",
    ),
    Metric(
        "groups/all_wrong_share",
        "share",
        "Share of these groups in which every response is wrong.",
        "falls during training",
        "most groups",
        "add easier prompts, or raise `batch.group_size`; 1 means that template, extraction or engines are wrong",
    ),
    Metric(
        "buffer/size",
        "groups",
        "Groups left over after the step has taken its own.",
        "0 up to what one generation round yields beyond a step",
    ),
    Metric(
        "buffer/staleness_mean",
        "steps",
        "Mean staleness of the groups of this step; 0 means sampled from the weights that the step starts from.",
        "0 to `algorithm.max_staleness`",
        "always at the limit",
        "lower `batch.generation_groups`",
    ),
    Metric(
        "buffer/staleness_max",
        "steps",
        "Largest staleness of the groups of this step.",
        "at most `algorithm.max_staleness`",
    ),
    Metric(
        "buffer/stale_dropped",
        "groups",
        "Complete groups thrown away because they grew older than `algorithm.max_staleness`.",
        "0",
        "above 0 in many steps: generated tokens are wasted",
        "lower `batch.generation_groups`",
    ),
    Metric(
        "reward/num_no_answer",
        "responses",
        "The extraction found no answer.",
        "falls as the model learns the format",
        "most responses",
        "check template and `reward.extraction`; a truncated response has no answer either",
    ),
    Metric(
        "reward/num_timeout",
        "responses",
        "Comparing took longer than `reward.time_limit_s`.",
        "0 or few",
        "grows: time goes into verification",
        "raise `reward.num_workers`",
    ),
    Metric(
        "reward/num_crash", "responses", "Comparing ended its process.", "0", "above 0 in many steps", "report a bug"
    ),
    Metric(
        "reward/num_refused",
        "responses",
        "The answer is too long, or its numbers or expressions are too large, to be compared.",
        "0 or few",
        "grows: the policy writes huge answers",
        "check the ground truth's form",
    ),
    # ---- mismatch ----
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
    Metric(
        "time/step_s",
        "s",
        "From the last record to this one. The first record after a start also holds the first weight update. In "
        "supervised training: the policy update alone.",
        "steady",
        "several times longer",
        'see "A step gets much slower" above',
    ),
    Metric(
        "time/rollout_s",
        "s",
        "Collecting the step's groups: generation, verification, weights for engines that join, and waiting for "
        "engines while the run is paused.",
        "usually the longest stage",
        "grows",
        'see "A step gets much slower" above',
    ),
    Metric("time/pack_s", "s", "Planning micro-batches and handing samples to the ranks.", "a small part of the step"),
    Metric(
        "time/score_s",
        "s",
        "Log-probs of the step's tokens with the weights that it starts from, and those of the reference model.",
        "near 0 with one update per step and no KL; otherwise less than `time/update_s`",
    ),
    Metric(
        "time/update_s", "s", "Forward and backward passes and optimizer updates.", "grows with `policy/loss_tokens`"
    ),
    Metric(
        "time/weight_sync_s",
        "s",
        "Sending the new weights to the engines. With `weight_sync.in_flight=finish` it includes waiting for responses "
        "in flight.",
        "steady",
        "grows: an engine does not take part",
        "read `weight_sync/attempts` and `weight_sync/engines_failed`",
    ),
    Metric("time/evaluation_s", "s", "The held-out evaluation, if this step had one after it.", "steady"),
    Metric(
        "time/checkpoint_s",
        "s",
        "Checkpoint and Hugging Face export **after the step before**, as this step's record is already written when "
        "they begin. With `checkpoint.asynchronous` only copying, and waiting for an earlier checkpoint's files.",
        "near 0 when nothing was saved",
        "long",
        "save less often; use a faster file system",
    ),
    # ---- weight_sync, fleet ----
    Metric(
        "weight_sync/bytes",
        "bytes",
        "What the trainer sent, of all pipeline stages, counted once for all engines.",
        "the size of the weights in the engines' dtype; far less between full updates of delta sync",
    ),
    Metric(
        "weight_sync/bytes_per_s",
        "bytes/s",
        "`weight_sync/bytes` over the seconds of sending alone.",
        "steady; no general value",
        "falls",
        "check the network between trainer and engines",
    ),
    Metric("weight_sync/engines", "engines", "Engines that took the weights.", "all engines of the fleet"),
    Metric(
        "weight_sync/engines_failed",
        "engines",
        "Engines that did not take the weights; they leave and join again.",
        "0",
        "above 0",
        "read the trainer's warning and the engine's log",
    ),
    Metric(
        "weight_sync/attempts",
        "attempts",
        "Attempts until at least one engine took the weights; the run ends after the third.",
        "1",
        "2 or 3",
        "read the trainer's warnings and the engines' logs",
    ),
    Metric(
        "fleet/engines_serving",
        "engines",
        "Engines that hold the current weights and get requests.",
        "as many as were started",
        "fewer; below `rollout.fleet.min_engines` the run pauses",
        "restart the missing engines",
    ),
    Metric(
        "fleet/engines_healthy",
        "engines",
        "Engines that answered their last probe, whether or not they hold the current weights.",
        "as many as were started",
        "more than `fleet/engines_serving` for long: engines are refused",
        "the trainer's warning says why",
    ),
    Metric(
        "fleet/engines_away",
        "engines",
        "Engines that have left, or have not yet been able to join.",
        "0",
        "above 0",
        "restart them, unless their launcher does",
    ),
    Metric(
        "fleet/engines_dead",
        "events",
        "Times that an engine stopped accepting connections.",
        "0",
        "above 0",
        "read the engine's log; often it ran out of memory",
    ),
    Metric(
        "fleet/engines_hung",
        "events",
        "Times that an engine answered no probe for `rollout.fleet.hung_after_s`.",
        "0",
        "above 0",
        "read the engine's log; if it is only busy, raise `rollout.fleet.hung_after_s`",
    ),
    Metric(
        "fleet/engines_joined",
        "events",
        "Times that an engine joined or came back.",
        "the number of engines in the first record, then 0",
        "above 0 in many steps: engines come and go",
        "read the engines' logs",
    ),
    Metric(
        "fleet/failed_updates",
        "events",
        "Weight updates of single engines that failed. After 3 in a row an engine is refused.",
        "0",
        "above 0",
        "read the trainer's warning",
    ),
    Metric(
        "fleet/pauses",
        "events",
        "Times that the run waited for `rollout.fleet.min_engines`.",
        "0; 1 in the first record if engines start later than the trainer",
        "above 0 later",
        "read the trainer's warning; it names the missing engines",
    ),
    Metric(
        "fleet/probe_latency_max_s",
        "s",
        "The slowest engine's median of its last 3 probes; a probe generates one token.",
        "far below `rollout.fleet.hung_after_s`",
        "approaches it",
        "lower `rollout.fleet.requests_per_engine`",
    ),
    Metric(
        "fleet/slowest_probe_ratio",
        "ratio",
        "That value over the median of all engines.",
        "near 1",
        "well above 1 in many steps: one engine is slower than the others",
        "look at that machine",
    ),
)
"""All metrics, in the order in which they are documented."""
