"""Settings: criteria, presets, thresholds, the configuration, and settings of other tools. No torch here."""
