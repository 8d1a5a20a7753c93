"""What a task trains of the backbone itself, as a copy of its own: whole modules, rows of embeddings, biases."""
