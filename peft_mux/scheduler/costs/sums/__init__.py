"""What the tasks of an hTask amount to, from which latencies are made: tokens, seconds of a layer, depth."""
