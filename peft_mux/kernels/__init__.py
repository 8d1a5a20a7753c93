"""The arithmetic of multiplexing: each file holds a plain reference beside the code that is run."""
