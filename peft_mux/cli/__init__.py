"""The command `peft-mux`."""
