"""The page `docs/architectures.md`, written from `FAMILIES`: `python -m tools.architectures`."""

from __future__ import annotations

import sys
from pathlib import Path

from peft_mux.parallel.families import FAILING, FAMILIES, OWN_PLANS

_HEAD = """\
# Models

<!-- Written by `python -m tools.architectures`; a test compares this page with it. -->

The backbone can be any transformers model for causal language modelling, or for sequence or token classification, whose
attention uses transformers' attention interface. This includes mixtures of experts, and vision-language models on text.
Before the first step, packed and separate results are compared on the model itself (the *probe*). Recurrent layers are
refused.

| layout | models |
|---|---|
| one process, data parallelism (dp), sharded backbone (FSDP2) | every model that passes the probe |
| pipelines (pp), tensor parallelism (tp), pp x tp, FSDP2 x pp | the {count} model types below |

The {count} model types, by `model_type` of their configuration (divided by transformers' plans; {own} by ours):

{kinds}.

Each is compared with one process under pp, tp, FSDP2 and FSDP2 x pp, as a tiny random model: losses within 1e-5,
adapters within 1e-4 (`pytest -m '' tests/parallel/test_layouts.py`). pp x tp is tested with llama, qwen3,
granite, gpt_neox, opt and qwen3_moe.

## Limits
"""
_NOTES = """\
* Mixtures under pp and tp: adapters can be on attention layers only; frozen experts are cut under tp. Adapters on
  experts, which `all-linear` includes, need processes with whole layers.
* A pipeline process reads only the files of its stage, or all if transformers converts tensors while reading (separate
  experts, GPT-NeoX's head).
* FSDP2 x pp refuses unequal replicas and tensor parallelism.
"""


def page() -> str:
    """Return the page, in Markdown."""
    kinds = ", ".join(f"`{kind}`" for kind in FAMILIES)
    kinds_with_plans = " and ".join(f"`{kind}`" for kind in OWN_PLANS)
    limits = [f"* `{kind}` supports only whole layers: {reason}." for kind, reason in FAILING.items()]
    return "\n".join([_HEAD.format(count=len(FAMILIES), kinds=kinds, own=kinds_with_plans), *limits, _NOTES])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
