"""The ten class methods of the pull request that brought rollout correction to verl."""

from typing import Any, Self


class OriginalPresets:
    """
    Presets as class methods, for a [`RolloutCorrectionConfig`]. Each builds the preset of its name, with its thresholds in
    the order of that pull request. Further fields are passed on.
    """

    @classmethod
    def from_preset(cls, name: Any, **overrides: Any) -> Self:
        raise NotImplementedError

    @classmethod
    def token_is(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """Token weights, truncated at `threshold`."""
        return cls.from_preset("token_is", rollout_is_threshold=threshold, **overrides)

    @classmethod
    def token_tis(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """Another name of `token_is`."""
        return cls.from_preset("token_tis", rollout_is_threshold=threshold, **overrides)

    @classmethod
    def seq_is(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """Sequence weights, truncated at `threshold`."""
        return cls.from_preset("seq_is", rollout_is_threshold=threshold, **overrides)

    @classmethod
    def seq_is_rs(
        cls,
        is_threshold: float = 2.0,
        rs_threshold: float = 2.0,
        rs_threshold_lower: float | None = None,
        **overrides: Any,
    ) -> Self:
        """Sequence weights, and sequences whose ratio leaves `[rs_threshold_lower or 1 / rs_threshold, rs_threshold]` go."""
        bounds = [_or_reciprocal(rs_threshold_lower, rs_threshold), rs_threshold]
        return cls.from_preset(
            "seq_is_rs", rollout_is_threshold=is_threshold, rollout_rs_threshold=[bounds], **overrides
        )

    @classmethod
    def seq_mis(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """Sequence weights, and sequences whose ratio exceeds `threshold` go."""
        bounds = [0.0, threshold]
        return cls.from_preset("seq_mis", rollout_is_threshold=threshold, rollout_rs_threshold=[bounds], **overrides)

    @classmethod
    def geo_rs(
        cls,
        rs_threshold: float = 1.001,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 1e-4,
        **overrides: Any,
    ) -> Self:
        """Rejection by the geometric mean of the ratio, and of sequences with a token below `veto_threshold`."""
        bounds = [_or_reciprocal(rs_threshold_lower, rs_threshold), rs_threshold]
        return cls.from_preset("geo_rs", **{**_geometric(bounds, veto_threshold), **overrides})

    @classmethod
    def geo_mis(
        cls,
        rs_threshold: float = 1.001,
        rs_threshold_lower: float = 0.999,
        veto_threshold: float | None = 1e-4,
        **overrides: Any,
    ) -> Self:
        """The same with bounds that are not reciprocal."""
        bounds = [rs_threshold_lower, rs_threshold]
        return cls.from_preset("geo_mis", **{**_geometric(bounds, veto_threshold), **overrides})

    @classmethod
    def ppo_is_bypass(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """PPO clipped around the sampler. The weights are reported."""
        return cls.from_preset("ppo_is_bypass", rollout_is_threshold=threshold, **overrides)

    @classmethod
    def pure_is(cls, threshold: float = 2.0, **overrides: Any) -> Self:
        """REINFORCE with sequence weights."""
        return cls.from_preset("pure_is", rollout_is_threshold=threshold, **overrides)

    @classmethod
    def disabled(cls, **overrides: Any) -> Self:
        """No correction; the metrics are reported."""
        return cls.from_preset("disabled", **overrides)


def _or_reciprocal(lower: float | None, upper: float) -> float:
    return 1 / upper if lower is None else lower


def _geometric(bounds: list[float], veto: float | None) -> dict[str, Any]:
    if veto is None:
        return {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [bounds]}
    return {"rollout_rs_threshold": [bounds, [veto, float("inf")]]}
