"""The page `docs/architectures.md`, written from `FAMILIES`: `python -m tools.architectures`."""

from __future__ import annotations

import sys
from pathlib import Path

from peft_mux.modeling.backbone.families import FAILING, FAMILIES, OWN_PLANS

_LAYOUTS = ("one process", "dp", "pp", "tp", "pp x tp", "FSDP2", "FSDP2 x pp")
_HEAD = """\
# Architectures

<!-- Written by `python -m tools.architectures`; a test holds this page to it. -->

Which architectures train in which layout of processes, by the `model_type` of their configuration. One process, data
parallelism (dp) and a sharded backbone (FSDP2, `shard_backbone=True`) hold whole layers, and take each architecture
that the probe before the first step lets through. Pipelines (pp) and tensor parallelism (tp) divide the model, as the
plans of transformers say or, where it has none, one of ours. The {count} model types with a yes there are held
against one process under pp, tp, FSDP2 and FSDP2 x pp each, with losses within 1e-5 and adapters within 1e-4:
`pytest -m 'slow or not slow' tests/engine/families`. Both at once (pp x tp) are one after the other, stages first;
tested with llama, qwen3, granite, gpt_neox, opt and qwen3_moe.
"""
_NOTES = """\
* Mixtures train adapters on their layers of attention under pp and tp; frozen experts are cut under tp. Adapters on
  experts, which `all-linear` asks for too, need every process to hold whole layers.
* Each process of a pipeline reads the files of its own stage alone, but for tensors that transformers converts as it
  reads them (experts that lie one by one, GPT-NeoX's head): then it reads all, says so, and keeps its stage.
* Under FSDP2 x pp the replicas of a pipeline share the weights of each stage: a process holds its part of its stage's
  weights, and gathers one layer at a time. Replicas that differ, or that have tensor parallel ranks, are refused.
"""


def page() -> str:
    """Return the page, in Markdown."""
    lines = [
        _HEAD.format(count=len(FAMILIES)),
        f"| model type | plan | {' | '.join(_LAYOUTS)} |",
        f"|---|---|{'---|' * len(_LAYOUTS)}",
    ]
    whole_layers = "probed | probed | no | no | no | probed | no"
    for kind in FAMILIES:
        plan = "ours" if kind in OWN_PLANS else "transformers"
        lines.append(f"| {kind} | {plan} | {' | '.join(['yes'] * len(_LAYOUTS))} |")
    lines += [f"| {kind} | transformers | {whole_layers} |" for kind in FAILING]
    lines += [f"| any other |  | {whole_layers} |", ""]
    lines += [f"* `{kind}` is not divided: {reason}." for kind, reason in FAILING.items()]
    return "\n".join([*lines, _NOTES])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
