"""Tools that observe, explain and translate. A setting or a command that needs a tool imports it."""
