"""The families of models, by `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.config import ModelConfig
from specbatch.models.config_keys import check_keys, unknown_keys
from specbatch.models.families.cohere import COHERE, COHERE2
from specbatch.models.families.family import Family
from specbatch.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from specbatch.models.families.glm import GLM, GLM4
from specbatch.models.families.gpt_oss import GPT_OSS
from specbatch.models.families.hf_config import HfConfig
from specbatch.models.families.llama import LLAMA, MISTRAL, MIXTRAL
from specbatch.models.families.olmo import EXAONE4, FLEX_OLMO, OLMO2, OLMO3, OLMOE
from specbatch.models.families.plain_mlps import GPT2, GPT_NEOX, GPTJ, NEMOTRON, PHI, STABLELM, STARCODER2
from specbatch.models.families.pre_norms import (
    ARCEE,
    CWM,
    ERNIE4_5,
    EXAONE,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HELIUM,
    HUNYUAN,
    INTERNLM3,
    MINISTRAL,
    MINISTRAL3,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from specbatch.models.families.qwen import MELLUM, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from specbatch.models.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from specbatch.models.families.sigmoid_router import DOTS1, GLM4_MOE, HY_V3, MINIMAX_M2, SOLAR_OPEN

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "mellum": MELLUM,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "flex_olmo": FLEX_OLMO,
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "dots1": DOTS1,
    "solar_open": SOLAR_OPEN,
    "hy_v3": HY_V3,
    "minimax_m2": MINIMAX_M2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "seed_oss": SEED_OSS,
    "cwm": CWM,
    "arcee": ARCEE,
    "helium": HELIUM,
    "hunyuan_v1_dense": HUNYUAN,
    "ernie4_5": ERNIE4_5,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "exaone": EXAONE,
    "internlm3": INTERNLM3,
    "exaone4": EXAONE4,
    "phi3": PHI3,
    "glm": GLM,
    "glm4": GLM4,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "starcoder2": STARCODER2,
    "stablelm": STABLELM,
    "nemotron": NEMOTRON,
    "phi": PHI,
    "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
    "gptj": GPTJ,
}


def parse_hf_config(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` (and, for the end-of-sequence ids, a `generation_config.json`), both already parsed.

    Raise ModelError for model types, activations and rope types that no family has, for missing or inconsistent sizes,
    and for values of a wrong type or out of range. (`quantization.py` reads how it is quantised.)
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"model_type {shown(model_type)} is not supported",
            hint=f"supported model types: {', '.join(FAMILIES)}",
        )
    family = FAMILIES[model_type]
    check_keys(config, family.keys | family.neutral.keys())
    return family.read(HfConfig(config, generation_config))


def check_family_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Raise ModelError for a key of a model's `config.json` that changes the computation and that its family does not
    have. Return the keys that are neither applied nor known to change nothing."""
    family = FAMILIES[config["model_type"]]
    check_keys(config, family.keys, family.neutral, config["model_type"])
    return tuple(unknown_keys(config, family.keys, family.neutral))
