"""Facts about model families that cannot be read off their weights, in one place: what of them is refused, and why.

A worker of the engine decides by the module that it has before it (`sharding.worker.loader.reprocessed_modules`).
"""

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which models change their logits after the output head, which the trainer's chunked head does not do."""

PACKABLE_LAYERS = ("full_attention", "sliding_attention")
"""Values of a model's `layer_types` for which sequences can be kept apart in a pack (`trainer.policy.attention`)."""

REPROCESSED = (".experts.", ".kv_b_proj.")
"""In the names of weights that engines do not keep as they are loaded: experts are shuffled, MLA keeps products."""

REPROCESSED_KEYS = {"num_experts": "experts", "n_routed_experts": "experts", "kv_lora_rank": "attention"}
"""Keys of config.json by which a model has such weights, and what they belong to."""

NO_ADAPTER_ON_CPU = "num_experts"
"""Key of config.json of models for which vLLM's CPU build applies no LoRA adapters: it has none for mixtures."""
