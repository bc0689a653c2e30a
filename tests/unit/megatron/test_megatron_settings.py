"""What each section of the configuration makes of Megatron's settings, compared as a whole: nothing else may change."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, transformer_config

from dapo_mega.config import AlgorithmConfig, ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron import megatron_model, megatron_policy, trained_model, value_model
from dapo_mega.megatron.core import decoder, layers, optimization
from dapo_mega.megatron.core import settings as megatron_settings
from dapo_mega.models.architecture import ExpertGroups, Experts, LatentAttention
from dapo_mega.models.rope import YarnScaling
from dapo_mega.training import trainer

from .test_compute_checks import DENSE

EXPERTS = Experts(number=4, per_token=2, ffn_hidden_size=8, normalised=True)
LATENT = LatentAttention(6, 5, unrotated_head_dim=2, rotated_head_dim=2, value_head_dim=3)


class Made:
    """Constructors of Megatron's that only note their arguments."""

    def __init__(self, patch):
        self.settings = {}
        self.models = {}
        """By the names of their classes."""
        for name in ("MegatronPolicy", "ScoringModel", "ValueModel"):
            patch.setattr(trainer, name, partial(self.model, name, getattr(trainer, name)))
        for place, name, make in (
            (megatron_policy, "PolicyStage", self.stage),
            (value_model, "ValueStage", self.stage),
            (megatron_policy, "replay_routes", lambda stages: None),
            (decoder, "Float16Module", lambda config, stage: stage),
            (optimization, "DistributedDataParallel", self.wrapped),
            (optimization, "get_megatron_optimizer", self.optimizer),
            (optimization, "OptimizerParamScheduler", self.schedule),
        ):
            patch.setattr(place, name, make)

    def model(self, name, make, *arguments, **options):
        self.settings = self.models[name] = {}
        make(*arguments, **options)

    def stage(self, config, spec, **arguments):
        self.note("transformer", fields(config))
        self.note("stage", {name: value for name, value in arguments.items() if name != "inverse_frequencies"})
        return torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})})

    def wrapped(self, config, ddp, chunk, disable_bucketing):
        in_buckets = self.settings.get("ddp.in_buckets", [])
        self.note("ddp", {**fields(ddp), "in_buckets": [*in_buckets, not disable_bucketing]})
        self.config = config
        return SimpleNamespace(no_sync=f"chunk {len(in_buckets)}")

    def optimizer(self, config, chunks):
        self.note("optimizer", fields(config))
        self.note("transformer", {"no_sync_func": self.config.no_sync_func})
        return SimpleNamespace(chained_optimizers=[])

    def schedule(self, optimizer, **arguments):
        self.note("schedule", arguments)

    def note(self, kind, values):
        self.settings.update({f"{kind}.{name}": value for name, value in values.items()})


def fields(config):
    values = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    # Megatron keeps the layout of a pipeline in an object.
    made = {name: getattr(value, "input_data", value) for name, value in values}
    return {name: getattr(value, "__name__", None) if callable(value) else value for name, value in made.items()}


@pytest.fixture
def settings(monkeypatch):
    """A function: the settings of a policy whose configuration has these sections."""
    made = Made(monkeypatch)
    monkeypatch.setattr(decoder, "ends_of_pipeline", lambda _: {"pre_process": True, "post_process": True})
    monkeypatch.setattr(decoder, "block_spec", lambda *_: None)
    monkeypatch.setattr(megatron_model, "load_weights", lambda *_: None)
    monkeypatch.setattr(megatron_model, "unwrapped", lambda chunk: chunk)
    monkeypatch.setattr(trained_model, "unwrapped", lambda chunk: chunk)
    monkeypatch.setattr(trained_model, "WeightGatherer", lambda *_: None)
    use_deterministic = partial(made.note, "torch", {"deterministic": True})
    monkeypatch.setattr(megatron_model, "use_deterministic_algorithms", use_deterministic)
    monkeypatch.setattr(accelerator, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "capability", lambda: (9, 0))
    monkeypatch.setattr(accelerator, "cuda_version", lambda: (12, 9))
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())

    def settings_of(
        *,
        arch=None,
        model=None,
        parallel=None,
        compute=None,
        optimizer=None,
        machine="gpu te sinks",
        of="MegatronPolicy",
    ):
        monkeypatch.setattr(megatron_settings, "attends_with_sinks", lambda: ("sinks" in machine, False))
        monkeypatch.setattr(accelerator, "has_gpu", lambda: "gpu" in machine)
        found = {"transformer_engine": "te" in machine, "fused_weight_gradient_mlp_cuda": "apex" in machine}
        monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: found.get(name) or None)
        architecture = dataclasses.replace(DENSE, **(arch or {}))
        stored = SimpleNamespace(arch=architecture, family=None, config=None, source=None)
        monkeypatch.setattr(megatron_policy, "open_policy", lambda path, trains_mtp=False: stored)
        monkeypatch.setattr(value_model, "open_value_model", lambda path: stored)
        made.models = {}
        config = SimpleNamespace(
            model=ModelConfig(path="model", **(model or {})),
            parallel=ParallelConfig(**(parallel or {})),
            optimizer=OptimizerConfig(**(optimizer or {})),
            compute=ComputeConfig(**(compute or {})),
            rollout=SimpleNamespace(temperature=0.7),
            batch=SimpleNamespace(updates_per_step=3),
            num_steps=50,
            seed=0,
            lora=None,
            algorithm=AlgorithmConfig(kl={"coefficient": 0.1}),
            uses_critic=True,
            distillation=None,
            critic_lora=None,
            critic_model=ModelConfig(path="critic", **(model or {})),
            critic_optimizer=OptimizerConfig(learning_rate=0.25, warmup_steps=40),
        )
        trainer.build_models(config, SimpleNamespace(control=None))
        return made.models[of]

    return settings_of


def differences(got, base):
    return {name: value for name, value in got.items() if name not in base or base[name] != value}


# What a bf16 policy on a GPU with Transformer Engine has otherwise than Megatron by default.
OTHERWISE_THAN_MEGATRON = {
    "ddp.grad_reduce_in_fp32": True,
    "ddp.in_buckets": [True],
    "ddp.use_distributed_optimizer": True,
    "optimizer.bf16": True,
    "optimizer.lr": 1e-06,
    "optimizer.min_lr": 1e-06,
    "optimizer.params_dtype": torch.bfloat16,
    "optimizer.use_distributed_optimizer": True,
    "optimizer.weight_decay": 0.1,
    "schedule.end_wd": 0.1,
    "schedule.init_lr": 0.0,
    "schedule.lr_decay_steps": 151,
    "schedule.lr_decay_style": "constant",
    "schedule.lr_warmup_steps": 60,
    "schedule.max_lr": 1e-06,
    "schedule.min_lr": 1e-06,
    "schedule.override_opt_param_scheduler": True,
    "schedule.start_wd": 0.1,
    "schedule.use_checkpoint_opt_param_scheduler": False,
    "schedule.wd_incr_steps": 0,
    "schedule.wd_incr_style": "constant",
    "stage.embedding_scale": 1.0,
    "stage.fused": True,
    "stage.max_sequence_length": 64,
    "stage.parallel_output": True,
    "stage.position_embedding_type": "rope",
    "stage.post_process": True,
    "stage.pre_process": True,
    "stage.rotary_base": 10000.0,
    "stage.rotary_magnitude": 1.0,
    "stage.share_embeddings_and_output_weights": True,
    "stage.temperature": 0.7,
    "stage.true_vocab_size": 11,
    "stage.vocab_size": 11,
    "stage.vp_stage": None,
    "stage.windowed_inverse_frequencies": None,
    "transformer.activation_func": "silu",
    "transformer.add_bias_linear": False,
    "transformer.add_qkv_bias": True,
    "transformer.apply_rope_fusion": True,
    "transformer.attention_dropout": 0.0,
    "transformer.autocast_dtype": torch.bfloat16,
    "transformer.bf16": True,
    "transformer.bias_activation_fusion": True,
    "transformer.bias_dropout_fusion": True,
    "transformer.calculate_per_token_loss": True,
    "transformer.ffn_hidden_size": 12,
    "transformer.finalize_model_grads_func": "finalize_model_grads",
    "transformer.gated_linear_unit": True,
    "transformer.hidden_dropout": 0.0,
    "transformer.kv_channels": 4,
    "transformer.layernorm_epsilon": 1e-06,
    "transformer.moe_token_dispatcher_type": "alltoall",
    "transformer.normalization": "RMSNorm",
    "transformer.num_query_groups": 2,
    "transformer.params_dtype": torch.bfloat16,
    "transformer.pipeline_dtype": torch.bfloat16,
    "transformer.variable_seq_lengths": True,
}


def test_a_policy_has_of_megatrons_settings_what_it_needs_and_no_other(settings):
    made = {
        "transformer": TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=4),
        "ddp": DistributedDataParallelConfig(),
        "optimizer": MegatronOptimizerConfig(),
    }
    defaults = {f"{kind}.{name}": value for kind, config in made.items() for name, value in fields(config).items()}
    assert differences(settings(), defaults) == OTHERWISE_THAN_MEGATRON


def experts(**changes):
    return {"experts": dataclasses.replace(EXPERTS, **changes)}


def of(kind, **values):
    return {f"{kind}.{name}": value for name, value in values.items()}


transformer = partial(of, "transformer")
OF_EXPERTS = transformer(
    num_moe_experts=4,
    moe_ffn_hidden_size=8,
    moe_grouped_gemm=True,
    moe_router_bias_update_rate=0.0,
    moe_router_dtype="fp32",
    moe_router_load_balancing_type="none",
    moe_router_topk_scaling_factor=1.0,
)
OF_FP8 = transformer(
    fp8="hybrid",
    fp8_amax_compute_algo="max",
    fp8_amax_history_len=1024,
    num_layers_at_start_in_bf16=0,
    num_layers_at_end_in_bf16=0,
)
# Newer versions of Megatron have one more.
OF_NEWER = {"mla_down_proj_fusion": False} if hasattr(MLATransformerConfig, "mla_down_proj_fusion") else {}
OF_LATENT = transformer(
    **OF_NEWER,
    apply_rope_fusion=False,
    beta_fast=32,
    beta_slow=1,
    cache_mla_latents=False,
    kv_lora_rank=5,
    mscale=1.0,
    mscale_all_dim=0.0,
    multi_latent_attention=True,
    original_max_position_embeddings=4096,
    q_lora_rank=6,
    qk_head_dim=2,
    qk_layernorm=True,
    qk_pos_emb_head_dim=2,
    rope_type="rope",
    rotary_base=10000.0,
    rotary_percent=1.0,
    rotary_scaling_factor=1.0,
    v_head_dim=3,
)
YARN = YarnScaling(4.0, 16.0, 2.0, original_positions=32, truncate=True, attention_factor=1.0)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OF_OVERLAP = of("ddp", overlap_grad_reduce=True) | transformer(no_sync_func="chunk 0")
RARE = experts(
    scores="sigmoid",
    scaling=2.5,
    has_router_bias=True,
    groups=ExpertGroups(2, 1, "sum"),
    shared_ffn_hidden_size=6,
    gates_shared=True,
    dense_layers=frozenset({0}),
)
SIGMOID = experts(scores="sigmoid")
OF_SIGMOID = {**OF_EXPERTS, **transformer(moe_router_score_function="sigmoid")}
MOE_TP2 = {"tensor": 2, "sequence": True, "expert_tensor": 2}
# (sections, what they change).
CHANGES = [
    (
        {"machine": "cpu"},
        transformer(
            apply_rope_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            use_cpu_initialization=True,
            use_te_activation_func=True,
        ),
    ),
    ({"machine": "gpu te apex"}, transformer(gradient_accumulation_fusion=True)),
    ({"machine": "gpu"}, transformer(apply_rope_fusion=False)),
    ({"model": {"layer_implementation": "local"}}, transformer(apply_rope_fusion=False)),
    (
        {"model": {"dtype": "fp32"}},
        of("optimizer", bf16=False, params_dtype=torch.float32)
        | transformer(bf16=False, **dict.fromkeys(["autocast_dtype", "params_dtype", "pipeline_dtype"], torch.float32)),
    ),
    ({"arch": {"tied_embeddings": False}}, of("stage", share_embeddings_and_output_weights=False)),
    ({"arch": {"qkv_bias": False}}, transformer(add_qkv_bias=False)),
    ({"arch": {"sliding_window": 5}}, transformer(window_size=(4, 0))),
    ({"arch": {"qk_norm": True}}, transformer(qk_layernorm=True)),
    (
        {"arch": {"sliding_window": 5, "full_attention_layers": frozenset({1, 3}), "attention_sinks": True}},
        transformer(window_size=(4, 0), window_attn_skip_freq=[1, 0, 1, 0], softmax_type="learnable"),
    ),
    (
        {
            "arch": {"activation": "gelu_tanh", "zero_centred_norms": True, "attention_scale": 0.25},
            "model": {"layer_implementation": "local"},
        },
        transformer(
            activation_func=None,
            apply_rope_fusion=False,
            bias_activation_fusion=False,
            layernorm_zero_centered_gamma=True,
            softmax_scale=0.25,
        ),
    ),
    (
        {"arch": experts(has_biases=True, swiglu_limit=7.0)},
        OF_EXPERTS
        | transformer(
            activation_func="quick_gelu",
            activation_func_clamp_value=7.0,
            add_bias_linear=True,
            bias_dropout_fusion=False,
            glu_linear_offset=1.0,
        ),
    ),
    ({"arch": {"rope_theta": 5e5}}, of("stage", rotary_base=5e5)),
    ({"arch": experts()}, OF_EXPERTS),
    ({"arch": experts(normalised=False)}, {**OF_EXPERTS, **transformer(moe_router_pre_softmax=True)}),
    (
        {"arch": RARE, "model": {"layer_implementation": "local"}},
        OF_SIGMOID
        | transformer(
            apply_rope_fusion=False,
            moe_grouped_gemm=False,
            moe_layer_freq=[0, 1, 1, 1],
            moe_router_enable_expert_bias=True,
            moe_router_group_topk=1,
            moe_router_num_groups=2,
            moe_router_topk_scaling_factor=2.5,
            moe_shared_expert_gate=True,
            moe_shared_expert_intermediate_size=6,
        ),
    ),
    ({"arch": {"latent_attention": LATENT}}, OF_LATENT),
    (
        {"arch": {"latent_attention": dataclasses.replace(LATENT, yarn_weights=(0.8, 0.6)), "rope_scaling": YARN}},
        OF_LATENT
        | transformer(
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.8,
            mscale_all_dim=0.6,
            original_max_position_embeddings=32,
            rope_type="yarn",
            rotary_scaling_factor=4.0,
        ),
    ),
    ({"parallel": {"tensor": 2}}, of("stage", vocab_size=12) | transformer(tensor_model_parallel_size=2)),
    (
        {"parallel": {"tensor": 2, "sequence": True}},
        of("stage", vocab_size=12) | transformer(tensor_model_parallel_size=2, sequence_parallel=True),
    ),
    (
        {"parallel": {"pipeline": 2}},
        transformer(
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout=[["embedding", "decoder", "decoder"], ["decoder", "decoder", "loss"]],
            microbatch_group_size_per_vp_stage=2,
        ),
    ),
    (
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "compute": OVERLAP},
        of("ddp", in_buckets=[True, False], overlap_grad_reduce=True, overlap_param_gather=True)
        | of("optimizer", overlap_param_gather=True)
        | of("stage", vp_stage=1)
        | transformer(
            batch_p2p_comm=False,
            overlap_p2p_comm=True,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout=[["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]],
            virtual_pipeline_model_parallel_size=2,
            microbatch_group_size_per_vp_stage=2,
            no_sync_func=["chunk 0", "chunk 1"],
        ),
    ),
    ({"parallel": {"context": 2}}, transformer(context_parallel_size=2)),
    (
        {"parallel": {"expert": 2}, "arch": experts()},
        {**OF_EXPERTS, **transformer(expert_model_parallel_size=2)},
    ),
    (
        {"parallel": MOE_TP2, "arch": experts()},
        OF_EXPERTS
        | of("stage", vocab_size=12)
        | transformer(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2),
    ),
    ({"compute": {"fused_output_layer": False}}, of("stage", fused=False)),
    (
        {"compute": {"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]}},
        transformer(recompute_granularity="selective", recompute_modules=["layernorm", "mlp"]),
    ),
    (
        {"compute": {"recompute": "full", "recompute_layers": 2}},
        transformer(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    ),
    ({"compute": {"overlap_grad_reduce": True}}, OF_OVERLAP),
    (
        {"compute": OVERLAP},
        OF_OVERLAP | of("ddp", overlap_param_gather=True) | of("optimizer", overlap_param_gather=True),
    ),
    (
        {"compute": {"optimizer_offload": 0.5}},
        of("optimizer", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, overlap_cpu_optimizer_d2h_h2d=True),
    ),
    ({"compute": {"deterministic": True}}, of("torch", deterministic=True) | transformer(deterministic_mode=True)),
    (
        {"compute": {"fp8": {"scaling": "delayed", "amax_history": 7}}},
        {**OF_FP8, **transformer(fp8_amax_history_len=7)},
    ),
    (
        {"compute": {"fp8": {"scaling": "tensorwise", "bf16_layers_at_ends": 2}}},
        OF_FP8
        | transformer(
            fp8_recipe="tensorwise",
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=2,
            num_layers_at_end_in_bf16=2,
        ),
    ),
    (
        {"compute": {"fp8": {"scaling": "blockwise", "params": True, "format": "e4m3"}}},
        {**OF_FP8, **transformer(fp8="e4m3", fp8_recipe="blockwise", fp8_param=True)}
        | of("ddp", fp8_param_gather=True),
    ),
    (
        {"compute": {"fp8": {"scaling": "delayed"}}, "arch": experts()},
        {**OF_EXPERTS, **OF_FP8, **transformer(moe_router_padding_for_quantization=True)},
    ),
    (
        {"compute": {"moe": {"aux_loss_coefficient": 0.1}}, "arch": experts()},
        {**OF_EXPERTS, **transformer(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="aux_loss")},
    ),
    (
        {"compute": {"moe": {"z_loss_coefficient": 0.1}}, "arch": experts()},
        {**OF_EXPERTS, **transformer(moe_z_loss_coeff=0.1)},
    ),
    (
        {"compute": {"moe": {"router_bias_update_rate": 0.1}}, "arch": SIGMOID},
        {**OF_SIGMOID, **transformer(moe_router_bias_update_rate=0.1, moe_router_enable_expert_bias=True)},
    ),
    (
        {"optimizer": {"learning_rate": 0.5}},
        of("optimizer", lr=0.5, min_lr=0.5) | of("schedule", max_lr=0.5, min_lr=0.5),
    ),
    ({"optimizer": {"warmup_steps": 0}}, of("schedule", lr_warmup_steps=1)),
    ({"optimizer": {"warmup_steps": 70}}, of("schedule", lr_warmup_steps=210, lr_decay_steps=211)),
    (
        {"optimizer": {"weight_decay": 0.5}},
        of("optimizer", weight_decay=0.5) | of("schedule", start_wd=0.5, end_wd=0.5),
    ),
    (
        {"optimizer": {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.25}},
        of("optimizer", adam_beta1=0.5, adam_beta2=0.6, adam_eps=0.25),
    ),
    ({"optimizer": {"clip_grad": 0.5}}, of("optimizer", clip_grad=0.5)),
    *(
        (
            {"optimizer": {"schedule": schedule}},
            of("optimizer", min_lr=0.0) | of("schedule", lr_decay_style=schedule, min_lr=0.0),
        )
        for schedule in ("linear", "cosine")
    ),
]


def test_a_section_changes_what_it_names_and_nothing_else(settings):
    base = settings()
    wrong = []
    for sections, expected in CHANGES:
        got, wanted = settings(**sections), {**base, **expected}
        wrong += [(sections, name, got.get(name)) for name in wanted.keys() | got if got.get(name) != wanted.get(name)]
    assert not wrong


ALL_OF_COMPUTE = {
    "recompute": "selective",
    "recompute_modules": ["mlp"],
    **OVERLAP,
    "optimizer_offload": 0.5,
    "deterministic": True,
    "fused_output_layer": False,
}


@pytest.mark.parametrize("scaling", ["none", "blockwise", "delayed"])
def test_a_runs_reference_and_critic_compute_as_its_policy(settings, scaling):
    """But for what is theirs: a frozen copy learns nothing, so it has no gradients and no scales of earlier passes."""
    sections = {
        "parallel": {"expert": 2},
        "arch": experts(),
        "compute": {**ALL_OF_COMPUTE, "fp8": {"scaling": scaling, "format": "e4m3", "amax_history": 7}},
        "optimizer": {"beta1": 0.5, "clip_grad": 0.25},
    }
    policy, reference, critic = (
        settings(**sections, of=name) for name in ("MegatronPolicy", "ScoringModel", "ValueModel")
    )
    of_learning = ("ddp", "optimizer", "schedule", "transformer.no_sync_func")
    computed = {name: value for name, value in policy.items() if not name.startswith(of_learning)}
    recipe = {"transformer.fp8_recipe": "tensorwise"} if scaling == "delayed" else {}
    assert {name: value for name, value in reference.items() if not name.startswith(of_learning)} == computed | recipe
    assert reference["transformer.no_sync_func"] is None
    own = of("optimizer", lr=0.25, min_lr=0.25, adam_beta1=0.9, clip_grad=1.0)
    own |= of("schedule", max_lr=0.25, min_lr=0.25, lr_warmup_steps=120)
    heads = ("stage.temperature", "stage.true_vocab_size", "stage.fused", "stage.share_embeddings_and_output_weights")
    assert {name: value for name, value in critic.items() if name != "stage.has_bias"} == {
        name: value for name, value in (policy | own).items() if name not in heads
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": {"norms": "behind"}}, "not supported on Transformer Engine's layers; set model.layer_implementation"),
        ({"arch": {"attention_sinks": True}, "parallel": {"context": 2}}, "attention sinks under parallel.context=2"),
        ({"arch": {"attention_sinks": True}, "machine": "gpu te"}, "sinks, which this Transformer Engine does not"),
    ],
)
def test_what_transformer_engine_does_not_compute_is_refused(settings, changes, message):
    with pytest.raises(InputError, match=message):
        settings(**changes)
