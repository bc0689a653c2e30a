"""Asks SGLang engines, each of which must serve the model that is asked for."""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dapo_mega.config import RunConfig
from dapo_mega.config.files import validated
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.fleet_client import FleetClient
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion, run_name
from dapo_mega.evaluation.sampling import Sampler
from dapo_mega.models import load_architecture
from dapo_mega.types import LogProbs, Prompt, TokenIds
from dapo_mega.weight_sync.agreement import engine_logprobs, fixed_sequence, mean_difference

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1
_GATHERING_S = 30.0
_SCORING_TIMEOUT_S = 300.0
_VERSION = 0
DETERMINISTIC = ", deterministic"
"""What the name of an engine ends with that samples by the seeds of requests."""


def with_engines(config: RunConfig, **fleet: Any) -> RunConfig:
    """The configuration with standing engines, which `fleet` names as `rollout.fleet` does. Raises InputError."""
    raw = config.model_dump()
    raw["rollout"] |= {"placement": "fleet", "fleet": fleet}
    # No weights are sent, so engines need not be able to take them, and none are reserved.
    raw["weight_sync"] = {"transport": "disk"}
    raw["evaluation"]["beside_training"] = False
    raw["lora"] = None  # Adapters are merged into what is evaluated.
    return validated(RunConfig, raw)


class FleetSampler(FleetClient, Sampler):
    """Sends requests to engines that have the model's sizes and agree with its log-probs of a fixed sequence.

    An engine that agreed is given a name for its weights. Were they replaced meanwhile, its answers would carry another
    name: such answers are not used, and the engine must agree again.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        api_key: str,
        tend: Callable[[], None] = lambda: None,
        close_engines: Callable[[], None] = lambda: None,
    ) -> None:
        """`config` is one of `with_engines`. `tend` is called again and again, to start and restart engines."""
        model = Path(config.model.path)
        arch = load_architecture(model)[1]
        self.engines: tuple[str, ...] = ()
        self._tolerance = config.engine_tolerance
        self._tokens = fixed_sequence(config, prompts, arch.vocab_size)
        self._expected = _expected_logprobs(model, config.model.dtype, self._tokens)
        self._name = run_name(config.output_dir)
        self._close_engines = close_engines
        fleet = config.rollout.fleet
        self.most_open = 2 * fleet.requests_per_engine * len(fleet.urls)
        super().__init__(config, arch.vocab_size, api_key, self._name, arch, tend)
        self.update_outdated = self._admit
        self._gather_until = time.monotonic() + _GATHERING_S

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See `RolloutFleet`. Raises FleetError when no engine that serves the model can be reached."""
        with closing(work):
            # The first engine would get all requests.
            while self._membership.in_state("joining", "outdated", "away") and time.monotonic() < self._gather_until:
                self.tend()
                time.sleep(_TICK_S)
            return super().run(work)

    def close(self) -> None:
        """See `FleetClient`. Ends the engines that were started for it."""
        super().close()
        self._close_engines()

    def _admit(self) -> None:
        targets = self.pause_generation(self.targets(only_outdated=True))
        named = self.start_call(targets, self._name_weights, _SCORING_TIMEOUT_S).result()
        self.resume_generation(targets)
        for url, result in named.items():
            if isinstance(result, EngineError):
                self.failed(url, f"its weights could not be named: {result.reason}")
        ready = [target for target in targets if not isinstance(named[target.url], EngineError)]
        versions = VersionRange(self._name, _VERSION, _VERSION)
        score = partial(engine_logprobs, token_ids=self._tokens, versions=versions, timeout_s=_SCORING_TIMEOUT_S)
        scores = self.start_call(ready, score, _SCORING_TIMEOUT_S).result()
        for url, found in scores.items():
            if isinstance(found, EngineError):
                self.failed(url, f"it did not score a sequence: {found.reason}")
            elif not (difference := mean_difference(found, self._expected)) <= self._tolerance:
                self.disagrees(
                    url,
                    "it serves another model than the one that is asked for: log-probs of a fixed sequence are "
                    f"{difference:.4g} nats away on average, and at most {self._tolerance:g} are allowed; start it "
                    "with that model's checkpoint",
                )
            else:
                logger.info("engine %s serves the model: log-probs agree to %.2g nats on average", url, difference)
                self.synced(url, _VERSION)
                name = str(named[url])
                self.engines = tuple(sorted({*self.engines, name}))
                if not name.endswith(DETERMINISTIC):
                    logger.warning(
                        "engine %s draws by random numbers of its own: the same command gives other responses; start "
                        "it with --enable-deterministic-inference where that matters",
                        url,
                    )

    async def _name_weights(self, client: EngineClient) -> str:
        """Name the engine's weights; returns what the engine is."""
        version = str(WeightVersion(self._name, _VERSION))
        await client.command("update_weight_version", new_version=version, abort_all_requests=False)
        info = await client.info()
        return f"SGLang {info.version}{DETERMINISTIC if info.deterministic else ''}"


@torch.inference_mode()
def _expected_logprobs(model: Path, dtype: str, token_ids: TokenIds) -> LogProbs:
    """The model's log-probs [L - 1] of all tokens but the first, in nats."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=kind)
    tokens = torch.from_numpy(token_ids.astype(np.int64))[None]
    logprobs = loaded(tokens).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()
