"""What a run shows: progress of every task, plots of the losses."""
