"""Engine: requests, scheduler, blocks, and the answers."""
