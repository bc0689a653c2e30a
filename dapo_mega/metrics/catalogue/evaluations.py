"""Metrics of held-out evaluations."""

from dapo_mega.declared import Metric

EVALUATIONS: tuple[Metric, ...] = (
    Metric(
        "evaluation/avg_at_k",
        "share",
        "Mean over prompts of the share of the prompt's k responses that are correct.",
        "rises; its standard error from sampling is at most 0.5 / sqrt(prompts x k)",
        "flat or falling while `rollout/accuracy_mean` rises",
        'see "Accuracy stays flat" in dapo_mega/metrics/README.md',
        better="higher",
    ),
    Metric(
        "evaluation/pass_at_k",
        "share",
        "Share of prompts with at least one correct response among the k.",
        "at least avg@k; the distance between the two is what sampling can still find",
        "falls while avg@k rises: the policy loses variety",
        "read `policy/entropy`",
        better="higher",
    ),
    Metric(
        "evaluation/maj_at_k",
        "share",
        "Share of prompts whose most frequent answer is correct. Equal answers vote together, however they are spelt "
        "(`1/2` and `0.5`); a tie of t answers counts 1/t if one of them is correct; a response without an answer does "
        "not vote.",
        "usually above avg@k",
        "below avg@k: the model agrees on wrong answers",
        "look at the prompts; the ground truth may be wrong or have another form",
        better="higher",
    ),
    Metric(
        "evaluation/pass_at_<k>",
        "share",
        "Unbiased estimate of the chance that at least one of 2, 4, 8, ... responses is correct: "
        "1 - C(n-c, k) / C(n, k), mean over prompts. Recorded for powers of two "
        "below the fewest responses of a prompt.",
        "rises with k",
        better="higher",
    ),
    Metric("evaluation/k", "responses", "The k of this evaluation: `evaluation.samples_per_prompt`.", "constant"),
    Metric(
        "evaluation/failed",
        "responses",
        "Responses that could not be generated.",
        "0",
        "above 0: this evaluation has no score",
        "read `rollout/failed_calls_<cause>`, or the trainer's warning",
        better="lower",
    ),
    Metric(
        "evaluation/unscored",
        "responses",
        "Responses that could not be scored.",
        "0",
        "above 0: the other values are over fewer responses, as the console says",
        "as for `reward/num_failed`",
    ),
    Metric(
        "evaluation/reward_mean",
        "reward",
        "Mean reward of the responses, as in training but for Kimi's length reward.",
        "rises",
        "falls while `rollout/reward_mean` rises",
        'see "Accuracy stays flat" in dapo_mega/metrics/README.md',
    ),
    Metric(
        "evaluation/part_<name>",
        "reward",
        "Mean of one part of the reward, as `reward/part_<name>`.",
        "as `reward/part_<name>`",
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
        better="lower",
    ),
    Metric(
        "evaluation/avg_at_k_<name>",
        "share",
        "avg@k of the prompts of one source. This and the next two are recorded if the prompts have several sources, "
        "with the names of `source/...`.",
        "rises for every source",
        "one falls while others rise: the policy forgets it",
        "raise its weight in `data.mixture`",
        better="higher",
    ),
    Metric(
        "evaluation/response_length_mean_<name>",
        "tokens",
        "Mean length of the responses to prompts of one source.",
        "as `evaluation/response_length_mean`",
    ),
    Metric("evaluation/share_<name>", "share", "The part of the prompts that are of this source.", "constant"),
    Metric(
        "evaluation/unfinished",
        "responses",
        "Of the failed responses, those that were unfinished when the evaluation ended: at `evaluation.limit_s`, or "
        "because its engines were lost or training needed them. Only with `evaluation.beside_training`, as the next "
        "three.",
        "0",
        "above 0: the evaluation has no score, as the responses that are missing are the long ones; the trainer's "
        "warning says why it ended",
        "raise `evaluation.limit_s` or `evaluation.engines`",
        better="lower",
    ),
    Metric(
        "evaluation/engines",
        "engines",
        "Engines that generated the responses, while the others served training.",
        "`evaluation.engines`; after the last step all",
        "0: no engine could be spared, and there is no result",
        "start more engines, or lower `rollout.fleet.min_engines`",
    ),
    Metric(
        "evaluation/generation_s",
        "s",
        "Seconds in which the responses were generated.",
        "below the time between two evaluations",
        "longer: training waits for one evaluation before the next, in `time/evaluation_s`",
        "raise `evaluation.every` or `evaluation.engines`",
        better="lower",
    ),
    Metric(
        "evaluation/lost",
        "events",
        "1: this step's evaluation was under way when the run ended, and the run went on from a checkpoint of a later "
        "step, which does not have its weights. There is no result.",
        "absent",
    ),
)
