"""What decides an evaluation's scores beside the model and the problems; saved with its responses."""

from typing import Any, Final

from dapo_mega.config import RunConfig

GROUPS: Final = {
    "template": ("template", "chat_template", "template_arguments"),
    "grader": ("grader",),
    "budget": ("max_response_tokens",),
    "sampling": ("temperature", "top_p", "top_k"),
}
"""The settings that must be equal for a comparison, by what they are about."""


def evaluation_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of `GROUPS` as JSON values, with the model and the seed for whoever reads the file. `grader` is the
    component of the reward that decides what is correct, None if there is none."""
    dataset, sampling = config.data.evaluation, config.evaluation
    reward = config.reward.for_evaluation()
    deciding = next((part for part in reward.parts if part.label == reward.deciding), None)
    return {
        "model": config.model.path,
        "seed": config.seed,
        "template": dataset.template if dataset else None,
        "chat_template": dataset.chat_template if dataset else None,
        "template_arguments": (dataset.template_arguments or None) if dataset else None,
        "grader": deciding.model_dump(mode="json", exclude={"name", "weight", "correct", "incorrect"})
        if deciding
        else None,
        "max_response_tokens": config.rollout.max_response_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **({"stop": list(config.rollout.stop)} if config.rollout.stop else {}),
    }
