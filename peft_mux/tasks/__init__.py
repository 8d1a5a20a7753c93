"""One task in a run: its rows, optimizer, status and isolation; and the table of all."""
