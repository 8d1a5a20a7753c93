"""The frozen backbone: its modules and digests, and the checks of it before training."""
