"""Speed and memory of attention, side by side and checked in the same run."""
