"""The demo's own tokenizer and backbone, made in this process from its own text.

Not here: anything that a real run needs; `peft_mux.backbone` loads those models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS = 256


def make_tokenizer(texts: Sequence[str], *, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))])
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=MAX_POSITIONS, **special)


def make_backbone(tokenizer, *, hidden_size: int = 192, num_layers: int = 4, intermediate_size: int = 704, seed: int = 0) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pretrain(model, tokenizer, texts, *, num_steps: int = 200, batch_size=6, block=96, lr=3e-3, seed: int = 0, progress=None) -> float:
    stream: list[int] = []
    for ids in tokenizer(list(texts))["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    blocks = torch.tensor(stream[: len(stream) // block * block]).view(-1, block)
    g = torch.Generator().manual_seed(seed)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    warm = max(1, num_steps // 20)
    order = torch.cat([torch.randperm(len(blocks), generator=g) for _ in range(math.ceil(num_steps * batch_size / len(blocks)))])
    model.train()
    recent = []
    for step in range(num_steps):
        scale = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        for group in opt.param_groups:
            group["lr"] = lr * scale
        ids = blocks[order[step * batch_size : (step + 1) * batch_size]]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        recent = [*recent, loss.item()][-10:]
        if progress:
            progress(step + 1, num_steps, recent[-1])
    model.eval()
    return sum(recent) / len(recent)
