"""What one does with a trained model, without the training loop."""
