"""How much longer the parts of a step take than a profile says, learnt from measured passes."""
