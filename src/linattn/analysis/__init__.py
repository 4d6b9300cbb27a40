"""What attention does in a trained model."""
