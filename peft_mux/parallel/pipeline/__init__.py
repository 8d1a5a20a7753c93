"""Pipeline parallelism: stages in separate processes that follow a template (M section 3.4.1)."""
