"""Settings of other systems, and files of settings, translated to fields of the configuration."""
