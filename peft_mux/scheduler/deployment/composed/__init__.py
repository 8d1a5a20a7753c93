"""LobRA and MuxTune composed: deployments priced by the plan that runs on each replica."""
