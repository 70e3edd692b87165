"""What is written down about a run: metrics, dump, monitor. Nothing here changes the loss."""
