"""Algorithm 1: operators of several passes cut into subgraphs, and ordered (M section 3.4.2).

What a run of passes in turns is planned with and follows: which operators are launched together, in which order, and
how long that takes on a compute and a communication stream.

    launcher           Algorithm 1 itself, one decision at a time: for plans, and for the turns of the engine
    passes, groups     whole passes as rows of subgraphs, and which of them take turns
    graph, layers      operators of an hTask, and those of decoder layers under tensor parallelism
    segments           the cut into subgraphs
    schedule           the launch order of Algorithm 1; `exhaustive` finds the best order of small buckets
    streams            when the subgraphs of an order run
    adapter_fusion     adapters of several tasks as one operator (M section 3.4.3)
"""
