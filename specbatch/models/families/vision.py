"""Models that also read images: the configuration of their text part, which runs alone.

A row of text has equal positions in all three parts of a multimodal rotary embedding ("mrope"), which is the ordinary
one then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbatch.models.checks import mapping

_LLAMA: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32},
}
_QWEN2_VL: dict[str, Any] = {
    **{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    **{"max_window_layers": 80, "rope_theta": 1e6, "eos_token_id": 151645},
}
# Sizes that the files of a text part leave out, if they are the defaults of transformers, by its `model_type`.
_DEFAULT_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336},
    "qwen2": _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016},
    "gemma3_text": {
        **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216},
        **{"num_hidden_layers": 26, "num_attention_heads": 8},
    },
}


@dataclass(frozen=True)
class VisionModel:
    """A `model_type` of a model with a part for images.

    architecture: its name in `architectures`.
    text: the family of the text part, if it is none that the text part itself names.
    defaults: values of keys that the text part does not have.
    """

    architecture: str
    text: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


VISION_MODELS: Mapping[str, VisionModel] = {
    "gemma3": VisionModel("Gemma3ForConditionalGeneration", "gemma3_text"),
    "mistral3": VisionModel("Mistral3ForConditionalGeneration", defaults={"model_type": "mistral"}),
    "llava": VisionModel("LlavaForConditionalGeneration", defaults={"model_type": "llama"}),
    "llava_next": VisionModel("LlavaNextForConditionalGeneration", defaults={"model_type": "llama"}),
    "internvl": VisionModel("InternVLForConditionalGeneration", defaults={"model_type": "qwen2"}),
    "idefics3": VisionModel("Idefics3ForConditionalGeneration", defaults={"model_type": "llama"}),
    "smolvlm": VisionModel("SmolVLMForConditionalGeneration", defaults={"model_type": "llama"}),
    "qwen2_vl": VisionModel("Qwen2VLForConditionalGeneration", "qwen2", _QWEN2_VL),
    "qwen2_5_vl": VisionModel("Qwen2_5_VLForConditionalGeneration", "qwen2", _QWEN2_VL),
    "qwen3_vl": VisionModel(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"max_position_embeddings": 128000, "rope_theta": 500000.0, "num_key_value_heads": 32},
    ),
    "qwen3_5": VisionModel("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": VisionModel("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
# Keys of a configuration without `text_config` that belong to other parts.
_OTHER_PARTS = frozenset(
    (
        *("model_type", "architectures", "text_config", "vision_config", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    )
)
_TIED = ("gemma3", "mistral3", "internvl")  # transformers' classes tie the embeddings by default


def text_part(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the text part of a model that also reads images; None: it is no such model."""
    name = raw.get("model_type")
    vision = VISION_MODELS.get(name) if isinstance(name, str) else None
    if vision is None:
        return None
    if raw.get("text_config") is not None:
        given = dict(mapping(raw["text_config"], "config.json: text_config"))
    else:  # older files of Qwen2-VL have the text part's keys among the others
        given = {key: value for key, value in raw.items() if key not in _OTHER_PARTS}
    text: dict[str, Any] = {**vision.defaults, **given}
    if vision.text is not None:
        text["model_type"] = vision.text
    text = {**_DEFAULT_SIZES.get(str(text.get("model_type")), {}), **text}
    for key in ("eos_token_id", "quantization_config", "compression_config"):
        if text.get(key) is None and raw.get(key) is not None:
            text[key] = raw[key]
    ties = [part.get("tie_word_embeddings") for part in (raw, given) if part.get("tie_word_embeddings") is not None]
    text["tie_word_embeddings"] = any(ties) if ties else name in _TIED
    for section in ("rope_scaling", "rope_parameters"):
        if text.get(section):
            text[section] = plain_rope(mapping(text[section], f"config.json: {section}"))
    return {key: value for key, value in text.items() if key != "architectures"}


def plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rotary embedding without those of its parts for images."""
    plain = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}
