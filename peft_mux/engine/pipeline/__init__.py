"""Pipeline parallelism: stages in processes of their own, driven by a template (M section 3.4.1)."""
