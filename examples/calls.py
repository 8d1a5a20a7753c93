"""Three models with three losses in one pass, and samples from one of them: the loop is yours, without Trainer or HTTP.

python examples/calls.py                     # on a small random Llama; --model takes a hub id or a folder
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peft_mux import AdamSettings, Call, CallResult, Calls, Example, GenerationRequest, SamplingOptions


# A loss is a function of the log-probabilities and columns of its rows, and returns a sum.
def cross_entropy(outputs):
    return -(outputs.logprobs_M * outputs.columns["weights"]).sum()


def importance_sampling(outputs):
    ratios = (outputs.logprobs_M - outputs.columns["logprobs"]).exp()
    return -(ratios * outputs.columns["advantages"]).sum()


def clipped(outputs):
    ratios, advantages = (outputs.logprobs_M - outputs.columns["logprobs"]).exp(), outputs.columns["advantages"]
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).sum()


def main(model: str | None, num_steps: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    backbone = AutoModelForCausalLM.from_pretrained(model) if model else LlamaForCausalLM(config)
    calls = Calls(backbone)
    losses = {"teacher": cross_entropy, "policy": importance_sampling, "ppo": clipped}
    for rank, name in zip((4, 16, 32), losses, strict=True):  # ranks and targets may differ
        calls.open(name, LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear"), seed=0)

    rng = np.random.default_rng(0)
    rows = {name: [rng.integers(1, 500, length) for length in (20, 33)] for name in losses}
    columns = {name: [] for name in losses}
    for name, task_rows in rows.items():
        for ones in (np.ones(len(row) - 1) for row in task_rows):
            drawn = {"logprobs": ones * -np.log(500), "advantages": ones}
            columns[name].append({"weights": ones} if name == "teacher" else drawn)
    for step in range(num_steps):
        batch = []
        for name, loss in losses.items():
            pairs = zip(rows[name], columns[name], strict=True)
            batch.append(Call(name, [Example(row[:-1], row[1:], values) for row, values in pairs], loss))
        results = calls.run(batch)  # one pass forward and backward; gradients add up until the step
        calls.step(dict.fromkeys(losses, AdamSettings(learning_rate=1e-2)))
        figures = {name: result.loss for name, result in results.items() if isinstance(result, CallResult)}
        print(f"step {step}: " + ", ".join(f"{name} {loss:.3f}" for name, loss in figures.items()))

    sampling, weights = calls.sampling(), calls.freeze("teacher")  # weights of now, whatever is trained later
    prompt, options = rows["teacher"][0][:3].tolist(), SamplingOptions(max_new_tokens=5)
    sampling.add([(weights, GenerationRequest(task="teacher", prompt=prompt, options=options))])
    while sampling.numbers:  # one token of every row a turn; rows may join, and calls may run, in between
        for completion in sampling.advance().values():
            print(f"{completion.task}: {prompt} -> {list(completion.token_ids)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder of a causal language model; a random one by default")
    parser.add_argument("--num-steps", type=int, default=20)
    arguments = parser.parse_args()
    main(arguments.model, arguments.num_steps)
