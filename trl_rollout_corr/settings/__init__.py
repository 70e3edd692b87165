"""What to correct and how: names, presets, thresholds, configuration, and settings of other tools. No torch here."""
