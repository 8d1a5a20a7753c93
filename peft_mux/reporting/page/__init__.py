"""HTML of a run: what a notebook shows while it trains, and the page that is left of it. No network, no scripts."""
