"""A frozen backbone with the adapters of many tasks: BaseOp, Adapter, Dispatch and Aggregate (M §3.2)."""
