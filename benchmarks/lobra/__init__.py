"""The evaluation of LobRA, as far as a planner and two cores can bear it."""
