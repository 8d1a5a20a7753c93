"""The frozen backbone: its shape and modules, and the checks of it before training."""
