"""What Megatron really allocates for several layouts, as bytes per category, on one of their processes."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state

from dapo_mega.batching.microbatch import MicroBatch, pack
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig, ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.megatron import megatron_model, output_layer
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.megatron_policy import MegatronPolicy, chosen_tokens
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.megatron.value_model import ValueModel


def allocated(cases):
    """{name: bytes}, on this process, of cases {name, model, parallel, compute, dtype, layers, lengths,
    num_micro_batches, is_critic}.

    `parallel` and `compute` are configuration sections, `model` is the folder of a checkpoint, `lengths` are the tokens
    of each sample of one micro-batch, of which the first quarter is its prompt.
    """
    return_weight_gradients()
    plans = AttentionPlans()
    results = {}
    for case in cases:
        plans.clear()
        results[case["name"]] = run_case(case, plans)
        parallel_state.destroy_model_parallel()
    return results


def return_weight_gradients():
    """Tensors that went through hooks come back without Megatron's marks, so the fused output layer cannot add to
    `main_grad`. Where the weight's gradient goes changes nothing about what is kept."""
    original = output_layer.output_logprobs
    output_layer.output_logprobs = lambda *args, **rest: original(*args, **{**rest, "accumulate_into_main_grad": False})


class AttentionPlans:
    """The packed attention's plans that are in use. Recomputed functions hold theirs as a variable, out of autograd's
    hooks' sight."""

    def __init__(self) -> None:
        self._plans = []
        original = megatron_model.packed_segments

        def noted(*args, **rest):
            plan = original(*args, **rest)
            self._plans = [known for known in self._plans if known()] + [weakref.ref(plan)]
            return plan

        megatron_model.packed_segments = noted

    def clear(self):
        """Dispatchers of experts hold on to their last graph, and it to its plan, also when their model is gone."""
        self._plans = []

    def tensors(self):
        plans = [plan for known in self._plans if (plan := known())]
        held = [tensor for plan in plans for tensor in (plan.token_of_slot, plan.slot_of_token, plan.key_order)]
        held += [tensor for plan in plans for tensor in plan.rotary or ()]
        return [tensor for tensor in held if tensor is not None]


def run_case(case, plans):
    parallel = ParallelConfig(**case.get("parallel", {}))
    processes = start_processes(parallel, 0)
    settings = (
        ModelConfig(
            path=case["model"],
            dtype=case.get("dtype", "fp32"),
            layer_implementation=case.get("layers", "auto"),
            train_mtp=case.get("mtp", False),
        ),
        parallel,
        OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
        processes,
    )
    schedule = {"updates_per_step": 1, "num_steps": 10, "compute": ComputeConfig(**case.get("compute", {}))}
    if case["is_critic"]:
        policy, make_batch = ValueModel(*settings, **schedule), ValueBatch
        make_labels, loss = MicroBatch.response_rows, ValueLoss()
    else:
        policy, make_batch = MegatronPolicy(*settings, **schedule, temperature=1.0), TokenBatch
        make_labels = partial(chosen_tokens, with_entropy=False, looks_ahead=policy.arch.trains_mtp)
        loss = PolicyGradient(AlgorithmConfig())
        policy._share_embedding()
    micro_batch = make_micro_batch(policy, case["lengths"])
    kept = [kept_for_backward(policy, chunk, micro_batch, make_labels, plans) for chunk in policy.chunks]
    peak = SavedStorages(policy, plans)
    batch = make_batch(micro_batch)
    if processes.is_last_stage:
        old = micro_batch.targets.rollout_logprobs[micro_batch.targets.response_mask]
        batch = make_batch(micro_batch, old, old)
    with peak:
        policy.update([batch] * case["num_micro_batches"], loss)
    return {
        "stage": processes.pipeline_rank,
        "num_scored": sum(length - length // 4 for length in case["lengths"]),
        "parameters": storage_bytes(parameter for chunk in policy.chunks for parameter in chunk.parameters()),
        "gradients": storage_bytes(buffer.grad_data for buffer in gradient_buffers(policy)),
        "optimizer": optimizer_bytes(policy),
        "activations": kept,
        "peak_activations": peak.peak_bytes,
    }


def make_micro_batch(policy, lengths):
    """One packed micro-batch of random tokens; under context parallelism this process's slice of it."""
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        ids, prompt = rng.integers(1, policy.arch.vocab_size, length).astype(np.int32), length // 4
        logprobs = np.full(length - prompt, -7.0, np.float32)
        samples.append(single_turn(ids[:prompt], ids[prompt:], logprobs, advantage=float(i % 2) - 0.5))
    batch = pack(flatten(samples), PackingLayout(multiple_of=policy.token_multiple), max_response_tokens=max(lengths))
    return policy.context_shard(batch)


class SavedStorages:
    """Counts the distinct storages kept for backward passes, by autograd or in attention plans, parameters left out."""

    def __init__(self, policy, plans) -> None:
        self._plans = plans
        self._parameters = {p.untyped_storage().data_ptr() for chunk in policy.chunks for p in chunk.parameters()}
        self._live = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self.peak_bytes = 0

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)

    def _pack(self, tensor):
        saved = Saved(tensor)
        self._live.add(saved)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())
        return saved

    def forget(self):
        """An output that its own function saved would keep itself where no backward pass lets go of it."""
        for saved in list(self._live):
            saved.tensor = None

    def num_bytes(self, *others):
        # A storage's size is asked for now: recomputed ones are emptied after they were saved.
        tensors = [*(saved.tensor for saved in self._live), *self._plans.tensors(), *others]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for pointer, size in storages.items() if pointer not in self._parameters)


class Saved:
    """One tensor kept for backward; gone as soon as autograd lets go of it."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor


def kept_for_backward(policy, chunk, micro_batch, make_labels, plans):
    """Bytes that the forward pass of one micro-batch through `chunk` leaves behind, its input and output included."""
    chunk.train()
    stage = unwrapped(chunk)
    handed_in = []
    if not stage.pre_process:
        num_tokens = len(micro_batch.tokens)
        if policy.config.sequence_parallel:
            num_tokens //= policy.config.tensor_model_parallel_size
        hidden = torch.randn(num_tokens, 1, policy.arch.hidden_size, dtype=policy.config.params_dtype)
        handed_in = [hidden.requires_grad_()]
        stage.set_input_tensor(handed_in[0])
    saved = SavedStorages(policy, plans)
    with saved:
        output = policy._forward(chunk, micro_batch, make_labels)
    num_bytes = saved.num_bytes(*(output if isinstance(output, tuple) else [output]), *handed_in)
    saved.forget()
    return num_bytes


def gradient_buffers(policy):
    return [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def storage_bytes(tensors):
    """Bytes of the distinct storages under `tensors`, padding of shared buffers included."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_bytes(policy):
    """Adam's moments and the float32 main weights, where these are not the parameters themselves."""
    own = {p.untyped_storage().data_ptr() for chunk in policy.chunks for p in chunk.parameters()}
    tensors = []
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in optimizer.optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return storage_bytes(t for t in tensors if t.untyped_storage().data_ptr() not in own)
