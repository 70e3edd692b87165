"""Settings: criteria, presets, thresholds, the configuration, and settings of TRL. No torch."""
