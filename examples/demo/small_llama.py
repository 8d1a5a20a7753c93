"""A small Llama and a tokenizer, made and briefly pre-trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

VOCAB_SIZE = 768
EOS, PAD = "<|end|>", "<|pad|>"


def make_tokenizer(lines: Sequence[str]) -> Any:
    """Return a byte-level BPE tokenizer trained on `lines`; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def make_backbone(tokenizer: Any, *, hidden_size: int = 128, num_layers: int = 4, seed: int = 0) -> Any:
    """Return a randomly initialised Llama of about a million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 16 * 16,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def pretrain(
    model: Any,
    tokenizer: Any,
    lines: Sequence[str],
    *,
    num_steps: int = 160,
    block: int = 64,
    batch_size: int = 16,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> float:
    """Train the whole model on next tokens of `lines`, and return the mean loss of the last ten steps.

    Args:
        model: the model to train, changed in place.
        tokenizer: the tokenizer of the model.
        lines: texts, which are joined by EOS and cut into blocks.
        num_steps: number of steps of AdamW with a one-cycle schedule.
        block: number of tokens of a block.
        batch_size: number of blocks of a step.
        seed: fixes which blocks each step takes.
        report: called with step and loss every 25 steps.
    """
    blocks = _blocks(tokenizer, lines, block)
    generator = torch.Generator().manual_seed(seed)
    optimizer, schedule = _optimizer(model, num_steps)
    model.train()
    losses = []
    for step in range(1, num_steps + 1):
        rows = blocks[torch.randint(len(blocks), (batch_size,), generator=generator)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if report is not None and step % 25 == 0:
            report(step, losses[-1])
    return float(np.mean(losses[-10:]))


def _optimizer(model: Any, num_steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW over all parameters, and its one-cycle schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps, pct_start=0.1)


def _blocks(tokenizer: Any, lines: Sequence[str], block: int) -> torch.Tensor:
    """Return the tokens of all lines, joined by EOS, as int64 `[blocks, block]`; what fills no block is left out."""
    ids = np.concatenate([[*tokenizer(line)["input_ids"], tokenizer.eos_token_id] for line in lines])
    return torch.from_numpy(ids[: len(ids) // block * block].reshape(-1, block).astype(np.int64))
