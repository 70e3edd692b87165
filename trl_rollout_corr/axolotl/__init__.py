"""
Rollout correction as a plugin of Axolotl, for `rl: grpo`. `trl-rollout-corr docs processes#axolotl` shows how to use
it.

In Axolotl's YAML:

```yaml
plugins: [trl_rollout_corr.axolotl.RolloutCorrectionPlugin]
rollout_correction: auto
```

This module needs Axolotl to be installed. The rest of the package does not import it.
"""

from .plugin import RolloutCorrectionArgs, RolloutCorrectionPlugin


__all__ = ["RolloutCorrectionArgs", "RolloutCorrectionPlugin"]
