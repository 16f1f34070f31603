"""What one does with a checkpoint: score text, look inside. Knows nothing of the training loop."""
