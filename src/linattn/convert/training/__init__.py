"""What both stages of training share: options, data, losses, and a loop that can be resumed after any kill."""
