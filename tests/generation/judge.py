"""What the tests of generation share: adapters far from their initial weights, and plain PEFT as the judge."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig, PeftModel

from peft_mux import Completion, MultiTaskPeftModel


def held(backbone: Any, configs: Mapping[str, PeftConfig], scale: float = 0.3) -> MultiTaskPeftModel:
    """Return a model on a copy of the backbone whose adapters are far from their initial weights."""
    model = MultiTaskPeftModel(copy.deepcopy(backbone), configs, verify=False)
    for number, name in enumerate(configs):
        with torch.no_grad():
            for key, weight in sorted(model.task_parameters(name).items()):
                generator = torch.Generator().manual_seed(1000 * number + sum(map(ord, key)))
                weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return model


class Judge:
    """Plain PEFT, one adapter and one prompt at a time, from what a model has saved.

    Args:
        backbone: the backbone as it was before any adapter came.
        model: what saves its adapters.
        folder: where they go.
    """

    def __init__(self, backbone: Any, model: MultiTaskPeftModel, folder: Path) -> None:
        model.save_pretrained(folder)
        self._backbone, self._folder = backbone, folder
        self._loaded: dict[str, Any] = {}

    def plain(self, task: str) -> Any:
        """Return plain PEFT's model of a task, loaded once."""
        if task not in self._loaded:
            plain = PeftModel.from_pretrained(copy.deepcopy(self._backbone), str(self._folder / task))
            self._loaded[task] = plain.eval()
        return self._loaded[task]

    def completions(
        self, task: str, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int] = (), **settings: Any
    ) -> list[tuple[int, ...]]:
        """Return the tokens that `generate` of plain PEFT appends to each prompt."""
        plain, found = self.plain(task), []
        for number, prompt in enumerate(prompts):
            if seeds:
                torch.manual_seed(seeds[number])
            ids = torch.tensor([list(prompt)])
            out = plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
            found.append(tuple(out[0, len(prompt) :].tolist()))
        return found

    def logprobs(self, completion: Completion) -> np.ndarray:
        """Return the log-probabilities of a completion's tokens in one plain pass over prompt and completion."""
        tokens = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            logits = self.plain(completion.task)(input_ids=tokens).logits[0].float().log_softmax(-1)
        start = len(completion.prompt_token_ids)
        return logits[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0].numpy()


def prompts(seed: int, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, size=length).tolist() for length in lengths]
