"""Pipeline templates: the order of actions on every stage, simulated and drawn (M section 3.4.1)."""
