"""`peft-mux serve`: a fine-tuning service for clients of the Tinker API, whose tenants share every pass.

The event loop of uvicorn answers requests (`app.py`, `wire.py`); one thread owns the model (`engine.py`); one commits
to the ledger (`ledger.py`); one writes folders (`models.py`, `checkpoints.py`). A request is committed before its
future leaves, so a server that was killed continues where it was.
"""
