"""Which rows of a step go to which replica and into which pass: lengths in, indices out, in pure Python and numpy.

The planner cuts a typical step with what is here, and the engine every real one, so that what is planned is what runs.
Rows are divided among replicas (`even_shares.py`), then those of the tasks of an hTask are cut into passes
(`passes.py`), which packs them (`best_fit.py`) and cuts long ones into parts of whole chunks (`chunking.py`). What rows
begin with alike is found in `shared_runs.py`, and which tokens of a stream are computed in `prefix_tree.py`.
"""
