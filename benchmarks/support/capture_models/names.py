"""Names of the models on which capture is judged, as plain data."""

from __future__ import annotations

TRANSFORMERS = (
    # decoders
    *("gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "falcon", "mpt", "codegen", "ctrl"),
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text"),
    *("phi", "phi3", "stablelm", "starcoder2", "cohere", "olmo2", "granite"),
    # recurrent decoders
    *("mamba", "mamba2", "rwkv"),
    # encoders
    *("bert", "distilbert", "roberta", "albert", "electra", "deberta_v2", "mpnet", "modernbert"),
    *("mobilebert", "roformer", "fnet", "longformer", "funnel", "xlnet", "layoutlm", "perceiver"),
    # encoder-decoders
    *("t5", "switch_transformers", "bart", "pegasus", "mbart", "marian", "m2m_100"),
    # audio
    *("whisper", "wav2vec2", "hubert", "audio_spectrogram_transformer"),
    # images with text
    *("clip", "siglip", "vilt"),
    # images
    *("vit", "deit", "beit", "dinov2", "vit_mae", "swin", "convnext", "resnet", "regnet"),
    *("segformer", "mobilevit", "poolformer", "pvt", "dpt", "detr", "yolos"),
)
TORCHVISION = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s"),
    *("googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small"),
    *("regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1"),
    *("swin_t", "swin_v2_t", "vgg11", "vit_b_16"),
    # segmentation
    *("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    # video
    "r3d_18",
)
BY_HAND = (
    *("unet", "batchnorm_cnn", "lstm_classifier", "packed_gru_classifier", "encoder_decoder"),
    *("siamese", "tied_language_model", "adapters", "running_statistics", "class_token"),
    *("module_list_transformer", "shared_depth"),
)
# Names by family.
NAMES = {"transformers": TRANSFORMERS, "torchvision": TORCHVISION, "by hand": BY_HAND}
