"""The evaluation of LobRA, with a planner and two CPU cores."""
