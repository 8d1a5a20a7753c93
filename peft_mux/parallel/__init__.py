"""A run over several processes: replicas, pipeline stages, cut layers, sharded weights; passes as CUDA graphs.

How such a run is built::

    arguments --> layout        which process holds what (`ParallelLayout`), and what this refuses of tasks and settings
                    |
                    |--> parallelize   the part of this process: stage (pipeline), cut (tensor) or shards (fsdp)
                    |      |--> cells, keepers     how its gradients are summed; who keeps which optimizer
                    |
                    |--> dispatch      which rows of a step its replica trains
"""
