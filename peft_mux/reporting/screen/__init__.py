"""What a run shows while it trains: a live table in a terminal, one output in a notebook, plain lines elsewhere."""
