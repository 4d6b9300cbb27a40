"""What both stages of training share: options, text, losses, and a loop that can be resumed after any kill."""
