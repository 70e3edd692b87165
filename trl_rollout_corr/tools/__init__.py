"""What observes, explains and translates. A tool is imported when a setting or a command asks for it."""
