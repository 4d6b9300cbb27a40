"""What both stages of training share: options, text, losses, and a loop that goes on after any kill."""
