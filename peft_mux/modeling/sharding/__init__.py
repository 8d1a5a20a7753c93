"""What layers need when their weights lie in several processes: all-reduces, gathered weights, pieces of parameters."""
