"""Tiny models of transformers, made from their configurations with random parameters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from benchmarks.support.capture_models.case import (
    Batch,
    CaptureCase,
    own_loss,
    seeded,
    wave_loss,
)
from benchmarks.support.capture_models.libraries import import_library
from benchmarks.support.capture_models.names import TRANSFORMERS
from benchmarks.support.capture_models.transformers_inputs import (
    CLASSES,
    LENGTH,
    SIZE,
    SOUND_BANDS,
    SPEECH_BANDS,
    VOCABULARY,
    Inputs,
    captioned_images,
    classified,
    detected_tokens,
    images,
    masked_tokens,
    next_tokens,
    padded_tokens,
    placed_tokens,
    segmented_images,
    spectrograms,
    transcripts,
    waveforms,
)

FAMILY = "transformers"

classified_text = partial(classified, padded_tokens)
classified_images = partial(classified, images)

# Options of configurations, by the names that several models share.
NAMED: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
NAMED |= {"bos_token_id": 1, "eos_token_id": 2, "num_labels": CLASSES}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {**LAYERS, "intermediate_size": 48}
ENCODER = {**NAMED, **WIDE, "max_position_embeddings": 32}
GROUPED = {**ENCODER, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT = {**NAMED, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
STATES = {**NAMED, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
SEQUENCES: dict[str, Any] = {"d_model": 32, "max_position_embeddings": 32}
SEQUENCES |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
SEQUENCES |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
BART = {**NAMED, **SEQUENCES, "decoder_start_token_id": 3, "forced_eos_token_id": None}
T5 = {**NAMED, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": 1}
# The class token starts as zeros. The default eps, 1e-12, would give it gradients of thousands.
PATCHES = {**WIDE, "patch_size": 8, "layer_norm_eps": 1e-5, "num_labels": CLASSES}
VIT = {**PATCHES, "image_size": SIZE}
# LayerDrop would skip layers at random; masks in time would draw from NumPy's generator.
SOUND: dict[str, Any] = {**NAMED, **WIDE, "conv_dim": (16, 16), "conv_kernel": (10, 4)}
SOUND |= {"conv_stride": (5, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
SOUND |= {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16, "layerdrop": 0.0}
SOUND |= {"apply_spec_augment": False}
TOWERS = {
    "text_config": {**ENCODER, "projection_dim": 16},
    "vision_config": {**VIT, "projection_dim": 16},
}
STAGES = {"depths": [1, 2], "hidden_sizes": [16, 32], "num_labels": CLASSES}
BASIC = {"embedding_size": 16, "layer_type": "basic"}

# Models, options of their configurations, and inputs, by the name of the case. Configurations
# ignore the shared options that they do not know.
MODELS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "gpt2": ("GPT2LMHeadModel", GPT, next_tokens),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {**NAMED, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32},
        next_tokens,
    ),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, next_tokens),
    "gpt_neox": ("GPTNeoXForCausalLM", ENCODER, next_tokens),
    "opt": ("OPTForCausalLM", {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32}, next_tokens),
    "bloom": (
        "BloomForCausalLM",
        {**NAMED, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        next_tokens,
    ),
    "falcon": ("FalconForCausalLM", {**ENCODER, "ffn_hidden_size": 48}, next_tokens),
    "mpt": (
        "MptForCausalLM",
        {**NAMED, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 32},
        next_tokens,
    ),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, next_tokens),
    "ctrl": ("CTRLLMHeadModel", {**GPT, "dff": 48}, next_tokens),
    "llama": ("LlamaForCausalLM", GROUPED, next_tokens),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, next_tokens),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, next_tokens),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, next_tokens),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16},
        next_tokens,
    ),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, next_tokens),
    "gemma2": ("Gemma2ForCausalLM", GEMMA, next_tokens),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        next_tokens,
    ),
    "phi": ("PhiForCausalLM", ENCODER, next_tokens),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "original_max_position_embeddings": 32}, next_tokens),
    "stablelm": ("StableLmForCausalLM", GROUPED, next_tokens),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED, next_tokens),
    "cohere": ("CohereForCausalLM", GROUPED, next_tokens),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, next_tokens),
    "granite": ("GraniteForCausalLM", GROUPED, next_tokens),
    "mamba": ("MambaForCausalLM", STATES, next_tokens),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**STATES, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        next_tokens,
    ),
    "rwkv": (
        "RwkvForCausalLM",
        # The cache of evaluation mode changes tensors in place that backward needs.
        {**NAMED, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 32}
        | {"use_cache": False},
        next_tokens,
    ),
    "bert": ("BertForMaskedLM", ENCODER, masked_tokens),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {**NAMED, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
        | {"max_position_embeddings": 32},
        classified_text,
    ),
    "roberta": ("RobertaForSequenceClassification", ENCODER, classified_text),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}, masked_tokens),
    "electra": ("ElectraForPreTraining", {**ENCODER, "embedding_size": 16}, detected_tokens),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        | {"position_buckets": 4, "pooler_hidden_size": 32},
        classified_text,
    ),
    "mpnet": ("MPNetForMaskedLM", ENCODER, masked_tokens),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**ENCODER, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
        masked_tokens,
    ),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        masked_tokens,
    ),
    "roformer": ("RoFormerForMaskedLM", {**ENCODER, "embedding_size": 32}, masked_tokens),
    "fnet": ("FNetForMaskedLM", {**NAMED, **WIDE, "max_position_embeddings": 32}, next_tokens),
    "longformer": (
        "LongformerForSequenceClassification",
        {**ENCODER, "attention_window": 4},
        classified_text,
    ),
    "funnel": (
        "FunnelForSequenceClassification",
        {**NAMED, "block_sizes": [1, 1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
        classified_text,
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        {**NAMED, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
        masked_tokens,
    ),
    "layoutlm": (
        "LayoutLMForMaskedLM",
        {**ENCODER, "max_2d_position_embeddings": 32},
        placed_tokens,
    ),
    "perceiver": (
        "PerceiverForMaskedLM",
        {**NAMED, "d_model": 32, "d_latents": 32, "num_latents": 4, "num_blocks": 1}
        | {"num_self_attends_per_block": 2, "num_self_attention_heads": 4}
        | {"num_cross_attention_heads": 4, "max_position_embeddings": LENGTH}
        | {"qk_channels": 32, "v_channels": 32},
        masked_tokens,
    ),
    "t5": ("T5ForConditionalGeneration", T5, masked_tokens),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1}
        | {"num_sparse_decoder_layers": 1},
        masked_tokens,
    ),
    "bart": ("BartForConditionalGeneration", BART, masked_tokens),
    "pegasus": ("PegasusForConditionalGeneration", BART, masked_tokens),
    "mbart": ("MBartForConditionalGeneration", BART, masked_tokens),
    "marian": ("MarianMTModel", BART, masked_tokens),
    "m2m_100": (
        "M2M100ForConditionalGeneration",
        {**BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        masked_tokens,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": SPEECH_BANDS,
            "max_source_positions": LENGTH,
            "max_target_positions": 32,
        },
        transcripts,
    ),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", SOUND, partial(classified, waveforms)),
    "hubert": ("HubertForSequenceClassification", SOUND, partial(classified, waveforms)),
    "audio_spectrogram_transformer": (
        "ASTForAudioClassification",
        {**PATCHES, "frequency_stride": 4, "time_stride": 4, "max_length": 32}
        | {"num_mel_bins": SOUND_BANDS},
        partial(classified, spectrograms),
    ),
    "clip": ("CLIPModel", {**TOWERS, "projection_dim": 16}, captioned_images),
    "siglip": ("SiglipModel", TOWERS, captioned_images),
    "vilt": (
        "ViltModel",
        {**ENCODER, "image_size": SIZE, "patch_size": 8, "max_image_length": -1},
        captioned_images,
    ),
    "vit": ("ViTForImageClassification", VIT, classified_images),
    "deit": ("DeiTForImageClassification", VIT, classified_images),
    "beit": ("BeitForImageClassification", VIT, classified_images),
    "dinov2": ("Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, classified_images),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {**VIT, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2}
        | {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 24},
        images,
    ),
    "swin": (
        "SwinForImageClassification",
        {"image_size": SIZE, "patch_size": 4, "embed_dim": 16, "depths": [1, 2]}
        | {"num_heads": [2, 4], "window_size": 4, "num_labels": CLASSES},
        classified_images,
    ),
    "convnext": ("ConvNextForImageClassification", {**STAGES, "num_stages": 2}, classified_images),
    "resnet": ("ResNetForImageClassification", {**STAGES, **BASIC}, classified_images),
    "regnet": (
        "RegNetForImageClassification",
        {**STAGES, "embedding_size": 16, "groups_width": 8},
        classified_images,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES},
        segmented_images,
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "image_size": SIZE,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
        }
        # A larger stride would leave one patch to the last stage's attention.
        | {"num_attention_heads": 4, "output_stride": 8, "num_labels": CLASSES},
        classified_images,
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2, "patch_sizes": [7, 3]}
        | {"strides": [4, 2], "padding": [2, 1], "num_labels": CLASSES},
        classified_images,
    ),
    "pvt": (
        "PvtForImageClassification",
        {"image_size": SIZE, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32]}
        | {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2]}
        | {"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "num_labels": CLASSES},
        classified_images,
    ),
    "dpt": (
        "DPTForDepthEstimation",
        {**VIT, "neck_hidden_sizes": [8, 8, 16], "fusion_hidden_size": 16}
        | {"reassemble_factors": [4, 2, 1], "backbone_out_indices": [0, 1, 2], "head_in_index": -1}
        # The default, 0.02, gives depths of zero.
        | {"initializer_range": 0.15},
        images,
    ),
    "detr": (
        "DetrForObjectDetection",
        # The default backbone needs timm.
        {**SEQUENCES, "num_queries": 5, "num_labels": CLASSES}
        | {"backbone_config": {"model_type": "resnet", **STAGES, **BASIC}},
        images,
    ),
    "yolos": (
        "YolosForObjectDetection",
        {**VIT, "image_size": [SIZE, SIZE], "num_detection_tokens": 5},
        images,
    ),
}
# Models that mix the samples of a micro-batch: by BatchNorm, by the similarity of each image with
# each text, or by a loss that balances the experts.
MIXING = {"resnet", "regnet", "mobilevit", "segformer", "clip", "siglip", "switch_transformers"}
# Models without labels that compute a loss of their own.
OWN_LOSS = {"vit_mae"}


def cases() -> dict[str, CaptureCase]:
    """Return the cases by name.

    Raises:
        MissingLibraryError: If transformers is not installed.
    """
    import_library("transformers")
    return {name: _case(name) for name in TRANSFORMERS}


def _case(name: str) -> CaptureCase:
    model, options, inputs = MODELS[name]
    has_labels = "labels" in inputs(1, seeded(0))
    return CaptureCase(
        name=name,
        family=FAMILY,
        make=partial(_make, model, options),
        batch=partial(_batch, inputs),
        loss=own_loss if has_labels or name in OWN_LOSS else wave_loss,
        is_per_sample=name not in MIXING,
    )


def _make(model: str, options: dict[str, Any]) -> nn.Module:
    model_class = getattr(import_library("transformers"), model)
    # Models adjust the containers in their configuration.
    made = model_class(model_class.config_class(**copy.deepcopy(options)))
    return made.train()


def _batch(inputs: Inputs, samples: int, seed: int) -> Batch:
    return inputs(samples, seeded(seed))
