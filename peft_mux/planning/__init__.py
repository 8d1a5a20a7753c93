"""The facts of a run, gathered for the scheduler, and its answers, told to the user."""
