"""What cuts a step off: signals that end the run after it, and memory that does not suffice for its passes."""
