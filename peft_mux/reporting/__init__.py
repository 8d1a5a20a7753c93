"""What people see of a run: progress, plots, the page, trackers and uploads; and what they ask of it meanwhile."""
