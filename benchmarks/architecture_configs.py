"""Small configurations of the architectures that ``architectures.py`` tries, and their inputs."""

from __future__ import annotations

from typing import Any

import torch

WORDS, IDS = 96, (3, 80)
"""The size of vocabularies, and the range of the words of inputs: special ones lie above."""
BATCH, LENGTH, SIDE, SAMPLES, FRAMES = 2, 16, 32, 1600, 64

SMALL: dict[Any, str] = {
    WORDS: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size n_embd d_model dim n_embed embedding_size embedding_dim word_embed_proj_dim "
    "dim_model moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "expert_ffn_size lru_width attention_hidden_size emb_dim embed_dim out_hidden_size "
    "projection_dim hidden_dim text_hidden_size image_size encoder_hidden_size codevector_dim "
    "projector_hidden_size output_hidden_size decoder_hidden_size proj_codevector_dim "
    "classifier_proj_size adapter_hidden_size num_filters num_mel_bins",
    64: "intermediate_size ffn_dim n_inner d_ff dim_ff feed_forward_size decoder_ffn_dim "
    "encoder_ffn_dim ffn_hidden_size dff inner_dim intermediate_size_mlp mlp_dim "
    "shared_intermediate_size dense_intermediate_size max_position_embeddings n_positions n_ctx "
    "max_seq_len block_ff_dim max_sequence_length context_length seq_length mamba_d_ssm d_inner "
    "max_target_positions max_source_positions num_position_embeddings num_speech_encoder_ff "
    "speech_encoder_intermediate_size speech_decoder_ffn_dim speech_encoder_ffn_dim",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts depth "
    "encoder_attention_heads num_local_experts n_routed_experts moe_num_experts conv_kernel "
    "time_step_rank mamba_dt_rank conv1d_width linear_num_value_heads attention_heads "
    "num_queries linear_num_heads swa_num_attention_heads index_topk "
    "speech_encoder_attention_heads speech_decoder_attention_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_top_k moe_topk moe_k "
    "n_mamba_heads encoder_layers num_encoder_layers linear_num_key_heads num_kv_shared_layers "
    "top_k_experts spatial_merge_size index_n_heads swa_num_key_value_heads speech_encoder_layers "
    "num_conv_pos_embedding_groups speech_decoder_layers",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts "
    "first_k_dense_replace num_dense_layers mamba_n_groups n_groups mamba_ngroups "
    "num_residual_layers num_lstm_layers",
    8: "head_dim dim_head attention_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim sliding_window attention_window window_size sliding_window_size state_size "
    "mamba_d_state ssm_state_size mamba_d_head mamba_head_dim mamba_n_heads mamba_num_heads "
    "mamba_chunk_size chunk_size kv_channels linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input laurel_rank query_pre_attn_scalar mamba_headdim d_head "
    "patch_size local_attention linear_head_dim swa_head_dim d_kv num_conv_pos_embeddings "
    "attention_chunk_size attention_window_size num_groups",
    16: "q_lora_rank kv_lora_rank qk_head_dim index_head_dim",
    3: "altup_num_inputs conv_L_cache num_codebooks",
}
"""Small values for the attributes of configurations."""
SHORT = "depths hidden_sizes embed_dims encoder_hidden_sizes neck_hidden_sizes conv_dim"
"""Attributes that are lists of sizes."""
DECODERS = "bert roberta electra camembert bert-generation big_bird ernie data2vec-text rembert "
DECODERS += (
    "megatron-bert roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer"
)
MLA = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16}
SWA |= {"swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS_OF_LAYERS = ["sliding_attention", "full_attention"] * 2
SWIN = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
HGNET = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 32], "embedding_size": 8}
HGNET |= {"stage_mid_channels": [8] * 4, "stage_out_channels": [16, 16, 32, 32]}
HGNET |= {"hidden_sizes": [16, 16, 32, 32], "stage_numb_of_layers": [2] * 4}
MROPE: dict[str, Any] = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32, 32]}
RESNET |= {"depths": [1] * 4, "layer_type": "basic", "out_features": ["stage4"]}
DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": RESNET}
FOUR = {"out_features": None, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
NECK: dict[str, Any] = {"backbone_config": FOUR, "neck_hidden_sizes": [8, 16, 24, 32]}
NECK |= {"reassemble_hidden_size": 32, "fusion_hidden_size": 16}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{key: {"attention_type": "original_full"} for key in ("big_bird", "bigbird_pegasus")},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_global_transformer": {"hidden_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"topk_group": 1, "n_group": 1},
    "dots1": MLA,
    "dots3_note_text": SWA,
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 32}
    | {"adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "gemma3n_text": {"num_hidden_layers": 6, "layer_types": KINDS_OF_LAYERS + KINDS_OF_LAYERS[:2]}
    | {"intermediate_size": 64, "activation_sparsity_pattern": [0.5] + [0.0] * 5},
    "gemma4_text": {"global_head_dim": 8, "num_kv_shared_layers": 2}
    | {"layer_types": KINDS_OF_LAYERS, "moe_intermediate_size": 32},
    "gemma4_unified_text": {"global_head_dim": 8, "layer_types": KINDS_OF_LAYERS},
    "gemma3n": {"vision_config": {"architecture": "test_convnext"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_moe": {"moe_topk": 2, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8},
    "reformer": {"attention_head_size": 8, "attn_layers": ["local", "lsh"] * 2, "hash_seed": 0}
    | {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "num_buckets": 2}
    | {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    "roc_bert": {"pronunciation_vocab_size": WORDS, "shape_vocab_size": WORDS},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SWIN),
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "hgnet_v2": HGNET,
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512], "image_size": 64},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2}
    | {"d_model": 32, "num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    | {"train_size": (32, 32)},
    "luke": {"entity_vocab_size": WORDS, "entity_emb_size": 16},
    "esm": {"vocab_size": WORDS, "mask_token_id": 90},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    **{key: {"out_indices": [1, 2, 3, 4]} for key in ("beit", "data2vec-vision")},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 4},
    **{key: {"image_size": [32, 32]} for key in ("internvl_vision", "qianfan_ocr_vision")},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "levit": {"image_size": 64, "patch_size": 16},
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), DETR),
    "deformable_detr": DETR
    | {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 24, 32]},
    **dict.fromkeys(("depth_anything", "prompt_depth_anything"), NECK),
    "granite_speech5_encoder": {"context_size": 8},
    **{key: {"vocab_size": WORDS} for key in ("wav2vec2-bert", "wav2vec2-conformer")},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text"), MROPE),
    **dict.fromkeys(("paddleocr_vl_text", "glm46v_text", "qwen2_5_omni_text"), MROPE),
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "num_hidden_layers": 6}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "num_hidden_layers": 6}
    | {"n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
}
"""Values of single configurations, by their model type."""

TIMM = """
    beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_lite_tiny convit_tiny convmixer_768_32
    convnext_atto crossvit_tiny_240 cs3darknet_s davit_tiny deit_tiny_distilled_patch16_224
    densenet121 dla46_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    efficientnet_b0 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0
    fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050 hardcorenas_a hgnetv2_b0
    hiera_tiny_224 hrnet_w18_small inception_next_atto inception_v3 lcnet_050 levit_128s
    test_mambaout maxvit_pico_rw_256 coatnet_pico_rw_224 caformer_s18 mixer_s16_224 gmlp_s16_224
    resmlp_12_224 mobilenetv3_small_050 mobilenetv4_conv_small_035 mobileone_s0 mobilevit_xxs
    mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small test_nfnet pit_ti_224 poolformer_s12
    pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002 repghostnet_050 repvit_m0_9 res2net50_26w_4s
    resnest14d resnet18 resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1
    skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small vgg11
    visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos vitamin_small_224 volo_d1_224
    ese_vovnet19b_slim_dw xception41 xcit_nano_12_p16_224
"""
"""Models of timm, a small one for each of its families."""
SIZED = "botnet levit fastvit efficientvit_m coat_ crossvit efficientformer_ inception_v"
"""How the names of those begin that need pictures of their usual size."""


BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
HEADED = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
IMAGE, TEXT = (BATCH, 4, 16, 16), (BATCH, 7, 32)
VIDEO = (BATCH, 4, 3, 16, 16)
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        BLOCKS
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 8}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "in_channels": 4, "out_channels": 4},
        {"sample": IMAGE, "timestep": 9},
    ),
    "UNet2DConditionModel": (
        BLOCKS
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32},
        {"sample": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "UNet3DConditionModel": (
        BLOCKS
        | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "attention_head_dim": 8}
        | {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32},
        {"sample": VIDEO, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "UNetMotionModel": (
        BLOCKS
        | {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion")}
        | {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")}
        | {"cross_attention_dim": 32, "num_attention_heads": 2, "motion_num_attention_heads": 2},
        {"sample": VIDEO, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "DiTTransformer2DModel": (
        HEADED | {"in_channels": 4, "out_channels": 8, "sample_size": 16, "norm_num_groups": 4},
        {"hidden_states": IMAGE, "timestep": 9, "class_labels": 9},
    ),
    "Transformer2DModel": (
        HEADED | {"in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 32},
        {"hidden_states": (BATCH, 16, 8, 8), "encoder_hidden_states": TEXT},
    ),
    "PixArtTransformer2DModel": (
        HEADED
        | {"in_channels": 4, "out_channels": 8, "sample_size": 16, "cross_attention_dim": 16}
        | {"caption_channels": 32, "use_additional_conditions": False},
        {"hidden_states": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "SD3Transformer2DModel": (
        HEADED
        | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32}
        | {"caption_projection_dim": 16, "pooled_projection_dim": 24, "pos_embed_max_size": 16},
        {"hidden_states": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT}
        | {"pooled_projections": (BATCH, 24)},
    ),
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 24}
        | {"axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (BATCH, 16, 4), "encoder_hidden_states": TEXT, "timestep": 9}
        | {"pooled_projections": (BATCH, 24), "img_ids": (16, 3), "txt_ids": (7, 3)},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 2}
        | {"num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
        | {"joint_attention_dim": 32, "caption_projection_dim": 16, "pos_embed_max_size": 64},
        {"hidden_states": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "SanaTransformer2DModel": (
        HEADED
        | {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "sample_size": 16}
        | {"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 32},
        {"hidden_states": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "CogVideoXTransformer3DModel": (
        HEADED
        | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32}
        | {"sample_width": 16, "sample_height": 16, "sample_frames": 9, "max_text_seq_length": 7},
        {"hidden_states": (BATCH, 3, 4, 16, 16), "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
        | {"text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 3, "rope_max_seq_len": 32},
        {"hidden_states": VIDEO, "timestep": 9, "encoder_hidden_states": TEXT},
    ),
    "AutoencoderKL": (
        BLOCKS
        | {"down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (BATCH, 3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16)}
        | {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        {"sample": (BATCH, 3, 16, 16)},
    ),
    "VQModel": (
        BLOCKS
        | {"down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 16},
        {"sample": (BATCH, 3, 16, 16)},
    ),
    "ControlNetModel": (
        BLOCKS
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
        | {"cross_attention_dim": 32, "conditioning_embedding_out_channels": (8, 16)},
        {"sample": IMAGE, "timestep": 9, "encoder_hidden_states": TEXT}
        | {"controlnet_cond": (BATCH, 3, 32, 32)},
    ),
    "PriorTransformer": (
        HEADED | {"embedding_dim": 16, "num_embeddings": 7},
        {"hidden_states": (BATCH, 16), "timestep": 9, "proj_embedding": (BATCH, 16)}
        | {"encoder_hidden_states": (BATCH, 7, 16)},
    ),
}
"""Configurations of the models of diffusers, and their inputs: a shape, or the number of values."""


AUTO: dict[str, dict[str, str]] = {
    "causal": {"": "CAUSAL_LM"},
    "masked": {"": "MASKED_LM"},
    "seq2seq": {"": "SEQ_TO_SEQ_CAUSAL_LM"},
    "vision": {
        "": "IMAGE_CLASSIFICATION",
        " segmentation": "SEMANTIC_SEGMENTATION",
        " depth": "DEPTH_ESTIMATION",
        " video": "VIDEO_CLASSIFICATION",
        " detection": "OBJECT_DETECTION",
    },
    "audio": {" ctc": "CTC", " classification": "AUDIO_CLASSIFICATION", "": "SPEECH_SEQ_2_SEQ"},
    "image-text": {"": "IMAGE_TEXT_TO_TEXT"},
}
"""By kind, the mappings of transformers, and what is behind the names of their entries."""
KINDS = (*AUTO, "timm", "diffusers")


def configured(kind: Any, **more: Any) -> Any:
    """Return a small configuration of a class, without dropout."""
    default = kind()
    old = vars(default)
    aliases = getattr(kind, "attribute_map", {})
    given: dict[str, Any] = {}
    for value, names in SMALL.items():
        for name in names.split():
            key = aliases.get(name, name)
            if type(old.get(key)) is int:
                given[key] = min(value, old[key])
    heads = old.get("num_attention_heads")
    for name in SHORT.split():
        if isinstance(sizes := old.get(name), (list, tuple)):
            small = [1 if name == "depths" else 32 for _ in sizes]
            if name == "hidden_sizes" and isinstance(heads, (list, tuple)):
                small = [16 * one for one in heads]
            given[name] = small
    for name, value in (("head_dim", 8), ("num_experts_per_tok", 2)):
        if name in old and old[name] is None:
            given[name] = value
    if "kv_lora_rank" in old:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    special = IDS[1] + 1
    for name, value in old.items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            given[name], special = special, min(special + 1, WORDS - 1)
    if "pad_token_id" in old:
        given["pad_token_id"] = 0
    given |= {**OVERRIDES.get(kind.model_type, {}), **more}
    for name in kind.sub_configs:
        if old.get(name) is not None:
            part = given.get(name, {})
            if isinstance(part, dict) and "model_type" not in part:
                given[name] = configured(type(old[name]), **part)
    config = kind(**given)
    quiet(config)
    return config


def quiet(config: Any) -> None:
    """Take out of a configuration what draws random numbers, and the cache."""
    for name, value in list(vars(config).items()):
        if any(part in name for part in ("drop", "_pdrop", "jitter", "mask_time_prob")):
            if isinstance(value, float):
                setattr(config, name, 0.0)
            elif isinstance(value, list) and value and isinstance(value[0], float):
                setattr(config, name, [0.0] * len(value))
    for name in ("use_cache", "apply_spec_augment"):
        if hasattr(config, name):
            setattr(config, name, False)


def words(config: Any, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return rows of words of different lengths."""
    stop = min(IDS[1], getattr(config, "vocab_size", None) or IDS[1])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, stop, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[2, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def found(config: Any, *names: str) -> Any:
    """Return the first of some attributes that a configuration, or a part of it, has."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for one in (config, *(part for part in parts if part is not None)):
        for name in names:
            if (value := getattr(one, name, None)) is not None:
                return value
    return None


def pixels(config: Any) -> torch.Tensor:
    """Return pictures of the size that a configuration has."""
    side = found(config, "image_size") or SIDE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return noise(BATCH, found(config, "num_channels") or 3, height, width)
