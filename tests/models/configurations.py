"""Small random transformers models of every kind, and how much of each fuses.

One `Configuration` a model, in groups by kind. The counts are exact for the transformers version
in constraints.txt; `test_models_compiled.py` measures them, and docs/models.md prints them. A row
in which low-rank layers stay out of kernel calls says why in its note.
"""

from __future__ import annotations

import torch
from small_models import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    Configuration,
    Kind,
    image,
    image_in_text,
    random,
    text,
    text_and_image,
    text_to_text,
)
from torch import Tensor

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT = {**TEXT, "num_key_value_heads": None, "head_dim": None, "use_cache": None}
BERT = {name: value for name, value in BERT.items() if value is not None}
VIT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
TOKENS = {name: TEXT[name] for name in TEXT if name.endswith("_token_id") or name[:3] in ("voc",)}
SEQ2SEQ = {**TOKENS, "use_cache": False, "decoder_start_token_id": 2}
BART = {
    **SEQ2SEQ, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
WAVES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "layerdrop": 0.0,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
EXPERTS = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4,
}  # fmt: skip
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
GROUPS = {
    **EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
STATES = {"state_size": 4, "time_step_rank": 8}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}  # fmt: skip

HALVES = "gate and up are halves of one layer, so their product stays outside of the kernel"
SCALED = "the query is scaled after its layer, which keeps it out of the call of key and value"

C = Configuration
DENSE = (
    C("llama", 14, 6, {}), C("mistral", 14, 6, {}), C("qwen2", 14, 6, {}), C("qwen3", 14, 6, {}),
    C("gemma", 14, 6, {}), C("gemma2", 14, 6, {}), C("gemma3_text", 14, 6, SLIDING),
    C("gemma3n_text", 29, 18, {
        **SLIDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64, "laurel_rank": 8, "intermediate_size": [64, 64],
        "activation_sparsity_pattern": [0.95, 0.0],
    }, note="the sparse gate of the first layer has no kernel; its two products are calls"),
    C("gemma4_text", 19, 11, {
        **SLIDING, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16,
        "per_layer_config": {},
    }),
    C("phi", 12, 6, {"num_key_value_heads": 4}, note="the MLP reads the x of attention"),
    C("phi3", 8, 8, {}, note=HALVES), C("gpt2", 8, 8, GPT), C("gpt_neox", 8, 8, {}),
    C("gptj", 12, 8, {**GPT, "rotary_dim": 4}), C("gpt_bigcode", 8, 8, GPT),
    C("gpt_neo", 12, 8, {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]
    }),
    C("codegen", 8, 8, {**GPT, "rotary_dim": 4}),
    C("opt", 12, 10, {"ffn_dim": 64, "word_embed_proj_dim": 32}, note=SCALED),
    C("bloom", 8, 8, {"n_layer": 2, "n_head": 4}), C("falcon", 8, 6, {"head_dim": None}),
    C("mpt", 8, 8, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    C("stablelm", 14, 6, {}), C("starcoder2", 12, 8, {}), C("cohere", 14, 6, {}),
    C("cohere2", 14, 6, {}), C("olmo2", 14, 6, {}), C("olmo3", 14, 6, {}), C("granite", 14, 6, {}),
    C("nemotron", 12, 8, {}), C("persimmon", 8, 8, {"num_key_value_heads": 4}),
    C("glm4", 12, 8, {}, note=HALVES), C("smollm3", 14, 6, {}), C("exaone4", 14, 6, {}),
    C("hunyuan_v1_dense", 14, 6, {}), C("apertus", 12, 8, {}),
    C("bitnet", 14, 8, {}, note="a norm inside of the MLP keeps its last layer a call of its own"),
    C("diffllama", 14, 6, {}), C("modernbert-decoder", 12, 8, {}, note=HALVES),
    C("xglm", 12, 10, {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
      note=SCALED),
    C("ctrl", 12, 8, {**GPT, "dff": 64}, graphs=2), C("doge", 14, 6, {}),
)  # fmt: skip
EXPERT = (
    C("mixtral", 8, 4, EXPERTS), C("qwen2_moe", 14, 6, SHARED), C("qwen3_moe", 8, 4, EXPERTS),
    C("olmoe", 8, 4, EXPERTS), C("phimoe", 8, 4, EXPERTS), C("gpt_oss", 8, 4, EXPERTS),
    C("granitemoe", 8, 4, EXPERTS),
    C("llama4_text", 14, 6, {
        **EXPERTS, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
        "moe_layers": [1], "num_experts_per_tok": 1, "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    }),
    C("jetmoe", 2, 2, {**EXPERTS, "kv_channels": 8}, graphs=16,
      note="query and output are experts; only the layer of key and value is low-rank"),
    C("ernie4_5_moe", 14, 6, {
        "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_intermediate_size": 32,
    }),
    C("glm4_moe", 14, 6, GROUPS), C("dots1", 14, 6, GROUPS), C("flex_olmo", 8, 4, EXPERTS),
    C("hunyuan_v1_moe", 14, 6, {**EXPERTS, "moe_topk": 2}),
    C("minimax", 7, 5, {
        **EXPERTS, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]
    }),
    C("minimax_m2", 8, 4, EXPERTS),
    C("afmoe", 16, 6, {**EXPERTS, **SLIDING, "num_dense_layers": 1}),
    C("mimo_v2_flash", 11, 7, EXPERTS),
)  # fmt: skip
MLA = (
    C("deepseek_v2", 16, 10, {**LATENT, **GROUPS}), C("deepseek_v3", 16, 10, {**LATENT, **GROUPS}),
    C("deepseek_v32", 20, 14, {
        **LATENT, **GROUPS, **SPARSE, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2,
        "layer_types": ["indexed_attention"] * 2,
    }),
    C("minicpm3", 16, 10, LATENT), C("youtu", 16, 10, LATENT),
    C("longcat_flash", 16, 10, {
        **LATENT, **EXPERTS, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
        "num_layers": 2, "zero_expert_num": 1, "moe_topk": 2,
    }, graphs=10, note="the router reads classifier.weight, so it stays dense"),
    C("glm4_moe_lite", 16, 10, {**LATENT, **GROUPS, **SPARSE}),
    C("kimi_linear", 19, 11, {
        **LATENT, **EXPERTS, **SPARSE, "num_experts_per_token": 2, "linear_head_dim": 8,
        "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    }),
    C("bailing_hybrid", 18, 14, {**LATENT, **GROUPS}),
)  # fmt: skip
MULTIPLIED = "the mixer multiplies by dt_proj.weight, which `compress` does not see: exclude it"
READ = "the mixer reads dt_proj.weight instead of calling the layer, so `compress` leaves it dense"
SSM = (
    C("mamba", 6, 6, STATES, note=READ), C("falcon_mamba", 8, 6, STATES, uses=6, note=MULTIPLIED),
    C("mamba2", 4, 4, {
        "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4
    }),
    C("jamba", 10, 6, {
        **EXPERTS, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
        "use_mamba_kernels": False, "mamba_d_state": 4,
    }),
    C("bamba", 12, 6, {**MAMBA2, "attn_layer_indices": [1]}),
    C("zamba2", 13, 10, {
        "mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"], "chunk_size": 4, "use_mamba_kernels": False,
        "num_mem_blocks": 1, "adapter_rank": 8, "num_key_value_heads": 4,
    }),
    C("falcon_h1", 18, 10, {**MAMBA2, "mamba_d_ssm": 64}),
    C("nemotron_h", 10, 8, {
        **EXPERTS, "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 4, "moe_shared_expert_intermediate_size": 32,
    }),
    C("granitemoehybrid", 10, 8, {
        **EXPERTS, **MAMBA2, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"],
    }, note=HALVES),
    C("qwen3_next", 13, 6, {**SHARED, **LINEAR}), C("qwen3_5_text", 13, 7, LINEAR),
    C("qwen3_5_moe_text", 13, 7, {**SHARED, **LINEAR}), C("olmo_hybrid", 15, 7, LINEAR),
    C("lfm2", 12, 6, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    C("lfm2_moe", 9, 5, {
        **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1
    }),
    C("rwkv", 14, 14, {"attention_hidden_size": 32},
      note="each projection reads its own mix of two tokens, so none share a call"),
    C("recurrent_gemma", 13, 6, {
        "lru_width": 32, "block_types": ["recurrent", "attention"], "num_key_value_heads": 1
    }),
    C("xlstm", 16, 6, {"num_heads": 4, "num_blocks": 2, "embedding_dim": 32}),
)  # fmt: skip
_T5 = {**T5, "d_model": 32, **{name: None for name in BART if name not in (*SEQ2SEQ, "d_model")}}
ENCODER_DECODER = (
    C("t5", 32, 22, _T5), C("mt5", 36, 18, {**_T5, "d_model": 32}),
    C("umt5", 36, 18, _T5),
    C("longt5", 32, 22, _T5, graphs=8),
    C("bart", 32, 22, {}), C("mbart", 32, 22, {}), C("pegasus", 32, 22, {}),
    C("marian", 32, 22, {}), C("m2m_100", 32, 22, {}), C("blenderbot", 32, 22, {}),
    C("plbart", 32, 22, {}), C("bigbird_pegasus", 32, 22, {"attention_type": "original_full"}),
    C("pegasus_x", 32, 34, {}, uses=44, note="global and local tokens share layers"),
    C("led", 38, 24, {
        "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    }, uses=32, graphs=5, note="the layers of global attention run with global tokens only"),
    C("prophetnet", 34, 32, {
        "encoder_layers": None, "decoder_layers": None, "d_model": None,
        "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    }, uses=38, note="the decoder's two streams share layers"),
    C("fsmt", 33, 27, {"langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64}, graphs=3,
      note=SCALED),
)  # fmt: skip
ENCODER = (
    C("bert", 13, 9, {}), C("roberta", 13, 9, {}), C("electra", 13, 9, {}), C("mpnet", 13, 9, {}),
    C("modernbert", 8, 8, {}, note=HALVES), C("rembert", 14, 10, {}), C("roformer", 12, 8, {}),
    C("megatron-bert", 13, 9, {}),
    C("nystromformer", 12, 12, {}, note="query and key are scaled after their layers"),
    C("convbert", 17, 11, {}), C("roc_bert", 14, 10, {}), C("layoutlm", 13, 9, {}),
    C("ibert", 1, 1, {}, note="its integer linears are not nn.Linear and stay dense"),
    C("xlm-roberta-xl", 13, 9, {}), C("eurobert", 14, 6, {}), C("nomic_bert", 14, 6, {}),
    C("esm", 13, 11, {}, note=SCALED), C("mra", 12, 8, {}), C("yoso", 12, 8, {}),
    C("fnet", 6, 6, {}), C("mobilebert", 32, 26, {}), C("deberta", 8, 8, {}),
    C("deberta-v2", 12, 8, {}),
    C("albert", 8, 10, {}, uses=14, note="two layers share their weights"),
    C("distilbert", 12, 8, {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    C("xlm", 12, 10, {"emb_dim": 32, "n_layers": 2, "n_heads": 4}, graphs=4, note=SCALED),
    C("longformer", 19, 9, {"attention_window": 4}, uses=13, graphs=6,
      note="the layers of global attention run with global tokens only"),
    C("big_bird", 13, 9, {"attention_type": "original_full"}),
    C("canine", 25, 20, {
        "num_hash_buckets": 64, "downsampling_rate": 2, "local_transformer_stride": 4
    }, uses=28, note="two of its encoders share layers"),
)  # fmt: skip
STAGES = {"num_hidden_layers": None, "intermediate_size": None, "image_size": None}
SWIN = {
    **STAGES, "hidden_size": None, "num_attention_heads": None, "image_size": 16, "embed_dim": 16,
    "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4,
}  # fmt: skip
VISION = (
    C("vit", 13, 9, {}), C("deit", 13, 9, {}), C("beit", 12, 8, {}), C("dinov2", 12, 8, {}),
    C("dinov3_vit", 12, 8, {}), C("clip_vision_model", 12, 8, {}),
    C("siglip_vision_model", 14, 10, {}), C("ijepa", 12, 8, {}), C("vit_mae", 12, 8, {}),
    C("data2vec-vision", 12, 8, {}), C("aimv2_vision_model", 17, 8, {}), C("vitdet", 8, 8, {}),
    C("sam_vision_model", 8, 8, {}), C("pixtral", 14, 6, {}), C("dpt", 13, 9, {}),
    C("swin", 13, 11, SWIN), C("swinv2", 13, 11, SWIN),
    C("convnext", 4, 4, {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4
    }),
    C("segformer", 12, 9, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
        "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
    }),
    C("pvt", 12, 9, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
        "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2],
        "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    }),
    C("hiera", 9, 8, {
        "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": [3, 3],
        "patch_stride": [2, 2], "patch_padding": [1, 1], "image_size": [16, 16],
        "query_stride": [2, 2], "masked_unit_size": [4, 4], "num_query_pool": 1, "mlp_ratio": 2.0,
        "embed_dim_multiplier": 2.0,
    }),
    C("focalnet", 8, 8, {
        "embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3],
        "hidden_sizes": [16, 32], "patch_size": 4,
    }),
    C("mobilevit", 54, 36, {
        "hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 16],
        "image_size": 32,
    }, inputs=random("pixel_values", 3, 32, 32)),
    C("videomae", 12, 8, {"num_frames": 2, "tubelet_size": 2},
      inputs=random("pixel_values", 2, 3, 16, 16)),
    C("vivit", 13, 9, {"num_frames": 2, "tubelet_size": [2, 8, 8]},
      inputs=random("pixel_values", 2, 3, 16, 16)),
    C("timesformer", 14, 14, {"num_frames": 2}, inputs=random("pixel_values", 2, 3, 16, 16)),
)  # fmt: skip
SPEECH = {**BART, **{name: None for name in WAVES if name not in BART}, "num_hidden_layers": None}
MHA = "its attention hands the weights to F.multi_head_attention_forward, and stays dense"
AUDIO = (
    C("wav2vec2", 13, 9, {}), C("hubert", 13, 9, {}), C("unispeech", 13, 9, {}),
    C("wavlm", 5, 5, {}, note=MHA), C("data2vec-audio", 13, 9, {}),
    C("sew", 13, 9, {}),
    C("sew-d", 13, 11, {}, uses=17, note="position keys pass through the layers of the tokens"),
    C("wav2vec2-conformer", 19, 15, {}),
    C("wav2vec2-bert", 17, 13, {
        "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 5
    }, inputs=random("input_features", 6, 16)),
    C("whisper", 32, 26, {
        **SPEECH, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 8
    }, inputs=random("input_features", 8, 12, decoder=True), note=SCALED),
    C("speech_to_text", 32, 22, {
        **SPEECH, "input_feat_per_channel": 8, "conv_channels": 32, "max_source_positions": 16,
        "max_target_positions": 16,
    }, inputs=random("input_features", 12, 8, decoder=True)),
    C("audio-spectrogram-transformer", 12, 8, {
        "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8,
        "time_stride": 8,
    }, inputs=random("input_values", 32, 16)),
    C("mimi", 24, 16, {
        "num_filters": 4, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16,
        "codebook_size": 32, "upsampling_ratios": [4, 2], "num_quantizers": 2, "head_dim": 8,
        "num_key_value_heads": 4, "upsample_groups": 32, "sampling_rate": 400, "sliding_window": 8,
    }, inputs=random("input_values", 1, 256), graphs=22),
    C("moonshine", 32, 22, {
        **TOKENS, "use_cache": False, "decoder_start_token_id": 1, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
    }, inputs=random("input_values", 2000, decoder=True), note=HALVES),
    C("parakeet_encoder", 19, 15, {
        "num_mel_bins": 16, "subsampling_conv_channels": 8, "num_key_value_heads": 4
    }, inputs=random("input_features", 32, 16)),
    C("patchtst", 12, 8, {
        "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
        "d_model": 32, "ffn_dim": 64,
    }, inputs=random("past_values", 16, 2)),
)  # fmt: skip
TOWERS = {"text_config": BERT, "vision_config": VIT, "projection_dim": 16}
SEES = {"image_token_index": IMAGE, "image_token_id": IMAGE}
SIGLIP = {"model_type": "siglip_vision_model", **VIT, "vision_use_head": False}
LLAMA = {"model_type": "llama", **TEXT}
QWEN = {
    **SEES, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "text_config": {**TEXT, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]
    }},
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "embed_dim": 32,
        "mlp_ratio": 2, "fullatt_block_indexes": [1], "window_size": 8,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip


def patches_in_text() -> dict[str, Tensor]:
    """A prompt of Qwen's: an image of four by four patches, merged to four tokens."""
    ids = torch.tensor([[VISION_START, *[IMAGE] * 4, VISION_END, 3, 4]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def sound_in_text() -> dict[str, Tensor]:
    """A prompt in which sixteen frames of sound take the place of four tokens."""
    ids = torch.tensor([[IMAGE] * 4 + [3, 4]] * 2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(2, 8, 16),
        "feature_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


TILES = {**SEES, "text_config": LLAMA, "scale_factor": 2}
ONCE = "blocks alike run the same compiled graphs, whose chains count once"
MULTIMODAL = (
    C("clip", 26, 18, TOWERS), C("siglip", 27, 19, TOWERS), C("chinese_clip", 26, 18, TOWERS),
    C("altclip", 27, 19, {**TOWERS, "text_config": {**BERT, "project_dim": 16}}),
    C("owlvit", 26, 18, TOWERS),
    C("blip", 31, 19, {
        **TOWERS, "text_config": {**BERT, "encoder_hidden_size": 32}, "image_text_hidden_size": 16
    }, uses=23, note="this forward does not call the cross-attention"),
    C("llava", 28, 16, {
        **SEES, "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **VIT},
        "image_seq_length": 4,
    }, inputs=image_in_text(4), graphs=3),
    C("gemma3", 26, 14, {
        **SEES, "text_config": {"model_type": "gemma3_text", **TEXT, **SLIDING},
        "vision_config": SIGLIP, "mm_tokens_per_image": 4,
    }, inputs=image_in_text(4), graphs=3),
    C("internvl", 28, 16, {
        **SEES, "text_config": {"model_type": "qwen2", **TEXT}, "image_seq_length": 4,
        "vision_config": {
            "model_type": "internvl_vision", **VIT, "image_size": [16, 16], "patch_size": [4, 4]
        },
    }, inputs=image_in_text(4), graphs=3),
    C("aya_vision", 28, 16, {
        **SEES, "text_config": {"model_type": "cohere2", **TEXT}, "vision_config": SIGLIP,
        "downsample_factor": 2, "alignment_intermediate_size": 64,
    }, inputs=image_in_text(1), graphs=3),
    C("idefics3", 27, 15, {**TILES, "vision_config": {"model_type": "idefics3_vision", **VIT}},
      inputs=image_in_text(1, 1), graphs=8),
    C("smolvlm", 27, 15, {**TILES, "vision_config": {"model_type": "smolvlm_vision", **VIT}},
      inputs=image_in_text(1, 1), graphs=7),
    C("qwen2_vl", 24, 12, QWEN, chains=20, graphs=24, inputs=patches_in_text, note=ONCE),
    C("qwen2_5_vl", 26, 13, QWEN, chains=23, graphs=29, inputs=patches_in_text, note=ONCE),
    C("qwen3_vl", 26, 11, QWEN, chains=15, graphs=35, inputs=patches_in_text, note=ONCE),
    C("qwen3_5", 23, 13, {**QWEN, "text_config": {**QWEN["text_config"], **LINEAR}},
      chains=19, graphs=29, inputs=patches_in_text, note=ONCE),
    C("git", 25, 17, {**BERT, "vision_config": VIT}), C("vilt", 13, 9, {**BERT, **VIT}, graphs=10),
    C("visual_bert", 14, 10, {**BERT, "visual_embedding_dim": 16}, inputs=lambda: {
        **text(), "visual_embeds": torch.randn(2, 3, 16), "visual_attention_mask": torch.ones(2, 3),
        "visual_token_type_ids": torch.ones(2, 3, dtype=torch.long),
    }),
    C("lxmert", 30, 22, {
        **BERT, "l_layers": 1, "r_layers": 1, "x_layers": 1, "visual_feat_dim": 16
    }, inputs=lambda: {
        **text(), "visual_feats": torch.randn(2, 3, 16), "visual_pos": torch.rand(2, 3, 4)
    }, uses=34, note="both directions of the cross-attention share layers"),
    C("qwen2_audio", 27, 17, {
        "audio_token_index": IMAGE, "audio_token_id": IMAGE,
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2,
            "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8,
            "max_source_positions": 8,
        },
    }, inputs=sound_in_text, graphs=3),
)  # fmt: skip

KINDS = (
    Kind("Dense decoders", DENSE, TEXT, text),
    Kind("Mixture of experts", EXPERT, TEXT, text),
    Kind("Latent attention", MLA, TEXT, text),
    Kind("State space and hybrids", SSM, TEXT, text),
    Kind("Encoder-decoders", ENCODER_DECODER, BART, text_to_text),
    Kind("Encoders", ENCODER, BERT, text),
    Kind("Vision", VISION, VIT, image),
    Kind("Audio and time series", AUDIO, WAVES, random("input_values", 400)),
    Kind("Multimodal", MULTIMODAL, {}, text_and_image),
)
MODELS = {row.model_type: (kind, row) for kind in KINDS for row in kind.rows}
