"""A run over several processes: replicas, pipeline stages, cut layers, sharded weights; passes as CUDA graphs."""
