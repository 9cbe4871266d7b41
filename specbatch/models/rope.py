"""Rotary position embedding: frequencies, their scaling, and how long a sequence may become by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specbatch.errors import ModelError
from specbatch.models.checks import flag, mapping, number, shown, whole_number

RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope", "off"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Frequencies are computed once and do not depend on the sequence length."""

    theta: float
    scaling: RopeScaling = "none"
    partial: float = 1.0  # share of a head's dimensions that rotate: the first ones
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # linear, llama3, yarn and longrope: tokens, before scaling; linear: 0 if not known
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from factor (and the mscales)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    # One divisor for each frequency: `rope_freqs.weight` of a GGUF, or those of LongRoPE.
    frequency_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] = ()  # longrope: those of rows above `original_max_position`

    def checked(self, source: str) -> RopeConfig:
        """Itself. Raises ModelError, which begins with `source`, where a value is out of range."""
        ranges: list[tuple[str, float, bool, str]] = [
            ("rope_theta", self.theta, 1 < self.theta < 1e30, "above 1 and below 1e30"),
            ("the rope scaling factor", self.factor, 1 <= self.factor <= 1e6, "from 1 to 1,000,000"),
            ("partial_rotary_factor", self.partial, 0 < self.partial <= 1, "above 0 and at most 1"),
        ]
        if self.scaling == "llama3":
            in_order = 0 < self.low_freq_factor < self.high_freq_factor
            ranges.append(("low_freq_factor", self.low_freq_factor, in_order, "above 0 and below high_freq_factor"))
        if self.scaling == "yarn":
            in_order = 0 < self.beta_slow <= self.beta_fast
            ranges.append(("beta_slow", self.beta_slow, in_order, "above 0 and at most beta_fast"))
            ranges.append(("beta_fast", self.beta_fast, self.beta_fast <= 1e6, "at most 1,000,000"))
            if self.attention_factor is not None:
                ranges.append(("attention_factor", self.attention_factor, self.attention_factor > 0, "above 0"))
            for name, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
                ranges.append((name, value or 0.0, (value or 0.0) >= 0, "0 or more"))
        for value in (*(self.frequency_divisors or ()), *self.long_divisors):
            ranges.append(("a frequency divisor", value, 0 < value < math.inf, "above 0 and finite"))
        for name, value, is_fine, wanted in ranges:
            if not is_fine:
                raise ModelError(f"{source}: {name} is {value:g}; it must be {wanted}")
        return self

    def stretching(self) -> str | None:
        """Describe how linear and YaRN scaling extend the context, which config.json need not show. None for other
        scalings, and where `original_max_position` is not known."""
        if self.scaling not in ("linear", "yarn") or not self.original_max_position:
            return None
        return f"{self.scaling} scaling: {self.original_max_position} x {self.factor:g}"

    def context_length(self, max_position: int, name: str) -> int:
        """The longest sequence in tokens, where the files call it `max_position`.

        Linear and YaRN scaling stretch the original length by `factor`, regardless of `max_position`: it can be the
        length before or after, or neither. With llama3 scaling it is the stretched length. (vLLM reads files so.)
        Raises ModelError, which begins with `name`, for a length beyond all bounds.
        """
        if self.stretching() is None:
            return max_position
        length = math.floor(self.original_max_position * self.factor + 1e-3)  # a rounded factor costs no token
        return whole_number(length, f"{name}, stretched {self.factor:g} times,")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head rotate."""
        return int(head_dim * self.partial)

    def inverse_frequencies(self, head_dim: int) -> tuple[torch.Tensor, float]:
        """Returns (float32 CPU tensor of shape (rotary_dim // 2,) in radians per token, factor on cos and sin).

        The operations and their order are those of transformers' `ROPE_INIT_FUNCTIONS`: results agree bit for bit.
        """
        rotary_dim = self.rotary_dim(head_dim)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
        powers = self.theta**exponents
        inverse = 1.0 / powers
        attention_factor = 1.0
        if self.scaling == "off":
            return torch.zeros_like(inverse), 1.0
        if self.scaling == "longrope":
            assert self.frequency_divisors is not None
            return 1.0 / (torch.tensor(self.frequency_divisors) * powers), self._longrope_attention_factor()
        if self.scaling == "linear":
            inverse = inverse / self.factor
        elif self.scaling == "llama3":
            inverse = self._llama3(inverse)
        elif self.scaling == "yarn":
            inverse, attention_factor = self._yarn(powers, rotary_dim)
        if self.frequency_divisors is not None:
            divisors = torch.tensor(self.frequency_divisors, dtype=torch.float32)
            assert divisors.shape == inverse.shape, (divisors.shape, inverse.shape)
            inverse = inverse / divisors
        return inverse, attention_factor

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
        low_wavelength = self.original_max_position / self.low_freq_factor
        high_wavelength = self.original_max_position / self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        scaled = torch.where(wavelength > low_wavelength, inverse / self.factor, inverse)
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        between = ~(wavelength < high_wavelength) * ~(wavelength > low_wavelength)
        return torch.where(between, smoothed, scaled)

    def _yarn(self, powers: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, float]:
        """YaRN (Peng et al. 2023, arXiv:2309.00071), equations as in transformers."""

        def correction_dim(num_rotations: float) -> float:
            return (rotary_dim * math.log(self.original_max_position / (num_rotations * 2 * math.pi))) / (
                2 * math.log(self.theta)
            )

        low, high = correction_dim(self.beta_fast), correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # no division by zero
        ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        extrapolation = 1 - ramp
        inverse = 1.0 / (self.factor * powers) * (1 - extrapolation) + 1.0 / powers * extrapolation
        return inverse, self._yarn_attention_factor()

    def _longrope_attention_factor(self) -> float:
        if self.attention_factor is not None or self.factor <= 1:
            return self.attention_factor or 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def for_rows(self, max_tokens: int) -> RopeConfig:
        """Return the rotary embedding for rows of up to this number of tokens. LongRoPE (Ding et al. 2024) has other
        frequencies for long rows. All rows of a run have the same ones, because they share keys in the cache."""
        if self.scaling != "longrope" or max_tokens <= self.original_max_position:
            return self
        return replace(self, frequency_divisors=self.long_divisors)

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(multiplier: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * multiplier * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return float(mscale(self.mscale) / mscale(self.mscale_all_dim))
        return mscale(1.0)


# Heads that do not rotate ("NoPE"): all frequencies are 0, so that a rotation changes no bit.
NO_ROPE = RopeConfig(theta=10000.0, scaling="off")


def parse_rope(
    config: Mapping[str, Any], max_position: int, theta: float = 10000.0, partial: float | None = None
) -> RopeConfig:
    """Read a config.json: `rope_parameters` of transformers 5, and the older `rope_theta` with `rope_scaling`. `theta`
    and `partial`: the `rope_theta` and the `partial_rotary_factor` of a file that has none. `partial` None: heads of
    the family rotate as a whole."""
    # `rope_scaling` wins where both are present, as in transformers.
    given = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(
            f"config.json: rope parameters of their own for {shown(nested[0])} are not supported",
            hint="one set for all layers is",
        )

    def optional(key: str) -> float | None:
        return None if given.get(key) is None else number(given[key], f"config.json: {key}")

    def value(key: str, default: float) -> float:
        found = optional(key)
        return default if found is None else found

    outer_theta = config.get("rope_theta")
    theta = value("rope_theta", theta if outer_theta is None else number(outer_theta, "config.json: rope_theta"))
    kind = given.get("rope_type", given.get("type", "default"))
    scaling: RopeScaling
    if kind in ("default", "dynamic"):  # dynamic scaling begins above `max_position`, which no row exceeds
        scaling = "none"
    elif kind in ("linear", "llama3", "yarn", "longrope"):
        scaling = kind
    else:
        raise ModelError(
            f"rope type {shown(kind)} is not supported",
            hint="supported rope types: default, linear, llama3, yarn, longrope",
        )
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is None and share not in (None, 1, 1.0):
        raise ModelError(
            f"partial_rotary_factor {shown(share)} is not supported", hint="heads of this family rotate as a whole"
        )
    partial = partial or 1.0
    if share is not None:
        partial = number(share, "config.json: partial_rotary_factor")
    if scaling == "none":
        return RopeConfig(theta=theta, partial=partial).checked("config.json")
    key = "original_max_position_embeddings"
    lengths = [where[key] for where in (config, given) if where.get(key) is not None]
    original = whole_number(lengths[0], f"config.json: {key}") if lengths else max_position
    factor = optional("factor")
    if factor is None and scaling in ("yarn", "longrope"):
        factor = max_position / original
        if scaling == "longrope":  # below 1 nothing has a factor
            factor = max(factor, 1.0)
    missing = [] if factor is not None else ["factor"]
    if scaling == "llama3":
        missing += [name for name in ("low_freq_factor", "high_freq_factor") if given.get(name) is None]
    if scaling == "longrope":
        missing += [name for name in ("short_factor", "long_factor") if not given.get(name)]
    if missing or factor is None:
        raise ModelError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        partial=partial,
        factor=factor,
        low_freq_factor=value("low_freq_factor", 1.0),
        high_freq_factor=value("high_freq_factor", 4.0),
        original_max_position=original,
        beta_fast=value("beta_fast", 32.0),
        beta_slow=value("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=given.get("truncate") is None or flag(given["truncate"], "config.json: truncate"),
        frequency_divisors=_numbers(given, "short_factor") if scaling == "longrope" else None,
        long_divisors=(_numbers(given, "long_factor") or ()) if scaling == "longrope" else (),
    ).checked("config.json")


def _numbers(given: Mapping[str, Any], key: str) -> tuple[float, ...] | None:
    """Return a list of numbers; None: there is none."""
    values = given.get(key)
    if values is None:
        return None
    if not isinstance(values, list):
        raise ModelError(f"config.json: {key} must be a list of numbers, not {shown(values)}")
    return tuple(number(value, f"config.json: {key}") for value in values)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return {} if value is None else mapping(value, f"config.json: {key}")
