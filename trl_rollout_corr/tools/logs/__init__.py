"""Logs that people have of a run: of the trainer, and of the trackers that it reports to."""
