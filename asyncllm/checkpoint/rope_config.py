"""RopeConfig: parameters of a checkpoint's rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncllm.checkpoint.config_file import ConfigFile

MAX_POSITIONS = 2**31 - 1
"""Maximum position of a token: devices store positions as int32."""

RopeKind = Literal["default", "linear", "llama3", "longrope", "none", "proportional", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "longrope", "yarn")
"""RoPE types (``rope_type``) that every family accepts; some also accept "proportional".

"dynamic" is not supported: its frequencies depend on the longest sequence of a batch, so an output
would depend on other requests.
"""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of a rotary embedding (RoPE); ``gpu/models/rope.py`` computes it.

    Attributes:
        theta: base of the frequencies.
        kind: kind of the frequencies' scaling; "none" for a layer without RoPE.
        factor: factor by which "linear", "llama3", "proportional" and "yarn" stretch positions.
        rotated_fraction: "proportional" rotates this fraction of a head's pairs, the leading ones.
        low_freq_factor, high_freq_factor: parameters of "llama3".
        original_max_position: context length of pretraining, in tokens.
        beta_fast, beta_slow: bounds between which "yarn" interpolates, in rotations within
            ``original_max_position``.
        truncate: whether "yarn" rounds these two bounds outwards to whole frequency indices.
        attention_factor: factor of cosines and sines ("yarn", "longrope").
        short_factors, long_factors: divisor of each frequency in "longrope", for contexts up to
            ``original_max_position`` and for longer ones.
        query_scale_beta: queries at position p are multiplied by
            ``1 + query_scale_beta * log(1 + p // original_max_position)`` (Ministral 3).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_scale_beta: float = 0.0
    rotated_fraction: float = 1.0


NO_ROPE = RopeConfig(kind="none")

ROPE_PARAMETERS_FIELD = "rope_parameters"
"""Name of the config.json field with RoPE parameters since transformers 5."""


def rope_parameters_section(config: ConfigFile) -> ConfigFile:
    """Read the section with the RoPE parameters: ``rope_scaling`` or ``rope_parameters``.

    ``rope_scaling`` wins if a file has both, as in transformers.
    """
    return config.section(
        "rope_scaling" if config.values.get("rope_scaling") else ROPE_PARAMETERS_FIELD
    )


def read_rope(
    config: ConfigFile, rotary_dim: int, aliases: Mapping[str, RopeKind] | None = None
) -> RopeConfig:
    """Read the RoPE of a model in which all layers have the same RoPE.

    Args:
        rotary_dim: number of elements of a head that are rotated.
        aliases: map from other names that the file may use for RoPE types to those types.

    Raises:
        ModelLoadError: if the file has separate parameters for each kind of layer; and as for
            ``read_rope_section``.
    """
    section = rope_parameters_section(config)
    if any(isinstance(value, dict) for value in section.values.values()):
        name = "rope_scaling" if config.values.get("rope_scaling") else ROPE_PARAMETERS_FIELD
        raise config.field_error(name, "one set of RoPE parameters for all layers")
    theta = config.number("rope_theta", 10_000.0, exclusive_low=True)
    return read_rope_section(section, config, theta, rotary_dim, aliases)


def read_layer_ropes(
    config: ConfigFile, rotary_dim: int, default_thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """Read the RoPE of full-attention layers and of sliding-window layers.

    ``rope_parameters`` has an object for each kind of layer. In files of transformers 4,
    ``rope_scaling`` has the parameters of full layers.

    Args:
        default_thetas: default base by kind of layer.

    Returns:
        The RoPE by kind of layer.
    """
    ropes: dict[str, RopeConfig] = {}
    legacy = config.section("rope_scaling")
    for name, theta in default_thetas.items():
        parameters = config.section(ROPE_PARAMETERS_FIELD).section(name)
        scaled = legacy if legacy.values and name == "full_attention" else parameters
        section = ConfigFile(config.path, {**parameters.values, **scaled.values})
        ropes[name] = read_rope_section(section, config, theta, rotary_dim)
    return ropes


def read_rope_section(
    section: ConfigFile,
    config: ConfigFile,
    theta: float,
    rotary_dim: int,
    aliases: Mapping[str, RopeKind] | None = None,
) -> RopeConfig:
    """Read the RoPE that ``section`` describes.

    Args:
        config: the model's configuration, for its context lengths.
        theta: base if ``section`` has none.
        rotary_dim, aliases: as for ``read_rope``.

    Raises:
        ModelLoadError: for an unsupported kind, or a parameter that is missing, of the wrong type
            or out of bounds.
    """
    theta = section.number("rope_theta", theta, exclusive_low=True)
    key = "rope_type" if "rope_type" in section else "type"
    names: dict[str, RopeKind] = {**{kind: kind for kind in ROPE_KINDS}, **(aliases or {})}
    kind: RopeKind = names[section.choice(key, tuple(names), "default")]
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=section.number("factor", low=1.0))
    if kind == "proportional":
        factor = section.number("factor", 1.0, exclusive_low=True)
        rotated_fraction = section.number("partial_rotary_factor", 1.0, high=1.0)
        return RopeConfig(theta=theta, kind=kind, factor=factor, rotated_fraction=rotated_fraction)
    name, context = "original_max_position_embeddings", config.values["max_position_embeddings"]
    # As in transformers, the field of ``config`` wins.
    holder = config if name in config else section
    original_context = holder.integer(name, context, high=MAX_POSITIONS)
    implied_factor = context / original_context
    if kind == "llama3":
        fields = _read_llama3(section)
    elif kind == "yarn":
        fields = _read_yarn(section, implied_factor)
        if theta <= 1.0:
            raise section.field_error("rope_theta", "a number above 1 with yarn")
    else:
        fields = _read_longrope(section, implied_factor, original_context, rotary_dim // 2)
    return RopeConfig(theta=theta, kind=kind, original_max_position=original_context, **fields)


def _read_llama3(section: ConfigFile) -> dict[str, Any]:
    low = section.number("low_freq_factor", exclusive_low=True)
    high = section.number("high_freq_factor", exclusive_low=True)
    if high <= low:
        raise section.field_error("high_freq_factor", f"a number above low_freq_factor={low:g}")
    factor = section.number("factor", low=1.0)
    return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}


def _read_yarn(section: ConfigFile, implied_factor: float) -> dict[str, Any]:
    factor = section.number("factor", implied_factor, exclusive_low=True)
    fast = section.number("beta_fast", 32.0, exclusive_low=True)
    slow = section.number("beta_slow", 1.0, exclusive_low=True)
    if fast < slow:
        raise section.field_error("beta_fast", f"a number from beta_slow={slow:g} on")
    scale, all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    implied = _yarn_mscale(factor)
    if scale and all_dim:
        implied = _yarn_mscale(factor, scale) / _yarn_mscale(factor, all_dim)
    return {
        "factor": factor,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": section.boolean("truncate", True),
        "attention_factor": section.number("attention_factor", implied, exclusive_low=True),
    }


def _yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's attention temperature (Peng et al., 2023, equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _read_longrope(
    section: ConfigFile, implied_factor: float, original_context: int, num_pairs: int
) -> dict[str, Any]:
    factor = section.number("factor", implied_factor, exclusive_low=True)
    implied = 1.0
    if factor > 1.0:
        if original_context < 2:
            accepted = "an integer from 2 on with longrope"
            raise section.field_error("original_max_position_embeddings", accepted)
        implied = math.sqrt(1.0 + math.log(factor) / math.log(original_context))
    return {
        "factor": factor,
        "attention_factor": section.number("attention_factor", implied, exclusive_low=True),
        "short_factors": _read_longrope_factors(section, "short_factor", num_pairs),
        "long_factors": _read_longrope_factors(section, "long_factor", num_pairs),
    }


def _read_longrope_factors(section: ConfigFile, name: str, num_pairs: int) -> tuple[float, ...]:
    accepted = f"a list of {num_pairs} numbers, one for each rotated pair of a head"
    factors = section.checked_list(name, accepted, lambda factor: True, num_pairs)
    files = (ConfigFile(section.path, {name: factor}) for factor in factors)
    return tuple(file.number(name, exclusive_low=True) for file in files)
