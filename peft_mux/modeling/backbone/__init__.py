"""The frozen backbone: what is read off it, and what is proven about it before training."""
